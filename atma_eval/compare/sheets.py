"""Tables of a comparison as text: what each format writes in its own way. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atma_eval.compare.cells import Cell
from atma_eval.compare.columns import Column
from atma_eval.compare.contrast import FEWEST_DOCUMENTS, Contrast
from atma_eval.compare.pairing import Entry, comparable
from atma_eval.compare.tables import SHARE, Comparison, Table
from atma_eval.metrics import Metric
from atma_eval.report import number
from atma_eval.stats import EffectiveLength, Estimate

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


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table: sections of lines under column heads, and what must be said below."""

    title: str
    stub: str
    heads: tuple[str, ...]
    sections: tuple[tuple[Line, ...], ...]
    footnotes: tuple[str, ...] = ()


def signed(value: float) -> str:
    return ("−" if value < 0 else "+" if value > 0 else "") + number(abs(value))


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
        footnotes=tuple(_footnotes(table, comparison)),
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
        return Text(main=_outcomes(cell), failed=True)
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
    return Text(main=number(of.mean), under=f"{number(of.low)}–{number(of.high)}")


def _outcomes(cell: Cell) -> str:
    return ", ".join(f"{count} {status}" for status, count in cell.statuses.items()) or NOTHING


def _spread_text(cell: Cell | None) -> Text:
    means = list(cell.seed_means.values()) if cell else []
    return Text(main=f"{number(min(means))}–{number(max(means))}" if means else NOTHING)


def _count_lines(table: Table) -> tuple[Line, ...]:
    cells = [[c for (_, at), c in table.cells.items() if at == column and c.units] for column in table.columns]
    documents = Line(
        label="n (documents)",
        cells=tuple(_range({len({u.document for u in cell.units.values()}) for cell in column}) for column in cells),
        faint=True,
    )
    if not table.retrieval:
        return (documents,)
    trials = tuple(_range({cell.num_samples for cell in column}) for column in cells)
    return (Line(label="n (trials)", cells=trials, faint=True), documents)


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
        known = [c.smallest for (_, at), c in table.contrasts.items() if at == column and c.smallest is not None]
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
        return Text(main=main, under=f"{number(low)}–{number(high)}")
    if metric.kind != "proportion":
        return Text(main=main, under=f"±{number(max(high - mean, mean - low))}")
    return Text(main=main, under=f"{low:.2f}, {high:.2f}".replace("-0.00", "0.00").replace("-", "−"))


# -- what must be said --------------------------------------------------------------------------------------

_INTERVALS = {
    "proportion": "Wilson over trials",
    "share": "t over documents, Wilson over trials where all or none are right",
    "mean": "t over documents",
    "ratio": "t over documents",
    "exponential": "t over documents",
}


def _footnotes(table: Table, comparison: Comparison) -> Iterator[str]:
    pooled = any(len(entry.seeds) > 1 for entry in table.entries)
    line = f"95 % intervals: {_INTERVALS[table.metric.kind]}"
    if pooled and table.metric.kind == "proportion":
        line += "; of several seeds, t over documents"
    if any(entry.imported for entry in table.entries):
        line += "; imported shares: Wilson over the trials behind them; imported losses have none"
    better = "higher" if table.metric.higher_is_better else "lower"
    yield f"{line}; {better} is better."
    if pooled:
        yield "They speak of these checkpoints on other samples; min–max of seeds is what another training run moves."
    yield from _best_note(table)
    if table.contrasts:
        yield from _difference_notes(table, comparison)
    yield from _left_out(table)


def _best_note(table: Table) -> Iterator[str]:
    if any(table.is_best(name, column) for column, name in table.best.items()):
        yield "† best: ahead of the second on the same samples, adjusted p < 0.05."
    elif table.best:
        yield "No best is marked: none is ahead of the second by more than chance (paired, adjusted p < 0.05)."


