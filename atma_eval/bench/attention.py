"""Attention: prefill beside torch's own flash kernel, and decoding beside the bandwidth of the memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from atma_eval.bench.parts import NAMES, Bench, Paged, free_bytes, thousands
from atma_eval.bench.report import Line
from atma_eval.bench.timing import Run
from atma_eval.kernels.decode import key_value_bytes

PREFILL_AT_LEAST = 0.7  # times the speed of flash attention
OF_COPY_AT_LEAST = 0.8  # of the bytes per second that a copy moves
SPLIT_AT_LEAST = 8.0  # times the speed of one piece, for one long stream
MOST_OF_MEMORY = 0.8  # of what is free goes to the pages; results and the stopwatch need some too


def flash_runs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """Torch's flash attention as it takes grouped heads here, and with heads expanded beforehand: what works of it."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    group = q.shape[1] // k.shape[2]
    wide_keys, wide_values = (x.repeat_interleave(group, dim=1) for x in (keys, values))

    def attend(keys: Tensor, values: Tensor, grouped: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)

    runs: dict[str, Run] = {
        "flash, grouped": lambda: attend(keys, values, True),
        "flash, expanded": lambda: attend(wide_keys, wide_values, False),
    }
    return {name: run for name, run in runs.items() if _works(run)}


def _works(run: Run) -> bool:
    try:
        run()
    except RuntimeError as refusal:
        if isinstance(refusal, torch.OutOfMemoryError):
            raise
        return False
    return True


def prefill(bench: Bench) -> Iterator[Line]:
    """Polar and softmax prefill against the faster form of flash attention, all in the same rounds."""
    from atma_eval.kernels.polar_triton import polar_prefill, softmax_prefill

    num_heads, num_kv_heads, width = bench.sizes.heads
    parameters = bench.polar_parameters()
    for length in bench.while_time(bench.sizes.prefill_lengths):
        q = bench.normal(1, length, num_heads, width).transpose(1, 2)
        k, v = bench.normal(2, 1, length, num_kv_heads, width, seed=3)
        stock = flash_runs(q, k, v)
        runs: dict[str, Run] = {
            "polar": partial(polar_prefill, q, k, v, parameters),
            "softmax": partial(softmax_prefill, q, k, v, scale=width**-0.5),
        }
        timings = bench.time(runs | stock)
        case = f"{num_heads}/{num_kv_heads}x{width} {NAMES[bench.sizes.dtype]}, {thousands(length)}"
        operations = 2 * num_heads * length * (length + 1) * width  # two products over half a square
        if not stock:
            yield Line(what="flash attention", case=case, note="torch's flash kernel does not serve this here")
            continue
        name = min(stock, key=lambda name: timings[name].median_s)
        flash_s = timings[name].median_s
        for core in runs:
            mine = timings[core].median_s
            yield Line(
                what=f"{core} prefill",
                case=case,
                figures={
                    "ms": 1e3 * mine,
                    "flash ms": 1e3 * flash_s,
                    "TFLOP/s": operations / mine / 1e12,
                    "flash TFLOP/s": operations / flash_s / 1e12,
                    "speed / flash": flash_s / mine,
                },
                judged="speed / flash",
                target=PREFILL_AT_LEAST,
                timings={"kernel": timings[core]} | {key: timings[key] for key in stock},
                note=f"flash attention is the faster of two forms: {name}" if name == "flash, expanded" else None,
            )


def _pages_that_fit(bench: Bench, page_bytes: int) -> int:
    """Pages of the largest case that fits: they are filled once, for all cases."""
    sizes = bench.sizes
    most = int(MOST_OF_MEMORY * free_bytes(bench.device)) // page_bytes
    wanted = [
        batch * -(-length // sizes.page)
        for batch, length in itertools.product(sizes.decode_batches, sizes.decode_lengths)
    ]
    return max((count for count in wanted if count <= most), default=0)


def decoding(bench: Bench) -> Iterator[Line]:
    """One new token of each stream: bytes of keys and values per second, and what the split over the context brings."""
    from atma_eval.kernels.decode_triton import polar_decode, softmax_decode

    sizes = bench.sizes
    num_heads, num_kv_heads, width = sizes.heads
    num_pages = _pages_that_fit(bench, 2 * sizes.page * num_kv_heads * width * sizes.dtype.itemsize)
    keys, values = (
        torch.empty(num_pages, sizes.page, num_kv_heads, width, dtype=sizes.dtype, device=bench.device).normal_()
        for _ in range(2)
    )
    parameters, copy = bench.polar_parameters(), bench.copy()

    def streams(batch: int, length: int) -> tuple[Tensor, Paged, Tensor]:
        """Queries, pages in random order, no two streams with a page in common, and lengths."""
        per_stream = -(-length // sizes.page)
        order = torch.randperm(num_pages, device=bench.device)[: batch * per_stream]
        q = bench.normal(batch, 1, num_heads, width).transpose(1, 2)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=bench.device)
        return q, Paged(keys, values, order.view(batch, per_stream).int()), lengths

    longest = max(sizes.decode_lengths)
    if -(-longest // sizes.page) <= num_pages:
        q, pages, lengths = streams(1, longest)

        def run(split_keys: int | None) -> None:
            polar_decode(q, *pages, lengths, parameters, details=False, host_lengths=[longest], split_keys=split_keys)

        timings = bench.time({"split": lambda: run(None), "one piece": lambda: run(longest)})
        split_s, whole_s = timings["split"].median_s, timings["one piece"].median_s
        yield Line(
            what="polar decode, split",
            case=f"1 stream of {thousands(longest)}",
            figures={"us": 1e6 * split_s, "one piece us": 1e6 * whole_s, "times faster": whole_s / split_s},
            judged="times faster",
            target=SPLIT_AT_LEAST,
            timings=timings,
        )

    def step(core: str, batch: int, length: int) -> Run:
        q, pages, lengths = streams(batch, length)
        known = [length] * batch
        if core == "softmax":
            return partial(softmax_decode, q, *pages, lengths, scale=width**-0.5, host_lengths=known)
        return partial(polar_decode, q, *pages, lengths, parameters, details=False, host_lengths=known)

    # Large batches first: the largest that fits has the target.
    cases = itertools.product(sorted(sizes.decode_batches, reverse=True), ("polar", "softmax"), sizes.decode_lengths)
    judged = set()
    for batch, core, length in bench.while_time(cases):
        case = f"{batch} x {thousands(length)} {NAMES[sizes.dtype]}"
        if batch * -(-length // sizes.page) > num_pages:
            yield Line(what=f"{core} decode", case=case, note="skipped, it does not fit the free memory")
            continue
        target = OF_COPY_AT_LEAST if batch >= sizes.large_batch and (core, length) not in judged else None
        judged.add((core, length))
        num_bytes = key_value_bytes([length] * batch, keys, values)
        yield bench.bandwidth_line(f"{core} decode", case, step(core, batch, length), copy, num_bytes, target=target)
