"""Time of calls that are compared: measured in turns (A, B, A, B, ...), by a stopwatch that suits the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

MIN_ROUNDS = 3
FLUSH_BYTES = 2**29  # several times the largest L2 cache, and some 0.1 ms of reading from the fastest memory
MAX_FLUSHES = 20

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: median and best of some rounds, and the very first, with compilation."""

    median_s: float
    best_s: float
    first_s: float
    num_rounds: int


class WarmUp(NamedTuple):
    """Seconds of the first call, and how long a later one keeps the host before it returns."""

    first_s: float
    queue_s: float


class Stopwatch(Protocol):
    """How a call is timed on one kind of device."""

    def warm_up(self, run: Run) -> WarmUp: ...

    def seconds(self, run: Run, queue_s: float) -> float: ...


class WallStopwatch:
    """By the clock, for calls that are over when they return."""

    def warm_up(self, run: Run) -> WarmUp:
        return WarmUp(self.seconds(run, 0), 0.0)

    def seconds(self, run: Run, queue_s: float) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class GpuStopwatch:
    """Between two events on the GPU, with a cold L2 cache.

    Before the first event a buffer larger than the cache is read (written, it would leave the cache full of what has
    yet to go to memory), as often as it takes to keep the GPU busy until the whole call is queued: what Python needs
    for its launches is not measured.
    """

    def __init__(self, device: torch.device):
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._buffer = torch.zeros(max(FLUSH_BYTES, 4 * cache) // 4, dtype=torch.float32, device=device)
        self._flush_s = 1.0  # until it is known
        self._flush_s = min(self.seconds(self._buffer.sum, 0) for _ in range(MIN_ROUNDS))

    def warm_up(self, run: Run) -> WarmUp:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        first = time.perf_counter()
        run()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        return WarmUp(first - start, queued - first)

    def seconds(self, run: Run, queue_s: float) -> float:
        for _ in range(min(MAX_FLUSHES, 1 + int(1.5 * queue_s / self._flush_s))):
            self._buffer.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def in_turns(stopwatch: Stopwatch, runs: dict[str, Run], *, max_rounds: int, at_most_s: float) -> dict[str, Timing]:
    """Time each of ``runs``, one after the other in every round.

    Args:
        stopwatch: how.
        runs: what, by name.
        max_rounds: of these; fewer, but at least three, where they would take longer than
        at_most_s: seconds in all, compilation apart.
    """
    warm = {name: stopwatch.warm_up(run) for name, run in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    num_rounds = done = 0
    start = time.perf_counter()
    while done < max(num_rounds, 1):
        for name, run in runs.items():
            taken[name].append(stopwatch.seconds(run, warm[name].queue_s))
        done += 1
        if done == 1:
            round_s = max(1e-9, time.perf_counter() - start)
            num_rounds = max(min(MIN_ROUNDS, max_rounds), min(max_rounds, int(at_most_s / round_s)))
    return {
        name: Timing(
            median_s=statistics.median(seconds),
            best_s=min(seconds),
            first_s=warm[name].first_s,
            num_rounds=len(seconds),
        )
        for name, seconds in taken.items()
    }
