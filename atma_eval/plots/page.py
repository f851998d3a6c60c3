"""What all pictures share: a page measured in inches, colours and marks, and names that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 8.0  # inches, of every figure
COLUMNS = 4  # panels side by side, at most
# Okabe and Ito's colours for the colour-blind, without the yellow that white paper swallows
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2.5, 1)), (0, (8, 2, 2, 2)), (0, (1, 1)))
MARKERS = "osD^vP"


def style(index: int) -> dict[str, Any]:
    """The looks of the model of this index, below ``len(COLOURS)``: any one of the three tells it apart."""
    return {"color": COLOURS[index], "linestyle": DASHES[index], "marker": MARKERS[index]}


def short(name: str, most: int = 24) -> str:
    """A name that fits: its middle left out where it is long."""
    half = (most - 1) // 2
    return _shown(name if len(name) <= most else f"{name[:half]}…{name[-half:]}")


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Names cut as by `short`; where that would make two of them one, they are folded instead."""
    cut = [short(name, most) for name in names]
    folded = [_shown(textwrap.fill(name, most)) for name in names]
    return [one if cut.count(one) == 1 else whole for one, whole in zip(cut, folded, strict=True)]


def _shown(name: str) -> str:
    return " " + name if name.startswith("_") else name  # matplotlib leaves a label out that begins so


@dataclass(frozen=True)
class Area:
    """A strip of the page: ``bottom`` and ``height`` in inches.

    Places are set by hand: layout engines fail on a page with many panels, and do not give equal files everywhere.
    """

    figure: Figure
    bottom: float
    height: float

    def place(self, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
        """Inches from the strip's lower left corner as fractions of the figure."""
        across, up = self.figure.get_size_inches()
        return left / across, (self.bottom + bottom) / up, width / across, height / up

    def axes(
        self, rows: int, columns: int, *, left: float, right: float, top: float, bottom: float, gap: tuple[float, float]
    ) -> np.ndarray:
        """Axes [rows, columns] inside margins, ``gap`` inches between columns and rows; all share their scales."""
        across, down = gap
        width = (WIDTH - left - right - across * (columns - 1)) / columns
        height = (self.height - top - bottom - down * (rows - 1)) / rows
        grid = np.empty((rows, columns), dtype=object)
        first: Axes | None = None
        for i in range(rows):
            for j in range(columns):
                x, y = left + j * (width + across), bottom + (rows - 1 - i) * (height + down)
                axis = self.figure.add_axes(self.place(x, y, width, height), sharex=first, sharey=first)
                first = first or axis
                grid[i, j] = axis
        return grid

    def legend(self, handles: Sequence[Any], labels: Sequence[str], *, left: float, top: float, **options: Any) -> None:
        """A legend whose upper left corner stands there, in inches from the strip's left and upper edge."""
        x, y, _, _ = self.place(left, self.height - top, 0, 0)
        self.figure.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(x, y), borderaxespad=0, frameon=False, **options
        )


def outer_ticks(axes: np.ndarray, count: int) -> list[Axes]:
    """Hide the panels beyond ``count`` and labels between panels; the axes that are the lowest of their column."""
    columns = axes.shape[1]
    lowest = []
    for i, axis in enumerate(axes.flat):
        axis.set_visible(i < count)
        last = i < count <= i + columns
        axis.tick_params(labelbottom=last, labelleft=i % columns == 0)
        if last:
            lowest.append(axis)
    return lowest
