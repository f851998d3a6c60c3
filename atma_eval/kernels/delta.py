"""The gated-delta memory (spec: architecture, section 6).

Per head, with unit-length query ``q`` and key ``k``, decay ``g`` and write strength ``b``::

    S <- g S;   u = b (v - S^T k);   S <- S + k u^T;   r = S^T q

`gated_delta` computes it chunk by chunk. Inside a chunk the corrections ``u`` of all steps solve one
unit-lower-triangular system, which is batched over all chunks at once; only the hand-over of the state
from chunk to chunk is sequential. `gated_delta_reference` is the recurrence as written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_FLOOR = 1e-12  # a floor on the norm, not added inside the root


def _prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = F.normalize(q.to(dtype), dim=-1, eps=L2_FLOOR)
    k = F.normalize(k.to(dtype), dim=-1, eps=L2_FLOOR)
    return q, k, v.to(dtype), dtype


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
    batch, num_tokens, num_heads, key_width = q.shape
    q, k, v, dtype = _prepare(q, k, v)
    value_width = v.shape[-1]
    chunk = min(chunk, num_tokens)
    num_chunks = -(-num_tokens // chunk)
    padding = num_chunks * chunk - num_tokens

    # logsigmoid, not log(sigmoid): the latter is log(0) below a logit of about -103.
    log_decay = F.logsigmoid(gamma_logit.to(dtype))
    beta = torch.sigmoid(beta_logit.to(dtype))

    def split(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, N, C, ...]; padded steps neither decay nor write
        if padding:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.view(batch, num_chunks, chunk, *x.shape[2:]).movedim(3, 1)

    q, k, v, log_decay, beta = split(q), split(k), split(v), split(log_decay), split(beta)
    decay = log_decay.cumsum(-1)  # log of the decay from the chunk's start through step p
    total = decay[..., -1:]

    steps = torch.arange(chunk, device=q.device)
    future = steps[None, :] > steps[:, None]
    # Every ratio kept is <= 1; the others are masked before exp so that they cannot overflow.
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    strict = (ratio * beta[..., None] * (k @ k.mT)).tril(-1)
    system = strict + torch.eye(chunk, dtype=dtype, device=q.device)
    right = torch.cat([v, k * decay.exp()[..., None]], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split([value_width, key_width], dim=-1)

    attend = ratio * (q @ k.mT)
    q_decayed = q * decay.exp()[..., None]
    k_to_end = (k * (total - decay).exp()[..., None]).mT
    keep = total.exp()[..., None]

    if state is None:
        state = torch.zeros(batch, num_heads, key_width, value_width, dtype=dtype, device=q.device)
    readouts = []
    for n in range(num_chunks):
        written = own[:, :, n] - from_state[:, :, n] @ state
        readouts.append(q_decayed[:, :, n] @ state + attend[:, :, n] @ written)
        state = keep[:, :, n] * state + k_to_end[:, :, n] @ written
    readout = torch.stack(readouts, dim=1)  # [B, N, H, C, V]
    readout = readout.transpose(2, 3).reshape(batch, num_chunks * chunk, num_heads, value_width)
    return readout[:, :num_tokens], state


def gated_delta_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma_logit: Tensor,
    beta_logit: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time; shapes as in `gated_delta`."""
    q, k, v, dtype = _prepare(q, k, v)
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
