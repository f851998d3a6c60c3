"""The command line of the measurements."""

from __future__ import annotations

import sys

import typer

from atma_eval.bench.cpu import cpu
from atma_eval.bench.gpu import gpu
from atma_eval.console import plain_console
from atma_eval.errors import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure the operations of the models.",
)
app.command()(cpu)
app.command()(gpu)


def main() -> None:
    """Entry point: user errors become two short lines, as in `atma_eval.cli`."""
    try:
        app()
    except UserError as error:
        console = plain_console(stderr=True, soft_wrap=True)
        console.print(f"error: {error.message}", style="red")
        if error.hint:
            console.print(f"hint: {error.hint}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
