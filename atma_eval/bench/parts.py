"""What every part of the GPU measurements is given: sizes, random inputs, a stopwatch, and the time that is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from atma_eval.bench.report import Line
from atma_eval.bench.timing import Run, Stopwatch, Timing, in_turns
from atma_eval.kernels.polar import PolarParameters

Case = TypeVar("Case")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPE = {  # of the model whose logits are compared: heads as those that are timed, and few tokens to choose from
    "vocab_size": 1024,
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "head_dim": 128,
    "attn_type": "polar",
    "attn_window": None,
    "mem_enabled": True,
    "mem_gamma_bias": 3.9,
    "mem_beta_bias": 0.0,
    "attn_kernel_size": 4,
    "conv_kernel_size": 3,
    "training_length": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is; tests take less.

    Attributes:
        heads: query heads, key/value heads, and their width.
        channels: of the convolutions.
        dtype: of what is timed.
        parity_types, parity_length: of what is compared with the truth; the truth has ``parity_rows`` rows at a time.
        window: of the windowed cases.
        memory_tokens: steps of the memory that are compared with the recurrence.
        model, model_tokens, model_steps: the random model, its tokens, and how many of them come one by one.
        max_golden: cases of the golden vectors; ``None`` is all.
        prefill_lengths, decode_lengths, decode_batches, step_batches, conv_batches: of the timed operations.
        large_batch: from which on the share of the copy bandwidth has a target.
        copy_bytes: what a copy reads.
        end_to_end: model, lengths, trials and documents of the two tasks.
        max_rounds, at_most_s: of one comparison, as in `timing.in_turns`.
    """

    heads: tuple[int, int, int] = (8, 2, 128)
    channels: int = 1024
    page: int = 256
    dtype: torch.dtype = torch.bfloat16
    parity_types: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    parity_length: int = 65_536
    parity_rows: int = 16
    window: int = 4096
    memory_tokens: int = 300
    model: dict[str, Any] = dataclasses.field(default_factory=lambda: SHAPE)
    model_tokens: int = 3000
    model_chunk: int = 1024
    model_steps: int = 16
    max_golden: int | None = None
    prefill_lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768, 65_536)
    decode_lengths: tuple[int, ...] = (2048, 8192, 32_768, 131_072)
    decode_batches: tuple[int, ...] = (1, 8, 64, 256)
    step_batches: tuple[int, ...] = (1, 16, 256, 2048)
    conv_batches: tuple[int, ...] = (1, 256, 32_768)
    large_batch: int = 64
    copy_bytes: int = 2**30
    end_to_end_model: str = "random:atma-378m"
    end_to_end_lengths: str = "2k..64k"
    warm_up_length: str = "2k"
    num_trials: int = 2
    num_documents: int = 2
    max_rounds: int = 50
    at_most_s: float = 0.5

    def quick(self) -> Sizes:
        """A first look: the same parts over fewer lengths."""
        return dataclasses.replace(
            self,
            parity_length=16_384,
            model_tokens=1500,
            prefill_lengths=(2048, 16_384),
            decode_lengths=(2048, 131_072),
            decode_batches=(1, 64),
            step_batches=(1, 2048),
            conv_batches=(1, 32_768),
            end_to_end_lengths="2k..16k",
            num_trials=1,
            num_documents=1,
            at_most_s=0.2,
        )


class TimeUp(Exception):
    """The time of a part is over: no error, it ends here and says so."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a part measures with."""

    device: torch.device
    sizes: Sizes
    stopwatch: Stopwatch
    deadline: float  # of the part, by `time.monotonic`

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeUp

    def while_time(self, cases: Iterable[Case]) -> Iterator[Case]:
        """Each case, until the time of the part is over."""
        for case in cases:
            self.check_time()
            yield case

    def time(self, runs: dict[str, Run]) -> dict[str, Timing]:
        return in_turns(self.stopwatch, runs, max_rounds=self.sizes.max_rounds, at_most_s=self.sizes.at_most_s)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Random values of the device's own generator."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, dtype=dtype or self.sizes.dtype, device=self.device, generator=generator)

    def polar_parameters(self) -> PolarParameters:
        """Those a fresh model has, spread a little from head to head."""
        num_heads, _, width = self.sizes.heads
        spread = self.normal(4, num_heads, dtype=torch.float32, seed=1) / 2
        middle = (2.0, 0.5, -1.0, -1.5)
        scalars = (value + row for value, row in zip(middle, spread, strict=True))
        return PolarParameters(self.normal(num_heads, width, dtype=torch.float32, seed=2), *scalars)

    def copy(self) -> Run:
        """A device-to-device copy: what the memory gives, for comparison."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def bandwidth_line(
        self, what: str, case: str, run: Run, copy: Run, num_bytes: int, *, target: float | None
    ) -> Line:
        """Bytes per second of ``run``, which has to move ``num_bytes``, beside those of a copy in the same rounds."""
        timings = self.time({"run": run, "copy": copy})
        rate = num_bytes / timings["run"].median_s
        copy_rate = 2 * self.sizes.copy_bytes / timings["copy"].median_s
        figures = {
            "us": 1e6 * timings["run"].median_s,
            "MB": num_bytes / 1e6,
            "GB/s": rate / 1e9,
            "copy GB/s": copy_rate / 1e9,
            "of copy": rate / copy_rate,
        }
        return Line(what=what, case=case, figures=figures, judged="of copy", target=target, timings=timings)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: its name, a title for people, what yields its lines, and by which share of the time it must end."""

    name: str
    title: str
    measure: Callable[[Bench], Iterator[Line]]
    until: float


class Paged(NamedTuple):
    """Keys and values in pages of random order, and the tables, int32 ``[B, max_pages]``."""

    keys: Tensor
    values: Tensor
    tables: Tensor


def in_pages(k: Tensor, v: Tensor, page: int) -> Paged:
    """``[B, S, G, K]`` each as pages ``[P, page, G, K]``; slots that hold nothing are NaN."""
    batch, length = k.shape[:2]
    num_pages = -(-length // page)
    generator = torch.Generator(k.device).manual_seed(0)
    order = torch.randperm(batch * num_pages, generator=generator, device=k.device)

    def pool(x: Tensor) -> Tensor:
        padded = x.new_full((batch, num_pages * page, *x.shape[2:]), torch.nan)
        padded[:, :length] = x
        pages = torch.empty_like(padded).view(batch * num_pages, page, *x.shape[2:])
        pages[order] = padded.view_as(pages)
        return pages

    return Paged(pool(k), pool(v), order.view(batch, num_pages).int())


def thousands(count: int) -> str:
    """``64K`` for 65,536."""
    return f"{count // 1024}K" if count % 1024 == 0 and count else f"{count:,}"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated there."""
    if device.type != "cuda":
        return 2**30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
