"""Charts as text for a terminal: bars of blocks, sparklines, and intervals on a ruled line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from atma_eval.plots.charts import (
    MARKS,
    Chart,
    ForestChart,
    Gap,
    HeatChart,
    Line,
    LineChart,
    Point,
    failures_text,
    length_text,
    number_text,
)
from atma_eval.words import span

BLOCKS = " ▏▎▍▌▋▊▉█"
SPARKS = "▁▂▃▄▅▆▇█"
BAR = 5  # characters
COLUMN = BAR + 8  # with its number and the space between columns
NAME = 24  # characters of a name, at most
RULE = 41  # characters of a forest plot's axis, at most


def bar(share: float, width: int = BAR) -> str:
    """A horizontal bar for a share from 0 to 1, in eighths of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    text = "█" * (eighths // 8) + (BLOCKS[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One block for each value between ``low`` and ``high``; a space where there is none."""
    span = (high - low) or 1.0
    steps = [None if v is None else min(7, max(0, int((v - low) / span * 8))) for v in values]
    return "".join(" " if step is None else SPARKS[step] for step in steps)


def whisker(gap: Gap, left: float, right: float, null: float, width: int = RULE) -> str:
    """An interval on a line from ``left`` to ``right``: ``├──●──┤``, and ``│`` where there is no difference."""

    def place(value: float) -> int:
        return min(width - 1, max(0, round((value - left) / (right - left) * (width - 1))))

    line = [" "] * width
    low, mean, high = gap.low, gap.mean, gap.high
    line[place(null)] = "│"
    if low is not None and high is not None:
        for i in range(place(low), place(high) + 1):
            line[i] = "─" if line[i] == " " else "┼"
        line[place(low)], line[place(high)] = "├", "┤"
    if mean is not None:
        line[place(mean)] = "●"
    return "".join(line)


class Sketch:
    """Charts for ``console.print``; tables are cut into pieces that fit its width."""

    def __init__(self, charts: Sequence[Chart]):
        self._charts = charts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for chart in self._charts:
            yield Text(chart.title, style="bold")
            if isinstance(chart, ForestChart):
                yield from _forest(chart, options.max_width)
            elif isinstance(chart, HeatChart):
                yield from _heatmap(chart, options.max_width)
            elif isinstance(chart, LineChart) and chart.kind == "position":
                yield from _positions(chart)
            elif isinstance(chart, LineChart):
                yield from _lines(chart, options.max_width)
            yield Text(_caption(chart) + "\n", style="dim")


def _caption(chart: Chart) -> str:
    """The picture's own, less the words on how it is drawn."""
    text = chart.caption
    if isinstance(chart, LineChart):
        marks, _, intervals = text.partition(": ")
        if marks in MARKS:
            # sparklines have no intervals
            text = intervals.partition("; ")[2] if chart.kind == "position" else f"In grey: {intervals}"
        text = text.replace("Thin lines are controls", "Controls").replace("× marks", "named at")
    elif isinstance(chart, ForestChart):
        text = text.replace("Filled: different", "* different").replace("hollow:", "without *:")
    else:
        text = text.replace("hatched where", "named where")
    return text


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, max_width=NAME, overflow="fold")
    return table


