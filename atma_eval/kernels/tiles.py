"""Attention statistics in one tiled pass over the keys: running max, L, Q and S.

With scores ``a`` in units of log2 and the running max ``M``, for each query row::

    p = 2^(a - M)      L = sum p      Q = sum p^2      S = sum p v

On a new max, ``L`` and ``S`` are scaled by ``2^(M_old - M_new)`` and ``Q`` by its square. Memory is one
tile, whatever the length. Rows of a tile are the query heads that share a key/value head, stacked, so each
key is read once per group; base 2 because `exp2` is several times faster than `exp` on current CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
MASKED = -1e38  # a finite "minus infinity": differences of two of them stay finite
TILE_KEYS = 1024
TILE_ROWS = 512  # per thread; with 1,024 keys one fp32 tile is 2 MB

KVRun = tuple[Tensor, Tensor]
"""Keys ``[S, G, K]`` and values ``[S, G, V]`` of consecutive tokens, usually views of pages."""


class Statistics(NamedTuple):
    """Per query and head: ``max`` (log2 units), ``L``, ``Q`` as ``[H, T]`` and ``S`` as ``[H, T, V]``."""

    max: Tensor
    L: Tensor
    Q: Tensor
    S: Tensor


def run_statistics(
    q: Tensor,
    runs: Sequence[KVRun],
    *,
    first_query: int,
    first_key: int = 0,
    window: int | None = None,
    with_squares: bool = True,
) -> Statistics:
    """Stream one stream's queries over its keys, causally.

    Args:
        q: queries ``[H, T, K]``, already scaled so that ``q @ k`` is the score in log2 units.
        runs: keys and values in token order, ``G`` heads; query head ``h`` uses head ``h // (H / G)``.
        first_query: absolute position of the first query; query ``i`` sees keys up to ``first_query + i``.
        first_key: absolute position of the first key in ``runs``.
        window: keys a query may see, itself included; ``None`` for all.
        with_squares: accumulate ``Q`` (zeros otherwise).

    Every query must see at least one key.
    """
    num_heads, num_queries, _ = q.shape
    num_kv_heads = runs[0][0].shape[1]
    group = num_heads // num_kv_heads
    value_width = runs[0][1].shape[-1]
    dtype = q.dtype
    step = max(1, TILE_ROWS * (torch.get_num_threads() if q.device.type == "cpu" else 8) // group)

    peak = q.new_empty(num_heads, num_queries)
    total = torch.empty_like(peak)
    squares = torch.zeros_like(peak)
    summed = q.new_empty(num_heads, num_queries, value_width)
    scratch = q.new_empty(min(step, num_queries) * group * TILE_KEYS)

    for g in range(num_kv_heads):
        heads = slice(g * group, (g + 1) * group)
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            rows = (stop - start) * group
            stacked = q[heads, start:stop].transpose(0, 1).reshape(rows, -1)
            position = torch.arange(first_query + start, first_query + stop, device=q.device)
            position = position.repeat_interleave(group)[:, None]
            m = q.new_full((rows, 1), MASKED)
            big_l, big_q = q.new_zeros(rows, 1), q.new_zeros(rows, 1)
            big_s = q.new_zeros(rows, value_width)
            first_seen = 0 if window is None else first_query + start - window + 1
            run_start = first_key
            for keys, values in runs:
                run_stop = run_start + keys.shape[0]
                lo, hi = max(run_start, first_seen), min(run_stop, first_query + stop)
                for j in range(lo, hi, TILE_KEYS):
                    j_stop = min(j + TILE_KEYS, hi)
                    width = j_stop - j
                    k_tile = keys[j - run_start : j_stop - run_start, g].to(dtype)
                    v_tile = values[j - run_start : j_stop - run_start, g].to(dtype)
                    a = torch.mm(stacked, k_tile.t(), out=scratch[: rows * width].view(rows, width))
                    hidden = None
                    if j_stop - 1 > first_query + start:
                        hidden = torch.arange(j, j_stop, device=q.device)[None, :] > position
                    if window is not None and j < first_query + stop - window:
                        outside = torch.arange(j, j_stop, device=q.device)[None, :] <= position - window
                        hidden = outside if hidden is None else hidden | outside
                    if hidden is not None:
                        a.masked_fill_(hidden, MASKED)
                    m_new = torch.maximum(m, a.amax(1, keepdim=True))
                    scale = torch.exp2(m - m_new)
                    m = m_new
                    torch.exp2(a.sub_(m), out=a)
                    if hidden is not None and window is not None:
                        # a row with no visible key yet has M = MASKED, so its masked scores became 2^0
                        a.masked_fill_(hidden, 0.0)
                    big_l.mul_(scale).add_(a.sum(1, keepdim=True))
                    big_s.mul_(scale).addmm_(a, v_tile)
                    if with_squares:
                        norm = torch.linalg.vector_norm(a, dim=1, keepdim=True)
                        big_q.mul_(scale * scale).addcmul_(norm, norm)
                run_start = run_stop
            shape = (stop - start, group)
            peak[heads, start:stop] = m.view(shape).t()
            total[heads, start:stop] = big_l.view(shape).t()
            squares[heads, start:stop] = big_q.view(shape).t()
            summed[heads, start:stop] = big_s.view(*shape, value_width).transpose(0, 1)
    return Statistics(peak, total, squares, summed)
