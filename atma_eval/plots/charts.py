"""What a picture shows, as plain data: estimates by model and length, and the line that says what they are.

`files` draws these with matplotlib and `sketch` in a terminal; `html_report` sets them beside its tables. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atma_eval.metrics import Metric
from atma_eval.stats import Estimate
from atma_eval.words import minus

KINDS = ("heatmap", "accuracy", "nll", "position", "forest")
MOST_IN_ONE_PANEL = 6  # lines; more get a panel each
MOST_WITH_BANDS = 2  # lines of one panel; the bands of more hide each other, and bars side by side do not


class Point(NamedTuple):
    """One estimate, at a length in tokens or a target position, and the outcomes of rows that were not scored."""

    at: float
    estimate: Estimate
    failed: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Estimates of one model in ascending order; ``control`` is ``none`` for the task itself."""

    model: str
    points: tuple[Point, ...]
    control: str = "none"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What charts of all kinds have.

    Attributes:
        caption: n, what a band or bar is, and what else is to be said, in a few sentences.
        trained: the training lengths of its models, where the manifest knows them.
        notes: what sets its models apart, which the caption says too.
    """

    kind: str
    task: str
    protocol: str
    title: str
    metric: Metric
    caption: str
    retrieval: bool
    x_label: str = "length, tokens"
    trained: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """A metric by length, or the loss by position; ``chance`` is what guessing the value in its form would score."""

    lines: tuple[Line, ...]
    controls: tuple[Line, ...] = ()
    chance: float | None = None


class Heat(NamedTuple):
    """Cells of one panel: ``cells[row][column]``, ``None`` where nothing was asked. Rows are models or depths."""

    title: str
    rows: tuple[str, ...]
    cells: tuple[tuple[Point | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class HeatChart(Chart):
    """A metric by length (columns) and by depth (a panel for each model), or by model where there is one depth."""

    lengths: tuple[int, ...]
    panels: tuple[Heat, ...]
    by_depth: bool


class Gap(NamedTuple):
    """A paired difference, model less baseline, at one length; ``resolved`` after adjusting for the whole grid."""

    length: int
    mean: float | None
    low: float | None
    high: float | None
    n: int
    resolved: bool


@dataclass(frozen=True, kw_only=True)
class ForestChart(Chart):
    """Paired differences of models against a baseline, by length; ``null`` is no difference (1 for a ratio)."""

    baseline: str
    null: float
    differences: dict[str, tuple[Gap, ...]] = field(default_factory=dict)


# -- words ------------------------------------------------------------------------------------------------


def length_text(length: float) -> str:
    """2K, 64K, 1M for multiples of 1,024; other lengths in full."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % size == 0:
            return f"{length / size:.0f}{unit}"
    return f"{length:,.0f}"


def number_text(value: float) -> str:
    """Three digits or so."""
    size = abs(value)
    if size != 0 and not 5e-4 <= size < 1e5:
        return minus(value) + f"{size:.0e}"
    return minus(value) + (f"{size:.{2 if size < 100 else 0}f}" if size >= 0.01 or size == 0 else f"{size:.3f}")


def failures_text(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in failed.items())


def range_text(counts: Iterable[int]) -> str:
    low, high = min(counts := list(counts), default=0), max(counts, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def interval_text(metric: Metric, retrieval: bool, num_documents: int) -> str:
    """What the interval of a metric is made of, as `metrics.estimate` makes it; imported means have no documents."""
    if metric.kind == "proportion" or num_documents == 0:
        return "95 % Wilson intervals over trials"
    return "95 % t intervals over " + ("documents" if num_documents != 1 or not retrieval else "trials of one document")


MARKS = ("Bands", "Bars", "Bars, models side by side")  # how the intervals of lines are drawn


def intervals_text(lines: Sequence[Line], interval: str) -> str:
    """What the intervals of lines are and are drawn as, or that there is none."""
    points = [point.estimate for line in lines for point in line.points if point.estimate.mean is not None]
    if points and all(estimate.low is None for estimate in points):
        return "No intervals: each point is one value, or equal values"
    bands, one_bar, side_by_side = MARKS
    if any(len(line.points) > 1 for line in lines) and not MOST_WITH_BANDS < len(lines) <= MOST_IN_ONE_PANEL:
        return f"{bands}: {interval}"
    return f"{one_bar if len(lines) == 1 else side_by_side}: {interval}"


def without_interval_text(points: Sequence[Estimate]) -> str:
    """A sentence about points that have none beside others that do; empty where there are no such."""
    bare = {estimate.low is None for estimate in points if estimate.mean is not None}
    return " A point without one has one value, or equal values: no interval." if len(bare) > 1 else ""
