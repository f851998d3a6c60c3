"""Tables of a comparison as text: what each format writes in its own way. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from atma_eval.compare.cells import Cell
from atma_eval.compare.columns import Column
from atma_eval.compare.contrast import Contrast
from atma_eval.compare.footnotes import footnotes
from atma_eval.compare.pairing import Entry
from atma_eval.compare.tables import Comparison, Table
from atma_eval.metrics import Metric
from atma_eval.stats import Estimate
from atma_eval.words import number, signed, span

NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A figure and, under it, its interval."""

    main: str
    under: str = ""
    best: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a sheet; ``heading`` lines have no cells."""

    label: str
    cells: tuple[Text, ...] = ()
    heading: bool = False
    faint: bool = False


Section = tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table: sections of lines under column heads, and what must be said below."""

    title: str
    stub: str
    heads: tuple[str, ...]
    sections: tuple[Section, ...]
    footnotes: tuple[str, ...] = ()


def _title(table: Table) -> str:
    parts = [table.task, table.metric.label, table.protocol]
    if table.by != "length":
        parts.insert(2, f"{'gap' if table.of_gaps else 'length'} {table.length:,}, by {table.by}")
    return " · ".join(parts)


def _stub(table: Table) -> str:
    if table.by == "length":
        return f"{'gap' if table.of_gaps else 'length'}, tokens"
    return {"depth": "depth", "position": "token of the value", "bucket": "positions"}[table.by]


# -- estimates and differences ----------------------------------------------------------------------------


def main_sheet(table: Table, comparison: Comparison) -> Sheet:
    """Estimates, counts, and differences from the baseline."""
    sections = [_estimate_lines(table), _count_lines(table)]
    if table.contrasts:
        sections.append(_difference_lines(table))
    return Sheet(
        title=_title(table),
        stub=_stub(table),
        heads=tuple(column.label(table.by) for column in table.columns),
        sections=tuple(sections),
        footnotes=tuple(footnotes(table, comparison)),
    )


def _estimate_lines(table: Table) -> tuple[Line, ...]:
    lines = []
    for entry in table.entries:
        cells = tuple(_estimate_text(table, entry, column) for column in table.columns)
        lines.append(Line(label=entry.name, cells=cells))
        if len(entry.seeds) > 1:
            spread = tuple(_spread_text(table.cells.get((entry.name, column))) for column in table.columns)
            lines.append(Line(label="seeds, min–max", cells=spread, faint=True))
    return tuple(lines)


def _estimate_text(table: Table, entry: Entry, column: Column) -> Text:
    cell = table.cells.get((entry.name, column))
    if cell is None:
        return Text(main=NOTHING)
    if not cell.units:
        return Text(main=cell.outcomes or NOTHING, failed=True)
    text = interval_text(cell.estimate)
    own = {other.num_samples for (_, at), other in table.cells.items() if at == column and other.units}
    n = f" n={cell.num_samples}" if len(own) > 1 else ""
    return Text(main=text.main, under=text.under + n, best=table.is_best(entry.name, column))


def interval_text(of: Estimate) -> Text:
    """A mean over its interval."""
    if of.mean is None:
        return Text(main="overflow")
    if of.low is None or of.high is None:
        return Text(main=number(of.mean), under="no interval")
    return Text(main=number(of.mean), under=span(of.low, of.high))


def _spread_text(cell: Cell | None) -> Text:
    means = list(cell.seed_means.values()) if cell else []
    return Text(main=span(min(means), max(means)) if means else NOTHING)


def _count_lines(table: Table) -> tuple[Line, ...]:
    cells = [[c for (_, at), c in table.cells.items() if at == column and c.units] for column in table.columns]
    samples = tuple(_range({cell.num_samples for cell in column}) for column in cells)
    if not table.retrieval:
        return (Line(label="n (documents)", cells=samples, faint=True),)
    documents = tuple(_range({c.num_documents for c in column if c.num_documents is not None}) for column in cells)
    return (
        Line(label="n (trials)", cells=samples, faint=True),
        Line(label="n (documents)", cells=documents, faint=True),
    )


def _range(counts: set[int]) -> Text:
    if not counts:
        return Text(main=NOTHING)
    low, high = min(counts), max(counts)
    return Text(main=f"{low:,}" if low == high else f"{low:,}–{high:,}")


def _difference_lines(table: Table) -> tuple[Line, ...]:
    ratio = table.metric.kind == "exponential"
    lines = [Line(label=f"{'ratio to' if ratio else 'difference from'} {table.baseline}", heading=True)]
    for entry in table.entries:
        contrasts = [table.contrasts.get((entry.name, column)) for column in table.columns]
        if any(contrasts):
            lines.append(Line(label=entry.name, cells=tuple(_contrast_text(c, table.metric) for c in contrasts)))
    smallest = []
    for column in table.columns:
        here = [c for (_, at), c in table.contrasts.items() if at == column and c.smallest is not None]
        # of what was told apart nothing was missed, and a model that fails outright would hide the rest
        missed = [c for c in here if not c.resolved]
        known = [c.smallest for c in missed or here if c.smallest is not None]
        smallest.append(Text(main=("×" if ratio else "") + number(max(known)) if known else NOTHING))
    lines.append(Line(label="detectable, 80 %", cells=tuple(smallest), faint=True))
    return tuple(lines)


def _contrast_text(contrast: Contrast | None, metric: Metric) -> Text:
    if contrast is None:
        return Text(main=NOTHING)
    mean, low, high, *_ = contrast.difference
    if mean is None:
        return Text(main="overflow")
    main = (number(mean) if contrast.null else signed(mean)) + ("*" if contrast.resolved else "")
    if low is None or high is None:
        return Text(main=main, under="no interval")
    if contrast.null:
        return Text(main=main, under=span(low, high))
    if metric.kind != "proportion":
        return Text(main=main, under=f"±{number(max(high - mean, mean - low))}")
    return Text(main=main, under=f"{low:.2f}, {high:.2f}".replace("-0.00", "0.00").replace("-", "−"))
