"""The ATMA family: short convolutions, and in every fourth block a global core with optional memory.

Maths: spec architecture, sections 2-6; parameter names are the checkpoint keys of section 7. Cores are ``polar``,
``nope``, ``rope`` and ``none`` (memory only, the DeltaNet-style baseline, which is ours). Every core may carry
the gated-delta memory and a sliding window. With a state, tokens may arrive in any pieces; without one the whole
sequence is computed differentiably, which is the training path.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atma_eval.kernels.choice import PYTORCH, Choice
from atma_eval.kernels.conv import causal_conv
from atma_eval.kernels.distractor import polar_distractor, softmax_distractor
from atma_eval.kernels.polar import PolarParameters, polar_training
from atma_eval.kernels.softmax import softmax_training
from atma_eval.models.advance import Core, advance_conv, advance_memory, attend
from atma_eval.models.config import AtmaConfig
from atma_eval.state import PAGE_SIZE, ConvState, KVState, LayerState, LayerStates, MemoryState, PagePool

NORM_EPS = 1e-6
# The authors call the un-weighted norms without an eps; with their torch that is the fp32 machine
# epsilon for 16-bit inputs too (architecture, section 3).
UNWEIGHTED_EPS = {torch.float64: torch.finfo(torch.float64).eps}
DEFAULT_UNWEIGHTED_EPS = 1.1920929e-7
ROPE_SCALE = 0.12  # constant, whatever the head width
ROPE_SLOWEST = 1024
SOFTCAP = 15.0
FP32_PARAMETERS = ("v_null", "null_base", "null_slope_raw", "len_gain_raw", "mag_beta_raw")


def unweighted_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=UNWEIGHTED_EPS.get(x.dtype, DEFAULT_UNWEIGHTED_EPS))


def softcap(z: Tensor) -> Tensor:
    """The algebraic cap ``15 z / sqrt(z^2 + 225)``; not tanh."""
    return SOFTCAP * z / torch.sqrt(z.square() + SOFTCAP**2)


class DepthwiseConv(nn.Module):
    """Filters of a causal convolution, ``[C, 1, K]``, without bias."""

    def __init__(self, channels: int, num_taps: int, choice: Choice):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, num_taps))
        self.impl = choice.impl

    def gated(self, b: Tensor, c: Tensor, u: Tensor, states: dict[str, ConvState] | None, name: str) -> Tensor:
        """``c * conv(b * u)`` of the short-convolution block; advances the state called ``name``."""
        if self._by_kernel(states):
            return advance_conv(u, self.weight, states, name, gates=(b, c))
        return c * self._advance(b * u, states, name)

    def residual(self, x: Tensor, states: dict[str, ConvState] | None, name: str) -> Tensor:
        """``x + conv(x)``, the canon form; advances the state called ``name``."""
        if self._by_kernel(states):
            return advance_conv(x, self.weight, states, name, residual=True)
        return x + self._advance(x, states, name)

    def _by_kernel(self, states: dict[str, ConvState] | None) -> bool:
        """The kernels go forward only: a whole sequence with gradients is PyTorch's."""
        return self.impl == "triton" and not (states is None and torch.is_grad_enabled())

    def _advance(self, x: Tensor, states: dict[str, ConvState] | None, name: str) -> Tensor:
        y, inputs = causal_conv(x, self.weight, states[name].inputs if states is not None else None)
        if states is not None:
            states[name] = ConvState(inputs)
        return y


class Rotary(nn.Module):
    """Rotary positions on half of the channel pairs, turning opposite to the usual direction (section 4)."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.angular_freq: Tensor
        self.register_buffer("angular_freq", torch.empty(head_dim // 2))
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """The fixed frequencies: 1 down to 1/1024 on the first half of the pairs, 0 on the rest."""
        turning = self.angular_freq.shape[0] // 2
        exponent = torch.arange(turning, dtype=torch.float32) / max(1, turning - 1)
        self.angular_freq.zero_()[:turning] = float(ROPE_SLOWEST) ** -exponent

    def forward(self, x: Tensor, offset: int) -> Tensor:
        """``x`` is ``[B, T, heads, d]``; the first token stands at position ``offset``."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(offset, offset + x.shape[1], device=x.device, dtype=torch.float64)
        # fp64 angles: a phase at position 65,536 keeps all of its fp32 digits.
        angle = position[:, None] * self.angular_freq.double()
        cos, sin = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]
        a, b = x.to(dtype).chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(x.dtype)


