"""Causal softmax attention over a paged past (spec: architecture, section 4).

The past and the causal block of the new tokens are computed apart by the stock flash kernel and merged by
log-sum-exp. Where the stock kernel does not serve (a window, which it can take only as a dense mask; another
device; values of another width), the tiled pass of `tiles` does, and costs the same per visible key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atma_eval.kernels.polar import row_sums, visible_keys
from atma_eval.kernels.tiles import LOG2_E, KVRun, cut, run_statistics

SPAN_KEYS = 4096  # keys of the past that one flash call takes


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: object) -> tuple[Tensor, Tensor]:
    """Stock flash attention: ``q`` ``[B, H, T, K]``, ``k`` and ``v`` ``[B, S, G, K]``; output and log-sum-exp.

    A private operator of torch (its behaviour is pinned by a test). Causal masks are aligned top left; a
    length of zero crashes it, so callers never pass one.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.transpose(1, 2), v.transpose(1, 2), 0.0, options.pop("is_causal", False), scale=scale, **options
    )


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys."""
    joined = torch.logaddexp(lse, other_lse)
    out = out * (lse - joined).exp()[..., None] + other * (other_lse - joined).exp()[..., None]
    return out, joined


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    past: Sequence[Sequence[KVRun]] = (),
    offset: int = 0,
    window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens over their past and themselves; arguments as in `polar.polar_attention`.

    Returns ``[B, H, T, V]`` in the type of ``q``. Scores are ``scale * q @ k``.
    """
    out = []
    for b in range(q.shape[0]):
        runs = list(past[b]) if past else []
        out.append(_one_stream(q[b : b + 1], k[b : b + 1], v[b : b + 1], runs, scale, offset, window))
    return torch.cat(out)


def _one_stream(
    q: Tensor, k: Tensor, v: Tensor, runs: list[KVRun], scale: float, offset: int, window: int | None
) -> Tensor:
    num_queries, num_new = q.shape[2], k.shape[1]
    windowed = window is not None and window < offset + num_new
    if windowed or q.device.type != "cpu" or k.shape[-1] != v.shape[-1]:
        return _tiled(q, k, v, runs, scale, offset, window)
    if num_queries < num_new:
        # Queries of the last tokens only: the earlier new tokens are a past like any other.
        split = num_new - num_queries
        runs = [*runs, (k[0, :split], v[0, :split])]
        k, v = k[:, split:], v[:, split:]
    out, lse = _flash(q, k, v, scale, is_causal=True)
    dtype = out.dtype
    num_past = sum(run[0].shape[0] for run in runs)
    for start in range(0, num_past, SPAN_KEYS):
        keys, values = cut(runs, 0, start, min(start + SPAN_KEYS, num_past))
        other, other_lse = _flash(q, keys[None], values[None], scale)
        out, lse = _merge(out, lse, other, other_lse)
    return out.to(dtype)


def _tiled(q: Tensor, k: Tensor, v: Tensor, runs: list[KVRun], scale: float, offset: int, window: int | None) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    runs = [*runs, (k[0], v[0])]
    end = offset + k.shape[1]
    stats = run_statistics(
        q[0].to(dtype) * (scale * LOG2_E),
        runs,
        first_query=end - q.shape[2],
        first_key=end - sum(run[0].shape[0] for run in runs),
        window=window,
        with_squares=False,
    )
    return (stats.S / stats.L[..., None]).to(q.dtype)[None]


def softmax_training(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """`softmax_reference` with gradients, in linear memory.

    The stock kernel where it needs no mask. A window it can take only as a dense mask, so the row blocks of
    polar attention serve there: at 2,048 tokens and a window of 256 three times as fast on the CPU.
    """
    if q.shape[2] == k.shape[1] and (window is None or window >= k.shape[1]):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
        )
    stats = row_sums(q.to(torch.promote_types(q.dtype, torch.float32)) * (scale * LOG2_E), k, v, window)
    return (stats.S / stats.L[..., None]).to(q.dtype)


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """The definition, differentiable: ``q`` ``[B, H, T, K]``, ``k`` and ``v`` ``[B, S, G, K | V]``, ``S >= T``."""
    visible = visible_keys(q.shape[2], k.shape[1], window, q.device)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, scale=scale, enable_gqa=True
    )
