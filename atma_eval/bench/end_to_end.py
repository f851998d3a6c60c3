"""`niah` and `ppl` of a whole model, by the code that the command line runs, with the kernels and without."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atma_eval import runner
from atma_eval.bench.parts import NAMES, Bench
from atma_eval.bench.report import Line
from atma_eval.records import RunDirectory
from atma_eval.spec import ModelSpec, RunSpec, TaskSpec, build_task, load_preset, parse_lengths

WARM_UP = "warm-up"
PRESETS = {"niah": "induction", "ppl": "perplexity"}


def _tasks(bench: Bench) -> tuple[TaskSpec, ...]:
    """One needle for the warm-up, then both tasks."""
    sizes = bench.sizes
    lengths = parse_lengths(sizes.end_to_end_lengths)
    niah, ppl = (load_preset(name) for name in PRESETS.values())
    needles: dict[str, Any] = {"lengths": lengths, "trials": sizes.num_trials, "docs": 1}
    warm_up = needles | {"lengths": parse_lengths(sizes.warm_up_length), "trials": 1}
    tasks = (
        build_task(dataclasses.replace(niah, name=WARM_UP), **warm_up),
        build_task(niah, **needles),
        build_task(ppl, lengths=lengths, docs=sizes.num_documents),
    )
    return tuple(TaskSpec(task=task) for task in tasks)


def _run(bench: Bench, impl: str) -> tuple[list[runner.Cell], list[dict[str, Any]]]:
    """Cells and rows; a row's peak memory is that of its own computation."""
    sizes, device = bench.sizes, bench.device
    dtype = str(sizes.dtype).removeprefix("torch.")
    model = ModelSpec(name=sizes.end_to_end_model, dtype=dtype, device=str(device), impl=impl)
    cells = runner.prepare(RunSpec(models=(model,), tasks=_tasks(bench), out=Path("unused")))

    def on_row(row: dict[str, Any]) -> None:
        bench.check_time()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    with tempfile.TemporaryDirectory() as folder, RunDirectory(Path(folder) / impl) as directory:
        return cells, runner.run(cells, runner.Events(on_row=on_row), directory).rows


def end_to_end(bench: Bench) -> Iterator[Line]:
    """Tokens per second and peak memory of each task, and how many times faster the kernels are."""
    speed: dict[tuple[str, str], float] = {}
    for impl in bench.while_time(("triton", "torch")):
        cells, rows = _run(bench, impl)
        for cell in cells:
            task = cell.spec.task.name
            own = [row for row in rows if row["task"] == task]
            if task == WARM_UP:
                continue
            num_tokens, elapsed_s = cell.account.computed_tokens, sum(row["elapsed_s"] for row in own)
            speed[task, impl] = num_tokens / elapsed_s
            failed = [row for row in own if row["status"] != "ok"]
            yield Line(
                what=f"{_command(task)}, {impl}",
                case=f"{cell.source.path.stem} {NAMES[bench.sizes.dtype]}, {bench.sizes.end_to_end_lengths}",
                figures={
                    "tokens": num_tokens,
                    "seconds": elapsed_s,
                    "tokens/s": speed[task, impl],
                    "peak GB": max(row["peak_memory_bytes"] for row in own) / 1e9,
                    "rows not ok": len(failed),
                },
                judged="rows not ok",
                target=0.0,
                at_least=False,
                note=f"{failed[0]['status']}: {failed[0]['error']}" if failed else None,
            )
    for task in PRESETS.values():
        ratio = speed[task, "triton"] / speed[task, "torch"]
        yield Line(what=_command(task), case="triton / torch", figures={"times faster": ratio})


def _command(task: str) -> str:
    return next(command for command, preset in PRESETS.items() if preset == task)