class ShortConvMixer(nn.Module):
    """LFM2 block: ``out(c * conv(b * u))`` with ``b, c, u`` from one projection; no activation."""

    def __init__(self, config: AtmaConfig, choice: Choice):
        super().__init__()
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width)
        self.conv = DepthwiseConv(width, config.conv_kernel_size, choice)
        self.out_proj = nn.Linear(width, width)

    def init_state(self, batch_size: int, num_pages: int) -> LayerState:
        return LayerState(convs={"conv": ConvState()})

    def forward(self, x: Tensor, state: LayerState | None) -> Tensor:
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(self.conv.gated(b, c, u, state.convs if state is not None else None, "conv"))


class GatedDeltaMemory(nn.Module):
    """The memory branch ``mem.*`` (section 6): gates from the block input, queries, keys and values from the core."""

    def __init__(self, config: AtmaConfig, choice: Choice):
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.choice = choice
        self.gamma_bias, self.beta_bias, self.chunk = config.mem_gamma_bias, config.mem_beta_bias, config.mem_chunk
        self.w_gamma = nn.Linear(width, heads)
        self.w_beta = nn.Linear(width, heads)
        self.gate = nn.Linear(width, heads * config.head_dim)
        self.proj = nn.Linear(heads * config.head_dim, width)

    def forward(self, n: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LayerState | None, last: int) -> Tensor:
        """Output for the last tokens of ``n`` ``[B, T, C]``, given heads ``q`` ``[B, T, H, d]`` and ``k``, ``v``."""
        # Gate logits are formed in the activation type and raised before the constant is added.
        dtype = torch.promote_types(n.dtype, torch.float32)
        gamma = self.w_gamma(n).to(dtype) + self.gamma_bias
        beta = self.w_beta(n).to(dtype) + self.beta_bias
        memory = state.memory if state is not None else None
        readout = advance_memory(q, k, v, gamma, beta, memory, chunk=self.chunk, choice=self.choice)
        read = unweighted_norm(readout[:, -last:]).flatten(2).to(n.dtype)
        return self.proj(read * torch.sigmoid(self.gate(n[:, -last:])))


