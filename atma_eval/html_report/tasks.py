"""What the page says of each task: tables, pictures with what they support, controls, failures."""

from __future__ import annotations

from collections.abc import Sequence

from atma_eval.compare import Comparison, Table
from atma_eval.compare.effective import effective_sheet
from atma_eval.compare.sheets import Line as SheetLine
from atma_eval.compare.sheets import Sheet, Text, main_sheet
from atma_eval.html_report.claims import claims_of
from atma_eval.html_report.parts import Content, Html, el, folded, join, picture, table
from atma_eval.html_report.summary import tables_of
from atma_eval.metrics import METRICS, metrics_of
from atma_eval.plots.charts import Chart, Line, Point, failures_text, length_text
from atma_eval.plots.estimates import by_length, chance_of, models_with, rows_of
from atma_eval.plots.files import render
from atma_eval.runs import ModelRows
from atma_eval.words import number, span

MOST_UNFOLDED = 4  # models whose metrics are all shown at once
CONTROL_LINES = ("exact", "first_token", "nll")


def _estimate(point: Point | None) -> Html:
    """A cell: the mean over its interval, or why there is none."""
    if point is None:
        return el("td", "–")
    mean, low, high, _ = point.estimate
    if mean is None:
        return el("td", failures_text(point.failed) or "–", class_="bad")
    interval = "no interval" if low is None or high is None else span(low, high)
    lost = el("small", f"and {failures_text(point.failed)}", class_="bad") if point.failed else None
    return el("td", number(mean), el("small", interval), lost)


def task_section(
    anchor: str, task: str, models: Sequence[ModelRows], comparisons: Sequence[Comparison], charts: Sequence[Chart]
) -> Html:
    tables = tables_of(task, comparisons)
    return el(
        "section",
        el("h2", task, id_=anchor),
        [_sheet(main_sheet(found, comparison)) for found, comparison in tables],
        [_figure(chart) for chart in charts],
        _effective([found for found, _ in tables]),
        _every_metric(models, task),
        _failures(models, task),
    )


def _figure(chart: Chart) -> Html:
    supports, does_not = claims_of(chart)
    return el(
        "figure",
        picture(render([chart], ".svg"), f"{chart.title}. {chart.caption}"),
        el(
            "figcaption",
            el("p", el("strong", "It supports: "), supports),
            el("p", el("strong", "It does not show: "), does_not),
        ),
    )


def _sheet(sheet: Sheet) -> Html:
    """A table of ``compare`` as HTML."""
    rows: list[list[Content]] = []
    for section in sheet.sections:
        rows += [_line(line, len(sheet.heads)) for line in section]
    return join(
        el("h3", sheet.title),
        table((sheet.stub, *sheet.heads), rows, [el("div", note) for note in sheet.footnotes]),
    )


def _line(line: SheetLine, num_columns: int) -> list[Content]:
    cells: list[Content] = [_text(text) for text in line.cells]
    if line.heading:
        return [el("em", line.label), *[el("td")] * num_columns]
    return [el("span", line.label, class_="soft") if line.faint else line.label, *cells]


def _text(text: Text) -> Html:
    looks = "bad" if text.failed else "resolved" if text.best or text.main.endswith("*") else ""
    under = el("small", text.under) if text.under else None
    return el("td", text.main + ("†" if text.best else ""), under, class_=looks)


def _effective(tables: Sequence[Table]) -> Html | None:
    held = [_sheet(effective_sheet(found)) for found in tables if found.effective_lengths]
    return join(held) if held else None


def _every_metric(models: Sequence[ModelRows], task: str) -> Html | None:
    """Every metric with its controls and chance, a table for each model; folded where there are many."""
    parts = []
    for model in models_with(models, task):
        row = rows_of(model, task)[0]
        lines: list[tuple[str, Line, str]] = []
        for name in metrics_of(row):
            lines.append((METRICS[name].label, by_length(model, task, METRICS[name]), ""))
            if name in CONTROL_LINES:
                lines += [
                    (f"{METRICS[name].label}: {control}", by_length(model, task, METRICS[name], control), control)
                    for control in ("absent", "format")
                    if rows_of(model, task, control)
                ]
        lengths = sorted({point.at for _, line, _ in lines for point in line.points})
        rows: list[list[Content]] = []
        for label, line, control in lines:
            at = {point.at: point for point in line.points}
            shown = el("span", label, class_="soft") if control else label
            rows.append([shown, *(_estimate(at.get(length)) for length in lengths)])
        chances = [
            f"{METRICS[name].label} {chance:.3g}"
            for name in metrics_of(row)
            if (chance := chance_of(row, name)) is not None
        ]
        caption = f"Guessing digits would score: {', '.join(chances)}." if chances else None
        head = ("gap" if row["gap"] == row["length"] else "length", *map(length_text, lengths))
        parts.append(join(el("h3", model.name), table(head, rows, caption)))
    if not parts:
        return None
    name = "All metrics and controls, by model"
    if len(parts) > MOST_UNFOLDED:
        return folded(name, *parts)
    return el("details", el("summary", name), *parts, open="")


def _failures(models: Sequence[ModelRows], task: str) -> Html | None:
    """What could not be scored, with the first error of its kind."""
    kinds: dict[tuple[str, int, str, str], list[str]] = {}
    for model in models:
        for row in model.rows:
            if row["task"] == task and row["status"] != "ok":
                kind = (model.name, row["length"], row["control"], row["status"])
                kinds.setdefault(kind, []).append(str(row["error"] or ""))
    if not kinds:
        return None
    rows: list[list[Content]] = [
        [name, length_text(length), control, status, f"{len(errors):,}", el("td", errors[0], class_="text")]
        for (name, length, control, status), errors in sorted(kinds.items())
    ]
    head = ("not scored", "length", "control", "status", "rows", "first error")
    return join(el("h3", "Failures"), table(head, rows, "Left out of every mean; never counted as wrong."))


def how_to_read() -> Html:
    points = (
        "n is the number of trials (retrieval) or documents (loss). Trials of one document are not independent, so "
        "losses and token accuracies have intervals over documents; those of exact and first token are over trials.",
        "Exact: every token of the value is the most probable one. Scored under teacher forcing, that is the same "
        "event as greedy generation of the value. Token accuracy is not: after a first right token the rest is easier.",
        "Absent: the same question without the needle. Format: another value of the same form, scored where the true "
        "one stands in the context. Uplift: loss of that other value less loss of the true. Chance: guessing digits.",
        "Two intervals that overlap do not say that two models are equal, nor two that do not that they differ by "
        "much: the paired differences answer that, on the same samples.",
        "One checkpoint is one training run. What another seed of the same recipe would score is not in its interval.",
        "Lengths are exact, in the model's own tokens. Rows that failed are counted and left out, not scored as wrong.",
    )
    return el("section", el("h2", "How to read this", id_="reading"), el("ul", [el("li", point) for point in points]))
