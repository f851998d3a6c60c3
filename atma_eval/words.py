"""How figures and counts are written wherever a person reads them. CSV and JSON hold plain numbers instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def number(value: float) -> str:
    """Four digits or so: two of them and a dash fit a column of a table of six lengths."""
    size = abs(value)
    if size != 0 and not 5e-4 <= size < 1e5:
        return minus(value) + f"{size:.0e}"
    return minus(value) + f"{size:.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"


def minus(value: float) -> str:
    """The sign of a negative number: not a hyphen, which is short and breaks lines."""
    return "−" if value < 0 else ""


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def span(low: float, high: float, write: Callable[[float], str] = number) -> str:
    """``0.207–0.900``; with a comma where a bound is negative, for its sign would run into the dash."""
    return f"{write(low)}{', ' if low < 0 else '–'}{write(high)}"


def times(value: float) -> str:
    """A multiple: three digits at most, and all of a large whole number."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def plural(count: int | str, noun: str) -> str:
    """``1 row``, ``1,200 rows``; a range of counts, as text, is always many."""
    text = count if isinstance(count, str) else f"{count:,}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def first_few(names: Sequence[str], count: int = 3) -> str:
    """``a, b, c and 9 more``."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more:,} more" if more > 0 else "")


def sentence(text: str) -> str:
    """A note as a sentence among others: a capital first, a full stop last."""
    return text[0].upper() + text[1:].rstrip(".") + "."