class GlobalMixer(nn.Module):
    """A global block: the core over all (or a window of) past tokens, plus the memory branch."""

    def __init__(self, config: AtmaConfig, q2_floor: float | None, choice: Choice):
        super().__init__()
        self.impl = choice.impl
        width, heads, kv_heads, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.core, self.window, self.q2_floor = config.attn_type, config.attn_window, q2_floor
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d
        has_core = self.core != "none"
        self.q = nn.Linear(width, heads * d * (2 if has_core else 1))
        self.k = nn.Linear(width, kv_heads * d)
        self.v = nn.Linear(width, kv_heads * d)
        if has_core:
            self.proj = nn.Linear(heads * d, width)
        if self.core == "rope":
            self.rotary = Rotary(d)
        else:
            self.canon_q = DepthwiseConv(heads * d, config.attn_kernel_size, choice)
            self.canon_k = DepthwiseConv(kv_heads * d, config.attn_kernel_size, choice)
            self.canon_v = DepthwiseConv(kv_heads * d, config.attn_kernel_size, choice)
        if self.core == "polar":
            self.mu_proj = nn.Linear(heads, width)
            self.v_null = nn.Parameter(torch.empty(heads, d))
            for name in FP32_PARAMETERS[1:]:
                self.register_parameter(name, nn.Parameter(torch.empty(heads)))
        self.mem = GatedDeltaMemory(config, choice) if config.mem_enabled else None
        # Training only: set to [B, R, C], the next pass leaves the loss of so many random keys (kernels.distractor).
        self.random_inputs: Tensor | None = None
        self.distractor_loss: Tensor | None = None

    def init_state(self, batch_size: int, num_pages: int) -> LayerState:
        state = LayerState()
        if self.core != "rope":
            state.convs = {name: ConvState() for name in ("canon_q", "canon_k", "canon_v")}
        if self.core != "none":
            weight = self.k.weight
            shape = (self.kv_heads, self.head_dim, self.head_dim)
            state.kv = KVState(PagePool(shape, weight.dtype, weight.device, num_pages), batch_size, self.window)
        if self.mem is not None:
            state.memory = MemoryState()
        return state

    def _heads(self, x: Tensor, canon: str, state: LayerState | None) -> Tensor:
        """The canon residual on flattened heads ``[B, T, heads, d]``; none for rope, which has no such weights."""
        if self.core == "rope":
            return x
        states = state.convs if state is not None else None
        return getattr(self, canon).residual(x.flatten(2), states, canon).view_as(x)

    def forward(self, n: Tensor, state: LayerState | None, offset: int, last: int) -> Tensor:
        """``n`` ``[B, T, C]`` at positions from ``offset``; the output of the last ``last`` tokens ``[B, last, C]``."""
        batch, num_new, _ = n.shape
        d = self.head_dim
        q = self.q(n).view(batch, num_new, self.heads, -1)
        q, gate = q[..., :d], q[:, -last:, :, d:]  # the split is inside each head
        k = unweighted_norm(self.k(n).view(batch, num_new, self.kv_heads, d))
        v = self.v(n).view(batch, num_new, self.kv_heads, d)
        q = self._heads(unweighted_norm(q), "canon_q", state)
        k, v = self._heads(k, "canon_k", state), self._heads(v, "canon_v", state)

        out = n.new_zeros(batch, last, n.shape[-1])
        if self.core != "none":
            out = self._core(q, k, v, gate, state, offset, last)
        if self.mem is not None:
            out = out + self.mem(n, q, k, v, state, last)
        return out

    @property
    def polar_parameters(self) -> PolarParameters:
        return PolarParameters(*(getattr(self, name) for name in FP32_PARAMETERS))

    @property
    def scale(self) -> float:
        return ROPE_SCALE if self.core == "rope" else 1 / math.sqrt(self.head_dim)

    def _distract(self, random_inputs: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor) -> Tensor:
        """The distractor loss: random keys are neither rotated nor convolved, and normed but for nope (trap 15)."""
        with torch.no_grad():
            keys, values = (f(random_inputs).unflatten(-1, (self.kv_heads, -1)) for f in (self.k, self.v))
            keys = keys if self.core == "nope" else unweighted_norm(keys)
        if self.core == "polar":
            num_keys = torch.arange(k.shape[1] - q.shape[2] + 1, k.shape[1] + 1, device=k.device)
            return polar_distractor(q, keys, self.polar_parameters, num_keys)
        return softmax_distractor(q, k, v, keys, values, mixed, scale=self.scale)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: LayerState | None, offset: int, last: int
    ) -> Tensor:
        if self.core == "rope":
            q, k = self.rotary(q, offset), self.rotary(k, offset)
        queries = q[:, -last:].transpose(1, 2)
        polar = self.polar_parameters if self.core == "polar" else None
        if state is None and torch.is_grad_enabled():
            mixed, magnitude = self._train(queries, k, v, polar)
        else:
            core = Core(polar, self.scale, self.window, self.q2_floor)
            kv = state.kv if state is not None else None
            mixed, magnitude = attend(core, queries, k, v, kv, offset=offset, impl=self.impl)
        out = self.proj((mixed.transpose(1, 2) * torch.sigmoid(gate)).flatten(2))
        return out if magnitude is None else out + self.mu_proj(magnitude.transpose(1, 2))

    def _train(self, q: Tensor, k: Tensor, v: Tensor, polar: PolarParameters | None) -> tuple[Tensor, Tensor | None]:
        """The core over a whole sequence, with gradients, and the distractor loss where random inputs are set."""
        magnitude = None
        if polar is not None:
            mixed, magnitude, *_ = polar_training(q, k, v, polar, window=self.window, q2_floor=self.q2_floor)
        else:
            mixed = softmax_training(q, k, v, scale=self.scale, window=self.window)
        if self.random_inputs is not None:
            self.distractor_loss = self._distract(self.random_inputs.to(q.dtype), q, k, v, mixed)
        return mixed, magnitude


