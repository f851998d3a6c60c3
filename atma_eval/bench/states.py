"""Steps of the states that lie in place, beside the bandwidth of the memory, and the fused convolution of a prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atma_eval.bench.attention import OF_COPY_AT_LEAST
from atma_eval.bench.parity import CANON_TAPS, SHORT_TAPS
from atma_eval.bench.parts import NAMES, Bench, thousands
from atma_eval.bench.report import Line
from atma_eval.bench.timing import Run
from atma_eval.kernels.conv import causal_conv

FUSED_AT_LEAST = 1.0  # times the speed of PyTorch


def states(bench: Bench) -> Iterator[Line]:
    """The lines of this part."""
    yield from _memory(bench)
    yield from _convolution_step(bench)
    yield from _convolution_prefill(bench)


def _target(batch: int, batches: tuple[int, ...]) -> float | None:
    return OF_COPY_AT_LEAST if batch == max(batches) else None


def _memory(bench: Bench) -> Iterator[Line]:
    from atma_eval.kernels.delta_triton import gated_delta_step, step_bytes

    sizes, copy = bench.sizes, bench.copy()
    num_heads, num_kv_heads, width = sizes.heads
    for batch in bench.while_time(sizes.step_batches):
        q = bench.normal(batch, 1, num_heads, width)
        k, v = bench.normal(2, batch, 1, num_kv_heads, width, seed=3)
        gamma, beta = bench.normal(2, batch, 1, num_heads, dtype=torch.float32, seed=4)
        table = bench.normal(batch, num_heads, width, width, dtype=torch.float32, seed=5)
        slots = torch.randperm(batch, device=bench.device)
        yield bench.bandwidth_line(
            "memory step",
            f"{batch:,} x {num_heads}x{width}x{width} fp32",
            partial(gated_delta_step, q, k, v, gamma, beta, table, slots),
            copy,
            step_bytes(batch, table),
            target=_target(batch, sizes.step_batches),
        )


def _convolution_step(bench: Bench) -> Iterator[Line]:
    """Bytes here are those of the state, read and written, and of inputs, gates and outputs: none dwarfs the rest."""
    from atma_eval.kernels.conv_triton import conv_step

    sizes, copy = bench.sizes, bench.copy()
    weight = bench.normal(sizes.channels, 1, SHORT_TAPS)
    for batch in bench.while_time(sizes.conv_batches):
        x, b, c = bench.normal(3, batch, 1, sizes.channels, seed=3)
        table = bench.normal(batch, SHORT_TAPS - 1, sizes.channels, seed=4)
        slots = torch.randperm(batch, device=bench.device)
        yield bench.bandwidth_line(
            "convolution step",
            f"{batch:,} x {sizes.channels} {NAMES[sizes.dtype]}",
            partial(conv_step, x, weight, table, slots, gates=(b, c)),
            copy,
            (2 * table.numel() + 4 * x.numel()) * x.element_size(),
            target=_target(batch, sizes.conv_batches),
        )


def _convolution_prefill(bench: Bench) -> Iterator[Line]:
    """Whether the fused form pays."""
    from atma_eval.kernels.conv_triton import conv_prefill

    sizes = bench.sizes
    x, b, c = bench.normal(3, 1, sizes.parity_length, sizes.channels)

    def gated(weight: Tensor) -> Tensor:
        return c * causal_conv(b * x, weight)[0]

    def residual(weight: Tensor) -> Tensor:
        return x + causal_conv(x, weight)[0]

    forms: tuple[tuple[str, int, Run, dict[str, Any]], ...] = (
        ("short", SHORT_TAPS, gated, {"gates": (b, c)}),
        ("canon", CANON_TAPS, residual, {"residual": True}),
    )
    for name, num_taps, plain, options in bench.while_time(forms):
        weight = bench.normal(sizes.channels, 1, num_taps)
        timings = bench.time(
            {
                "kernel": partial(conv_prefill, x, weight, **options),
                "PyTorch": partial(plain, weight),
            }
        )
        mine, theirs = timings["kernel"].median_s, timings["PyTorch"].median_s
        yield Line(
            what=f"{name} convolution",
            case=f"{thousands(sizes.parity_length)} x {sizes.channels} {NAMES[sizes.dtype]}",
            figures={"us": 1e6 * mine, "PyTorch us": 1e6 * theirs, "times faster": theirs / mine},
            judged="times faster",
            target=FUSED_AT_LEAST,
            timings=timings,
        )
