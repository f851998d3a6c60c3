"""One to sixteen steps of the gated-delta memory, in place: the Triton form of `delta` for decoding.

The state lies in a table of slots. A program takes a few value columns of one stream and head into registers, advances
them over all new tokens and writes them back: one read and one write of the state, where gathering it, stepping and
scattering it back moves it three times each way. Everything is fp32. For long inputs the chunked forms serve:
`delta.gated_delta`, or flash-linear-attention's through `gated_delta_fla`.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import importlib
import importlib.util

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from atma_eval.errors import UserError
from atma_eval.kernels.aot import Configuration
from atma_eval.kernels.choice import MAX_STEPS
from atma_eval.kernels.common_triton import TYPES, on_its_device, require_supported
from atma_eval.kernels.delta import L2_FLOOR

NUM_STAGES = 3
FLA_ROOT_EPS = 1e-6  # flash-linear-attention normalises by sqrt(sum x^2 + 1e-6), we by max(sqrt(sum x^2), 1e-12)
FLA_WIDTH = 256
FLA_MODULE = "fla.ops.gated_delta_rule"

UNIT_FLOOR = tl.constexpr(L2_FLOOR)


@triton.jit
def _unit(x):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), UNIT_FLOOR)


@triton.jit(do_not_specialize=["num_steps"])
def _step_kernel(
    q,
    k,
    v,
    gamma_logit,  # [B, T, H]
    beta_logit,
    table,  # [slots, H, K, V] fp32
    slots,
    readout,  # [B, T, H, V] fp32
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    num_steps,
    GROUP_Q: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    stream = tl.program_id(2).to(tl.int64)
    dims_k = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dims_k < WIDTH_K
    in_v = dims_v < WIDTH_V
    row = stream * num_steps * num_heads + head
    slot = stream if slots is None else tl.load(slots + stream)
    if slot < 0:  # padding: no state is its own
        for t in range(num_steps):
            zero = tl.zeros((BLOCK_V,), tl.float32)
            tl.store(readout + (row + t * num_heads) * WIDTH_V + dims_v, zero, mask=in_v)
        return

    place = table + (slot * num_heads + head) * (WIDTH_K * WIDTH_V) + dims_k[:, None] * WIDTH_V + dims_v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    q_row = q + stream * stride_qb + head // GROUP_Q * stride_qh + dims_k
    k_row = k + stream * stride_kb + head // GROUP_K * stride_kh + dims_k
    v_row = v + stream * stride_vb + head // GROUP_V * stride_vh + dims_v
    for t in range(num_steps):
        gate = row + t * num_heads
        gamma = tl.sigmoid(tl.load(gamma_logit + gate).to(tl.float32))
        beta = tl.sigmoid(tl.load(beta_logit + gate).to(tl.float32))
        query = _unit(tl.load(q_row + t * stride_qt, mask=in_k, other=0.0).to(tl.float32))
        key = _unit(tl.load(k_row + t * stride_kt, mask=in_k, other=0.0).to(tl.float32))
        value = tl.load(v_row + t * stride_vt, mask=in_v, other=0.0).to(tl.float32)
        state *= gamma
        written = beta * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * written[None, :]
        tl.store(readout + gate * WIDTH_V + dims_v, tl.sum(state * query[:, None], 0), mask=in_v)
    tl.store(place, state, mask=inside)


def step_tile(key_width: int, value_width: int) -> tuple[int, int, int]:
    """``BLOCK_K``, ``BLOCK_V`` and warps of `_step_kernel`.

    Rows of 32 values are whole cache lines; 16 KB of state to a program of 4 warps is 32 registers a thread, and a
    multiprocessor then holds enough programs to keep the memory busy.
    """
    block_k = triton.next_power_of_2(key_width)
    return block_k, min(32, triton.next_power_of_2(value_width)), 8 if block_k > 128 else 4


@on_its_device
def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma_logit: Tensor,
    beta_logit: Tensor,
    table: Tensor,
    slots: Tensor | None = None,
) -> Tensor:
    """Advance the memories of some streams over ``T`` tokens, in place, and read them at each.

    Args:
        q, k: ``[B, T, H, K]``, any length, normalised here; fewer heads serve as many of ``H`` in turn, as in grouped
            attention. ``T`` from 1 to 16; any strides but the last.
        v: ``[B, T, H, V]``, likewise.
        gamma_logit, beta_logit: gate logits ``[B, T, H]``, constants of the config included.
        table: memories ``[slots, H, K, V]``, fp32, contiguous; advanced in place.
        slots: which of them each stream has, int64 ``[B]``, none twice. A negative one is padding: it reads as zeros
            and touches nothing. ``None``: stream ``b`` has slot ``b``.

    Returns:
        Readout ``[B, T, H, V]`` in fp32.
    """
    batch, num_steps, num_heads = gamma_logit.shape
    key_width, value_width = table.shape[2:]
    require_supported(q.dtype, key_width, q.device)
    if not 1 <= num_steps <= MAX_STEPS:
        raise UserError(f"the memory kernel takes 1 to {MAX_STEPS} steps, not {num_steps}", "prefill more")
    if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1] != num_heads:
        raise ValueError(f"the table must be contiguous fp32 [slots, {num_heads}, K, V]: {table.dtype} {table.shape}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    readout = torch.empty(batch, num_steps, num_heads, value_width, dtype=torch.float32, device=q.device)
    block_k, block_v, num_warps = step_tile(key_width, value_width)
    _step_kernel[(triton.cdiv(value_width, block_v), num_heads, batch)](
        q,
        k,
        v,
        gamma_logit.contiguous(),
        beta_logit.contiguous(),
        table,
        None if slots is None else slots.to(torch.int64),
        readout,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        num_steps,
        GROUP_Q=num_heads // q.shape[2],
        GROUP_K=num_heads // k.shape[2],
        GROUP_V=num_heads // v.shape[2],
        WIDTH_K=key_width,
        WIDTH_V=value_width,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )
    return readout


def step_bytes(num_streams: int, table: Tensor) -> int:
    """Bytes of state that a step has to move: each stream's own, read once and written once."""
    return 2 * num_streams * table[0].numel() * table.element_size()


