"""Estimates of runs put into charts: by length, by depth, by position. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from atma_eval.compare.unlike import apart
from atma_eval.metrics import METRICS, Metric, Row, Unit, estimate, is_retrieval, ratio_of_sums, units
from atma_eval.plots.charts import (
    Heat,
    HeatChart,
    Line,
    LineChart,
    Point,
    failures_text,
    interval_text,
    intervals_text,
    length_text,
    number_text,
    range_text,
    without_interval_text,
)
from atma_eval.runs import ModelRows
from atma_eval.stats import Estimate
from atma_eval.words import plural, sentence

CONTROLS = {"absent": "needle absent", "format": "another value of the same form (format)"}
NOTHING = Estimate(None, None, None, 0)
LEAST_OF_BUCKET = 1 / 8  # a last bucket of positions that is cut off before this share of it is left out


def rows_of(model: ModelRows, task: str, control: str = "none") -> list[Row]:
    return [row for row in model.rows if row["task"] == task and row["control"] == control]


def models_with(models: Sequence[ModelRows], task: str) -> list[ModelRows]:
    """Models that have rows of the task itself."""
    return [model for model in models if rows_of(model, task)]


def chance_of(row: Row, metric: str) -> float | None:
    """What guessing digits scores, for tasks whose targets are digits of one token each; else ``None``."""
    if not row["protocol"].startswith(("induction", "passkey", "niah")):
        return None
    guesses = {"exact": 10.0 ** -row["num_targets"], "first_token": 0.1, "token_accuracy": 0.1, "nll": math.log(10)}
    return guesses.get(metric)


def _points(rows: list[Row], metric: Metric, task_rows: list[Row], control: str) -> tuple[Point, ...]:
    """An estimate for each length of ``rows``; ``task_rows`` hold the control that a contrast is made with too."""
    found = units(task_rows, metric, control)
    points = []
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        values = [unit for key, unit in found.items() if key.length == length]
        failed = Counter(row["status"] for row in here if row["status"] != "ok")
        points.append(Point(length, estimate(values, metric) if values else NOTHING, dict(failed)))
    return tuple(points)


def by_length(model: ModelRows, task: str, metric: Metric, control: str = "none") -> Line:
    """A metric of one model at each length that it has rows of."""
    mine = [row for row in model.rows if row["task"] == task]
    points = _points([row for row in mine if row["control"] == control], metric, mine, control)
    return Line(model=model.name, points=points, control=control)


def _by_gap(models: Sequence[ModelRows], task: str) -> bool:
    """Whether lengths name the gap, rather than the whole context."""
    return all(row["gap"] == row["length"] for model in models for row in rows_of(model, task))


def _common(kind: str, models: list[ModelRows], task: str, metric: Metric, title: str) -> dict[str, Any]:
    row = rows_of(models[0], task)[0]
    trained = {model.training_length for model in models}
    return {
        "kind": kind,
        "task": task,
        "protocol": row["protocol"],
        "metric": metric,
        "title": title,
        "retrieval": is_retrieval(row),
        "x_label": "gap, tokens" if _by_gap(models, task) else "length, tokens",
        "trained": tuple(sorted(length for length in trained if length)),
        "notes": tuple(apart(models, task, metric)),
    }


def _documents(models: list[ModelRows], task: str) -> int:
    """Documents that were scored; those of imported means nobody counted."""
    own = [model for model in models if not model.run.imported]
    return len({row["text_id"] for model in own for row in rows_of(model, task) if row["status"] == "ok"})


def _ending(models: list[ModelRows], points: Iterable[Point], mark: str, notes: Iterable[str]) -> str:
    """Sentences on what is missing, failures and unfinished runs, and on what sets models apart."""
    failed: Counter[str] = Counter()
    for point in points:
        failed.update(point.failed)
    text = f" Not scored, and left out: {failures_text(failed)}{mark}." if failed else ""
    if any("unfinished" in note for model in models for note in model.run.notes):
        text += " A run is unfinished: this is what it has."
    if any(model.run.imported for model in models):
        text += " Imported means have Wilson intervals over the trials behind them if they are shares, else none."
    return "".join([text, *(f" {sentence(note)}" for note in notes)])


def length_chart(kind: str, models: list[ModelRows], task: str, metric: Metric) -> LineChart:
    lines = tuple(by_length(model, task, metric) for model in models)
    controls = tuple(
        line
        for control in CONTROLS
        for model in models
        if metric.contrast is None and rows_of(model, task, control)
        for line in [by_length(model, task, metric, control)]
        if any(point.estimate.mean is not None for point in line.points)
    )
    row = rows_of(models[0], task)[0]
    chance = chance_of(row, metric.name)
    points = [point for line in lines for point in line.points]
    documents = _documents(models, task)
    unit = "trial" if is_retrieval(row) else "document"
    counts = [point.estimate.n for point in points if point.estimate.n]
    of = plural(range_text(counts), unit)
    drawn = intervals_text(lines, interval_text(metric, is_retrieval(row), documents))
    shared = f", {plural(documents, 'document')}" if is_retrieval(row) and documents else ""
    caption = f"{drawn}; n = {of} per point{shared}."
    caption += without_interval_text([point.estimate for point in points])
    bare = [line.model for line in lines if all(p.estimate.mean is None and not p.failed for p in line.points)]
    if bare and len(bare) < len(lines):
        caption += f" No {metric.label} is known of {', '.join(bare)}."
    if controls:
        said = [words for control, words in CONTROLS.items() if any(line.control == control for line in controls)]
        caption += f" Thin lines are controls: {', and '.join(said)}."
    if chance is not None:
        caption += f" Guessing digits scores {chance:.3g} (chance)."
    what = "gap" if _by_gap(models, task) else "length"
    common = _common(kind, models, task, metric, f"{task}: {metric.label} by {what}")
    caption += _ending(models, points, "; × marks a length of which no row was scored", common["notes"])
    return LineChart(
        **common,
        caption=caption,
        lines=lines,
        controls=controls,
        chance=chance,
    )


def heatmap_chart(models: list[ModelRows], task: str, metric: Metric) -> HeatChart:
    rows = [row for model in models for row in rows_of(model, task)]
    lengths = tuple(sorted({row["length"] for row in rows}))
    depths = sorted({row["depth"] for row in rows if row["depth"] is not None})
    by_depth = len(depths) > 1

    def across(line: tuple[Point, ...]) -> tuple[Point | None, ...]:
        at = {point.at: point for point in line}
        return tuple(at.get(length) for length in lengths)

    if by_depth:
        panels = tuple(
            Heat(
                model.name,
                tuple(f"{depth:g}" for depth in depths),
                tuple(across(_at_depth(model, task, metric, depth)) for depth in depths),
            )
            for model in models
        )
    else:
        cells = tuple(across(by_length(model, task, metric).points) for model in models)
        panels = (Heat("", tuple(model.name for model in models), cells),)
    points = [point for panel in panels for row in panel.cells for point in row if point]
    counts = [point.estimate.n for point in points if point.estimate.n]
    unit = "trials" if is_retrieval(rows[0]) else "documents"
    bounds = [point.estimate[1:3] for point in points]
    widths = [high - low for low, high in bounds if low is not None and high is not None]
    better = "higher" if metric.higher_is_better else "lower"
    caption = f"Mean of n {unit} in each cell, n = {range_text(counts)}; {better} is better."
    if widths:
        interval = interval_text(metric, is_retrieval(rows[0]), _documents(models, task))
        caption += f" The widest of the {interval} spans {number_text(max(widths))}."
    if any(point is None for panel in panels for row in panel.cells for point in row):
        caption += " Empty: not asked."
    what = "depth and length" if by_depth else "model and length"
    common = _common("heatmap", models, task, metric, f"{task}: {metric.label} by {what}")
    caption += _ending(models, points, "; hatched where no row was scored", common["notes"])
    return HeatChart(
        **common,
        caption=caption,
        lengths=lengths,
        panels=panels,
        by_depth=by_depth,
    )


def _at_depth(model: ModelRows, task: str, metric: Metric, depth: float) -> tuple[Point, ...]:
    mine = [row for row in model.rows if row["task"] == task and row["depth"] == depth]
    return _points([row for row in mine if row["control"] == "none"], metric, mine, "none")


def position_chart(models: list[ModelRows], task: str) -> LineChart | None:
    """Loss by log2 bucket of the target position, at the longest length of each model that has curves."""
    lines, lengths, ends = [], set(), set()
    for model in models:
        rows = [row for row in rows_of(model, task) if row["status"] == "ok" and row["key"] in model.run.curves]
        longest = max((row["length"] for row in rows), default=None)
        if longest is None:
            continue
        rows = [row for row in rows if row["length"] == longest]
        points = _buckets([(row["text_id"], *model.run.curves[row["key"]]) for row in rows], longest)
        lines.append(Line(model=model.name, points=points))
        lengths.add(longest)
        ends.add(len(rows))
    if not lines:
        return None
    num, long = plural(range_text(ends), "document"), " or ".join(map(length_text, sorted(lengths)))
    drawn = intervals_text(lines, "95 % t intervals over documents (may leave the frame)")
    caption = (
        f"{drawn}; n = {num} of {long} tokens. "
        "Each point is the mean of the positions from one power of two to the next."
    )
    caption += without_interval_text([point.estimate for line in lines for point in line.points])
    common = _common("position", models, task, METRICS["nll"], f"{task}: nll (nats) by position")
    return LineChart(
        **{**common, "x_label": "target position, tokens"},
        caption=caption + _ending(models, [], "", common["notes"]),
        lines=tuple(lines),
    )


def _buckets(curves: list[tuple[str, np.ndarray, np.ndarray]], length: int) -> tuple[Point, ...]:
    points = []
    for k in range(len(curves[0][1])):
        found = [Unit(float(s[k] / c[k]), float(c[k]), text, None) for text, s, c in curves if c[k]]
        first, last = 2**k, min(2 ** (k + 1) - 1, length)
        if found and (last + 1 - first) >= LEAST_OF_BUCKET * first:
            points.append(Point(math.sqrt(first * last), ratio_of_sums(found), {}))
    return tuple(points)
