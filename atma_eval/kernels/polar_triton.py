"""Prefill on a GPU: polar attention, and softmax attention by the same kernel, in one pass over the keys.

Maths and shapes are those of `polar` and `tiles`; `README.md` beside this file says what differs. A program owns a
block of rows. A row is one query of one head, and the heads that share a key/value head are neighbours
(row = query * group + head), so keys and values are never expanded, whatever the size of the group.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atma_eval.kernels.aot import SHARED_BYTES, TARGETS, Configuration
from atma_eval.kernels.common_triton import (
    FLOOR,
    LOG2_E,
    MASKED,
    TYPES,
    log1p,
    on_its_device,
    require_supported,
    shared_bytes,
    softplus,
    tanh,
)
from atma_eval.kernels.polar import PolarOutput, PolarParameters

SECTION = tl.constexpr(16)  # key/value heads whose blocks are handed out together
NO_WINDOW = 2**31 - 1

COMPILED = {  # head widths of the table: those of our models, one that is padded, the largest
    torch.bfloat16: (16, 48, 64, 128, 256),
    torch.float16: (128,),
    torch.float32: (16, 128),
}


class PagedPast(NamedTuple):
    """The past of ``B`` streams in pages.

    Attributes:
        keys, values: the pool, ``[P, page, G, K]``; what lies in other slots than those of the past is never used.
        tables: page of each ``page`` positions, int32 ``[B, max_pages]``; what lies before ``first`` is never read.
        length: tokens of every stream, or of each, int32 ``[B]`` on the device.
        first: the first position that is still there.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor
    length: int | Tensor
    first: int = 0


class Tiles(NamedTuple):
    """How a launch is cut: rows and keys of a tile, keys of one with a mask, warps of a program, pipeline stages."""

    rows: int
    keys: int
    edge: int
    num_warps: int
    num_stages: int


def tiles(dtype: torch.dtype, width: int, shared_bytes: int) -> Tiles:
    """Tile sizes for a head width and the shared memory that one program may have.

    Of the 16-bit types a tile of queries and ``num_stages`` tiles each of keys and values lie there at once. Two
    groups of four warps take 64 rows each, so that one can be at its exponentials while the other multiplies.
    """
    large, medium = shared_bytes >= SHARED_BYTES[90], shared_bytes >= SHARED_BYTES[80]
    if dtype == torch.float32:  # exact products, on no tensor core: small tiles, or the registers overflow
        return Tiles(64 if width <= 64 else 32, 32, 32, 8, 2) if width <= 128 else Tiles(32, 16, 16, 8, 2)
    if width <= 128:
        return Tiles(128, 128, 64, 8, 3) if large else Tiles(128, 64, 32, 8, 3)
    return Tiles(128, 64, 32, 8, 2) if large else Tiles(64, 32, 32, 8, 3 if medium else 2)