def fla_refusal(dtype: torch.dtype, width: int, device: torch.device) -> str | None:
    """Why flash-linear-attention's chunked kernel cannot take heads of this type and width there, or ``None``."""
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if device.type != "cuda":
        return "flash-linear-attention needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-linear-attention takes 16-bit inputs, not {dtype}"
    if width > FLA_WIDTH:
        return f"flash-linear-attention takes head widths up to {FLA_WIDTH}, not {width}"
    try:
        importlib.import_module(FLA_MODULE)
    except Exception as error:
        return f"flash-linear-attention cannot be imported ({error})"
    return None


def gated_delta_fla(
    q: Tensor, k: Tensor, v: Tensor, gamma_logit: Tensor, beta_logit: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`delta.gated_delta` by flash-linear-attention's chunked kernel, where `fla_refusal` says nothing.

    It differs in two ways: lengths are taken as ``sqrt(sum x^2 + 1e-6)`` (`FLA_ROOT_EPS`), and the readout has passed
    through the 16-bit type of the inputs. It is returned in fp32, like the state.
    """
    fla = importlib.import_module(FLA_MODULE)  # takes seconds, so only here
    readout, after = fla.chunk_gated_delta_rule(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=F.logsigmoid(gamma_logit.float()),
        beta=torch.sigmoid(beta_logit.float()),  # by keyword: its place among the arguments has changed before
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return readout.float(), after


def configurations() -> list[Configuration]:
    """The step kernel for each input type and head width, keys and values of a quarter of the heads."""
    listed = []
    for dtype, element in TYPES.items():
        for width in (16, 64, 80, 128, 256):
            block_k, block_v, num_warps = step_tile(width, width)
            strides = [name for name in _step_kernel.arg_names if name.startswith("stride_")]
            signature: dict[str, str] = dict.fromkeys(("q", "k", "v"), f"*{element}")
            signature |= dict.fromkeys(("gamma_logit", "beta_logit", "table", "readout"), "*fp32")
            signature |= dict.fromkeys([*strides, "num_steps"], "i32")
            groups = {"slots": None, "GROUP_Q": 1, "GROUP_K": 4, "GROUP_V": 4}
            widths = {"WIDTH_K": width, "WIDTH_V": width, "BLOCK_K": block_k, "BLOCK_V": block_v}
            listed.append(
                Configuration(
                    name=f"memory step {element} d{width}",
                    kernel=_step_kernel,
                    signature=signature,
                    constants=groups | widths,
                    divisible=tuple(name for name in signature if name != "num_steps"),
                    num_warps=num_warps,
                    num_stages=NUM_STAGES,
                    spill_free=dtype.itemsize == 2 and width <= 128,
                )
            )
    return listed
