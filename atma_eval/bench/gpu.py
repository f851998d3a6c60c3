"""Everything that only a GPU can show, in one script of minutes: `python -m atma_eval.bench gpu`.

Parts run one after another. One that fails, or whose time is over, ends alone: what it had measured is kept, the next
begins, and the exit code is 1. The JSON file is written anew after every part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import platform
import re
import subprocess
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from atma_eval.bench.attention import decoding, prefill
from atma_eval.bench.end_to_end import end_to_end
from atma_eval.bench.models import models
from atma_eval.bench.parity import parity
from atma_eval.bench.parts import Bench, Part, Sizes, TimeUp
from atma_eval.bench.report import PartReport, notes, tables, write_json
from atma_eval.bench.states import states
from atma_eval.bench.timing import GpuStopwatch, WallStopwatch
from atma_eval.console import WIDTH, plain_console
from atma_eval.errors import UserError, did_you_mean
from atma_eval.kernels.choice import choose
from atma_eval.records import git_commit

BUDGET_S, QUICK_BUDGET_S = 330.0, 120.0  # of six minutes; what is left is for starting and for the last line's end
TRACEBACK_CHARACTERS = 4000

PARTS = (
    Part(name="parity", title="Error against fp64 truth", measure=parity, until=0.27),
    Part(name="models", title="Logits against fp32 on the processor", measure=models, until=0.42),
    Part(name="prefill", title="Prefill against torch's flash attention", measure=prefill, until=0.55),
    Part(name="decode", title="Decoding against copy bandwidth", measure=decoding, until=0.72),
    Part(name="states", title="Steps of memory and convolution", measure=states, until=0.8),
    Part(name="end-to-end", title="Tasks from end to end", measure=end_to_end, until=1.0),
)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures belong to."""
    facts: dict[str, Any] = {"name": platform.machine(), "type": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "num_processors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": _driver(),
        }
    versions = {name: _version(name) for name in ("atma-eval", "torch", "triton", "fla-core")}
    versions |= {"cuda": torch.version.cuda, "python": platform.python_version()}
    return {"device": facts, "versions": versions, "git_commit": git_commit()}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def result_path(folder: Path, device_name: str, day: datetime.date) -> Path:
    """``<device>-<date>.json``; an earlier run of the day is kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    paths = (folder / f"{slug}-{day}{suffix}.json" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(path for path in paths if not path.exists())


def run_part(part: Part, bench: Bench) -> PartReport:
    """Its lines, as far as it came."""
    report = PartReport(name=part.name, title=part.title)
    start = time.monotonic()
    if start > bench.deadline:
        return report
    try:
        report.status = "done"
        with torch.no_grad():
            for line in part.measure(bench):
                report.lines.append(line)
    except TimeUp:
        report.status = "stopped"
    except Exception as error:  # one part's failure is reported, and the rest goes on
        report.status = "failed"
        report.error = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        report.traceback = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
    report.elapsed_s = time.monotonic() - start
    return report


def show(report: PartReport, console: Console) -> None:
    console.print(f"\n{report.title}")
    for table in tables(report.lines):
        console.print(table)
    for note in notes(report.lines):
        console.print(note, style="dim")
    console.print(report.summary(), style="red" if report.error else None)
    if report.traceback:
        plain_console(stderr=True, soft_wrap=True).print(report.traceback, style="dim")


def measure(
    *,
    sizes: Sizes,
    device: torch.device,
    out: Path,
    budget_s: float = BUDGET_S,
    parts: tuple[Part, ...] = PARTS,
) -> bool:
    """Run ``parts``, show them, write them to a file in ``out``.

    Returns whether every part was done and met its targets. Raises `UserError` where the kernels cannot run; on a CPU
    they do so only in Triton's interpreter, as in the test.
    """
    start = time.monotonic()
    choose("triton", dtype=sizes.dtype, head_dim=sizes.heads[2], device=device)
    about = machine(device)
    console = plain_console(width=WIDTH)
    path = result_path(out, about["device"]["name"], datetime.date.today())
    console.print(", ".join(str(about["device"][key]) for key in ("name", "capability") if key in about["device"]))
    console.print(", ".join(f"{name} {version}" for name, version in about["versions"].items() if version))
    stopwatch = GpuStopwatch(device) if device.type == "cuda" else WallStopwatch()
    reports = []
    for part in parts:
        bench = Bench(device=device, sizes=sizes, stopwatch=stopwatch, deadline=start + part.until * budget_s)
        reports.append(run_part(part, bench))
        show(reports[-1], console)
        missed = [f"{line.what}, {line.case}" for report in reports for line in report.missed]
        complete = [report.name for report in reports if report.status == "done"]
        write_json(
            path,
            {
                "schema": 1,
                **about,
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "budget_s": budget_s,
                "elapsed_s": time.monotonic() - start,
                "sizes": dataclasses.asdict(sizes),
                "missing_parts": [part.name for part in parts if part.name not in complete],
                "num_targets_met": sum(line.ok is True for report in reports for line in report.lines),
                "missed_targets": missed,
                "parts": [report.to_dict() for report in reports],
            },
        )
        gc.collect()
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after an illegal access nothing works any more, this neither
                torch.cuda.empty_cache()
    console.print(f"\n{time.monotonic() - start:.0f} s; figures in {path}", soft_wrap=True)
    for line in missed:
        console.print(f"missed: {line}")
    return not missed and len(complete) == len(parts)


def gpu(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the JSON file.", metavar="DIR")] = Path(
        "results/bench"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths, two minutes.")] = False,
    part: Annotated[list[str] | None, typer.Option("--part", help="Only this part. Repeats.", metavar="NAME")] = None,
) -> None:
    """Parity and speed of the Triton kernels on a GPU, six minutes at most; exit code 1 if anything falls short."""
    names = [known.name for known in PARTS]
    for name in part or ():
        if name not in names:
            raise UserError(f"unknown part {name!r}", did_you_mean(name, names))
    if not torch.cuda.is_available():
        raise UserError(
            f"there is no GPU that torch {torch.__version__} can use",
            "`python -m atma_eval.bench cpu` measures the PyTorch operations on a processor",
        )
    sizes = Sizes()
    good = measure(
        sizes=sizes.quick() if quick else sizes,
        device=torch.device("cuda", torch.cuda.current_device()),
        out=out,
        budget_s=QUICK_BUDGET_S if quick else BUDGET_S,
        parts=tuple(known for known in PARTS if not part or known.name in part),
    )
    raise typer.Exit(0 if good else 1)
