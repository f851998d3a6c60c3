"""Columns of a comparison: rows of one model taken apart by length, depth, place in the value, or position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from atma_eval.compare.pairing import Units
from atma_eval.errors import UserError
from atma_eval.metrics import METRICS, Metric, Row, Unit, UnitKey, is_retrieval, metric_for, units
from atma_eval.runs import ModelRows

By = Literal["length", "depth", "position", "bucket"]
BY: tuple[By, ...] = ("length", "depth", "position", "bucket")
BY_METRICS = {"position": ("token_accuracy", "nll"), "bucket": ("nll", "perplexity")}


class Column(NamedTuple):
    """What a column is of: a length, and within it a depth, a place in the value (from 1) or a position bucket."""

    length: int
    part: float | int | None = None

    def label(self, by: By) -> str:
        if by == "length":
            return f"{self.length:,}"
        if by == "bucket" and isinstance(self.part, int):
            first, last = 2**self.part, min(2 ** (self.part + 1) - 1, self.length)
            return f"{first:,}–{last:,}" if last > first else f"{first:,}"
        return f"{self.part:g}"


def metric_by(row: Row, name: str | None, by: By) -> Metric:
    """The metric of a table; a place in the value is right or wrong, and a bucket has a loss only."""
    if by not in BY_METRICS:
        return metric_for(row, name)
    allowed = BY_METRICS[by]
    if (name or allowed[0]) not in allowed:
        raise UserError(f"there is no {name} by {by}", f"allowed: {', '.join(allowed)}")
    metric = METRICS[name or allowed[0]]
    return replace(metric, kind="proportion", label="token right") if metric.name == "token_accuracy" else metric


def has_parts(rows: Sequence[Row], by: By) -> bool:
    """Whether rows of a task can be taken apart so."""
    if by == "depth":
        return len({row["depth"] for row in rows if row["control"] == "none"}) > 1
    return by == "length" or is_retrieval(rows[0]) == (by == "position")


def columns_of(model: ModelRows, rows: Sequence[Row], metric: Metric, by: By) -> dict[Column, Units]:
    """Values of one model's rows of one task, by column."""
    columns: dict[Column, Units] = {}
    if by in ("length", "depth"):
        for key, unit in units(rows, metric).items():
            column = Column(key.length, key.depth if by == "depth" else None)
            columns.setdefault(column, {})[key] = unit
        return columns
    parts: Callable[[Row], dict[int, float]]
    parts = _places(metric) if by == "position" else _buckets(model)
    for row in rows:
        if row["status"] == "ok" and row["control"] == "none":
            key = UnitKey(row["length"], row["depth"], row["trial"], row["text_id"])
            for part, value in parts(row).items():
                unit = Unit(value, 1.0, row["text_id"], row["sample_hash"], row.get("num_trials") or 1)
                columns.setdefault(Column(row["length"], part), {})[key] = unit
    return columns


def _places(metric: Metric) -> Callable[[Row], dict[int, float]]:
    def parts(row: Row) -> dict[int, float]:
        if metric.name == "nll":
            return dict(enumerate(row["nll"] or (), start=1))
        pairs = zip(row["target_ids"] or (), row["predicted_ids"] or ())
        return {place: float(target == predicted) for place, (target, predicted) in enumerate(pairs, start=1)}

    return parts


def _buckets(model: ModelRows) -> Callable[[Row], dict[int, float]]:
    def parts(row: Row) -> dict[int, float]:
        sums, counts = model.run.curves.get(row["key"], ((), ()))
        return {k: float(total / count) for k, (total, count) in enumerate(zip(sums, counts)) if count}

    return parts
