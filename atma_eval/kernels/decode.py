"""Attention of a few new tokens over pages of keys and values, streams of different lengths in one call.

The new tokens are stored first; the queries of a stream are its last ``T`` positions. The keys are read through the
block table and never gathered by the Triton form (`decode_triton`), which reads each of them once for all query heads
and new tokens that share it; the PyTorch form here takes one stream after another. Maths: `polar` and `softmax`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from atma_eval.kernels.choice import MAX_STEPS, Impl
from atma_eval.kernels.polar import NORM_FLOOR, PolarOutput, PolarParameters, polar_attention
from atma_eval.kernels.softmax import softmax_attention

MAX_QUERIES = MAX_STEPS


def polar_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    parameters: PolarParameters,
    *,
    window: int | None = None,
    q2_floor: float | None = None,
    details: bool = True,
    host_lengths: Sequence[int] | None = None,
    impl: Impl = "torch",
) -> PolarOutput:
    """Polar attention of the last ``T`` tokens of each stream over its pages.

    Args:
        q: queries ``[B, H, T, K]``, ``T`` from 1 to 16, any strides but the last.
        keys, values: the pool, ``[P, page, G, K]`` and ``[P, page, G, V]``; query head ``h`` uses ``h // (H / G)``.
        tables: pages of each stream in order, int32 ``[B, N]``; pages behind a window may be -1.
        lengths: keys of each stream, the new tokens included, int32 ``[B]``. A stream of none is padding.
        parameters: per-head values.
        window: keys a query may see, itself included. No page that the *first* new token sees may have been dropped.
        q2_floor: legacy floor on the participation ratio; ``None`` is exact.
        details: whether ``n_eff`` and ``null_mass`` are wanted; without, the Triton form leaves them empty.
        host_lengths: lengths, or upper bounds of them, known without asking the device. They divide the Triton form's
            work, whose outputs for a longer stream may be NaN; ``None`` takes what the table could hold.

    Returns:
        As `polar.polar_attention`. A query that sees no key has the direction of the null and magnitude 0.
    """
    if impl == "triton":
        from atma_eval.kernels import decode_triton

        return decode_triton.polar_decode(
            q,
            keys,
            values,
            tables,
            lengths,
            parameters,
            window=window,
            q2_floor=q2_floor,
            details=details,
            host_lengths=host_lengths,
        )
    rows, wide = q.shape[:3], torch.promote_types(q.dtype, torch.float32)
    nothing = torch.nn.functional.normalize(parameters.v_null, dim=-1, eps=NORM_FLOOR).to(q.dtype)
    out = PolarOutput(
        nothing[:, None].repeat(rows[0], 1, rows[2], 1),
        q.new_zeros(rows),
        q.new_zeros(rows, dtype=wide),
        q.new_ones(rows, dtype=wide),
    )
    for b, live, k, v, first in _streams(q, keys, values, tables, lengths, window):
        part = polar_attention(live, k, v, parameters, offset=first, window=window, q2_floor=q2_floor)
        for whole, piece in zip(out, part, strict=True):
            whole[b, :, q.shape[2] - live.shape[2] :] = piece[0]
    return out


def softmax_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    host_lengths: Sequence[int] | None = None,
    impl: Impl = "torch",
) -> Tensor:
    """Softmax attention of the last ``T`` tokens of each stream over its pages, ``[B, H, T, V]`` in the type of ``q``.

    Arguments as in `polar_decode`; scores are ``scale * q @ k``. A query that sees no key gets zeros.
    """
    if impl == "triton":
        from atma_eval.kernels import decode_triton

        return decode_triton.softmax_decode(
            q, keys, values, tables, lengths, scale=scale, window=window, host_lengths=host_lengths
        )
    out = q.new_zeros(*q.shape[:3], values.shape[-1])
    for b, live, k, v, first in _streams(q, keys, values, tables, lengths, window):
        part = softmax_attention(live, k, v, scale=scale, offset=first, window=window)
        out[b, :, q.shape[2] - live.shape[2] :] = part[0]
    return out


def _streams(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, int]]:
    """Each stream with keys: its index, its queries that see some, and keys and values from position ``first``."""
    page = keys.shape[1]
    for b, length in enumerate(lengths.tolist()):
        num_live = min(q.shape[2], length)
        if num_live <= 0:
            continue
        first = first_visible(length, q.shape[2], window) // page
        pages = tables[b, first : -(-length // page)].long()
        stored = slice(0, length - first * page)
        k, v = (pool[pages].flatten(0, 1)[None, stored] for pool in (keys, values))
        yield b, q[b : b + 1, :, q.shape[2] - num_live :], k, v, first * page


def first_visible(length: int, num_queries: int, window: int | None) -> int:
    """The first position that any of the last ``num_queries`` of ``length`` tokens sees."""
    return 0 if window is None else max(0, length - num_queries - window + 1)


def key_value_bytes(
    lengths: Iterable[int],
    keys: Tensor,
    values: Tensor,
    *,
    num_queries: int = 1,
    window: int | None = None,
) -> int:
    """Bytes of keys and values that a decode call has to fetch: each visible one once. What speed is measured by."""
    visible = sum(length - first_visible(length, num_queries, window) for length in lengths)
    width = keys.shape[2] * (keys.shape[3] + values.shape[3])
    return visible * width * keys.element_size()
