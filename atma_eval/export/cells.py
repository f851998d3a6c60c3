"""Figures of a run: one per model, task, length, control and metric, with its interval."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from atma_eval.metrics import METRICS, Metric, Row, Unit, estimate, metrics_of, units
from atma_eval.runs import ModelRows
from atma_eval.stats import Z_95, Estimate

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure.

    Attributes:
        name: the task at this length, as a name of its own.
        estimate: its mean is ``None`` where no row could be scored (``num_failed`` says how many could not), or where
            a perplexity is no longer a number.
        method: how the interval was made; ``None`` where there is none.
        rows: the scored rows under it.
    """

    name: str
    model: str
    task: str
    protocol: str
    length: int
    control: str
    metric: Metric
    estimate: Estimate
    method: str | None
    rows: list[Row]
    num_failed: int

    @property
    def num_documents(self) -> int | None:
        """``None`` for an imported figure: its ``text_id`` is a whole data set."""
        if any(row["trial"] is None for row in self.rows):
            return None
        return len({row["text_id"] for row in self.rows})

    @property
    def standard_error(self) -> float | None:
        """That of a normal interval as wide as ours; unlike ``sqrt(p (1 - p) / n)`` it is never zero."""
        _, low, high, _ = self.estimate
        return None if low is None or high is None else (high - low) / (2 * Z_95)


def cells_of(model: ModelRows) -> list[Cell]:
    """All figures of a model: tasks in the order of its rows, then by length; controls as they come."""
    found = []
    by_cell: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in model.rows:
        by_cell[row["task"], row["length"]].append(row)
    order = {task: i for i, task in enumerate(model.tasks)}
    for task, length in sorted(by_cell, key=lambda key: (order[key[0]], key[1])):
        rows = by_cell[task, length]
        name = cell_name(task, length, [row for row in rows if row["control"] == "none"] or rows)
        for control in dict.fromkeys(row["control"] for row in rows):
            mine = [row for row in rows if row["control"] == control]
            ok = [row for row in mine if row["status"] == "ok"]
            for metric in (METRICS[name] for name in metrics_of(_shape(rows))):
                if metric.contrast is not None and control != "none":
                    continue
                values = list(units(rows, metric, control).values())
                if not values and ok:
                    continue  # these rows have no such figure: an imported loss of a needle without its accuracy
                result = estimate(values, metric) if values else Estimate(None, None, None, 0)
                found.append(
                    Cell(
                        name=name,
                        model=model.name,
                        task=task,
                        protocol=mine[0]["protocol"],
                        length=length,
                        control=control,
                        metric=metric,
                        estimate=result,
                        method=None if result.low is None else interval_method(values, metric),
                        rows=ok,
                        num_failed=len(mine) - len(ok),
                    )
                )
    return found


def _shape(rows: list[Row]) -> Row:
    """A row that shows what task this is: a control may lack the depth that marks a retrieval task."""
    return next((row for row in rows if row["control"] == "none"), rows[0])


def interval_method(values: list[Unit], metric: Metric) -> str:
    """In words, how `metrics.estimate` makes the interval of these values."""
    if metric.kind == "proportion" or any(unit.num_trials > 1 for unit in values):
        return "Wilson over trials"
    if metric.kind == "share" and len({unit.value for unit in values}) == 1:
        return "Wilson over trials"
    one = len({unit.document for unit in values}) == 1
    return "t over trials of one document" if one else "t over documents"


def cell_name(task: str, length: int, rows: list[Row]) -> str:
    """The task at one length as a name of its own, for formats in which a task has no lengths.

    ``induction_gap2048`` where the length is the gap, ``perplexity_length2048`` where it is the whole context.
    """
    kind = "gap" if all(row["gap"] == length for row in rows) else "length"
    return re.sub(r"[^\w.-]", "_", f"{task}_{kind}{length}")


def number_or_none(value: float | None) -> float | None:
    return None if value is None else float(value)
