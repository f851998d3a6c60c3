"""Typed state of a stream: what a model carries from token to token.

A state is created, advanced, forked and measured; it is never cut back, since recurrences cannot be.
Keys and values live in pages that forks share; convolution and memory states are small and copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from atma_eval.kernels.tiles import KVRun

PAGE_SIZE = 256
DROPPED = -1  # a page that a sliding window has left behind


class State(Protocol):
    """What a model of any kind carries along one stream."""

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def fork(self) -> State:
        """An independent continuation that shares what it can."""
        ...

    def release(self) -> None:
        """Give shared memory back. The state must not be used afterwards."""
        ...


class PagePool:
    """Reference-counted pages of keys ``[P, page, G, K]`` and values ``[P, page, G, V]``."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, num_pages: int):
        self.num_kv_heads, self.key_width, self.value_width = shape
        self.keys = torch.empty(num_pages, PAGE_SIZE, self.num_kv_heads, self.key_width, dtype=dtype, device=device)
        self.values = torch.empty(num_pages, PAGE_SIZE, self.num_kv_heads, self.value_width, dtype=dtype, device=device)
        self.references = [0] * num_pages
        self._free = list(range(num_pages))

    def allocate(self) -> int:
        """The lowest free page, so that a stream's pages tend to lie in one piece."""
        if not self._free:
            self._grow()
        page = heapq.heappop(self._free)
        self.references[page] = 1
        return page

    def release(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            heapq.heappush(self._free, page)

    def _grow(self) -> None:
        old = len(self.references)
        more = max(4, old // 2)
        self.keys = torch.cat([self.keys, self.keys.new_empty(more, *self.keys.shape[1:])])
        self.values = torch.cat([self.values, self.values.new_empty(more, *self.values.shape[1:])])
        self.references.extend([0] * more)
        for page in range(old, old + more):
            heapq.heappush(self._free, page)


class KVState:
    """Keys and values of ``B`` streams of equal length: a block table per stream over a shared `PagePool`.

    A fork shares every page; the first of the two to write into a shared last page copies it.
    """

    def __init__(self, pool: PagePool, batch_size: int, window: int | None = None):
        self.pool = pool
        self.tables: list[list[int]] = [[] for _ in range(batch_size)]
        self.length = 0
        self.window = window
        self._table: Tensor | None = None  # of `table`, until pages change

    def append(self, k: Tensor, v: Tensor, *, pending: int = 0) -> None:
        """Store ``[B, T, G, K]`` and ``[B, T, G, V]`` after what is there.

        Pages that a window has left behind go back, but for those that the last ``pending`` tokens have yet to see.
        """
        for table, stream_k, stream_v in zip(self.tables, k, v, strict=True):
            self._append_stream(table, stream_k, stream_v)
        self.length += k.shape[1]
        if self.window is not None:
            self._drop_before(self.length - pending - self.window + 1)

    def table(self) -> Tensor:
        """The block tables on the pool's device, int32 ``[B, pages]``; `DROPPED` where a page is gone."""
        if self._table is None:
            self._table = torch.tensor(self.tables, dtype=torch.int32, device=self.pool.keys.device)
        return self._table

    def lengths(self) -> Tensor:
        """Tokens of each stream on the pool's device, int32 ``[B]``."""
        return torch.full((len(self.tables),), self.length, dtype=torch.int32, device=self.pool.keys.device)

    @property
    def first_kept(self) -> int:
        """The first position whose page is still there."""
        gone = sum(page == DROPPED for page in self.tables[0]) if self.tables else 0
        return gone * PAGE_SIZE

    def _append_stream(self, table: list[int], k: Tensor, v: Tensor) -> None:
        pool = self.pool
        written = 0
        while written < k.shape[0]:
            inside = (self.length + written) % PAGE_SIZE
            if inside == 0:
                table.append(pool.allocate())
                self._table = None
            elif pool.references[table[-1]] > 1:
                page = pool.allocate()
                pool.keys[page, :inside] = pool.keys[table[-1], :inside]
                pool.values[page, :inside] = pool.values[table[-1], :inside]
                pool.release(table[-1])
                table[-1] = page
                self._table = None
            count = min(PAGE_SIZE - inside, k.shape[0] - written)
            pool.keys[table[-1], inside : inside + count] = k[written : written + count]
            pool.values[table[-1], inside : inside + count] = v[written : written + count]
            written += count

    def _drop_before(self, position: int) -> None:
        for table in self.tables:
            for index in range(max(0, position) // PAGE_SIZE - 1, -1, -1):
                if table[index] == DROPPED:
                    break
                self.pool.release(table[index])
                table[index] = DROPPED
                self._table = None

    def runs(self) -> list[list[KVRun]]:
        """For each stream its past as contiguous views ``[S, G, K | V]`` in token order.

        Positions that a window has dropped are absent from the front.
        """
        return [list(self._stream_runs(table)) for table in self.tables]

    def _stream_runs(self, table: list[int]) -> Iterator[KVRun]:
        index = next((i for i, page in enumerate(table) if page != DROPPED), len(table))
        while index < len(table):
            stop = index + 1
            while stop < len(table) and table[stop] == table[stop - 1] + 1:
                stop += 1
            pages = slice(table[index], table[index] + stop - index)
            count = min(self.length, stop * PAGE_SIZE) - index * PAGE_SIZE
            yield self.pool.keys[pages].flatten(0, 1)[:count], self.pool.values[pages].flatten(0, 1)[:count]
            index = stop

    def fork(self) -> KVState:
        twin = KVState(self.pool, 0, self.window)
        twin.tables = [list(table) for table in self.tables]
        twin.length = self.length
        for table in self.tables:
            for page in table:
                if page != DROPPED:
                    self.pool.references[page] += 1
        return twin

    def release(self) -> None:
        """Give the pages back. The state must not be used afterwards."""
        for table in self.tables:
            for page in table:
                if page != DROPPED:
                    self.pool.release(page)
        self.tables = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages this state holds, shared ones counted in full."""
        pages = sum(page != DROPPED for table in self.tables for page in table)
        width = self.pool.num_kv_heads * (self.pool.key_width + self.pool.value_width)
        return pages * PAGE_SIZE * width * self.pool.keys.element_size()


@dataclass
class ConvState:
    """The last ``K - 1`` inputs of a causal convolution, ``[B, K - 1, C]``, oldest first; ``None`` at the start.

    Forks share the tensor: it is replaced, or written in place only after `own`.
    """

    inputs: Tensor | None = None
    shared: bool = False

    def own(self) -> Tensor | None:
        """The inputs, copied first if a fork may look at them: safe to write to."""
        if self.shared and self.inputs is not None:
            self.inputs, self.shared = self.inputs.clone(), False
        return self.inputs

    def fork(self) -> ConvState:
        self.shared = True
        return ConvState(self.inputs, shared=True)

    @property
    def num_bytes(self) -> int:
        return 0 if self.inputs is None else self.inputs.nbytes


@dataclass
class MemoryState:
    """The gated-delta memory ``[B, H, K, V]`` in fp32; ``None`` (zero) at the start.

    Forks share the tensor: it is replaced, or written in place only after `own`.
    """

    matrix: Tensor | None = None
    shared: bool = False

    def own(self) -> Tensor | None:
        """The memory, copied first if a fork may look at it: safe to write to."""
        if self.shared and self.matrix is not None:
            self.matrix, self.shared = self.matrix.clone(), False
        return self.matrix

    def fork(self) -> MemoryState:
        self.shared = True
        return MemoryState(self.matrix, shared=True)

    @property
    def num_bytes(self) -> int:
        return 0 if self.matrix is None else self.matrix.nbytes


@dataclass
class LayerState:
    """State of one block: its convolutions by name, keys and values, and memory, where it has them."""

    convs: dict[str, ConvState] = field(default_factory=dict)
    kv: KVState | None = None
    memory: MemoryState | None = None

    def fork(self) -> LayerState:
        return LayerState(
            {name: conv.fork() for name, conv in self.convs.items()},
            self.kv.fork() if self.kv is not None else None,
            self.memory.fork() if self.memory is not None else None,
        )

    @property
    def num_bytes(self) -> int:
        parts = [*self.convs.values(), self.kv, self.memory]
        return sum(part.num_bytes for part in parts if part is not None)


@dataclass
class LayerStates:
    """State of a whole model: one `LayerState` per block, and how many tokens it has seen."""

    layers: list[LayerState]
    length: int = 0

    def fork(self) -> LayerStates:
        return LayerStates([layer.fork() for layer in self.layers], self.length)

    def release(self) -> None:
        """Give shared pages back. The state must not be used afterwards."""
        for layer in self.layers:
            if layer.kv is not None:
                layer.kv.release()

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)
