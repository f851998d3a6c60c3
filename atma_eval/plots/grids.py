"""Heatmaps of a metric, and forest plots of paired differences."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from atma_eval.plots.charts import ForestChart, Heat, HeatChart, Point, failures_text, length_text, number_text
from atma_eval.plots.page import COLOURS, COLUMNS, WIDTH, Area, outer_ticks, short, short_names

# -- heatmaps ---------------------------------------------------------------------------------------------


def _panel_columns(chart: HeatChart) -> int:
    """Panels side by side: as many as leave each cell room for its number."""
    return max(1, min(len(chart.panels), 3, 15 // max(1, len(chart.lengths))))


def _panel_rows(chart: HeatChart) -> int:
    return math.ceil(len(chart.panels) / _panel_columns(chart))


def heatmap_height(chart: HeatChart) -> float:
    tall = max(len(panel.rows) for panel in chart.panels)
    return _panel_rows(chart) * (0.36 * max(tall, 2) + 0.28) + 0.5


def draw_heatmap(area: Area, chart: HeatChart) -> None:
    columns = _panel_columns(chart)
    left = 0.75 if chart.by_depth else 0.25 + 0.075 * max(len(short(name)) for name in chart.panels[0].rows)
    axes = area.axes(
        _panel_rows(chart), columns, left=left, right=1.0, top=0.2 if chart.by_depth else 0.02, bottom=0.5,
        gap=(0.12, 0.28),
    )  # fmt: skip
    numbers = [p.estimate.mean for panel in chart.panels for row in panel.cells for p in row if p]
    means = [mean for mean in numbers if mean is not None]
    low, high = min(means, default=0.0), max(means, default=1.0)
    if chart.metric.kind in ("proportion", "share"):
        low, high = 0.0, 1.0
    # the better the brighter, whichever way the metric goes
    brighter = "cividis" if chart.metric.higher_is_better else "cividis_r"
    colours = ScalarMappable(Normalize(low, high if high > low else low + 1), brighter)
    cell = (WIDTH - left - 1.0) / columns / len(chart.lengths)  # inches
    for axis, panel in zip(axes.flat, chart.panels):
        _panel(axis, panel, chart, colours, size=max(4.0, min(8.0, 14 * cell)))
    for axis in outer_ticks(axes, len(chart.panels)):
        axis.set_xlabel(chart.x_label)
    if chart.by_depth:
        for axis in axes[:, 0]:
            axis.set_ylabel("depth")
    height = min(area.height - 0.75, 2.2)
    scale = area.figure.add_axes(area.place(WIDTH - 0.85, area.height - height - 0.2, 0.12, height))
    bar = area.figure.colorbar(colours, cax=scale)
    bar.set_label(chart.metric.label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _panel(axis: Axes, panel: Heat, chart: HeatChart, colours: ScalarMappable, size: float) -> None:
    for i, row in enumerate(panel.cells):
        for j, point in enumerate(row):
            if point is not None:
                _cell(axis, j, i, point, colours, size)
    axis.set_xlim(-0.5, len(chart.lengths) - 0.5)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)  # depth 0, the start of the text, on top
    axis.set_xticks(range(len(chart.lengths)), [length_text(length) for length in chart.lengths])
    axis.set_yticks(range(len(panel.rows)), short_names(panel.rows))
    axis.tick_params(length=0, labelsize=max(5.0, min(8.0, size + 1)))
    axis.spines[:].set_visible(False)
    axis.set_title(short(panel.title, 32), fontsize=8, pad=3)


def _cell(axis: Axes, x: int, y: int, point: Point, colours: ScalarMappable, size: float) -> None:
    mean = point.estimate.mean
    corner = (x - 0.5, y - 0.5)
    if mean is None:
        axis.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="0.55", hatch="////", linewidth=0.6))
        what = "\n".join(f"{count} {status}" for status, count in point.failed.items()) or "none"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axis.text(x, y, what, ha="center", va="center", fontsize=max(4.0, size - 1.5), color="0.15", bbox=behind)
        return
    red, green, blue, _ = colours.to_rgba(np.array([mean]))[0]
    axis.add_patch(Rectangle(corner, 1, 1, facecolor=(red, green, blue), edgecolor="white", linewidth=0.8))
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.46 else "white"
    axis.text(x, y - 0.14, number_text(mean), ha="center", va="center", fontsize=size, color=ink)
    below = f"n={point.estimate.n}" + (f", {failures_text(point.failed)}" if point.failed else "")
    axis.text(x, y + 0.27, below, ha="center", va="center", fontsize=max(3.5, size - 2.5), color=ink)


# -- forest -----------------------------------------------------------------------------------------------


def _forest_rows(chart: ForestChart) -> int:
    return math.ceil(len(chart.differences) / COLUMNS)


def forest_height(chart: ForestChart) -> float:
    tall = max(len(gaps) for gaps in chart.differences.values())
    return _forest_rows(chart) * (0.22 * max(tall, 3) + 0.3) + 0.6


def draw_forest(area: Area, chart: ForestChart) -> None:
    columns = min(COLUMNS, len(chart.differences))
    right = 0.6 if columns > 1 else WIDTH / 2
    axes = area.axes(
        _forest_rows(chart),
        columns,
        left=0.75,
        right=right,
        top=0.22,
        bottom=0.6,
        gap=(0.42, 0.3),
    )
    lengths = sorted({gap.length for gaps in chart.differences.values() for gap in gaps})
    titles = short_names(list(chart.differences), 28)
    for axis, title, gaps in zip(axes.flat, titles, chart.differences.values()):
        axis.axvline(chart.null, color="0.4", linewidth=0.9, zorder=1)
        for gap in gaps:
            if gap.mean is None:
                continue
            y, colour = lengths.index(gap.length), COLOURS[0] if gap.resolved else "0.4"
            if gap.low is not None and gap.high is not None:
                axis.plot([gap.low, gap.high], [y, y], color=colour, linewidth=1.4, zorder=2)
            face = colour if gap.resolved else "white"
            axis.plot(gap.mean, y, "o", color=colour, markerfacecolor=face, markersize=4.8, zorder=3)
            edge = axis.get_yaxis_transform()
            axis.text(1.02, y, f"n={gap.n}", transform=edge, fontsize=6, color="0.3", va="center")
        axis.set_ylim(len(lengths) - 0.5, -0.5)
        axis.set_yticks(range(len(lengths)), [length_text(length) for length in lengths])
        axis.tick_params(labelsize=7.5)
        axis.grid(axis="x", color="0.92", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=8, pad=3)
    better = "better →" if chart.metric.higher_is_better else "← better"
    for axis in outer_ticks(axes, len(chart.differences)):
        axis.set_xlabel(f"{'difference' if chart.null == 0 else 'ratio'}, {chart.metric.label}\n{better}", fontsize=7.5)
    axes[0, 0].set_ylabel(chart.x_label, fontsize=8)
