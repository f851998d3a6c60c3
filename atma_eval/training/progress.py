"""What a person sees of a training run: a bar with figures on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from atma_eval.console import plain_console
from atma_eval.training.loop import Logged


class _Bar(Progress):
    """A bar, and under it a line of text."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.line)


class TrainingProgress:
    """Tokens and reports of a run as they come; use as a context manager around it.

    On a terminal: a bar and under it the latest loss, recall accuracy, tokens per second, MFU (see `flops`) and the
    time left. Elsewhere a line per report on stderr.
    """

    def __init__(self, num_tokens: int, done: int, *, quiet: bool = False):
        self._console = plain_console(stderr=True, quiet=quiet)
        if not self._console.is_terminal:
            self._console.soft_wrap = True
        self._bar: _Bar | None = None
        if self._console.is_terminal and not quiet:
            columns = TextColumn("{task.percentage:>3.0f} %"), BarColumn(bar_width=40), TimeElapsedColumn()
            self._bar = _Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=num_tokens, completed=done)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def message(self, text: str) -> None:
        self._console.print(text)

    def tokens(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def report(self, logged: Logged) -> None:
        if self._bar is not None:
            self._bar.line = logged.line()
        else:
            self._console.print(logged.line())
