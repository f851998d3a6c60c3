"""One page that says what runs show, with how much certainty, and how they were made.

Self-contained: styles and pictures are in the file, nothing is loaded and nothing runs. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atma_eval import __version__
from atma_eval.compare import CompareSpec, Comparison, compare
from atma_eval.compare.unlike import groups_that_pair
from atma_eval.errors import UserError, did_you_mean
from atma_eval.html_report.manifest import manifest_section
from atma_eval.html_report.parts import Html, el, page
from atma_eval.html_report.summary import summary_section
from atma_eval.html_report.tasks import how_to_read, task_section
from atma_eval.plots.builders import build_charts
from atma_eval.plots.charts import Chart
from atma_eval.plots.estimates import models_with
from atma_eval.plots.forest import forests_of
from atma_eval.runs import ModelRows
from atma_eval.words import plural

MOST_IN_TITLE = 3  # tasks that are named there


def html_report(models: Sequence[ModelRows], *, baseline: str | None = None) -> str:
    """The whole page. Raises `UserError` for a baseline that is not there.

    Runs that asked different things stand side by side; the page says why they are not paired.
    """
    _check_baseline(models, baseline)
    tasks = list(dict.fromkeys(task for model in models for task in model.tasks))
    comparisons = _compare(models, tasks, baseline)
    sections: list[Html] = []
    notes = [note for model in models for note in model.run.notes]
    for number, task in enumerate(tasks, start=1):
        mine = [model for model in models if task in model.tasks]
        charts = _charts(mine, task, comparisons[task])
        sections.append(task_section(f"task-{number}", task, mine, comparisons[task], charts))
        notes += [note for comparison in comparisons[task] for note in comparison.notes]
        notes += [note for chart in charts for note in chart.notes]
    links = [el("a", task, href=f"#task-{number}") for number, task in enumerate(tasks, start=1)]
    num_models = len({model.name for model in models})
    named = ", ".join(tasks) if len(tasks) <= MOST_IN_TITLE else f"{len(tasks)} tasks"
    title = f"{plural(num_models, 'model')}, {named}"
    return page(
        f"atma-eval: {title}",
        (Path(__file__).parent / "style.css").read_text(encoding="utf-8"),
        el("h1", "Long context: ", title),
        el("nav", links, el("a", "how to read this", href="#reading"), el("a", "how it was made", href="#manifest")),
        summary_section(models, tasks, comparisons),
        _notes(notes),
        *sections,
        how_to_read(),
        manifest_section(models),
        el("p", f"Made by atma-eval {__version__} from the records alone.", class_="soft"),
    )


def _check_baseline(models: Sequence[ModelRows], baseline: str | None) -> None:
    if baseline is not None:
        try:
            compare(models, CompareSpec(baseline=baseline))
        except UserError:
            known = {model.name for model in models} | {model.label for model in models}
            if baseline not in known:
                raise UserError(f"no model is called {baseline!r}", did_you_mean(baseline, known)) from None


def _compare(models: Sequence[ModelRows], tasks: Sequence[str], baseline: str | None) -> dict[str, list[Comparison]]:
    """The comparison of each task, all of one call where that can be; else one for each group of models that pair.

    A task of which only controls were scored has none.
    """
    try:
        whole = compare(models, CompareSpec(baseline=baseline))
        return {task: [whole] for task in tasks}
    except UserError:
        pass  # one task that does not pair must not take the others' differences away
    found: dict[str, list[Comparison]] = {}
    for task in tasks:
        groups, _ = groups_that_pair(models_with(models, task), task)
        found[task] = []
        for group in groups:
            names = {name for model in group for name in (model.name, model.label)}
            spec = CompareSpec(task=task, baseline=baseline if baseline in names else None)
            found[task].append(compare(group, spec))
    return found


def _charts(models: Sequence[ModelRows], task: str, comparisons: Sequence[Comparison]) -> list[Chart]:
    if not models_with(models, task):
        return []
    charts = build_charts(models, task=task)
    if len(models) > 1 and not any(chart.kind == "heatmap" for chart in charts):
        charts = build_charts(models, task=task, kinds=("heatmap",)) + charts
    forests = [chart for comparison in comparisons for chart in forests_of(comparison) if chart.task == task]
    return [*charts, *forests]


def _notes(notes: Sequence[str]) -> Html | None:
    if not notes:
        return None
    return el(
        "div", el("p", "To be kept in mind:"), el("ul", [el("li", n) for n in dict.fromkeys(notes)]), class_="notes"
    )
