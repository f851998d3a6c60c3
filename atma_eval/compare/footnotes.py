"""What must be said below a table: its intervals, its tests, and what it leaves out. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from atma_eval.compare.contrast import FEWEST_DOCUMENTS
from atma_eval.compare.pairing import comparable
from atma_eval.compare.tables import Comparison, Table
from atma_eval.words import plural

_INTERVALS = {
    "proportion": "Wilson over trials",
    "share": "t over documents, Wilson over trials where all or none are right",
    "mean": "t over documents",
    "ratio": "t over documents",
    "exponential": "t over documents",
}


def footnotes(table: Table, comparison: Comparison) -> Iterator[str]:
    pooled = any(len(entry.seeds) > 1 for entry in table.entries)
    line = f"95 % intervals: {_INTERVALS[table.metric.kind]}"
    if pooled and table.metric.kind == "proportion":
        line += ", of several seeds over those of one"
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
    how = "paired means, t interval and sign-flip test over documents"
    if table.metric.kind == "proportion":
        how = "exact McNemar over trials, Newcombe's paired interval, wider where trials of a document go together"
        if any(not contrast.binary for contrast in table.contrasts.values()):
            how += "; where seeds disagree, sign-flip test over documents"
    yield f"Baseline: {table.baseline}{given}. Pairs are the same samples; {how}."
    yield (
        f"* adjusted p < 0.05 (Benjamini-Hochberg over {plural(comparison.num_tests, 'difference')}) and no interval "
        f"that holds {1 if table.metric.kind == 'exponential' else 0}."
    )
    yield (
        "Detectable: a difference these samples show with 80 % power at p < 0.05, for the model hardest to tell, of "
        "those without * if there are any."
    )
    few = min(c.difference.num_clusters for c in table.contrasts.values())
    if 1 < few < FEWEST_DOCUMENTS and any(not c.binary for c in table.contrasts.values()):
        yield f"With {few} documents no sign-flip test can reach p < 0.05; {FEWEST_DOCUMENTS} could."


def _left_out(table: Table) -> Iterator[str]:
    whole = table.by in ("length", "depth")  # else one row is in several columns
    failures = [
        f"{name} at {column.label(table.by) if whole else f'{column.length:,}'}: {cell.outcomes}"
        for (name, column), cell in table.cells.items()
        if cell.statuses
    ]
    if failures:
        yield "Not scored, and left out of the means: " + "; ".join(dict.fromkeys(failures)) + "."
    for entry in table.entries:
        counts = [c.num_left_out for (name, _), c in table.contrasts.items() if name == entry.name]
        alone = sum(counts) if whole else max(counts, default=0)
        if alone:
            samples = plural(alone, "sample")
            yield f"{entry.name} and {table.baseline}: {samples} of only one side, left out of the pairs."
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
