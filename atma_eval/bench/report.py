"""What was measured: lines with targets, tables of 100 columns, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from atma_eval.bench.timing import Timing
from atma_eval.files import replacing


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measurement.

    Attributes:
        what: the operation.
        case: its shape and types.
        figures: by column; none where it was skipped.
        judged: the figure that is held against the target.
        target: ``None`` where there is none.
        at_least: whether the target is the least or the most that will do.
        timings: behind the figures, for the file.
        note: why there are no figures, or what to know of them.
    """

    what: str
    case: str
    figures: dict[str, float] = field(default_factory=dict)
    judged: str | None = None
    target: float | None = None
    at_least: bool = True
    timings: dict[str, Timing] = field(default_factory=dict)
    note: str | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the target was met (never by NaN); ``None`` where there is none."""
        if self.judged is None or self.target is None or self.judged not in self.figures:
            return None
        value = self.figures[self.judged]
        return value >= self.target if self.at_least else value <= self.target


@dataclass(kw_only=True)
class PartReport:
    """Lines of one part, and how it ended: ``done``, ``failed``, ``stopped`` in the middle, ``skipped``."""

    name: str
    title: str
    status: str = "skipped"
    lines: list[Line] = field(default_factory=list)
    error: str | None = None
    traceback: str | None = None
    elapsed_s: float = 0.0

    @property
    def missed(self) -> list[Line]:
        return [line for line in self.lines if line.ok is False]

    @property
    def first_calls_s(self) -> float:
        """Seconds of first calls, most of it compilation; a timing that lies behind several lines counts once."""
        timings = {id(timing): timing for line in self.lines for timing in line.timings.values()}
        return sum(timing.first_s for timing in timings.values())

    def summary(self) -> str:
        """How it ended, in a sentence."""
        judged = [line for line in self.lines if line.ok is not None]
        said = f"{self.name}: {self.status}"
        if self.status == "stopped":
            said += ", its time was over"
        if self.status == "skipped":
            return said + ", no time was left"
        if self.error:
            said += f": {self.error}"
        met = sum(line.ok is True for line in judged)
        said += f"; {met} of {len(judged)} targets met, {self.elapsed_s:.0f} s"
        return said + (f", {self.first_calls_s:.0f} s of it first calls" if self.first_calls_s >= 1 else "")

    def to_dict(self) -> dict[str, Any]:
        lines = [{**dataclasses.asdict(line), "ok": line.ok} for line in self.lines]
        return {**dataclasses.asdict(self), "first_calls_s": self.first_calls_s, "lines": lines}


def number(value: float) -> str:
    """Three digits, or all of them before the point."""
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3g}"


def verdict(line: Line) -> str:
    if line.ok is None:
        return ""
    return "ok" if line.ok else "missed"


def tables(lines: list[Line]) -> list[Table]:
    """One table for each set of columns, in the order of the lines; those without figures are in none."""
    by_columns: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        if line.figures:
            by_columns.setdefault(tuple(line.figures), []).append(line)
    return [_table(list(columns), among) for columns, among in by_columns.items()]


def _table(columns: list[str], lines: list[Line]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("measured", "case"):
        table.add_column(heading, no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    judged = any(line.target is not None for line in lines)
    if judged:
        table.add_column("target", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    for line in lines:
        cells = [line.what, line.case, *(number(line.figures[name]) for name in columns)]
        if judged:
            sign = "" if line.target is None else ("≥ " if line.at_least else "≤ ") + number(line.target)
            cells += [sign, verdict(line)]
        table.add_row(*cells, style="red" if line.ok is False else None)
    return table


def notes(lines: list[Line]) -> list[str]:
    """What was skipped, and what else is to be said, without repetition."""
    said = {line.note: f"{line.what}, {line.case}: {line.note}" for line in reversed(lines) if line.note}
    return list(reversed(said.values()))


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all; a figure that is no number becomes ``null``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(_plain(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
