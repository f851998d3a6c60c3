"""The distractor losses: what attention gives to random keys (spec: architecture, sections 4 and 5). Training only.

Random inputs pass through the key (and value) projections without gradient; the loss teaches queries to leave such
keys alone. For polar attention it is the mass on random keys that compete with the null sink alone; for softmax
attention the squared change of the output when random keys stand before the real ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atma_eval.kernels.polar import PolarParameters

ROWS = 256  # queries whose scores are held at once; the backward pass computes them again


def _log_sum_exp(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).logsumexp(-1)


def polar_distractor(q: Tensor, random_keys: Tensor, parameters: PolarParameters, num_keys: Tensor) -> Tensor:
    """Mean over streams, heads and queries of the mass on random keys in a softmax of them and the null sink.

    Args:
        q: queries as they enter the attention, ``[B, H, T, K]``.
        random_keys: ``[B, R, G, K]``, normed, without gradient.
        parameters: per-head values of the attention.
        num_keys: real keys each query sees, ``[T]``, whatever the window; they set temperature and null.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    p = parameters.to(dtype)
    num_keys = num_keys.to(dtype)
    temperature = p.temperature(num_keys)
    scaled = q.to(dtype) * (temperature / math.sqrt(q.shape[-1]))[..., None]
    keys = random_keys.to(dtype).transpose(1, 2).repeat_interleave(q.shape[1] // random_keys.shape[2], dim=1)
    rows = [checkpoint(_log_sum_exp, part, keys, use_reentrant=False) for part in scaled.split(ROWS, dim=2)]
    return torch.sigmoid(torch.cat(rows, dim=2) - temperature * p.null_logit(num_keys)).mean()


def softmax_distractor(
    q: Tensor, k: Tensor, v: Tensor, random_keys: Tensor, random_values: Tensor, mixed: Tensor, *, scale: float
) -> Tensor:
    """Mean squared change of the output by random keys that every query sees beside all real keys of its past.

    ``q`` ``[B, H, T, K]``, ``k`` and ``v`` ``[B, T, G, K | V]`` as they enter the attention; ``random_keys`` and
    ``random_values`` ``[B, R, G, K | V]``; ``mixed`` ``[B, H, T, V]`` is the output without them. No window here.
    """
    num_queries, num_random = q.shape[2], random_keys.shape[1]
    keys, values = torch.cat([random_keys, k], dim=1), torch.cat([random_values, v], dim=1)
    visible = torch.ones(num_queries, num_random + num_queries, dtype=torch.bool, device=q.device).tril(num_random)
    distracted = F.scaled_dot_product_attention(
        q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible, scale=scale, enable_gqa=True
    )
    return (distracted - mixed).square().mean()
