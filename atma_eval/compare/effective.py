"""How far each model keeps its score, as a sheet of its own. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from atma_eval.compare.cells import SHARE
from atma_eval.compare.sheets import NOTHING, Line, Sheet, Text
from atma_eval.compare.tables import Table
from atma_eval.stats import EffectiveLength
from atma_eval.words import number


def effective_sheet(table: Table) -> Sheet:
    """How far each model keeps its score."""
    shortest = table.columns[0].length
    lines = tuple(
        Line(label=name, cells=(Text(main=effective_text(of)), Text(main=_interval(of, shortest)), _score(of)))
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
            "right. Interval: documents drawn anew. Seeds stand alone.",
        ),
    )


def effective_text(of: EffectiveLength, write: Callable[[int], str] = "{:,}".format) -> str:
    """The length; else whether the model fails or its trials are too few to tell."""
    if of.length is None:
        return "too few trials" if of.too_few else "none"
    return f"{'≥ ' if of.censored else ''}{write(of.length)}"


def _interval(of: EffectiveLength, shortest: int) -> str:
    if of.reference is None or of.too_few:
        return NOTHING
    low, high = (f"{bound:,}" if bound is not None else f"< {shortest:,}" for bound in (of.low, of.high))
    return low if low == high else f"{low} to {high}"


def _score(of: EffectiveLength) -> Text:
    return Text(main=NOTHING if of.reference is None else number(of.reference))
