"""Every kernel at full length against fp64 truth, beside the error of PyTorch in the same type.

The truth is the definition (`polar_reference` and its like) in fp64, for a few rows at a time: the last ones of some
prefixes, so that its memory grows with the length and not with its square. Memory that an operation allocates and
does not write holds NaN.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atma_eval.bench.parts import NAMES, Bench, in_pages, thousands
from atma_eval.bench.report import Line
from atma_eval.kernels import decode
from atma_eval.kernels.choice import Impl
from atma_eval.kernels.conv import causal_conv
from atma_eval.kernels.delta import gated_delta, gated_delta_reference
from atma_eval.kernels.polar import polar_attention, polar_reference
from atma_eval.kernels.softmax import softmax_attention, softmax_reference

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
SHORT_TAPS, CANON_TAPS = 3, 4  # of the gated short convolution, and of the canon residual
Outputs = Sequence[Tensor]
Form = Callable[..., Tensor | Outputs]  # of queries, keys and values


def row_error(got: Tensor, truth: Tensor) -> float:
    """The largest distance of a row from its truth, relative to the length of that; NaN if anything is."""
    assert got.shape == truth.shape
    distance = (got.to(truth.dtype) - truth).norm(dim=-1)
    return (distance / truth.norm(dim=-1).clamp(min=1e-30)).max().item()


def scalar_error(got: Tensor, truth: Tensor) -> float:
    """The largest error, relative to values above one, absolute below; NaN if anything is."""
    assert got.shape == truth.shape
    return ((got.to(truth.dtype) - truth) / truth.abs().clamp(min=1)).abs().max().item()


def error(got: Outputs, truth: Outputs) -> float:
    """Of a first output of rows, and of the scalars per row that may follow it."""
    errors = [row_error(got[0], truth[0])]
    errors += [scalar_error(mine, true) for mine, true in zip(got[1:], truth[1:], strict=True)]
    return _worst(errors)


def _outputs(out: Tensor | Outputs) -> Outputs:
    return [out] if isinstance(out, Tensor) else out


def _worst(errors: Sequence[float]) -> float:
    return torch.tensor(errors).max().item()  # unlike max(), it passes a NaN on


def _line(what: str, case: str, dtype: torch.dtype, kernel: float, same_type: float) -> Line:
    return Line(
        what=f"{what} {NAMES[dtype]}",
        case=case,
        figures={"kernel": kernel, "PyTorch": same_type},
        judged="kernel",
        target=same_type + TOLERANCE[dtype],
        at_least=False,
    )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Allocations without a value hold NaN: torch fills them where it is asked to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic, which does not matter here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def parity(bench: Bench) -> Iterator[Line]:
    """The lines of this part."""
    for dtype in bench.sizes.parity_types:
        for kernels in (_prefill, _decode, _memory, _convolution):
            bench.check_time()
            with poisoned():
                yield from kernels(bench, dtype)
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()


def _prefill(bench: Bench, dtype: torch.dtype) -> Iterator[Line]:
    from atma_eval.kernels.polar_triton import PagedPast, polar_prefill, softmax_prefill

    sizes, length = bench.sizes, bench.sizes.parity_length
    num_heads, num_kv_heads, width = sizes.heads
    q = bench.normal(1, length, num_heads, width, dtype=dtype).transpose(1, 2)
    k, v = bench.normal(2, 1, length, num_kv_heads, width, dtype=dtype, seed=3)
    parameters, scale = bench.polar_parameters(), width**-0.5
    fp64 = parameters.to(torch.float64)

    def compare(got: Outputs, same: Form, true: Form, ends: Sequence[int], first: int = 0) -> tuple[float, float]:
        """Errors of the kernel, whose outputs begin at ``first``, and of PyTorch: the last rows before each end."""
        mine, theirs = [0.0 if all(x.isfinite().all() for x in got) else torch.nan], [0.0]
        for end in ends:
            start = end - min(sizes.parity_rows, end - first)
            piece = q[:, :, start:end], k[:, :end], v[:, :end]
            truth = _outputs(true(*(x.double() for x in piece)))
            mine.append(error([x[:, :, start - first : end - first] for x in got], truth))
            theirs.append(error(_outputs(same(*piece)), truth))
        return _worst(mine), _worst(theirs)

    everywhere = (sizes.parity_rows, length // 2 + 1, length)
    for window in (None, sizes.window):
        bench.check_time()
        case = thousands(length) + ("" if window is None else f", window {thousands(window)}")
        got: Outputs = polar_prefill(q, k, v, parameters, window=window, details=True)
        same = partial(polar_attention, parameters=parameters, window=window)
        true = partial(polar_reference, parameters=fp64, window=window)
        yield _line("polar prefill", case, dtype, *compare(got, same, true, everywhere))

    bench.check_time()
    num_past = 3 * length // 4 + 1  # in the middle of a page
    past = PagedPast(*in_pages(k[:, :num_past], v[:, :num_past], sizes.page), num_past)
    got = polar_prefill(q[:, :, num_past:], k[:, num_past:], v[:, num_past:], parameters, past=past, details=True)
    same, true = partial(polar_attention, parameters=parameters), partial(polar_reference, parameters=fp64)
    errors = compare(got, same, true, (num_past + 1, length), num_past)
    yield _line("polar prefill", f"{thousands(length)}, {num_past:,} in pages", dtype, *errors)

    bench.check_time()
    got = [softmax_prefill(q, k, v, scale=scale)]
    errors = compare(got, partial(softmax_attention, scale=scale), partial(softmax_reference, scale=scale), everywhere)
    yield _line("softmax prefill", thousands(length), dtype, *errors)


def _decode(bench: Bench, dtype: torch.dtype) -> Iterator[Line]:
    """Streams of different lengths in one launch, one new token each and then four."""
    sizes, length = bench.sizes, bench.sizes.parity_length
    num_heads, num_kv_heads, width = sizes.heads
    lengths = [length, length // 2 + 1, min(1000, length // 3), 4]
    k, v = bench.normal(2, len(lengths), length, num_kv_heads, width, dtype=dtype, seed=4)
    for b, end in enumerate(lengths):
        k[b, end:] = v[b, end:] = torch.nan
    pages = in_pages(k, v, sizes.page)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    parameters, scale = bench.polar_parameters(), width**-0.5
    fp64 = parameters.to(torch.float64)
    for num_queries in (1, 4):
        q = bench.normal(len(lengths), num_queries, num_heads, width, dtype=dtype, seed=5).transpose(1, 2)
        for core in ("polar", "softmax"):
            bench.check_time()

            def run(impl: Impl, core: str = core, q: Tensor = q) -> Outputs:
                arguments = (q, *pages, device_lengths)
                if core == "polar":
                    return decode.polar_decode(*arguments, parameters, host_lengths=lengths, impl=impl)
                return [decode.softmax_decode(*arguments, scale=scale, host_lengths=lengths, impl=impl)]

            outputs = run("triton"), run("torch")
            errors: tuple[list[float], list[float]] = ([], [])
            for b, end in enumerate(lengths):
                wide = (q[b : b + 1].double(), k[b : b + 1, :end].double(), v[b : b + 1, :end].double())
                truth = polar_reference(*wide, fp64) if core == "polar" else [softmax_reference(*wide, scale=scale)]
                for found, out in zip(errors, outputs, strict=True):
                    found.append(error([x[b : b + 1] for x in out], truth))
            case = f"4 streams to {thousands(length)}, {num_queries} new"
            yield _line(f"{core} decode", case, dtype, _worst(errors[0]), _worst(errors[1]))


def _memory(bench: Bench, dtype: torch.dtype) -> Iterator[Line]:
    """Steps of one to sixteen tokens in place, against the recurrence; then the prefill of flash-linear-attention."""
    from atma_eval.kernels.delta_triton import fla_refusal, gated_delta_fla, gated_delta_step

    num_heads, num_kv_heads, width = bench.sizes.heads
    batch, num_tokens = 3, bench.sizes.memory_tokens
    q = bench.normal(batch, num_tokens, num_heads, width, dtype=dtype, seed=6)
    k, v = bench.normal(2, batch, num_tokens, num_kv_heads, width, dtype=dtype, seed=7)
    gates = bench.normal(2, batch, num_tokens, num_heads, dtype=torch.float32, seed=8)
    gamma, beta = gates[0] + 3.9, gates[1]
    state = bench.normal(batch, num_heads, width, width, dtype=torch.float32, seed=9)
    wide_k, wide_v = (x.repeat_interleave(num_heads // num_kv_heads, dim=2) for x in (k, v))
    plain = (q, wide_k, wide_v, gamma, beta)
    truth = gated_delta_reference(*(x.double() for x in (*plain, state)))
    same = gated_delta(*plain, state)

    table = torch.full((batch + 2, *state.shape[1:]), torch.nan, device=bench.device)
    slots = torch.tensor([4, 0, 2], device=bench.device)
    table[slots] = state
    readouts: list[Tensor] = []
    start = 0
    while start < num_tokens:
        part = slice(start, min(num_tokens, start + (1, 2, 5, 16)[len(readouts) % 4]))
        pieces = q[:, part], k[:, part], v[:, part], gamma[:, part], beta[:, part]
        readouts.append(gated_delta_step(*pieces, table, slots))
        start = part.stop
    got = (torch.cat(readouts, dim=1), table[slots])

    def both(outputs: Outputs) -> float:
        return _worst([row_error(mine, true) for mine, true in zip(outputs, truth, strict=True)])

    yield _line("memory step", f"{num_tokens} tokens by 1, 2, 5, 16", dtype, both(got), both(same))
    refusal = fla_refusal(dtype, width, bench.device)
    name = f"memory prefill {NAMES[dtype]}"
    if refusal is not None:
        yield Line(what=name, case="flash-linear-attention", note=refusal)
        return
    figures = {"kernel": both(gated_delta_fla(*plain, state)), "PyTorch": both(same)}
    yield Line(what=name, case="flash-linear-attention", figures=figures)


def _convolution(bench: Bench, dtype: torch.dtype) -> Iterator[Line]:
    """A prefill over the whole length, then steps in place; with gates and with the residual."""
    from atma_eval.kernels.conv_triton import conv_prefill, conv_step

    channels, length = bench.sizes.channels, bench.sizes.parity_length
    step, num_steps = 5, 4
    x, b, c = bench.normal(3, 1, length + step * num_steps, channels, dtype=dtype, seed=10)
    for name, num_taps, gated in (("short", SHORT_TAPS, True), ("canon", CANON_TAPS, False)):
        bench.check_time()
        weight = bench.normal(channels, 1, num_taps, dtype=dtype, seed=11)

        def plain(x: Tensor, b: Tensor, c: Tensor, weight: Tensor, *, gated: bool = gated) -> Tensor:
            return c * causal_conv(b * x, weight)[0] if gated else x + causal_conv(x, weight)[0]

        def options(part: slice, gated: bool = gated) -> dict[str, Any]:
            return {"gates": (b[:, part], c[:, part])} if gated else {"residual": True}

        truth = plain(*(t.double() for t in (x, b, c, weight)))
        y, state = conv_prefill(x[:, :length], weight, **options(slice(length)))
        outputs, slots = [y], torch.zeros(1, dtype=torch.int64, device=bench.device)
        for start in range(length, x.shape[1], step):
            part = slice(start, start + step)
            outputs.append(conv_step(x[:, part], weight, state, slots, **options(part)))
        mine = row_error(torch.cat(outputs, dim=1), truth)
        case = f"{thousands(length)}, then {num_steps} steps"
        yield _line(f"{name} convolution", case, dtype, mine, row_error(plain(x, b, c, weight), truth))