@triton.jit
def _page(table, index, past_length, page_size, EDGE: tl.constexpr):
    """The page of a piece of the past; zero for one of the new keys, or beyond all."""
    return tl.load(table + index * EDGE // page_size, mask=index < tl.cdiv(past_length, EDGE), other=0)


@triton.jit
def _piece(i, begin, num_early, middle, num_middle, new_outer):
    """The ``i``-th piece that needs a mask: at the start, where the past ends, and at the end."""
    late = new_outer + i - num_early - num_middle
    return tl.where(i < num_early, begin + i, tl.where(i < num_early + num_middle, middle + i - num_early, late))


@triton.jit
def _tile(
    q, row_scale, position, peak, big_l, big_q, big_s,
    k, v, past_keys, past_values, page, stride_page, page_size, stride_token, past_length, offset, end, seen, window,
    index, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
    SOFTMAX: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Take ``KEYS`` keys into the statistics of the rows.

    ``index`` counts pieces of ``EDGE`` keys: first those of the past, which lie in ``page``, then the new ones. Only
    with ``MASK`` are there keys that a row must not see: later than itself, behind its window, or outside what there
    is, where nothing is loaded.
    """
    num_past = tl.cdiv(past_length, EDGE)
    is_past = index < num_past
    start = tl.where(is_past, index, index - num_past) * EDGE
    # A tile never leaves its page, and both sources have the same stride, so only the place of the tile differs.
    in_past = page.to(tl.int64) * stride_page + (start % page_size) * stride_token
    in_new = start.to(tl.int64) * stride_token
    slot = tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK_D)
    at = slot[:, None] * stride_token + column[None, :]
    key_at = tl.where(is_past, past_keys + in_past, k + in_new) + at
    value_at = tl.where(is_past, past_values + in_past, v + in_new) + at
    if MASK:
        first = tl.where(is_past, 0, offset) + start
        last = tl.where(is_past, past_length, end)
        there = (first + slot >= seen) & (first + slot < last)
        load = there[:, None] & (column < WIDTH)[None, :]
        keys = tl.load(key_at, mask=load, other=0.0)
    elif WIDTH < BLOCK_D:
        load = (column < WIDTH)[None, :]
        keys = tl.load(key_at, mask=load, other=0.0)
    else:
        keys = tl.load(key_at)
    a = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASK:
        since = tl.maximum(position - window + 1, seen) - first
        until = tl.minimum(position + 1, last) - first
        a = tl.where((slot[None, :] >= since[:, None]) & (slot[None, :] < until[:, None]), a, float("-inf"))
    # The factor is positive, so the largest product is that of the largest score: one multiply-add per score.
    new_peak = tl.maximum(peak, tl.max(a, 1) * row_scale)
    p = tl.exp2(a * row_scale[:, None] - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    big_l = big_l * shrink + tl.sum(p, 1)
    if not SOFTMAX:
        big_q = big_q * (shrink * shrink) + tl.sum(p * p, 1)
    values = tl.load(value_at, mask=load, other=0.0) if MASK or WIDTH < BLOCK_D else tl.load(value_at)
    big_s = tl.dot(p.to(values.dtype), values, big_s * shrink[:, None], input_precision="ieee")
    return new_peak, big_l, big_q, big_s


UNSPECIALISED = (
    "stride_tables", "num_streams", "num_kv_heads", "group", "num_queries", "num_new", "has_past", "page_size",
    "offset", "first", "window", "details",
)  # fmt: skip
PARAMETERS = ("v_null", "null_base", "null_slope", "len_gain", "mag_beta")
FLOATS = ("scale", "q2_floor")


@triton.jit(do_not_specialize=UNSPECIALISED)  # or a length of one, or of sixteen, would be a kernel of its own
def _prefill(
    q, k, v, past_keys, past_values, tables, lengths, out,
    magnitude, n_eff, null_mass, v_null, null_base, null_slope, len_gain, mag_beta,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qt: tl.int64, stride_kb: tl.int64, stride_vb: tl.int64,
    stride_page: tl.int64, stride_tables: tl.int64,
    num_streams, num_kv_heads, group, num_queries, num_new, has_past, page_size, offset, first, window, details,
    scale, q2_floor,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    # Blocks with the most keys start first, so that short ones fill the end of the launch. They are handed out for
    # a few key/value heads at a time, whose keys then stay in the L2 cache while all their blocks pass.
    num_blocks = tl.cdiv(num_queries * group, ROWS)
    section = tl.program_id(0) // (SECTION * num_blocks)
    inside = tl.program_id(0) - section * (SECTION * num_blocks)
    size = tl.minimum(num_streams * num_kv_heads - section * SECTION, SECTION)
    block = num_blocks - 1 - inside // size
    kv_head = section * SECTION + inside % size
    stream = (kv_head // num_kv_heads).to(tl.int64)
    kv_head = kv_head % num_kv_heads

    past_length = tl.load(lengths + stream, mask=has_past != 0, other=0)
    offset = tl.where(has_past != 0, past_length, offset)
    end = offset + num_new
    row = block * ROWS + tl.arange(0, ROWS)
    exists = row < num_queries * group
    query = row // group
    head = kv_head * group + row % group
    column = tl.arange(0, BLOCK_D)
    in_width = column < WIDTH
    position = tl.minimum(end - num_queries + query, end - 1)  # rows that do not exist do as the last one
    low = end - num_queries + block * ROWS // group  # positions of the first and the last row
    high = tl.minimum(end - num_queries + (block * ROWS + ROWS - 1) // group, end - 1)

    q_at = stream * stride_qb + head[:, None] * stride_qh + query[:, None] * stride_qt + column[None, :]
    q_tile = tl.load(q + q_at, mask=exists[:, None] & in_width[None, :], other=0.0)
    if SOFTMAX:
        row_scale = tl.full([ROWS], 1.0, tl.float32) * (scale * LOG2_E)
    else:
        # After the product, in fp32: a 16-bit query would lose digits to a temperature folded into it.
        num_visible = tl.minimum(position + 1, window).to(tl.float32)
        growth = softplus(tl.load(len_gain + head, mask=exists, other=0.0))
        row_scale = (1.0 + growth * tl.log(num_visible)) * (scale * LOG2_E)

    # Some row sees keys from `seen` on; every row sees those from `seen_by_all` to `low`. Whole tiles inside that range
    # need no mask and make up nearly all of a long loop; those of the past begin at `inner`, the new ones at
    # `new_inner`. What is left at the ends follows in a second loop, in narrower tiles, to waste less. All in pieces.
    per_tile: tl.constexpr = KEYS // EDGE
    seen = tl.maximum(low - window + 1, first)
    seen_by_all = tl.maximum(high - window + 1, first)
    num_past = tl.cdiv(past_length, EDGE)
    begin = tl.minimum(seen // EDGE, num_past) + tl.maximum(seen - offset, 0) // EDGE
    stop = num_past + tl.cdiv(high + 1 - offset, EDGE)
    inner = tl.minimum(tl.cdiv(seen_by_all, KEYS) * per_tile, num_past)
    num_inner = tl.maximum(past_length // EDGE - inner, 0) // per_tile
    outer = inner + num_inner * per_tile
    new_inner = tl.minimum(num_past + tl.cdiv(tl.maximum(seen_by_all - offset, 0), EDGE), stop)
    num_new_inner = tl.maximum(num_past + (low + 1 - offset) // EDGE - new_inner, 0) // per_tile
    new_outer = new_inner + num_new_inner * per_tile

    k += stream * stride_kb + kv_head * WIDTH
    v += stream * stride_vb + kv_head * WIDTH
    past_keys += kv_head * WIDTH
    past_values += kv_head * WIDTH
    tables += stream * stride_tables
    stride_token = num_kv_heads * WIDTH
    peak = tl.full([ROWS], MASKED, tl.float32)
    big_l = tl.zeros([ROWS], tl.float32)
    big_q = tl.zeros([ROWS], tl.float32)
    big_s = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # The page of a tile is looked up while the tile before it is at work. A load that the loads of its own tile wait
    # for would take a stage of the pipeline from them, and leave them nothing to hide behind.
    index = tl.where(num_inner > 0, inner, new_inner)
    page = _page(tables, index, past_length, page_size, EDGE)
    for i in range(num_inner + num_new_inner):
        next_index = tl.where(i + 1 < num_inner, index + per_tile, new_inner + (i + 1 - num_inner) * per_tile)
        next_page = _page(tables, next_index, past_length, page_size, EDGE)
        peak, big_l, big_q, big_s = _tile(
            q_tile, row_scale, position, peak, big_l, big_q, big_s, k, v, past_keys, past_values, page,
            stride_page, page_size, stride_token, past_length, offset, end, seen, window,
            index, WIDTH, BLOCK_D, EDGE, KEYS, SOFTMAX, False,
        )  # fmt: skip
        index, page = next_index, next_page

    # The rows are divided once more, without a sign this time, lest the compiler keep what it knows of them in
    # registers all through the first loop.
    query = (row.to(tl.uint32) // group.to(tl.uint32)).to(tl.int32)
    head = kv_head * group + row - query * group
    position = tl.minimum(end - num_queries + query, end - 1)
    exists = query < num_queries
    num_early = tl.maximum(inner - begin, 0)
    middle = tl.maximum(outer, begin)
    num_middle = new_inner - middle
    index = _piece(0, begin, num_early, middle, num_middle, new_outer)
    page = _page(tables, index, past_length, page_size, EDGE)
    for i in range(num_early + num_middle + stop - new_outer):
        next_index = _piece(i + 1, begin, num_early, middle, num_middle, new_outer)
        next_page = _page(tables, next_index, past_length, page_size, EDGE)
        peak, big_l, big_q, big_s = _tile(
            q_tile, row_scale, position, peak, big_l, big_q, big_s, k, v, past_keys, past_values, page,
            stride_page, page_size, stride_token, past_length, offset, end, seen, window,
            index, WIDTH, BLOCK_D, EDGE, EDGE, SOFTMAX, True,
        )  # fmt: skip
        index, page = next_index, next_page

    # Outputs lie token by token, heads together, as the projections that follow want them.
    out_row = (stream * num_queries + query) * (num_kv_heads * group) + head
    out_at = out + out_row[:, None] * WIDTH + column[None, :]
    stored = exists[:, None] & in_width[None, :]
    if SOFTMAX:
        tl.store(out_at, (big_s / big_l[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        # `polar._finish`: the null sink joins in units of the larger of itself and the best key.
        slope = softplus(tl.load(null_slope + head, mask=exists, other=0.0))
        num_visible = tl.minimum(position + 1, window).to(tl.float32)
        null = tl.load(null_base + head, mask=exists, other=0.0) + slope * tl.sqrt(tl.log(num_visible + 1.0))
        null *= row_scale / scale
        top = tl.maximum(peak, null)
        shrink = tl.exp2(peak - top)
        real = big_l * shrink
        sink = tl.exp2(null - top)
        ratio = big_l * big_l / big_q
        if q2_floor > 0:
            ratio = real * real / tl.maximum(big_q * shrink * shrink, q2_floor)
        null_value = tl.load(v_null + head[:, None] * WIDTH + column[None, :], mask=stored, other=0.0)
        mixed = big_s * shrink[:, None] + sink[:, None] * null_value
        length = tl.sqrt(tl.sum(mixed * mixed, 1))
        mixed = mixed * (1.0 / tl.maximum(length, FLOOR))[:, None]
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=stored)
        gain = softplus(tl.load(mag_beta + head, mask=exists, other=0.0))
        bounded = tanh(gain * log1p(ratio * (real / (real + sink))))
        tl.store(magnitude + out_row, bounded.to(magnitude.dtype.element_ty), mask=exists)
        if details != 0:
            tl.store(n_eff + out_row, ratio, mask=exists)
            tl.store(null_mass + out_row, sink / (real + sink), mask=exists)


def polar_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: PolarParameters,
    *,
    past: PagedPast | None = None,
    offset: int = 0,
    window: int | None = None,
    q2_floor: float | None = None,
    details: bool = False,
) -> PolarOutput:
    """`polar.polar_attention` in one launch; forward only.

    Args:
        q: the queries of the last ``T`` of the new tokens, ``[B, H, T, K]``.
        k, v: keys and values of all new tokens, ``[B, T', G, K]``, ``T' >= T``; of one width and of the type of ``q``.
        parameters: per-head values.
        past: what comes before the new tokens.
        offset: absolute position of the first new token; with a past that is its length, and this is not read.
        window: keys a query may see, itself included; ``None`` for all.
        q2_floor: legacy floor on the participation ratio; ``None`` is exact.
        details: fill ``n_eff`` and ``null_mass`` (fp32); they are empty otherwise.

    Raises `UserError` for a device, a type or a head width that the kernel does not serve.
    """
    p = PolarParameters(*(x.float().contiguous() for x in parameters))
    num_details = q.shape[0] * q.shape[1] * q.shape[2] if details else 0
    n_eff, null_mass = (q.new_empty(num_details, dtype=torch.float32) for _ in range(2))
    magnitude = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    results = (magnitude, n_eff, null_mass, *p)
    scale = q.shape[-1] ** -0.5
    direction = _launch(q, k, v, results, past, offset, window, scale, q2_floor or 0.0, details)
    if details:
        n_eff, null_mass = (x.view(magnitude.shape).transpose(1, 2) for x in (n_eff, null_mass))
    return PolarOutput(direction, magnitude.transpose(1, 2), n_eff, null_mass)


def softmax_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    past: PagedPast | None = None,
    offset: int = 0,
    window: int | None = None,
) -> Tensor:
    """`softmax.softmax_attention` in one launch; arguments as in `polar_prefill`. Returns ``[B, H, T, K]``."""
    return _launch(q, k, v, (None,) * 8, past, offset, window, scale, 0.0, False)


@on_its_device
def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor | None, ...],
    past: PagedPast | None,
    offset: int,
    window: int | None,
    scale: float,
    q2_floor: float,
    details: bool,
) -> Tensor:
    batch, num_heads, num_queries, width = q.shape
    num_new, num_kv_heads = k.shape[1:3]
    require_supported(q.dtype, width, q.device)
    tile = tiles(q.dtype, width, shared_bytes(q.device))
    q = q if q.stride(-1) == 1 else q.contiguous()
    k, v = (x if _is_dense(x) else x.contiguous() for x in (k, v))
    nothing = torch.empty(0, dtype=torch.int32, device=q.device)
    first, page_size = offset, tile.keys
    pages = (k, k, nothing, nothing)  # without a past nothing is read of them
    if past is not None:
        length = past.length
        if not isinstance(length, Tensor):
            length = torch.full((batch,), length, dtype=torch.int32, device=q.device)
        first, page_size = past.first, past.keys.shape[1]
        pages = (past.keys, past.values, past.tables, length)
    _check(q, k, v, pages, page_size, tile)
    out = q.new_empty(batch, num_queries, num_heads, width)
    group = num_heads // num_kv_heads
    grid = (triton.cdiv(num_queries * group, tile.rows) * batch * num_kv_heads,)
    _prefill[grid](
        q, k, v, *pages, out, *results,
        *q.stride()[:3], k.stride(0), v.stride(0), pages[0].stride(0), pages[2].stride(0),
        batch, num_kv_heads, group, num_queries, num_new, int(past is not None), page_size, offset, first,
        NO_WINDOW if window is None else window, int(details), float(scale), float(q2_floor),
        **_constants(width, tile, softmax=results[0] is None), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out.transpose(1, 2)


def _constants(width: int, tile: Tiles, *, softmax: bool) -> dict[str, Any]:
    sizes = {"ROWS": tile.rows, "KEYS": tile.keys, "EDGE": tile.edge}
    return {"WIDTH": width, "BLOCK_D": max(16, triton.next_power_of_2(width)), **sizes, "SOFTMAX": softmax}


def _is_dense(x: Tensor) -> bool:
    """Whether ``[..., T, G, K]`` has each token in one piece, right after the one before."""
    return x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1)


def _check(q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, ...], page_size: int, tile: Tiles) -> None:
    """Shapes and types that no option of a user decides: what is wrong here is a mistake in the calling code."""
    batch, num_heads, num_queries, width = q.shape
    shape = (batch, k.shape[1], k.shape[2], width)
    if k.shape != shape or v.shape != shape or num_heads % k.shape[2] or not 0 < num_queries <= k.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(k.shape)} and values {tuple(v.shape)}")
    keys, values, *indices = pages
    if {x.dtype for x in (k, v, keys, values)} != {q.dtype}:
        raise ValueError(f"keys and values, old and new, must be {q.dtype} as the queries")
    if keys.shape[2:] != shape[2:] or values.shape != keys.shape or keys.stride() != values.stride():
        raise ValueError(f"pages {tuple(keys.shape)} and {tuple(values.shape)} do not fit new keys {shape}")
    if not _is_dense(keys) or page_size % tile.keys:
        raise ValueError(f"pages must be dense and hold whole tiles of {tile.keys} keys, not {page_size} tokens")
    if any(x.dtype != torch.int32 or x.stride(-1) != 1 or x.shape[0] not in (0, batch) for x in indices):
        raise ValueError(f"tables and lengths must be int32, for {batch} streams")


def configurations() -> list[Configuration]:
    """Every kernel that the two public functions launch, at some head widths (`aot`)."""
    listed = []
    for dtype, width in ((dtype, width) for dtype, widths in COMPILED.items() for width in widths):
        by_tile: dict[Tiles, tuple[int, ...]] = {}
        for capability in SHARED_BYTES if dtype == torch.bfloat16 and width >= 128 else TARGETS:
            tile = tiles(dtype, width, SHARED_BYTES[capability])
            by_tile[tile] = (*by_tile.get(tile, ()), capability)
        for tile, targets in by_tile.items():
            listed += [_configuration(TYPES[dtype], width, tile, targets, softmax) for softmax in (False, True)]
    return listed


def _configuration(name: str, width: int, tile: Tiles, targets: tuple[int, ...], softmax: bool) -> Configuration:
    constants = _constants(width, tile, softmax=softmax)
    pointers = dict.fromkeys(("q", "k", "v", "past_keys", "past_values", "out"), f"*{name}")
    pointers |= dict.fromkeys(("tables", "lengths"), "*i32")
    polar = {"magnitude": f"*{name}"} | dict.fromkeys(("n_eff", "null_mass", *PARAMETERS), "*fp32")
    if softmax:
        constants |= dict.fromkeys(polar)
    else:
        pointers |= polar
    numbers = {
        parameter.name: parameter.annotation_type or ("fp32" if parameter.name in FLOATS else "i32")
        for parameter in _prefill.params
        if parameter.name not in pointers and parameter.name not in constants
    }
    strides = [name for name in numbers if name.startswith("stride_") and name not in UNSPECIALISED]
    return Configuration(
        name=f"{'softmax' if softmax else 'polar'} prefill {name} d{width}",
        kernel=_prefill,
        signature=pointers | numbers,
        constants=constants,
        divisible=(*pointers, *strides),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_free=name != "fp32" and width <= 128,
        targets=targets,
    )
