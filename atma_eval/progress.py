"""What a user sees while a run goes on: a table that fills in on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from atma_eval.console import plain_console
from atma_eval.report import Tables, summary
from atma_eval.words import plural

LINE_EVERY_S = 15.0
VIEW_EVERY_S = 1.0  # estimates cost more than a frame of the display


class RunProgress:
    """Rows and tokens of a run as they come; use as a context manager around it.

    Args:
        total_tokens: tokens the whole plan computes, of every model and task.
        chance: chance levels by task, shown under the tables.
        live: fill in a table in place; otherwise print a line now and then on stderr.
    """

    def __init__(self, total_tokens: int, chance: dict[str, dict[str, float]], *, live: bool, quiet: bool = False):
        self._total, self._chance = total_tokens, chance
        self._rows: list[dict[str, Any]] = []
        self._tokens = self._skipped = 0
        self._started = self._last_line = time.monotonic()
        self._console = plain_console() if live else plain_console(stderr=True, soft_wrap=True)
        self._quiet = quiet
        self._live: Live | None = None
        if live:
            self._bar = Progress(
                TextColumn("{task.percentage:>3.0f} %"),
                BarColumn(bar_width=40),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_tokens, left="")
            self._seen = (0, 0.0)
            self._table: Any = ""
            self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text)

    def row(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._live is None:
            self._line()

    def tokens(self, count: int, computed: bool) -> None:
        """``count`` tokens of the plan are done; those not ``computed`` now took no time."""
        self._tokens += count
        if not computed:
            self._skipped += count
        if self._live is not None:
            self._bar.update(self._task, completed=self._tokens, left=self._left())
        else:
            self._line()

    def _left(self) -> str:
        done = self._tokens - self._skipped
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self._started) * (self._total - self._tokens) / done
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02} left"

    def _line(self) -> None:
        """At the first row, then now and then, and at the end: how far the run is, and the figure that moved last."""
        now = time.monotonic()
        due = len(self._rows) == 1 or now - self._last_line >= LINE_EVERY_S or self._tokens >= self._total
        if self._quiet or not due:
            return
        self._last_line = now
        share = 100 * self._tokens / self._total if self._total else 100
        parts = [f"{share:3.0f} %", plural(len(self._rows), "row"), f"{now - self._started:.0f} s"]
        left = self._left()
        if left and self._tokens < self._total:
            parts.append(left)
        self._console.print(", ".join(parts) + self._latest())

    def _latest(self) -> str:
        """The headline figure of the cell that the last row of a task itself belongs to."""
        same = ("model", "task", "length", "control")
        last = next((row for row in reversed(self._rows) if row["control"] == "none" and row["status"] == "ok"), None)
        if last is None:
            return ""
        rows = [r for r in self._rows if r["status"] == "ok" and all(r[name] == last[name] for name in same)]
        metric = "exact" if last["gap"] is not None else "nll"
        estimate = summary(rows)[0][metric]
        return (
            f"; {last['model']}, {last['task']} at {last['length']:,}: {metric} {estimate['mean']:.3f} (n {len(rows)})"
        )

    def _view(self) -> Group:
        """The model and task under way, and the bar."""
        now = time.monotonic()
        if self._rows and len(self._rows) != self._seen[0] and now - self._seen[1] >= VIEW_EVERY_S:
            last = self._rows[-1]
            mine = [r for r in self._rows if (r["model"], r["task"]) == (last["model"], last["task"])]
            self._table = Tables(summary(mine), self._chance)
            self._seen = (len(self._rows), now)
        return Group(self._table, self._bar)
