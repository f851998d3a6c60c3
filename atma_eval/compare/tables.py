"""Models against each other, as plain data: estimates, paired differences against a baseline, and who is best.

One call tests a whole grid of tables, models and columns; p is adjusted over all of it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from atma_eval.compare.cells import Cells, cells_of, effective_length
from atma_eval.compare.columns import BY_METRICS, By, Column, has_parts, metric_by
from atma_eval.compare.contrast import Contrast, adjust, contrast
from atma_eval.compare.notes import MISSING, task_notes
from atma_eval.compare.pairing import Entry, comparable, entries
from atma_eval.compare.unlike import check_samples, headline_metrics
from atma_eval.errors import UserError, did_you_mean
from atma_eval.metrics import METRICS, Metric, Row, is_retrieval, metric_for, metrics_of
from atma_eval.runs import ModelRows
from atma_eval.stats import EffectiveLength


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """What is asked: ``None`` stands for every task, the headline metric, the first model measured."""

    task: str | None = None
    metric: str | None = None
    baseline: str | None = None
    by: By = "length"
    pool: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """One task, and one length where columns are parts of it.

    Attributes:
        entries: its lines; cells are missing where a line has no rows.
        contrasts: each line less the baseline, where samples pair.
        best: the line with the best mean of a column; ``leads`` what it is ahead of the second by. Without a lead
            that is resolved nobody is best.
        effective_lengths: by model, each seed alone: the mean of seeds is no model and sees as far as none of them.
    """

    task: str
    protocol: str
    retrieval: bool
    metric: Metric
    by: By
    length: int | None
    entries: tuple[Entry, ...]
    columns: tuple[Column, ...]
    cells: Cells
    baseline: str | None
    contrasts: dict[tuple[str, Column], Contrast]
    leads: dict[Column, Contrast]
    best: dict[Column, str]
    effective_lengths: dict[str, EffectiveLength]

    @property
    def of_gaps(self) -> bool:
        """Whether lengths are gaps between needle and question, rather than whole contexts."""
        row = _first_row(self.entries, self.task)
        return row["gap"] == row["length"]

    def is_best(self, name: str, column: Column) -> bool:
        return self.best.get(column) == name and self.leads[column].resolved


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything one call found; ``notes`` are about the runs and models."""

    spec: CompareSpec
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    @property
    def num_tests(self) -> int:
        """Differences from a baseline that p is adjusted over."""
        return sum(len(table.contrasts) for table in self.tables)


def compare(models: Sequence[ModelRows], spec: CompareSpec = CompareSpec()) -> Comparison:
    """Compare models, a table for each task (and length, where columns are parts of one).

    Raises `UserError` for a task, metric or baseline that is not there, and where runs asked different samples.
    """
    notes = list(dict.fromkeys(note for model in models for note in model.run.notes))
    by_task = {task: [m for m in models if task in m.tasks] for task in _tasks(models, spec)}
    lines = {}
    for task, mine in by_task.items():
        lines[task], unpooled = entries(mine, pool=spec.pool)
        notes += unpooled
    _check_common(lines)
    baselines = _baselines(lines, spec.baseline)
    drafts: list[Table] = []
    for task, found in lines.items():
        check_samples([seed for entry in found for seed in entry.seeds], task)
        shown = _draft(task, found, baselines[task], spec)
        drafts += shown
        metric = shown[0].metric if shown else None
        notes += task_notes(task, found, _first_row(found, task), metric, spec.metric, spec.by)
        if spec.baseline and len(found) > 1 and not any(_called(entry, spec.baseline) for entry in found):
            notes.append(f"{task} has no {spec.baseline}: no differences there")
    if not drafts:
        raise UserError(f"there is nothing to show by {spec.by}", MISSING[spec.by])
    return Comparison(spec=spec, tables=tuple(_adjusted(drafts)), notes=tuple(dict.fromkeys(notes)))


# -- what is compared ---------------------------------------------------------------------------------------


