"""``benchmark_matrix.json``: the figures of all benchmark logs, one entry per cell and metric."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from atma_eval.importing.benchmarks import SMOKE_SAMPLES, SYNTHETIC, depth_of, longdoc_figure, retrieval_figure
from atma_eval.importing.figures import UNKNOWN_TEXT, VALUE_DIGITS, Figure, ModelFigures, Parsed
from atma_eval.importing.files import (
    LogFile,
    expect_count,
    expect_dict,
    expect_length,
    expect_number,
    expect_share,
    is_smoke,
)
from atma_eval.importing.names import readable


def parse_matrix(file: LogFile, rows: list[Any]) -> Parsed:
    """All models of a ``benchmark_matrix.json``: one entry per cell and metric, gathered into cells."""
    parsed = Parsed()
    cells: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
    for i, row in enumerate(rows):
        where = f"{file.path}, row {i}"
        row = expect_dict(row, where)
        benchmark = str(row.get("benchmark"))
        if _is_smoke_row(row, where):
            parsed.left_out["smoke rows"] += 1
        elif benchmark not in ("retrieval", "longdoc"):
            parsed.left_out[f"{benchmark} rows (a row holds a loss, they have none)"] += 1
        else:
            metric = _metric(str(row.get("metric")))
            if metric is None:
                parsed.left_out[f"{benchmark} rows of metric {row.get('metric')}"] += 1
                continue
            names = ("model", "suite", "task", "dataset", "length", "depth")
            key = (benchmark, *(None if row.get(name) is None else str(row[name]) for name in names))
            if metric in cells[key]:
                parsed.left_out["rows given twice"] += 1
                if cells[key][metric] != row.get("value"):
                    parsed.note(f"{file.label}, row {i}: another {metric} of a cell; the first is kept")
                continue
            cells[key][metric] = expect_number(row.get("value"), where)
            cells[key].setdefault("samples", expect_count(row.get("samples"), f"{where}: samples") or 1)
    by_model: dict[str, list[Figure]] = defaultdict(list)
    for (benchmark, model, suite, task, dataset, length, depth), values in cells.items():
        where = f"{file.path}: {benchmark} {model} {task or dataset} at {length}"
        if "nll" not in values:
            parsed.left_out[f"{benchmark} cells without a loss"] += 1
            continue
        if benchmark == "retrieval":
            figure = retrieval_figure(
                task=f"{task}-{suite}",
                length=expect_length(length, where),
                depth=depth_of(depth, where),
                text_id=str(dataset or (SYNTHETIC if suite == "synthetic" else UNKNOWN_TEXT)),
                samples=values["samples"],
                digits=VALUE_DIGITS,
                accuracy=expect_share(values.get("accuracy"), where),
                exact=expect_share(values.get("exact"), where),
                nll=values["nll"],
                oom=False,
            )
        else:
            figure = longdoc_figure(
                alias=str(dataset or task or UNKNOWN_TEXT),
                length=expect_length(length, where),
                documents=values["samples"],
                nll=values["nll"],
                bits_per_byte=values.get("bits_per_byte"),
            )
        by_model[str(model)].append(figure)
    for name, figures in by_model.items():
        details = {"tokenizer": "gpt2", "authors_run_id": name}
        parsed.models.append(
            ModelFigures(
                name=readable(name, {}),
                hint="benchmarks",
                identity=("benchmark", name),
                details=details,
                figures=figures,
            )
        )
    return parsed


def _is_smoke_row(row: dict[str, Any], where: str) -> bool:
    if is_smoke(str(row.get("source_log") or "")) or row.get("stage") == "smoke":
        return True
    samples = expect_count(row.get("samples"), f"{where}: samples")
    return row.get("benchmark") == "retrieval" and samples is not None and samples <= SMOKE_SAMPLES


def _metric(name: str) -> str | None:
    """Which figure a metric's name means; perplexity follows from the loss and is not kept."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "exact" in words:
        return "exact"
    if "nll" in words or "nats" in words:
        return "nll"
    if "bpb" in words or {"bits", "byte"} <= words:
        return "bits_per_byte"
    if words & {"acc", "accuracy"}:
        return "accuracy"
    return None
