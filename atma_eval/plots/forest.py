"""Paired differences as a chart: what `compare` found, model by model and length by length. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from atma_eval.compare import CompareSpec, Comparison, Table, compare
from atma_eval.plots.charts import ForestChart, Gap, range_text
from atma_eval.runs import ModelRows


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
    documents = {found.difference.num_clusters for found in table.contrasts.values()}
    metric, ratio = table.metric, table.metric.kind == "exponential"
    pooled = any(len(entry.seeds) > 1 for entry in table.entries)
    interval = (
        "95 % score intervals of paired shares (Newcombe)"
        if metric.kind == "proportion" and not pooled
        else "95 % t intervals over documents"
    )
    counts = [gap.n for gaps in differences.values() for gap in gaps]
    seeds = [seed for entry in table.entries for seed in entry.seeds]
    trained = {seed.training_length for seed in seeds}
    caption = (
        f"Each model {'over' if ratio else 'less'} {table.baseline} on the samples both have: n = {range_text(counts)} "
        f"pairs of {range_text(documents)} documents. Bars: {interval}. Filled: different at 5 %, adjusted over "
        f"{num_tests} differences (Benjamini-Hochberg); hollow: not resolved, which is not the same as equal."
    )
    if any("unfinished" in note for seed in seeds for note in seed.run.notes):
        caption += " A run is unfinished: this is what it has."
    return ForestChart(
        kind="forest",
        task=table.task,
        protocol=table.protocol,
        title=f"{table.task}: {metric.label}, {'ratio' if ratio else 'paired difference'} to {table.baseline}",
        metric=metric,
        caption=caption,
        retrieval=table.retrieval,
        x_label="gap, tokens" if table.protocol.startswith("induction") else "length, tokens",
        trained=tuple(sorted(length for length in trained if length)),
        baseline=table.baseline or "",
        null=1.0 if ratio else 0.0,
        differences={name: tuple(sorted(gaps)) for name, gaps in differences.items()},
    )
