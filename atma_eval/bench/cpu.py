"""Speed of the PyTorch operations, as ratios that hold on any machine: `python -m atma_eval.bench cpu`.

What is compared runs in turns (A, B, A, B, ...), in processor time of its one thread, and the best of three
counts, so that a busy neighbour hits both sides alike.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from atma_eval.bench.report import write_json
from atma_eval.kernels.delta import gated_delta
from atma_eval.kernels.polar import PolarParameters, polar_attention
from atma_eval.kernels.softmax import softmax_attention
from atma_eval.kernels.tiles import use_workers
from atma_eval.state import KVState, PagePool

ROUNDS = 3
LENGTH = 16_384
LONG = 65_536
CHUNK = 2_048  # tokens a session hands over at a time
WINDOW = 1_024

POLAR_AT_MOST = 1.6  # times softmax
WINDOW_AT_LEAST = 4.0  # times faster than full attention
DELTA_AT_MOST = 4.6  # times the work for four times the tokens


@dataclass(frozen=True)
class Ratio:
    """One line of the report: ``seconds[0] / seconds[1]`` of the best runs against its target."""

    what: str
    shape: str
    fed: str
    seconds: tuple[float, float]
    target: float
    at_least: bool = False

    @property
    def value(self) -> float:
        return self.seconds[0] / self.seconds[1]

    @property
    def ok(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


def best_in_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Best time of each, in seconds, measured in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def attention_ratios(num_heads: int, num_kv_heads: int, width: int, chunk: int) -> Iterator[Ratio]:
    """Polar against softmax, and each against itself with a window, over `LENGTH` tokens fed ``chunk`` at a time."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, num_heads, LENGTH, width, generator=generator)
    k, v = torch.randn(2, 1, LENGTH, num_kv_heads, width, generator=generator)
    scalars = (torch.full((num_heads,), value) for value in (2.0, 0.5, -1.0, -1.5))
    parameters = PolarParameters(torch.zeros(num_heads, width), *scalars)

    def polar(q: Tensor, k: Tensor, v: Tensor, **placed: Any) -> None:
        polar_attention(q, k, v, parameters, **placed)

    def softmax(q: Tensor, k: Tensor, v: Tensor, **placed: Any) -> None:
        softmax_attention(q, k, v, scale=width**-0.5, **placed)

    def walk(attend: Callable[..., None], window: int | None) -> None:
        pool = PagePool((num_kv_heads, width, width), q.dtype, q.device, num_pages=LENGTH // 256)
        kv = KVState(pool, 1, window)
        for start in range(0, LENGTH, chunk):
            new = slice(start, start + chunk)
            past = kv.runs() if start else ()
            attend(q[:, :, new], k[:, new], v[:, new], past=past, offset=start, window=window)
            kv.append(k[:, new], v[:, new])

    best = best_in_turns(
        {
            "softmax": lambda: walk(softmax, None),
            "polar": lambda: walk(polar, None),
            "softmax, window": lambda: walk(softmax, WINDOW),
            "polar, window": lambda: walk(polar, WINDOW),
        }
    )
    shape = f"{num_heads}/{num_kv_heads}x{width}"
    fed = "16K whole" if chunk == LENGTH else f"16K by {chunk // 1024}K"
    yield Ratio("polar / softmax", shape, fed, (best["polar"], best["softmax"]), POLAR_AT_MOST)
    for core in ("softmax", "polar"):
        seconds = (best[core], best[f"{core}, window"])
        yield Ratio(f"{core}: full / window", shape, fed, seconds, WINDOW_AT_LEAST, at_least=True)


def delta_ratio(num_heads: int, width: int) -> Ratio:
    """The memory over `LONG` tokens against `LENGTH`: linear cost means a ratio of four."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, LONG, num_heads, width, generator=generator)
    gamma, beta = torch.randn(2, 1, LONG, num_heads, generator=generator)

    inputs = (q, k, v, gamma + 3.9, beta)
    quarters = [[x[:, start : start + LENGTH] for x in inputs] for start in range(0, LONG, LENGTH)]

    def scan_quarters() -> None:  # as many tokens as the long scan, from as cold a cache
        for quarter in quarters:
            gated_delta(*quarter)

    best = best_in_turns({"long": lambda: gated_delta(*inputs), "quarters": scan_quarters})
    seconds = (best["long"], best["quarters"] / len(quarters))
    return Ratio("memory: 64K / 16K", f"{num_heads}x{width}", "whole", seconds, DELTA_AT_MOST)


def cpu_ratios() -> Iterator[Ratio]:
    """Every line of ``bench cpu``, as it is measured."""
    for num_heads, num_kv_heads, width in ((4, 1, 16), (8, 2, 128)):
        for chunk in (LENGTH, CHUNK):
            yield from attention_ratios(num_heads, num_kv_heads, width, chunk)
        yield delta_ratio(num_heads, width)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report(ratios: list[Ratio], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("measured", "heads", "tokens"):
        table.add_column(heading, no_wrap=True)
    for heading in ("seconds", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for r in ratios:
        seconds = f"{r.seconds[0]:.2f}/{r.seconds[1]:.2f}"
        target = f"{'≥' if r.at_least else '≤'} {r.target}"
        verdict = "ok" if r.ok else "[red]too slow[/red]"
        table.add_row(r.what, r.shape, r.fed, seconds, f"{r.value:.2f}", target, verdict)
    return table


def cpu(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file too.")] = None,
) -> None:
    """Ratios on one CPU thread at 16K tokens, about two minutes; exit code 1 if a target is missed."""
    torch.set_num_threads(1)
    use_workers(1)
    machine = {"torch": torch.__version__, "cpu": cpu_name(), "threads": torch.get_num_threads()}
    with torch.inference_mode():
        ratios = list(track(cpu_ratios(), "measuring", total=14, console=Console(stderr=True), transient=True))
    title = (
        f"torch {machine['torch']}, {machine['cpu']}, {machine['threads']} thread, best of {ROUNDS}; window {WINDOW:,}"
    )
    Console().print(report(ratios, title))
    if json_file is not None:
        lines = [{**dataclasses.asdict(r), "ratio": r.value, "ok": r.ok} for r in ratios]
        write_json(json_file, {**machine, "rounds": ROUNDS, "lines": lines})
    raise typer.Exit(0 if all(r.ok for r in ratios) else 1)
