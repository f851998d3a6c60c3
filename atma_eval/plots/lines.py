"""A metric by length, or the loss by position: one panel for few models, a panel each for many."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from atma_eval.plots.charts import MOST_IN_ONE_PANEL, MOST_WITH_BANDS, Line, LineChart, length_text
from atma_eval.plots.page import COLOURS, COLUMNS, WIDTH, Area, outer_ticks, short_names, style

CONTROL_DASHES: dict[str, Any] = {"absent": (0, (1, 2)), "format": (0, (4, 3))}
GREY = "0.78"
STEP = 0.05  # octaves between models that are shifted sideways
LEGEND = 2.05  # inches


def _num_rows(chart: LineChart) -> int:
    return math.ceil(len(chart.lines) / COLUMNS)


def lines_height(chart: LineChart) -> float:
    return 2.75 if len(chart.lines) <= MOST_IN_ONE_PANEL else 1.45 * _num_rows(chart) + 0.95


def draw_lines(area: Area, chart: LineChart) -> None:
    if len(chart.lines) <= MOST_IN_ONE_PANEL:
        _one_panel(area, chart)
    else:
        _panels(area, chart)


def _one_panel(area: Area, chart: LineChart) -> None:
    axis = area.axes(1, 1, left=0.75, right=LEGEND + 0.1, top=0.05, bottom=0.55, gap=(0, 0))[0, 0]
    bands = len(chart.lines) <= MOST_WITH_BANDS
    for i, line in enumerate(chart.lines):
        shift = 0.0 if bands else STEP * (i - (len(chart.lines) - 1) / 2)
        _line(axis, line, style(i), bands=bands, shift=shift)
        for control in chart.controls:
            if control.model == line.model:
                _control(axis, control, COLOURS[i])
    _frame(axis, chart, room=0.5)
    axis.set_ylabel(chart.metric.label)
    axis.set_xlabel(chart.x_label)
    more = _other_handles(chart)
    handles = [Line2D([], [], **style(i), markersize=4.5, linewidth=1.6) for i in range(len(chart.lines))]
    labels = short_names([line.model for line in chart.lines])
    area.legend(
        [*handles, *more.values()], [*labels, *more], left=WIDTH - LEGEND, top=0.05, fontsize=8, handlelength=3.4
    )


def _panels(area: Area, chart: LineChart) -> None:
    axes = area.axes(_num_rows(chart), COLUMNS, left=0.65, right=0.15, top=0.2, bottom=0.75, gap=(0.14, 0.3))
    titles = short_names([line.model for line in chart.lines], 28)
    for i, (axis, line) in enumerate(zip(axes.flat, chart.lines)):
        for other in chart.lines:
            x, y, _, _ = _finite(other)
            axis.plot(x, y, color=GREY, linewidth=0.6, zorder=1)
        _line(axis, line, style(0), bands=True)
        for control in chart.controls:
            if control.model == line.model:
                _control(axis, control, COLOURS[0])
        _frame(axis, chart, room=0.36)
        axis.set_title(titles[i], fontsize=8, pad=3)
        axis.tick_params(labelsize=7.5)
        if i % COLUMNS == 0:
            axis.set_ylabel(chart.metric.label, fontsize=8)
    for axis in outer_ticks(axes, len(chart.lines)):
        axis.set_xlabel(chart.x_label, fontsize=8)
    more = {"the other models": Line2D([], [], color=GREY, linewidth=0.8), **_other_handles(chart)}
    top = area.height - 0.25
    area.legend(list(more.values()), list(more), left=0.65, top=top, fontsize=7.5, ncols=len(more), columnspacing=1.5)


def _finite(line: Line) -> tuple[list[float], list[float], list[float], list[float]]:
    """Positions, means and bounds, NaN where there is none: matplotlib leaves a gap there."""
    found = [(p.at, *(math.nan if v is None else v for v in p.estimate[:3])) for p in line.points]
    x, y, low, high = (list(values) for values in zip(*found, strict=True))
    return x, y, low, high


def _line(axis: Axes, line: Line, looks: dict[str, Any], *, bands: bool, shift: float = 0.0) -> None:
    """The means, their intervals as a band or as bars, and a cross at the foot where nothing was scored."""
    x, y, low, high = _finite(line)
    x = [at * 2**shift for at in x]
    colour = looks["color"]
    axis.plot(x, y, **looks, markersize=4.5, linewidth=1.5, zorder=4)
    if bands and len(x) > 1:
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1.5)
        for bound in (low, high):
            axis.plot(x, bound, color=colour, linewidth=0.5, linestyle=looks["linestyle"], alpha=0.7, zorder=2)
    else:
        axis.vlines(x, low, high, color=colour, linewidth=1.0, zorder=3)
        for bound in (low, high):
            axis.plot(x, bound, "_", color=colour, markersize=4, markeredgewidth=1.0, zorder=3)
    lost = [at for at, point in zip(x, line.points) if point.estimate.mean is None and point.failed]
    if lost:
        foot = axis.get_xaxis_transform()
        axis.plot(lost, [0.035] * len(lost), "x", color=colour, markersize=6, transform=foot, clip_on=False, zorder=5)


def _control(axis: Axes, line: Line, colour: str) -> None:
    x, y, _, _ = _finite(line)
    marker = "." if len(x) == 1 else None
    axis.plot(x, y, color=colour, linewidth=0.8, linestyle=CONTROL_DASHES[line.control], marker=marker, zorder=2)


def _other_handles(chart: LineChart) -> dict[str, Line2D]:
    """What else the legend names: controls, chance, training length."""
    handles = {}
    for control in dict.fromkeys(line.control for line in chart.controls):
        handles[f"control: {control}"] = Line2D([], [], color="0.3", linewidth=0.8, linestyle=CONTROL_DASHES[control])
    if chart.chance is not None:
        handles[f"chance: {chart.chance:.3g}"] = Line2D([], [], color="0.3", linewidth=2.4, alpha=0.3)
    if chart.trained:
        lengths = ", ".join(map(length_text, chart.trained))
        handles[f"training length: {lengths}"] = Line2D([], [], color="0.3", linewidth=0, marker="|", markersize=9)
    return handles


def _frame(axis: Axes, chart: LineChart, room: float) -> None:
    """Scales, ticks at least ``room`` inches apart, chance and training length."""
    axis.set_xscale("log", base=2)
    points = [point for line in chart.lines for point in line.points]
    at = sorted({point.at for point in points})
    by_position = chart.kind == "position"
    ticks = [2.0**k for k in range(math.ceil(math.log2(at[-1])) + 1)] if by_position else at
    left, right = min(at[0], ticks[0]) / 2**0.3, max(at[-1], ticks[-1]) * 2**0.3
    axis.set_xlim(left, right)
    across = axis.get_position().width * WIDTH
    apart = room / across * math.log2(right / left)
    shown: list[float] = []
    for tick in reversed(ticks):  # the longest is always named
        if not shown or math.log2(shown[-1] / tick) >= apart:
            shown.append(tick)
    axis.set_xticks(ticks, [length_text(tick) if tick in shown else "" for tick in ticks])
    axis.set_xticks([], minor=True)
    if chart.metric.kind in ("proportion", "share"):
        axis.set_ylim(-0.04, 1.04)
    elif by_position:  # the few targets of the first positions have bars as tall as all the rest
        means = [point.estimate.mean for point in points if point.estimate.mean is not None]
        pad = 0.4 * (max(means) - min(means)) or 0.5
        axis.set_ylim(max(0.0, min(means) - pad), max(means) + pad)
    if chart.chance is not None:
        axis.axhline(chart.chance, color="0.3", linewidth=2.4, alpha=0.3, zorder=1)
    for length in chart.trained:
        if left <= length <= right:
            axis.axvline(length, color="0.3", linewidth=0.8, zorder=1)
    axis.grid(axis="y", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
