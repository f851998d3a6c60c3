"""Paged decode grouped by key/value head, split over the context: the Triton form of `decode`.

A program takes one piece of one stream's keys and one key/value head. The query heads that share the head, times the
new tokens, are the rows of its tile, so each key and value is fetched once however many query rows there are. It
leaves the running max ``M``, ``L``, ``Q`` and ``S`` of its piece in scratch (`tiles` has the maths). A second, small
kernel joins the pieces of a row, ``L`` and ``S`` scaled by ``2^(M_old - M_new)`` and ``Q`` by its square, folds in the
null sink and writes the outputs.

Pieces are of equal size, not equal number: a stream takes as many as its length needs, programs beyond it end at
once, and one launch of fixed size serves whatever the lengths are (they are read on the device).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atma_eval.errors import UserError
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
from atma_eval.kernels.decode import MAX_QUERIES, first_visible
from atma_eval.kernels.decode_plan import Split, Tile, merge_tile, plan_splits, split_tile
from atma_eval.kernels.polar import PolarOutput, PolarParameters

# Or a length of one, or of sixteen, would be a kernel of its own.
UNSPECIALISED = ["num_queries", "window", "split_keys", "num_splits", "stride_table"]
MERGE_STAGES = 3
H200_PROCESSORS = 132  # what is planned for where there is no device

START = tl.constexpr(-5e37)  # running max before any key: so far above MASKED that a hidden key weighs exactly 0


@triton.jit
def _count(position, window, WINDOWED: tl.constexpr):
    """How many keys the query at ``position`` sees, at least 1, as the temperature and the null take it."""
    n = position + 1
    if WINDOWED:
        n = tl.minimum(n, window)
    return tl.maximum(n, 1).to(tl.float32)


@triton.jit
def _first_key(length, num_queries, window, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a stream's keys begin: the tile that holds the first key its first query sees."""
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - num_queries - window + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit(do_not_specialize=UNSPECIALISED)
def _split_kernel(
    q,
    keys,
    values,
    tables,
    lengths,
    len_gain_raw,
    sums,  # [B, H, T, splits, V] fp32
    stats,  # [3, B, H, T, splits] fp32: M, L, Q
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kp,
    stride_ks,
    stride_kg,
    stride_vp,
    stride_vs,
    stride_vg,
    stride_table,
    num_queries,
    window,
    split_keys,
    num_splits,
    scale,
    POLAR: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    split = tl.program_id(0)
    row_blocks = (GROUP * num_queries + ROWS - 1) // ROWS
    g = tl.program_id(1) // row_blocks
    stream = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + stream)
    start = _first_key(length, num_queries, window, WINDOWED, BLOCK_N) + split * split_keys
    if start >= length:
        return
    stop = tl.minimum(start + split_keys, length)

    row = tl.program_id(1) % row_blocks * ROWS + tl.arange(0, ROWS)
    head = g * GROUP + row % GROUP
    query = row // GROUP
    is_row = query < num_queries
    position = length - num_queries + query
    dims_k = tl.arange(0, BLOCK_K)
    dims_v = tl.arange(0, BLOCK_V)
    in_k = dims_k < WIDTH_K
    in_v = dims_v < WIDTH_V
    q_rows = q + stream * stride_qb + head.to(tl.int64) * stride_qh + query * stride_qt
    q_tile = tl.load(q_rows[:, None] + dims_k[None, :], mask=is_row[:, None] & in_k[None, :], other=0.0)
    to_log2 = tl.full((ROWS,), 0.0, tl.float32) + scale
    if POLAR:
        gain = tl.load(len_gain_raw + head, mask=is_row, other=0.0)
        to_log2 *= 1.0 + softplus(gain) * tl.log(_count(position, window, WINDOWED))

    m = tl.full((ROWS,), START, tl.float32)
    big_l = tl.zeros((ROWS,), tl.float32)
    big_q = tl.zeros((ROWS,), tl.float32)
    big_s = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for j in range(start, stop, BLOCK_N):
        # A tile never crosses a page. Page times stride may pass 2^31 elements.
        page = tl.load(tables + stream * stride_table + j // PAGE).to(tl.int64)
        key = j + tl.arange(0, BLOCK_N)
        slot = j % PAGE + tl.arange(0, BLOCK_N)
        stored = (key < length) & (page >= 0)  # what else lies in a page may be anything, NaN too
        k_rows = keys + page * stride_kp + g * stride_kg + slot * stride_ks
        v_rows = values + page * stride_vp + g * stride_vg + slot * stride_vs
        k = tl.load(k_rows[:, None] + dims_k[None, :], mask=stored[:, None] & in_k[None, :], other=0.0)
        a = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * to_log2[:, None]
        visible = stored[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            visible &= key[None, :] > position[:, None] - window
        a = tl.where(visible, a, MASKED)
        m_new = tl.maximum(m, tl.max(a, 1))
        p = tl.exp2(a - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        m = m_new
        big_l = big_l * shrink + tl.sum(p, 1)
        if POLAR:
            big_q = big_q * (shrink * shrink) + tl.sum(p * p, 1)
        v = tl.load(v_rows[:, None] + dims_v[None, :], mask=stored[:, None] & in_v[None, :], other=0.0)
        big_s = tl.dot(p.to(v.dtype), v, acc=big_s * shrink[:, None], input_precision="ieee")

    num_heads = tl.num_programs(1) // row_blocks * GROUP
    num_rows = tl.num_programs(2).to(tl.int64) * num_heads * num_queries
    place = ((stream * num_heads + head) * num_queries + query) * num_splits + split
    tl.store(sums + place[:, None] * WIDTH_V + dims_v[None, :], big_s, mask=is_row[:, None] & in_v[None, :])
    plane = num_rows * num_splits
    tl.store(stats + place, m, mask=is_row)
    tl.store(stats + plane + place, big_l, mask=is_row)
    if POLAR:
        tl.store(stats + 2 * plane + place, big_q, mask=is_row)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _merge_kernel(
    sums,
    stats,
    lengths,
    v_null,
    null_base,
    null_slope_raw,
    len_gain_raw,
    mag_beta_raw,
    direction,  # [B, H, T, V]
    magnitude,  # [B, H, T]
    n_eff,
    null_mass,
    num_queries,
    window,
    split_keys,
    num_splits,
    q2_floor,
    POLAR: tl.constexpr,
    WINDOWED: tl.constexpr,
    FLOORED: tl.constexpr,
    DETAILS: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    query = tl.program_id(0)
    head = tl.program_id(1)
    stream = tl.program_id(2).to(tl.int64)
    row = (stream * tl.num_programs(1) + head) * num_queries + query
    plane = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * num_queries * num_splits
    length = tl.load(lengths + stream)
    extent = length - _first_key(length, num_queries, window, WINDOWED, BLOCK_N)
    used = (extent + split_keys - 1) // split_keys
    dims = tl.arange(0, BLOCK_V)
    in_v = dims < WIDTH_V

    m = START
    big_l = 0.0
    big_q = 0.0
    big_s = tl.zeros((BLOCK_V,), tl.float32)
    # A stream longer than the host was told was not read to its end: its outputs are NaN, not something plausible.
    missing = used > num_splits
    used = tl.minimum(used, num_splits)
    for s in range(0, used, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        written = split < used
        place = row * num_splits + split
        part_m = tl.load(stats + place, mask=written, other=MASKED)
        m_new = tl.maximum(m, tl.max(part_m, 0))
        shrink = tl.exp2(m - m_new)
        part = tl.exp2(part_m - m_new)
        m = m_new
        big_l = big_l * shrink + tl.sum(part * tl.load(stats + plane + place, mask=written, other=0.0), 0)
        if POLAR:
            squares = tl.load(stats + 2 * plane + place, mask=written, other=0.0)
            big_q = big_q * (shrink * shrink) + tl.sum(part * part * squares, 0)
        tile = tl.load(
            sums + place[:, None] * WIDTH_V + dims[None, :], mask=written[:, None] & in_v[None, :], other=0.0
        )
        big_s = big_s * shrink + tl.sum(part[:, None] * tile, 0)

    big_l = tl.where(missing, float("nan"), big_l)
    big_s = tl.where(missing, float("nan"), big_s)
    out = direction + row * WIDTH_V + dims
    if not POLAR:
        tl.store(out, big_s / tl.where(big_l > 0.0, big_l, 1.0), mask=in_v)
    else:
        n = _count(length - num_queries + query, window, WINDOWED)
        temperature = 1.0 + softplus(tl.load(len_gain_raw + head)) * tl.log(n)
        growth = tl.sqrt(tl.log(n + 1.0))
        null = tl.load(null_base + head) + softplus(tl.load(null_slope_raw + head)) * growth
        null2 = temperature * null * LOG2_E
        top = tl.maximum(m, null2)
        shrink = tl.exp2(m - top)
        real = big_l * shrink
        sink = tl.exp2(null2 - top)
        everything = real + sink
        if FLOORED:
            ratio = real * real / tl.maximum(big_q * shrink * shrink, q2_floor)
        else:
            ratio = big_l * big_l / tl.where(big_q > 0.0, big_q, 1.0)
        s = big_s * shrink + sink * tl.load(v_null + head * WIDTH_V + dims, mask=in_v, other=0.0)
        norm = tl.sqrt(tl.sum(s * s, 0))
        tl.store(out, s / tl.maximum(norm, FLOOR), mask=in_v)
        beta = softplus(tl.load(mag_beta_raw + head))
        tl.store(magnitude + row, tanh(beta * log1p(ratio * (real / everything))))
        if DETAILS:
            tl.store(n_eff + row, ratio)
            tl.store(null_mass + row, sink / everything)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return H200_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(q: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise a `UserError` for what the kernel does not serve, a `ValueError` for what is wrong in the calling code."""
    num_queries, page = q.shape[2], keys.shape[1]
    require_supported(q.dtype, keys.shape[3], q.device)
    require_supported(q.dtype, values.shape[3], q.device)
    if not 1 <= num_queries <= MAX_QUERIES:
        raise UserError(f"the decode kernel takes 1 to {MAX_QUERIES} new tokens, not {num_queries}", "prefill more")
    if page % 16:
        raise UserError(f"the decode kernel does not serve pages of {page} tokens", "use a multiple of 16")
    if q.shape[3] != keys.shape[3] or keys.shape[:3] != values.shape[:3] or q.shape[1] % keys.shape[2]:
        raise ValueError(f"queries {q.shape} do not fit keys {keys.shape} and values {values.shape}")
    if not q.dtype == keys.dtype == values.dtype or not q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1:
        raise ValueError(f"queries, keys and values must be {q.dtype} all, and each head in one piece")


@on_its_device
def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    parameters: PolarParameters | None,
    scale: float,
    window: int | None,
    q2_floor: float | None,
    details: bool,
    host_lengths: Sequence[int] | None,
    split_keys: int | None,
) -> PolarOutput:
    batch, num_heads, num_queries, key_width = q.shape
    page, num_kv_heads, value_width = values.shape[1:]
    _check(q, keys, values)
    tables, lengths = tables.to(torch.int32).contiguous(), lengths.to(torch.int32)
    group = num_heads // num_kv_heads
    tile = split_tile(q.dtype, max(key_width, value_width), group * num_queries, page, shared_bytes(q.device))
    num_programs = num_kv_heads * -(-group * num_queries // tile.rows)
    bounds = host_lengths if host_lengths is not None else [tables.shape[1] * page] * batch
    early = 0 if window is None else tile.block_n - 1  # a window's first tile may begin before the window does
    extents = [n - first_visible(n, num_queries, window) + early for n in bounds]
    split = plan_splits(extents, num_programs, _num_processors(q.device), tile.block_n)
    if split_keys is not None:
        split_keys = -(-split_keys // tile.block_n) * tile.block_n
        split = Split(split_keys, -(-max(1, *extents) // split_keys))

    sums = torch.empty(
        batch, num_heads, num_queries, split.num_splits, value_width, dtype=torch.float32, device=q.device
    )
    stats = torch.empty(3, batch, num_heads, num_queries, split.num_splits, dtype=torch.float32, device=q.device)
    polar = parameters is not None
    gain = parameters.len_gain_raw if parameters is not None else None
    _split_kernel[(split.num_splits, num_programs, batch)](
        q,
        keys,
        values,
        tables,
        lengths,
        gain,
        sums,
        stats,
        *q.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        tables.stride(0),
        num_queries,
        window or 0,
        *split,
        scale * LOG2_E.value,
        POLAR=polar,
        WINDOWED=window is not None,
        GROUP=group,
        PAGE=page,
        **_split_constants(tile, key_width, value_width),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )

    block_s, num_warps = merge_tile(value_width, split.num_splits)
    rows = q.shape[:3]
    out = PolarOutput(
        q.new_empty(*rows, value_width),
        q.new_empty(rows if polar else 0),
        stats.new_empty(rows if details else 0),
        stats.new_empty(rows if details else 0),
    )
    _merge_kernel[(num_queries, num_heads, batch)](
        sums,
        stats,
        lengths,
        *(parameters if parameters is not None else [None] * 5),
        out.direction,
        out.magnitude if polar else None,
        out.n_eff if details else None,
        out.null_mass if details else None,
        num_queries,
        window or 0,
        *split,
        q2_floor or 0.0,
        POLAR=polar,
        WINDOWED=window is not None,
        FLOORED=q2_floor is not None,
        DETAILS=details,
        **_merge_constants(value_width, block_s, tile.block_n),
        num_warps=num_warps,
        num_stages=MERGE_STAGES,
    )
    return out


def _split_constants(tile: Tile, key_width: int, value_width: int) -> dict[str, int]:
    return {
        "WIDTH_K": key_width,
        "WIDTH_V": value_width,
        "BLOCK_K": max(16, triton.next_power_of_2(key_width)),
        "BLOCK_V": max(16, triton.next_power_of_2(value_width)),
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
    }


def _merge_constants(width: int, block_s: int, block_n: int) -> dict[str, int]:
    block_v = max(16, triton.next_power_of_2(width))
    return {"WIDTH_V": width, "BLOCK_V": block_v, "BLOCK_S": block_s, "BLOCK_N": block_n}


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
    split_keys: int | None = None,
) -> PolarOutput:
    """As `decode.polar_decode`; ``split_keys`` sets the size of a piece (the length itself: no split)."""
    p = PolarParameters(*(x.float().contiguous() for x in parameters))
    scale = 1 / math.sqrt(q.shape[-1])
    return _launch(q, keys, values, tables, lengths, p, scale, window, q2_floor, details, host_lengths, split_keys)


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
    split_keys: int | None = None,
) -> Tensor:
    """As `decode.softmax_decode`; ``split_keys`` as in `polar_decode`."""
    out = _launch(q, keys, values, tables, lengths, None, scale, window, None, False, host_lengths, split_keys)
    return out.direction


def configurations() -> list[Configuration]:
    """Both kernels for each type, at some head widths, query rows and numbers of pieces; what a window adds, once."""
    splits = [(dtype, width, 4, True, False) for dtype in TYPES for width in (16, 64, 80, 128, 256)]
    splits += [(dtype, 128, rows, True, False) for dtype in TYPES for rows in (64, 128) if rows * dtype.itemsize <= 256]
    splits += [(dtype, width, 4, False, False) for dtype in TYPES for width in (64, 128)]
    splits += [(dtype, 128, 4, polar, True) for dtype in TYPES for polar in (True, False)]
    merges = [(dtype, 128, pieces, True) for dtype in TYPES for pieces in (1, 256)]
    merges += [(torch.bfloat16, 128, pieces, False) for pieces in (1, 256)]
    merges += [(torch.bfloat16, width, 256, True) for width in (16, 80, 256)]
    listed = [_split_configuration(*case, target) for case in splits for target in TARGETS]
    return listed + [_merge_configuration(*case) for case in merges]


def _split_configuration(
    dtype: torch.dtype, width: int, num_rows: int, polar: bool, windowed: bool, target: int
) -> Configuration:
    tile = split_tile(dtype, width, num_rows, 256, SHARED_BYTES[target])
    pointers = dict.fromkeys(("q", "keys", "values"), f"*{TYPES[dtype]}") | dict.fromkeys(("tables", "lengths"), "*i32")
    pointers |= dict.fromkeys(("sums", "stats", *(("len_gain_raw",) if polar else ())), "*fp32")
    strides = [name for name in _split_kernel.arg_names if name.startswith("stride_")]
    numbers = dict.fromkeys([*strides, "num_queries", "window", "split_keys", "num_splits"], "i32") | {"scale": "fp32"}
    flags: dict[str, Any] = {"POLAR": polar, "WINDOWED": windowed, "GROUP": 4, "PAGE": 256}
    flags |= {} if polar else {"len_gain_raw": None}
    core, view = "polar" if polar else "softmax", " window" if windowed else ""
    return Configuration(
        name=f"{core} decode {TYPES[dtype]} d{width} rows {tile.rows}{view}",
        kernel=_split_kernel,
        signature=pointers | numbers,
        constants=flags | _split_constants(tile, width, width),
        divisible=(*pointers, *(name for name in strides if name not in UNSPECIALISED)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_free=dtype.itemsize == 2 and width <= 128,
        targets=(target,),
    )


def _merge_configuration(dtype: torch.dtype, width: int, num_splits: int, polar: bool) -> Configuration:
    block_s, num_warps = merge_tile(width, num_splits)
    flags: dict[str, Any] = {"POLAR": polar, "WINDOWED": False, "FLOORED": False, "DETAILS": False}
    pointers = dict.fromkeys(("sums", "stats"), "*fp32") | {"lengths": "*i32", "direction": f"*{TYPES[dtype]}"}
    own = dict.fromkeys(PolarParameters._fields, "*fp32") | {"magnitude": f"*{TYPES[dtype]}"}
    if polar:
        pointers |= own
    absent = dict.fromkeys(("n_eff", "null_mass", *(() if polar else own)))
    numbers = dict.fromkeys(("num_queries", "window", "split_keys", "num_splits"), "i32") | {"q2_floor": "fp32"}
    return Configuration(
        name=f"{'polar' if polar else 'softmax'} merge {TYPES[dtype]} d{width} by {block_s}",
        kernel=_merge_kernel,
        signature=pointers | numbers,
        constants=flags | absent | _merge_constants(width, block_s, 64),
        divisible=tuple(pointers),
        num_warps=num_warps,
        num_stages=MERGE_STAGES,
        spill_free=dtype.itemsize == 2 and width <= 128,
    )
