"""The gated-delta memory (spec: architecture, section 6).

Per head, with unit-length query ``q`` and key ``k``, decay ``g`` and write strength ``b``::

    S <- g S;   u = b (v - S^T k);   S <- S + k u^T;   r = S^T q

`gated_delta` computes it chunk by chunk. Inside a chunk the corrections ``u`` of all steps solve one
unit-lower-triangular system, which is batched over all chunks at hand; only the hand-over of the state
from chunk to chunk is sequential. Chunks are taken a segment at a time, so that the working memory stays
small whatever the length. `gated_delta_reference` is the recurrence as written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atma_eval.kernels.tiles import LOG2_E

SEGMENT = 1024  # tokens whose intermediate products are held at once
L2_FLOOR = 1e-12  # a floor on the norm, not added inside the root


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=L2_FLOOR)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma_logit: Tensor,
    beta_logit: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Advance the memory over ``T`` tokens and read it at each.

    Args:
        q, k: ``[B, T, H, K]``, any length; normalised here.
        v: ``[B, T, H, V]``.
        gamma_logit, beta_logit: gate logits ``[B, T, H]``, constants of the config included.
        state: memory before the first token, ``[B, H, K, V]`` in fp32 (fp64 for fp64 inputs); ``None`` is zero.
        chunk: steps solved together; changes speed and rounding, never the result.

    Returns:
        Readout ``[B, T, H, V]`` and the state after the last token, ``[B, H, K, V]``, both in fp32 (or fp64).
    """
    num_tokens = q.shape[1]
    size = chunk * max(1, SEGMENT // chunk)
    if num_tokens <= size:
        return _segment(q, k, v, gamma_logit, beta_logit, state, chunk)
    readout = v.new_empty(v.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    for start in range(0, num_tokens, size):
        part = slice(start, start + size)
        inputs = (q[:, part], k[:, part], v[:, part], gamma_logit[:, part], beta_logit[:, part])
        readout[:, part], state = _segment(*inputs, state, chunk)
    assert state is not None
    return readout, state


def _segment(
    q: Tensor, k: Tensor, v: Tensor, gamma_logit: Tensor, beta_logit: Tensor, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    batch, num_tokens, num_heads, key_width = q.shape
    value_width = v.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    chunk = min(chunk, num_tokens)
    num_chunks = -(-num_tokens // chunk)
    padding = num_chunks * chunk - num_tokens

    def split(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B H, C, ...]; padded steps neither decay nor write
        x = x.to(dtype)
        if padding:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        x = x.view(batch, num_chunks, chunk, *x.shape[2:]).transpose(0, 1).movedim(3, 2)
        return x.reshape(num_chunks, batch * num_heads, chunk, *x.shape[4:])

    q, k, v, beta = _unit(split(q)), _unit(split(k)), split(v), split(torch.sigmoid(beta_logit.to(dtype)))
    # logsigmoid, not log(sigmoid): the latter is log(0) below a logit of about -103. In base 2, because exp2 is
    # the fast one on a CPU, and summed in fp64, because the differences below cancel after a strong decay.
    log_decay = split(F.logsigmoid(gamma_logit.to(dtype))).double() * LOG2_E
    decay = log_decay.cumsum(-1)  # log of the decay from the chunk's start through step p
    total = decay[..., -1:]
    from_start = decay.to(dtype).exp2()[..., None]
    to_end = (total - decay).to(dtype).exp2()[..., None]
    keep = total.to(dtype).exp2()[..., None]

    # Every ratio kept is <= 1; the others, of the future, are held at 1 so that they cannot overflow, then dropped.
    ratio = (decay[..., :, None] - decay[..., None, :]).to(dtype).clamp_(max=0).exp2_().tril()
    weighted = k * beta[..., None]
    system = ratio * (weighted @ k.mT)  # its diagonal and what lies above are not read
    right = torch.cat([v * beta[..., None], weighted * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split([value_width, key_width], dim=-1)
    attend = ratio * (q @ k.mT)
    q_decayed = q * from_start
    k_to_end = (k * to_end).mT

    if state is None:
        memory = q.new_zeros(batch * num_heads, key_width, value_width)
    else:
        memory = state.reshape(batch * num_heads, key_width, value_width)
    readouts = []
    for n in range(num_chunks):
        written = torch.baddbmm(own[n], from_state[n], memory, alpha=-1)
        readouts.append(torch.baddbmm(q_decayed[n] @ memory, attend[n], written))
        memory = torch.baddbmm(keep[n] * memory, k_to_end[n], written)
    readout = torch.stack(readouts).view(num_chunks, batch, num_heads, chunk, value_width)
    readout = readout.permute(1, 0, 3, 2, 4).reshape(batch, num_chunks * chunk, num_heads, value_width)
    return readout[:, :num_tokens], memory.view(batch, num_heads, key_width, value_width)


def gated_delta_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma_logit: Tensor,
    beta_logit: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time; shapes as in `gated_delta`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = _unit(q.to(dtype)), _unit(k.to(dtype)), v.to(dtype)
    gamma = torch.sigmoid(gamma_logit.to(dtype))
    beta = torch.sigmoid(beta_logit.to(dtype))
    batch, num_tokens, num_heads, key_width = q.shape
    if state is None:
        state = q.new_zeros(batch, num_heads, key_width, v.shape[-1])
    readouts = []
    for t in range(num_tokens):
        state = gamma[:, t, :, None, None] * state
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * written[:, :, None, :]
        readouts.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(readouts, dim=1), state