def _difference_notes(table: Table, comparison: Comparison) -> Iterator[str]:
    given = "" if comparison.spec.baseline else ", the first model measured"
    by_trial = {contrast.binary for contrast in table.contrasts.values()}
    ways = []
    if True in by_trial:
        ways.append(
            "exact McNemar over trials, Newcombe's paired interval, wider where trials of a document go together"
        )
    if False in by_trial:
        of_seeds = "of several seeds, " if True in by_trial else ""
        ways.append(f"{of_seeds}paired means, t interval and sign-flip test over documents")
    how = "; ".join(ways)
    yield f"Baseline: {table.baseline}{given}. Pairs are the same samples; {how}."
    yield (
        f"* adjusted p < 0.05 (Benjamini-Hochberg over {comparison.num_tests} differences) and no interval that holds "
        f"{1 if table.metric.kind == 'exponential' else 0}."
    )
    yield "Detectable: a difference these samples show with 80 % power at p < 0.05, for the model hardest to tell."
    few = min(c.difference.num_clusters for c in table.contrasts.values())
    if 1 < few < FEWEST_DOCUMENTS and any(not c.binary for c in table.contrasts.values()):
        yield f"With {few} documents no sign-flip test can reach p < 0.05; {FEWEST_DOCUMENTS} could."


def _left_out(table: Table) -> Iterator[str]:
    whole = table.by in ("length", "depth")  # else one row is in several columns
    failures = [
        f"{name} at {column.label(table.by) if whole else f'{column.length:,}'}: {_outcomes(cell)}"
        for (name, column), cell in table.cells.items()
        if cell.statuses
    ]
    if failures:
        yield "Not scored, and left out of the means: " + "; ".join(dict.fromkeys(failures)) + "."
    for entry in table.entries:
        counts = [c.num_left_out for (name, _), c in table.contrasts.items() if name == entry.name]
        alone = sum(counts) if whole else max(counts, default=0)
        if alone:
            yield f"{entry.name} and {table.baseline}: {alone} samples of only one side are left out of the pairs."
    yield from _unpaired(table)


def _unpaired(table: Table) -> Iterator[str]:
    baseline = next((entry for entry in table.entries if entry.name == table.baseline), None)
    reasons: dict[str, list[str]] = {}
    for entry in table.entries if baseline else ():
        if baseline is None or entry is baseline or any(name == entry.name for name, _ in table.contrasts):
            continue
        if comparable(entry, baseline):
            why = "no scored sample in common"
        else:
            why = "imported figures have no samples" if entry.imported or baseline.imported else "another tokenizer"
        reasons.setdefault(why, []).append(entry.name)
    for why, names in reasons.items():
        yield f"Not paired with {table.baseline}: {', '.join(names)} ({why})."


# -- effective length ---------------------------------------------------------------------------------------


def effective_sheet(table: Table) -> Sheet:
    """How far each model keeps its score."""
    shortest = table.columns[0].length
    lines = tuple(
        Line(label=name, cells=(Text(main=_effective(of)), Text(main=_effective_interval(of, shortest)), _score(of)))
        for name, of in table.effective_lengths.items()
    )
    return Sheet(
        title=f"{table.task} · effective length, by {table.metric.label}",
        stub="model",
        heads=("tokens", "95 % interval", "score at the shortest"),
        sections=(lines,),
        footnotes=(
            f"The longest length that holds, as all before it, a lower bound of at least {SHARE:.0%} of the score at "
            "the shortest. ≥: the longest measured still holds. None: no length is shown to; it takes 22 trials, all "
            "right. Interval: documents drawn anew.",
        ),
    )


def _effective(of: EffectiveLength) -> str:
    if of.length is None:
        return "none"
    return f"{'≥ ' if of.censored else ''}{of.length:,}"


def _effective_interval(of: EffectiveLength, shortest: int) -> str:
    if of.reference is None:
        return NOTHING
    low, high = (f"{bound:,}" if bound is not None else f"< {shortest:,}" for bound in (of.low, of.high))
    return low if low == high else f"{low} to {high}"


def _score(of: EffectiveLength) -> Text:
    return Text(main=NOTHING if of.reference is None else number(of.reference))
