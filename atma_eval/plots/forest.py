"""Paired differences as a chart: what `compare` found, model by model and length by length. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from atma_eval.compare import CompareSpec, Comparison, Table, compare
from atma_eval.compare.unlike import apart
from atma_eval.plots.charts import ForestChart, Gap, range_text
from atma_eval.runs import ModelRows
from atma_eval.words import plural, sentence


def forests(
    models: Sequence[ModelRows], *, task: str | None = None, metric: str | None = None, baseline: str | None = None
) -> list[ForestChart]:
    """A forest plot for each task that two models or more share samples of; `UserError` as `compare` raises it."""
    return forests_of(compare(models, CompareSpec(task=task, metric=metric, baseline=baseline)))


def forests_of(comparison: Comparison) -> list[ForestChart]:
    """The charts of a comparison by length; tables without a difference give none."""
    return [_forest(table, comparison.num_tests) for table in comparison.tables if table.contrasts]


def _forest(table: Table, num_tests: int) -> ForestChart:
    differences: dict[str, list[Gap]] = {}
    for (name, column), found in table.contrasts.items():
        mean, low, high, _, n, _ = found.difference
        differences.setdefault(name, []).append(Gap(column.length, mean, low, high, n, found.resolved))
    metric, ratio = table.metric, table.metric.kind == "exponential"
    seeds = [seed for entry in table.entries for seed in entry.seeds]
    trained = {seed.training_length for seed in seeds}
    notes = tuple(apart(seeds, table.task, metric))
    caption = _caption(table, num_tests)
    if any("unfinished" in note for seed in seeds for note in seed.run.notes):
        caption += " A run is unfinished: this is what it has."
    caption = "".join([caption, *(f" {sentence(note)}" for note in notes)])
    return ForestChart(
        kind="forest",
        task=table.task,
        protocol=table.protocol,
        title=f"{table.task}: {metric.label}, {'ratio' if ratio else 'paired difference'} to {table.baseline}",
        metric=metric,
        caption=caption,
        retrieval=table.retrieval,
        x_label="gap, tokens" if table.of_gaps else "length, tokens",
        trained=tuple(sorted(length for length in trained if length)),
        notes=notes,
        baseline=table.baseline or "",
        null=1.0 if ratio else 0.0,
        differences={name: tuple(sorted(gaps)) for name, gaps in differences.items()},
    )


def _caption(table: Table, num_tests: int) -> str:
    found = [contrast.difference for contrast in table.contrasts.values()]
    score = table.metric.kind == "proportion"
    intervals = f"95 % {'score intervals of paired shares (Newcombe)' if score else 't intervals over documents'}"
    counts, documents = range_text(of.n for of in found), range_text(of.num_clusters for of in found)
    over = "over" if table.metric.kind == "exponential" else "less"
    caption = (
        f"Each model {over} {table.baseline} on the samples both have: n = {plural(counts, 'pair')} of "
        f"{plural(documents, 'document')}. Bars: {intervals}. Filled: different at 5 %, adjusted over "
        f"{plural(num_tests, 'difference')} (Benjamini-Hochberg); hollow: not resolved, which is not the same as equal."
    )
    if any(of.mean is not None and of.low is None for of in found):
        caption += " A point without a bar is of one pair, or of pairs that all differ alike: no interval."
    return caption