class MLP(nn.Module):
    """``proj(g * relu(a)^2)``: the first half is squared, the second is the plain gate."""

    def __init__(self, width: int):
        super().__init__()
        self.fc = nn.Linear(width, 8 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, g = self.fc(x).chunk(2, dim=-1)
        return self.proj(g * F.relu(a).square())


class Block(nn.Module):
    """``x + mixer(norm1(x))``, then ``x + mlp(norm2(x))``."""

    def __init__(self, config: AtmaConfig, index: int, q2_floor: float | None, choice: Choice):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = GlobalMixer(config, q2_floor, choice) if config.is_global(index) else ShortConvMixer(config, choice)
        self.mlp = MLP(config.hidden_size)

    def forward(self, x: Tensor, state: LayerState | None, offset: int, last: int) -> Tensor:
        n = self.norm1(x)
        if isinstance(self.attn, GlobalMixer):
            x = x[:, -last:] + self.attn(n, state, offset, last)
        else:
            x = x + self.attn(n, state)
        return x + self.mlp(self.norm2(x))


class Atma(nn.Module):
    """A `LanguageModel` of the ATMA family.

    Args:
        config: shape and behaviour; its ``attn_window`` is the window that is applied.
        q2_floor: legacy floor of the participation ratio (1e-6 for kernels before 16 August 2026); ``None`` is exact.
        choice: which code computes the operations; training is always PyTorch's.
    """

    def __init__(self, config: AtmaConfig, *, q2_floor: float | None = None, choice: Choice = PYTORCH):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i, q2_floor, choice) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.proj = nn.Linear(config.hidden_size, config.vocab_size)

    @property
    def training_length(self) -> int | None:
        return self.config.training_length

    @property
    def max_length(self) -> int | None:
        """Longest sequence the architecture can take; ``None``: no position table, no limit."""
        return None

    def cast(self, dtype: torch.dtype) -> Atma:
        """Weights in ``dtype``, but for the islands that stay fp32: polar scalars, null values, rotary frequencies."""
        wide = torch.promote_types(dtype, torch.float32)
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(wide if name.rsplit(".", 1)[-1] in FP32_PARAMETERS else dtype)
        return self

    def init_state(self, batch_size: int = 1, capacity: int = 0) -> LayerStates:
        """An empty state; ``capacity`` tokens are reserved, and it grows beyond them when needed."""
        if self.config.attn_window is not None:  # pages behind a window come back: room for it and a long piece
            capacity = min(capacity, self.config.attn_window + 4096)
        num_pages = batch_size * -(-capacity // PAGE_SIZE)
        layers = []
        for block in self.blocks:
            assert isinstance(block, Block)
            layers.append(block.attn.init_state(batch_size, num_pages))
        return LayerStates(layers)

    def state_bytes(self, num_tokens: int) -> int:
        """Bytes of one stream's state after ``num_tokens``, convolution states apart."""
        c, size = self.config, self.embed.weight.element_size()
        kept = num_tokens if c.attn_window is None else min(num_tokens, c.attn_window + PAGE_SIZE)
        kv = 2 * kept * c.num_kv_heads * c.head_dim * size if c.attn_type != "none" else 0
        memory = 4 * c.num_heads * c.head_dim**2 if c.mem_enabled else 0
        return c.num_global_blocks * (kv + memory)

    def forward(self, tokens: Tensor, state: LayerStates | None = None, last: int | None = None) -> Tensor:
        """Advance ``state`` over ``tokens`` ``[B, T]`` and return final hidden states.

        Args:
            tokens: ids ``[B, T]``, ``T >= 1``.
            state: advanced in place; ``None`` computes the tokens as a whole sequence.
            last: how many of the last positions are wanted; ``None`` for all.

        Returns:
            Hidden states before the final norm, ``[B, last, C]``.

        What lies after the last global block reaches back only a few tokens, so for positions nobody
        asks for, its work and that block's attention are left out; the state is the same.
        """
        num_new = tokens.shape[1]
        last = num_new if last is None else min(last, num_new)
        offset = state.length if state is not None else 0
        final_global = max((i for i, b in enumerate(self.blocks) if isinstance(b.attn, GlobalMixer)), default=-1)
        convs_after = len(self.blocks) - 1 - final_global
        reach = convs_after * (self.config.conv_kernel_size - 1)
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            layer = state.layers[i] if state is not None else None
            keep = min(num_new, last + reach) if i == final_global else x.shape[1]
            x = block(x, layer, offset, keep)
        if state is not None:
            state.length += num_new
        return x[:, -last:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in fp32 (fp64 for fp64 weights), ``[..., N]``."""
        z = self.proj(self.norm(hidden))
        return softcap(z.to(torch.promote_types(z.dtype, torch.float32)))

    @torch.no_grad()
    def init_weights(self, seed: int) -> Atma:
        """Random weights on the CPU: every branch alive, output projections small (never zero; trap 1)."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset_frequencies()
        depth = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        constants = {"null_base": 2.0, "null_slope_raw": 0.5, "len_gain_raw": -1.0, "mag_beta_raw": -1.5, "v_null": 0.0}
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            owner = name.rsplit(".", 2)[-2] if "." in name else ""
            if leaf in constants:
                parameter.fill_(constants[leaf])
            elif leaf == "bias":
                parameter.zero_()
            elif owner.startswith("norm"):
                parameter.fill_(1.0)
            elif owner == "embed":
                parameter.normal_(std=1.0, generator=generator)
            elif "conv" in owner or owner.startswith("canon"):
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]), generator=generator)
            else:
                std = 1 / math.sqrt(parameter.shape[1])
                writes = owner in ("proj", "out_proj", "mu_proj")
                parameter.normal_(std=std * depth if writes else std, generator=generator)
        return self