def _first_row(found: Sequence[Entry], task: str) -> Row:
    return next(row for row in found[0].seeds[0].rows if row["task"] == task)


def _tasks(models: Sequence[ModelRows], spec: CompareSpec) -> list[str]:
    rows = {task: model.rows for model in models for task in model.tasks}
    if spec.task is not None and spec.task not in rows:
        raise UserError(f"no run has a task {spec.task!r}", did_you_mean(spec.task, rows))
    chosen = [spec.task] if spec.task is not None else list(dict.fromkeys(t for m in models for t in m.tasks))
    if spec.metric is not None and spec.by not in BY_METRICS:
        first = {task: next(row for row in rows[task] if row["task"] == task) for task in chosen}
        having = [task for task in chosen if spec.metric in metrics_of(first[task])]
        if not having:
            _refuse_metric(spec.metric, first)
        return having
    return chosen


def _refuse_metric(name: str, first: dict[str, Row]) -> NoReturn:
    """Say what metrics there are; ``first`` is a row of each task."""
    if len(first) == 1:
        (row,) = first.values()
        metric_for(row, name)
    known = list(dict.fromkeys(metric for row in first.values() for metric in metrics_of(row)))
    what = f"no task here has the metric {name!r}" if name in METRICS else f"unknown metric {name!r}"
    raise UserError(what, did_you_mean(name, known))


def _check_common(lines: dict[str, list[Entry]]) -> None:
    runs = {seed.run.path: seed.run for found in lines.values() for entry in found for seed in entry.seeds}
    names = {entry.name for found in lines.values() for entry in found}
    if len(runs) > 1 and len(names) > 1 and all(len(found) < 2 for found in lines.values()):
        has = "; ".join(f"{found[0].name} has {task}" for task, found in lines.items())
        raise UserError(f"no two models share a task: {has}", "give runs of the same task")


def _baselines(lines: dict[str, list[Entry]], name: str | None) -> dict[str, Entry | None]:
    """The line of each task that the others are held against."""
    if name is None:
        return {task: next((e for e in found if not e.imported), found[0]) for task, found in lines.items()}
    chosen = {task: next((e for e in found if _called(e, name)), None) for task, found in lines.items()}
    if not any(chosen.values()):
        names = {entry.name for found in lines.values() for entry in found}
        raise UserError(f"no model is called {name!r}", did_you_mean(name, names))
    return chosen


def _called(entry: Entry, name: str) -> bool:
    """By the name in the table, without the count of seeds, or by the label of one of its seeds."""
    return name in (entry.name, entry.name.rpartition(" (")[0], *(s.label for s in entry.seeds))


# -- tables -------------------------------------------------------------------------------------------------


def _draft(task: str, found: list[Entry], baseline: Entry | None, spec: CompareSpec) -> list[Table]:
    """Tables of one task, their p not yet adjusted."""
    rows = {entry.name: [[r for r in seed.rows if r["task"] == task] for seed in entry.seeds] for entry in found}
    every = [row for seeds in rows.values() for seed in seeds for row in seed]
    if not has_parts(every, spec.by):
        return []
    metric, cells = _first_metric(found, rows, every[0], spec)
    columns = sorted({column for _, column in cells}, key=lambda c: (c.length, c.part or 0))
    lengths = list(dict.fromkeys(column.length for column in columns))
    if spec.by == "bucket":  # prefixes are nested: the longest that all have holds every position
        lengths = [n for n in lengths if all((entry.name, Column(n, 0)) in cells for entry in found)][-1:]
    groups = [columns] if spec.by == "length" else [[c for c in columns if c.length == n] for n in lengths]
    return [
        _table(task, found, metric, spec.by, group, {k: c for k, c in cells.items() if k[1] in group}, baseline)
        for group in groups
        if group
    ]