def _pieces(columns: Sequence[float], names: Sequence[str], width: int) -> Iterator[Sequence[float]]:
    step = max(1, (width - min(NAME, max(map(len, names)))) // COLUMN)
    for start in range(0, len(columns), step):
        yield columns[start : start + step]


def _scale(points: Sequence[Point], proportion: bool) -> tuple[float, float]:
    """What an empty and a full bar stand for: 0 and 1 of a share, else 0 and the largest value."""
    means = [point.estimate.mean for point in points if point.estimate.mean is not None]
    return (0.0, 1.0) if proportion else (min(0.0, *means, 0.0), max([*means, 0.0]) or 1.0)


def _cell(point: Point | None, scale: tuple[float, float], *, interval: bool) -> Text:
    if point is None:
        return Text("")
    mean, low, high, n = point.estimate
    if mean is None:
        return Text(failures_text(point.failed) or "none", style="red")
    share = (mean - scale[0]) / (scale[1] - scale[0])
    text = Text(f"{bar(share)} {number_text(mean):>5}")
    if interval and low is not None and high is not None:
        text.append(f"\n{span(low, high, number_text)}", style="dim")
    elif interval:
        text.append("\nno interval", style="dim")
    else:
        text.append(f"\nn={n}" + (f", {failures_text(point.failed)}" if point.failed else ""), style="dim")
    return text


def _lines(chart: LineChart, width: int) -> Iterator[Table]:
    lines = [*chart.lines, *chart.controls]
    scale = _scale([p for line in lines for p in line.points], chart.metric.kind in ("proportion", "share"))
    lengths = sorted({point.at for line in lines for point in line.points})
    for piece in _pieces(lengths, [chart.x_label, *(line.model for line in lines)], width):
        table = _table(chart.x_label)
        for length in piece:
            table.add_column(length_text(length), justify="right", no_wrap=True)
        for line in chart.lines:
            at = {point.at: point for point in line.points}
            table.add_row(Text(line.model), *(_cell(at.get(length), scale, interval=True) for length in piece))
            for control in (c for c in chart.controls if c.model == line.model):
                table.add_row(Text(f"  {control.control}", style="dim"), *_plain(control, piece))
        yield table


def _plain(control: Line, lengths: Sequence[float]) -> list[Text]:
    at = {point.at: point.estimate.mean for point in control.points}
    means = [at.get(length) for length in lengths]
    return [Text("" if mean is None else number_text(mean), style="dim") for mean in means]


def _positions(chart: LineChart) -> Iterator[Table | Text]:
    means = [p.estimate.mean for line in chart.lines for p in line.points if p.estimate.mean is not None]
    low, high = min(means), max(means)
    yield Text(f"▁ {number_text(low)} to █ {number_text(high)}, a block for each power of two")
    table = _table("model")
    last = max(line.points[-1].at for line in chart.lines)
    table.add_column(f"1 to about {last:,.0f}", no_wrap=True)
    for name in ("first", "least", "last"):
        table.add_column(name, justify="right")
    for line in chart.lines:
        values = [point.estimate.mean for point in line.points]
        known = [value for value in values if value is not None]
        figures = (known[0], min(known), known[-1])
        table.add_row(Text(line.model), sparkline(values, low, high), *map(number_text, figures))
    yield table


def _heatmap(chart: HeatChart, width: int) -> Iterator[Table | Text]:
    points = [p for panel in chart.panels for row in panel.cells for p in row if p]
    scale = _scale(points, chart.metric.kind in ("proportion", "share"))
    for panel in chart.panels:
        for piece in _pieces(chart.lengths, [chart.x_label, *panel.rows], width):
            if panel.title:
                yield Text(panel.title)
            table = _table("depth" if chart.by_depth else chart.x_label)
            places = [chart.lengths.index(int(length)) for length in piece]
            for length in piece:
                table.add_column(length_text(length), justify="right", no_wrap=True)
            for name, row in zip(panel.rows, panel.cells):
                table.add_row(Text(name), *(_cell(row[j], scale, interval=False) for j in places))
            yield table


def _forest(chart: ForestChart, width: int) -> Iterator[Table]:
    names = min(NAME, max(map(len, chart.differences)))
    rule = max(12, min(RULE, width - names - 32))  # beside the other columns
    gaps = [gap for found in chart.differences.values() for gap in found]
    ends = [v for gap in gaps for v in (gap.mean, gap.low, gap.high) if v is not None]
    left, right = min([*ends, chart.null]), max([*ends, chart.null])
    if right <= left:
        left, right = left - 1, right + 1
    table = _table("model")
    table.add_column(chart.x_label.split(",")[0], justify="right")
    table.add_column(f"{number_text(left)} to {number_text(right)}", no_wrap=True)
    table.add_column("difference" if chart.null == 0 else "ratio", justify="right", no_wrap=True)
    table.add_column("n", justify="right")
    for name, found in chart.differences.items():
        for i, gap in enumerate(found):
            if gap.mean is not None:
                drawn = whisker(gap, left, right, chart.null, rule)
                value = number_text(gap.mean) + ("*" if gap.resolved else " ")
                table.add_row(Text(name if i == 0 else ""), length_text(gap.length), drawn, value, f"{gap.n}")
    yield table
