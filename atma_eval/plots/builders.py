"""Which charts are made of runs: those asked for, or those that suit their tasks. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from atma_eval.compare.unlike import headline_metrics
from atma_eval.errors import UserError, did_you_mean
from atma_eval.metrics import METRICS, is_retrieval, metrics_of, units
from atma_eval.plots.charts import KINDS, Chart
from atma_eval.plots.estimates import heatmap_chart, length_chart, models_with, position_chart, rows_of
from atma_eval.plots.forest import forests
from atma_eval.runs import ModelRows

SCORES = ("exact", "first_token", "token_accuracy")  # what `accuracy` draws; `nll` draws the other metrics


def choose_tasks(models: Sequence[ModelRows], task: str | None) -> list[str]:
    """All tasks of the models, or the one asked for."""
    names = list(dict.fromkeys(name for model in models for name in model.tasks))
    if task is None:
        return names
    if task not in names:
        raise UserError(f"no run given has the task {task!r}", did_you_mean(task, names))
    return [task]


def build_charts(
    models: Sequence[ModelRows],
    *,
    kinds: Sequence[str] = (),
    task: str | None = None,
    metric: str | None = None,
    baseline: str | None = None,
) -> list[Chart]:
    """The charts asked for, or those that suit the tasks: by length, with depth if there are depths, by position.

    Raises `UserError` for a kind, task, metric or baseline that is not there, or a kind that has nothing to show.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"unknown kind of picture {kind!r}", did_you_mean(kind, KINDS))
    if metric is not None:
        for kind in kinds or ("heatmap",):
            _check_fit(kind, metric)
    if baseline is not None and not kinds:
        kinds = ("forest",)
    if baseline is not None and "forest" not in kinds:
        raise UserError("--baseline is for the kind forest", "add --kind forest, or leave --baseline out")
    tasks = choose_tasks(models, task)
    paired = forests(models, task=task, metric=metric, baseline=baseline) if "forest" in kinds else []
    charts: list[Chart] = []
    for name in tasks:
        having = models_with(models, name)
        if having and (metric is None or metric in metrics_of(rows_of(having[0], name)[0])):
            for kind in dict.fromkeys(kinds or _suitable(having, name, metric)):
                charts += [chart for chart in paired if chart.task == name] if kind == "forest" else []
                charts += _build(kind, having, name, metric)
    if not charts:
        rows = [row for model in models for row in model.rows if row["task"] in tasks]
        has = ", ".join(dict.fromkeys(name for row in rows for name in metrics_of(row)))
        raise UserError(
            f"nothing to draw: no {' or '.join(kinds) or 'picture'}{f' of {metric}' if metric else ''} can be made of "
            f"{', '.join(tasks)}",
            f"metrics there: {has}; accuracy needs a retrieval task, position the curves of a perplexity run, and "
            "forest two models with the same samples",
        )
    return charts


def _check_fit(kind: str, metric: str) -> None:
    allowed = {
        "accuracy": SCORES,
        "nll": tuple(name for name in METRICS if name not in SCORES),
        "position": ("nll",),
    }.get(kind, tuple(METRICS))
    if metric not in METRICS:
        raise UserError(f"unknown metric {metric!r}", did_you_mean(metric, METRICS))
    if metric not in allowed:
        raise UserError(f"the kind {kind} does not draw {metric}", f"it draws {', '.join(allowed)}")


def _suitable(models: list[ModelRows], task: str, metric: str | None) -> tuple[str, ...]:
    rows = [row for model in models for row in rows_of(model, task)]
    if metric is not None:
        return ("accuracy",) if metric in SCORES else ("nll",)
    if not is_retrieval(rows[0]):
        return ("nll", "position")
    deep = len({row["depth"] for row in rows}) > 1
    return ("heatmap", "accuracy", "nll") if deep else ("accuracy", "nll")


def _build(kind: str, models: list[ModelRows], task: str, metric: str | None) -> list[Chart]:
    """The chart of a kind, where the task has its metric; none of the kind forest."""
    names = headline_metrics(models, rows_of(models[0], task)[0])
    if kind == "position":
        chart = position_chart(models, task)
        return [chart] if chart else []
    losses = tuple(name for name in names if name in ("nll", "bits_per_byte"))
    candidates = {"accuracy": SCORES, "nll": losses}.get(kind, names)
    chosen = metric or next((name for name in candidates if _has_values(models, task, name)), candidates[0])
    if chosen not in names or kind == "forest":
        return []
    if kind == "heatmap":
        return [heatmap_chart(models, task, METRICS[chosen])]
    return [length_chart(kind, models, task, METRICS[chosen])]


def _has_values(models: Sequence[ModelRows], task: str, metric: str) -> bool:
    """Whether any row has the metric; an imported figure may be a token accuracy and nothing else."""
    return any(units([r for r in model.rows if r["task"] == task], METRICS[metric]) for model in models)
