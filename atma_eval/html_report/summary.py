"""The head of the page: what each task measured and found, and a line for each model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from atma_eval.compare import Comparison, Table
from atma_eval.compare.columns import Column
from atma_eval.compare.effective import effective_text
from atma_eval.html_report.parts import Content, Html, el, table
from atma_eval.metrics import is_retrieval
from atma_eval.plots.charts import Point, length_text, range_text
from atma_eval.plots.estimates import by_length, models_with, rows_of
from atma_eval.runs import ModelRows
from atma_eval.stats import EffectiveLength
from atma_eval.words import number, plural, span

MOST_NAMED = 3  # models in a sentence; of more it says how many
HEAD = (
    "model",
    el("th", "task: metric", scope="col", class_="text"),
    "at its shortest",
    "at its longest",
    "effective length",
    "rows not scored",
)
CAPTION = (
    "Mean with its 95 % interval. Effective length: the longest whose lower bound stays above 85 % of the score at "
    "the shortest, as at all lengths before it."
)


def tables_of(task: str, comparisons: Sequence[Comparison]) -> list[tuple[Table, Comparison]]:
    return [(found, comparison) for comparison in comparisons for found in comparison.tables if found.task == task]


def summary_section(
    models: Sequence[ModelRows], tasks: Sequence[str], comparisons: dict[str, list[Comparison]]
) -> Html:
    """A line for each model and task: the headline at the shortest and the longest length, and how far it holds."""
    rows: list[list[Content]] = []
    for task in tasks:
        tables = [found for found, _ in tables_of(task, comparisons[task])]
        held = {name: of for found in tables for name, of in found.effective_lengths.items()}
        rows += [_line(model, tables[0], held.get(model.name)) for model in models_with(models, task) if tables]
    return el("section", [_lead(task, models, comparisons[task]) for task in tasks], table(HEAD, rows, CAPTION))


def _line(model: ModelRows, found: Table, held: EffectiveLength | None) -> list[Content]:
    points = by_length(model, found.task, found.metric).points
    scored = [point for point in points if point.estimate.mean is not None]
    first, last = (scored[0], scored[-1]) if scored else (None, None)
    lost = sum(count for point in points for count in point.failed.values())
    return [
        model.name,
        el("td", f"{found.task}: {found.metric.label}", class_="text"),
        _at(first),
        _at(last),
        "–" if held is None else effective_text(held, length_text),
        el("td", f"{lost:,}", class_="bad" if lost else ""),
    ]


def _at(point: Point | None) -> Html:
    if point is None:
        return el("td", "nothing scored", class_="bad")
    mean, low, high, n = point.estimate
    interval = "no interval" if low is None or high is None else span(low, high)
    where = f"n = {n}, at {length_text(point.at)}"
    return el("td", "–" if mean is None else number(mean), el("small", interval), el("small", where))


# -- sentences --------------------------------------------------------------------------------------------


def _lead(task: str, models: Sequence[ModelRows], comparisons: Sequence[Comparison]) -> Html:
    """What was measured, and what the paired comparisons say, in two sentences or three."""
    rows = [row for model in models for row in rows_of(model, task)]
    lengths = sorted({row["length"] for row in rows})
    if not lengths:
        return el("p", el("strong", task), ": only controls were scored so far.")
    tables = [found for found, _ in tables_of(task, comparisons)]
    metric = tables[0].metric if tables else None
    num = {point.estimate.n for m in models for point in by_length(m, task, metric).points} if metric else ()
    what = "trial" if is_retrieval(rows[0]) else "document"
    between = " to ".join(dict.fromkeys(map(length_text, (lengths[0], lengths[-1]))))
    words = [f": {between} tokens, {plural(range_text(num), what)} for each model and length."]
    for found in tables:
        if found.contrasts:
            words += _findings(found, alone=len(tables) == 1)
    return el("p", el("strong", task), *words)


def _findings(found: Table, *, alone: bool) -> Iterator[str]:
    """What a table's differences say; where not all models pair, of which it speaks."""
    if not alone:
        yield f" Among {_named([entry.name for entry in found.entries])}:"
    num_resolved = sum(contrast.resolved for contrast in found.contrasts.values())
    yield f" {plural(len(found.contrasts), 'paired difference')} from {found.baseline}, {num_resolved} resolved."
    last = found.columns[-1]
    if last not in found.best:
        return
    best, at = _best(found, last), length_text(last.length)
    if len(best) > 1:
        yield f" The best mean at {at}, {_mean_text(found, best[0], last)}, is shared by {_named(best)}."
    else:
        ahead = "" if found.is_best(best[0], last) else "but not "
        yield f" The best mean at {at} is that of {best[0]}, {ahead}ahead of the second by more than chance."


def _best(found: Table, column: Column) -> list[str]:
    """All whose mean is the best one, but for rounding."""
    means = {
        entry.name: found.cells[entry.name, column].estimate.mean
        for entry in found.entries
        if (entry.name, column) in found.cells
    }
    top = means[found.best[column]]
    return [name for name, mean in means.items() if mean is not None and top is not None and math.isclose(mean, top)]


def _mean_text(found: Table, name: str, column: Column) -> str:
    mean = found.cells[name, column].estimate.mean
    return "–" if mean is None else number(mean)


def _named(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        return plural(len(names), "model")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
