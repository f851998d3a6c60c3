"""Polar attention: a direction and a bounded magnitude (spec: architecture, section 5).

Query ``i`` sees ``n`` keys. With temperature ``t = 1 + softplus(len_gain) ln n`` and a null sink at logit
``null_base + softplus(null_slope) sqrt(ln(n + 1))``, both multiplied by ``t``, the softmax weights ``w`` give

* the direction: ``sum w v + w_null v_null``, scaled to unit length;
* the magnitude: ``tanh(softplus(mag_beta) ln(1 + n_eff (1 - w_null)))``, where ``n_eff`` is the participation
  ratio ``(sum w)^2 / sum w^2`` over the real keys.

`polar_attention` streams over keys in linear memory; `polar_reference` materialises the weights, carries
gradients and is the truth in tests and the training path at demonstration size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atma_eval.kernels.tiles import LOG2_E, KVRun, Statistics, run_statistics

NORM_FLOOR = 1e-6


class PolarParameters(NamedTuple):
    """Learned per-head values: ``v_null`` is ``[H, V]``, the rest ``[H]``."""

    v_null: Tensor
    null_base: Tensor
    null_slope_raw: Tensor
    len_gain_raw: Tensor
    mag_beta_raw: Tensor

    def to(self, dtype: torch.dtype) -> PolarParameters:
        return PolarParameters(*(p.to(dtype) for p in self))

    def temperature(self, num_keys: Tensor) -> Tensor:
        """``[H, T]`` from the number of visible keys ``[T]``."""
        return 1 + F.softplus(self.len_gain_raw)[:, None] * num_keys.clamp(min=1).log()[None, :]

    def null_logit(self, num_keys: Tensor) -> Tensor:
        """``[H, T]``, before the temperature. Note ``n + 1`` here, ``n`` in the temperature."""
        growth = (num_keys.clamp(min=1) + 1).log().sqrt()
        return self.null_base[:, None] + F.softplus(self.null_slope_raw)[:, None] * growth[None, :]


class PolarOutput(NamedTuple):
    """``direction`` ``[B, H, T, V]``; ``magnitude``, ``n_eff`` and ``null_mass`` ``[B, H, T]``."""

    direction: Tensor
    magnitude: Tensor
    n_eff: Tensor
    null_mass: Tensor


def _finish(stats: Statistics, null: Tensor, p: PolarParameters, q2_floor: float | None) -> PolarOutput:
    """Fold the null sink (natural-log logit ``[..., H, T]``) into the statistics of the real keys.

    The statistics are in units of the largest real score, so ``L >= 1`` and ``Q >= 1``: the exact ratio needs
    no floor, and nothing is subtracted. ``q2_floor`` reproduces older kernels, which floored ``Q`` in units of
    the largest score *including* the null (architecture, trap 2).
    """
    null2 = null * LOG2_E
    top = torch.maximum(stats.max, null2)
    scale = torch.exp2(stats.max - top)
    real, sink = stats.L * scale, torch.exp2(null2 - top)
    everything = real + sink
    n_eff = stats.L.square() / stats.Q
    if q2_floor is not None:
        n_eff = real.square() / (stats.Q * scale.square()).clamp(min=q2_floor)
    m_eff = n_eff * (real / everything)
    direction = stats.S * scale[..., None] + sink[..., None] * p.v_null[:, None, :]
    direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=NORM_FLOOR)
    magnitude = torch.tanh(F.softplus(p.mag_beta_raw)[:, None] * torch.log1p(m_eff))
    return PolarOutput(direction, magnitude, n_eff, sink / everything)


def polar_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: PolarParameters,
    *,
    past: Sequence[Sequence[KVRun]] = (),
    offset: int = 0,
    window: int | None = None,
    q2_floor: float | None = None,
) -> PolarOutput:
    """Causal polar attention of new tokens over their past and themselves, in linear memory.

    Args:
        q: the queries of the last ``T`` of the new tokens, ``[B, H, T, K]``.
        k, v: keys and values of all new tokens, ``[B, T', G, K]`` and ``[B, T', G, V]``, ``T' >= T``.
        parameters: per-head values.
        past: for each stream the runs before the new tokens (`tiles.KVRun`); empty at the start.
        offset: absolute position of the first new token; runs may begin later if a window dropped some.
        window: keys a query may see, itself included; ``None`` for all.
        q2_floor: legacy floor on the participation ratio; ``None`` is exact.

    Computed in fp32 (fp64 for fp64 inputs); direction and magnitude return in the type of ``q``.
    """
    batch, _, num_queries, key_width = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    p = parameters.to(dtype)
    first_query = offset + k.shape[1] - num_queries
    num_keys = torch.arange(first_query + 1, first_query + num_queries + 1, device=q.device, dtype=dtype)
    if window is not None:
        num_keys = num_keys.clamp(max=window)
    temperature = p.temperature(num_keys)
    null = temperature * p.null_logit(num_keys)
    scaled = q.to(dtype) * (temperature * (LOG2_E / math.sqrt(key_width)))[None, :, :, None]

    streams = []
    for b in range(batch):
        runs = [*past[b], (k[b], v[b])] if past else [(k[b], v[b])]
        first_key = offset + k.shape[1] - sum(run[0].shape[0] for run in runs)
        stats = run_statistics(scaled[b], runs, first_query=first_query, first_key=first_key, window=window)
        streams.append(_finish(stats, null, p, q2_floor))
    out = PolarOutput(*(torch.stack(parts) for parts in zip(*streams, strict=True)))
    return out._replace(direction=out.direction.to(q.dtype), magnitude=out.magnitude.to(q.dtype))


def visible_keys(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean ``[T, S]``: which of ``S`` keys each of the last ``T`` positions may see."""
    position = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def polar_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: PolarParameters,
    *,
    window: int | None = None,
    q2_floor: float | None = None,
) -> PolarOutput:
    """The definition, with the ``T x S`` weights in memory; differentiable.

    ``q`` is ``[B, H, T, K]``, ``k`` and ``v`` are ``[B, S, G, K | V]`` with ``S >= T``; the queries are the last
    ``T`` positions.
    """
    num_heads, num_queries, key_width = q.shape[1:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    p = parameters.to(dtype)
    group = num_heads // k.shape[2]
    keys = k.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1)
    values = v.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1)
    visible = visible_keys(num_queries, k.shape[1], window, q.device)
    num_keys = visible.sum(-1).to(dtype)
    temperature = p.temperature(num_keys)
    scores = (q.to(dtype) * (temperature * (LOG2_E / math.sqrt(key_width)))[..., None]) @ keys.mT
    scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.amax(-1).detach()
    weights = torch.exp2(scores - peak[..., None])
    stats = Statistics(peak, weights.sum(-1), weights.square().sum(-1), weights @ values)
    out = _finish(stats, temperature * p.null_logit(num_keys), p, q2_floor)
    return out._replace(direction=out.direction.to(q.dtype), magnitude=out.magnitude.to(q.dtype))
