"""How a decode launch is cut: tiles, and pieces of the context, from shapes and the device. No kernel, no Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

PROGRAMS_PER_PROCESSOR = 8  # a program that ends late then holds up an eighth of its multiprocessor at most
MAX_ROWS = 128
SMALL_SHARED = 128_000  # bytes, of a consumer's card: the queries of many rows would not fit beside the keys
LARGE_SHARED = 200_000  # bytes: two programs with three tiles of 32 KB in flight fit


def _power_of_two(n: int) -> int:
    """The next one, ``n`` itself included."""
    return 1 << (n - 1).bit_length()


class Tile(NamedTuple):
    """How a launch is cut: rows and keys of a tile, and the compiler's options."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def split_tile(dtype: torch.dtype, width: int, num_rows: int, page: int, shared: int) -> Tile:
    """Tile of `_split_kernel` for the wider of key and value, and ``num_rows`` query rows of one key/value head.

    A tile of keys and one of values are 32 KB, and one stage fewer than ``num_stages`` is in flight: enough bytes to
    hide the memory's latency, in two programs on a multiprocessor of 164 KB or 228 KB. In fp32, which no tensor core
    multiplies exactly, the products take most registers: more warps share them, and many rows take fewer keys.
    """
    block_w = max(16, _power_of_two(width))
    exact = dtype.itemsize == 4
    small = shared < SMALL_SHARED
    most = min(MAX_ROWS, (8192 if exact or small else 16_384) // block_w)  # S: 64 registers a thread
    if exact and small:
        most = min(most, 64)  # the scores of 128 would not fit
    rows = min(most, max(16, _power_of_two(num_rows)))
    block_n = min(128, 32_768 // (2 * block_w * dtype.itemsize) // (2 if exact and rows > 32 else 1))
    block_n = max(16, min(block_n, page & -page))
    num_warps = 8 if exact or rows * max(block_w, block_n) > 4096 else 4
    return Tile(rows, block_n, num_warps, 4 if shared > LARGE_SHARED else 3)


def merge_tile(width: int, num_splits: int) -> tuple[int, int]:
    """Pieces that `_merge_kernel` takes at once, and warps: a row is one program, so many pieces want many loads."""
    return (4, 1) if num_splits <= 4 else (max(16, 8192 // max(16, _power_of_two(width))), 8)


class Split(NamedTuple):
    """``num_splits`` pieces of ``split_keys`` keys reach the end of the longest stream."""

    split_keys: int
    num_splits: int


def plan_splits(extents: Sequence[int], num_programs: int, num_processors: int, block_n: int) -> Split:
    """Divide streams of ``extents`` keys, each met by ``num_programs`` programs (key/value heads, mostly).

    A few programs per multiprocessor level out the differences. A piece is not smaller than about the root of the
    longest extent: the merge reads the pieces of a row one after another, as a program does its keys, and the two
    delays together are smallest there.
    """
    longest = max(1, *extents)
    wanted = sum(extents) * num_programs / (PROGRAMS_PER_PROCESSOR * num_processors)
    ideal = max(wanted, math.sqrt(longest), 2 * block_n)
    split_keys = block_n * math.ceil(longest / max(1, round(longest / ideal)) / block_n)
    return Split(split_keys, -(-longest // split_keys))
