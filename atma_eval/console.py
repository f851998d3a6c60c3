"""A terminal that prints names as they are: no markup, no emoji codes, no guessed colours in a user's text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console

from atma_eval.errors import UserError

EXIT_INTERRUPTED = 130
WIDTH = 100  # of a table that goes to a file or a pipe


def plain_console(**options: Any) -> Console:
    return Console(markup=False, emoji=False, highlight=False, **options)


def wide_console() -> Console:
    """Standard output; 100 columns where it is not a terminal, so that a saved table is never cramped to 80."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=WIDTH)


def say(text: str) -> None:
    """A sentence beside the data: on standard error, dim, never broken."""
    plain_console(stderr=True, soft_wrap=True).print(text, style="dim")


def refuse(error: UserError) -> NoReturn:
    """What was wrong and the hint, two short lines on standard error; ends the process with the error's exit code."""
    console = plain_console(stderr=True, soft_wrap=True)
    console.print(f"error: {error.message}", style="red")
    if error.hint:
        console.print(f"hint: {error.hint}")
    sys.exit(error.exit_code)


def run_module(main: Callable[[], None]) -> None:
    """``main`` of a ``python -m`` module: a user's mistake ends it as it ends a command, ctrl-C without a traceback."""
    try:
        main()
    except UserError as error:
        refuse(error)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