def _first_metric(
    found: list[Entry], rows: dict[str, list[list[Row]]], first: Row, spec: CompareSpec
) -> tuple[Metric, Cells]:
    """The metric asked for; else the first of the task's that any row has, as imported rows lack some."""
    models = [seed for entry in found for seed in entry.seeds]
    given = spec.metric is not None or spec.by in BY_METRICS
    names = (spec.metric,) if given else headline_metrics(models, first)
    candidates = []
    for name in names:
        metric = metric_by(first, name, spec.by)
        columns = {entry.name: cells_of(entry, rows[entry.name], metric, spec.by) for entry in found}
        cells = {(line, column): cell for line, mine in columns.items() for column, cell in mine.items()}
        if any(cell.units for cell in cells.values()):
            return metric, cells
        candidates.append((metric, cells))
    return candidates[0]


def _table(
    task: str, found: list[Entry], metric: Metric, by: By, columns: list[Column], cells: Cells, baseline: Entry | None
) -> Table:
    row = _first_row(found, task)
    retrieval = is_retrieval(row)
    contrasts: dict[tuple[str, Column], Contrast] = {}
    leads: dict[Column, Contrast] = {}
    best: dict[Column, str] = {}
    for column in columns:
        for entry in found:
            if baseline and entry is not baseline:
                versus = _contrast(entry, baseline, column, cells, metric, retrieval)
                if versus is not None:
                    contrasts[entry.name, column] = versus
        first, second = _two_best(found, column, cells, metric)
        lead = _contrast(first, second, column, cells, metric, retrieval) if first and second else None
        if first and lead:
            leads[column], best[column] = lead, first.name
    return Table(
        task=task,
        protocol=_protocols(found, task),
        retrieval=retrieval,
        metric=metric,
        by=by,
        length=None if by == "length" else columns[0].length,
        entries=tuple(found),
        columns=tuple(columns),
        cells=cells,
        baseline=baseline.name if baseline and len(found) > 1 else None,
        contrasts=contrasts,
        leads=leads,
        best=best,
        effective_lengths=_effective_lengths(found, task, metric) if by == "length" and retrieval else {},
    )


def _protocols(found: list[Entry], task: str) -> str:
    """One, but where imported rows stand beside ours."""
    rows = (row for entry in found for seed in entry.seeds for row in seed.rows if row["task"] == task)
    return " and ".join(dict.fromkeys(row["protocol"] for row in rows))


def _contrast(a: Entry, b: Entry, column: Column, cells: Cells, metric: Metric, retrieval: bool) -> Contrast | None:
    one, other = cells.get((a.name, column)), cells.get((b.name, column))
    if one is None or other is None or not comparable(a, b):
        return None
    return contrast(one.units, other.units, metric, retrieval=retrieval)


def _two_best(found: list[Entry], column: Column, cells: Cells, metric: Metric) -> tuple[Entry | None, Entry | None]:
    means = {e.name: cells[e.name, column].estimate.mean for e in found if (e.name, column) in cells}
    ranked = [e for e in found if means.get(e.name) is not None]
    ranked.sort(key=lambda e: means[e.name] or 0.0, reverse=metric.higher_is_better)
    return (ranked[0], ranked[1]) if len(ranked) > 1 else (None, None)


def _effective_lengths(found: list[Entry], task: str, metric: Metric) -> dict[str, EffectiveLength]:
    lengths = {}
    for seed in (seed for entry in found if not entry.imported for seed in entry.seeds):
        rows = [row for row in seed.rows if row["task"] == task]
        of = effective_length(cells_of(Entry(name=seed.name, seeds=(seed,)), [rows], metric, "length"), metric)
        if of is not None:
            lengths[seed.name] = of
    return lengths


def _adjusted(tables: list[Table]) -> list[Table]:
    """p over all differences from a baseline, and apart from them over all leads of the best over the second."""
    contrasts = iter(adjust([c for table in tables for c in table.contrasts.values()]))
    leads = iter(adjust([c for table in tables for c in table.leads.values()]))
    return [
        replace(
            table,
            contrasts={key: next(contrasts) for key in table.contrasts},
            leads={key: next(leads) for key in table.leads},
        )
        for table in tables
    ]
