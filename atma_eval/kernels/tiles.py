"""Attention statistics in one tiled pass over the keys: running max, L, Q and S.

With scores ``a`` in units of log2 and the running max ``M``, for each query row::

    p = 2^(a - M)      L = sum p      Q = sum p^2      S = sum p v

On a new max, ``L`` and ``S`` are scaled by ``2^(M_old - M_new)`` and ``Q`` by its square. Memory is one
tile, whatever the length. Rows of a tile are the query heads that share a key/value head, stacked, so each
key is read once per group; base 2 because `exp2` is several times faster than `exp` on current CPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
MASKED = -1e38  # a finite "minus infinity": differences of two of them stay finite
TILE_KEYS = 1024
TILE_ROWS = 512  # with 1,024 keys one fp32 tile is 2 MB
MAX_TILE_KEYS = 8192  # fewer rows, as in decoding, take more keys at once
MIN_WINDOW_STEP = 64

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
    step = min(num_queries, _query_step(group, window, q.device))

    peak = q.new_empty(num_heads, num_queries)
    total = torch.empty_like(peak)
    squares = torch.zeros_like(peak)
    summed = q.new_empty(num_heads, num_queries, value_width)

    inference = torch.is_inference_mode_enabled()  # a thread's own setting, which workers must share

    @torch.inference_mode(inference)
    def block(g: int, start: int) -> None:
        heads, queries = slice(g * group, (g + 1) * group), slice(start, min(start + step, num_queries))
        part = q[heads, queries]
        sums = _row_block(part, runs, g, first_query + start, first_key, window, with_squares)
        for out, value in zip((peak, total, squares, summed), sums, strict=True):
            out[heads, queries] = value

    blocks = [(g, start) for g in range(num_kv_heads) for start in range(0, num_queries, step)]
    pool = _pool if q.device.type == "cpu" and len(blocks) > 1 else None
    for _ in (pool.map if pool else map)(block, *zip(*blocks, strict=True)):
        pass
    return Statistics(peak, total, squares, summed)


def _row_block(
    q: Tensor,
    runs: Sequence[KVRun],
    kv_head: int,
    first_query: int,
    first_key: int,
    window: int | None,
    with_squares: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the queries ``[group, queries, K]`` that share a key head, their heads stacked as rows."""
    group, num_queries, _ = q.shape
    rows = group * num_queries
    tile_keys = min(MAX_TILE_KEYS, max(TILE_KEYS, TILE_ROWS * TILE_KEYS // rows))
    stacked = q.reshape(rows, -1)
    m = q.new_full((rows, 1), MASKED)
    big_l, big_q = q.new_zeros(rows, 1), q.new_zeros(rows, 1)
    big_s = q.new_zeros(rows, runs[0][1].shape[-1])
    scratch = q.new_empty(0)
    own = [(keys[:, kv_head], values[:, kv_head]) for keys, values in runs]
    first_seen = first_key if window is None else max(first_key, first_query - window + 1)
    for j, j_stop in _pieces(first_seen, first_query + num_queries, tile_keys):
        width = j_stop - j
        k_tile, v_tile = (x.to(q.dtype) for x in cut(own, first_key, j, j_stop))
        if scratch.numel() < rows * width:
            scratch = q.new_empty(rows * width)
        a = torch.mm(stacked, k_tile.t(), out=scratch[: rows * width].view(rows, width))
        _hide(a.view(group, num_queries, width), j, first_query, window)
        m_new = torch.maximum(m, a.amax(1, keepdim=True))
        scale = torch.exp2(m - m_new)
        m = m_new
        torch.exp2(a.sub_(m), out=a)
        big_l.mul_(scale).add_(a.sum(1, keepdim=True))
        big_s.mul_(scale).addmm_(a, v_tile)
        if with_squares:
            norm = torch.linalg.vector_norm(a, dim=1, keepdim=True)
            big_q.mul_(scale * scale).addcmul_(norm, norm)
    shape = (group, num_queries)
    return m.view(shape), big_l.view(shape), big_q.view(shape), big_s.view(*shape, -1)


def cut(runs: Sequence[KVRun], first: int, lo: int, hi: int) -> KVRun:
    """Keys and values of positions ``lo`` to ``hi`` of runs that start at ``first``: a view if one run holds them all.

    Work is divided by position, not by run, so that results do not depend on where the pages happen to lie.
    """
    parts = []
    for keys, values in runs:
        count = keys.shape[0]
        if lo < first + count and hi > first:
            inside = slice(max(lo - first, 0), min(hi - first, count))
            parts.append((keys[inside], values[inside]))
        first += count
    if len(parts) == 1:
        return parts[0]
    return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])


_pool: ThreadPoolExecutor | None = None


def use_workers(num_threads: int) -> None:
    """Share row blocks of attention on the CPU among this many threads (one until told otherwise).

    Blocks are independent and many operations long, so handing them out whole costs nothing; threads that meet at
    every operation, as torch's own do, lose far more than they gain once another process wants a core.
    """
    global _pool
    if _pool is not None:
        _pool.shutdown()
    # In a worker every operation runs on that worker alone; the caller's own setting is not touched.
    alone = functools.partial(torch.set_num_threads, 1)
    _pool = ThreadPoolExecutor(num_threads, "tiles", initializer=alone) if num_threads > 1 else None


def _query_step(group: int, window: int | None, device: torch.device) -> int:
    """Queries of one tile. A block of ``step`` queries meets ``window + step`` keys, so a window wants few."""
    step = TILE_ROWS * (1 if device.type == "cpu" else 8) // group
    if window is not None:
        step = min(step, max(MIN_WINDOW_STEP, window // 8))
    return max(1, step)


def _pieces(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a range in equal pieces of about ``size`` (0.5 to 1.5 times), so that no sliver is left over."""
    if hi > lo:
        width = -(-(hi - lo) // max(1, round((hi - lo) / size)))
        for j in range(lo, hi, width):
            yield j, min(j + width, hi)


def _hide(a: Tensor, first_key: int, first_query: int, window: int | None) -> None:
    """Set what a query must not see to minus infinity, in scores ``[group, queries, keys]``.

    Only the two triangles at the edges of the visible band are touched. Zeroing before adding minus infinity
    keeps a NaN of a hidden key from its neighbours, and is several times faster than a masked fill.
    """
    num_queries, num_keys = a.shape[1:]
    late = max(first_query + 1 - first_key, 0)  # first column that the first query must not see
    if late < num_keys:
        edge, diagonal = a[..., late:], first_query - first_key - late
        edge.tril_(diagonal).add_(a.new_full(edge.shape[1:], -torch.inf).triu_(diagonal + 1))
    if window is not None:
        early = first_query + num_queries - window - first_key  # columns that the last query no longer sees
        if early > 0:
            edge, diagonal = a[..., :early], first_query - window + 1 - first_key
            edge.triu_(diagonal).add_(a.new_full(edge.shape[1:], -torch.inf).tril_(diagonal - 1))
