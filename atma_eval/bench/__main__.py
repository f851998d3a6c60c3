"""The command line of the measurements."""

from __future__ import annotations

import typer

from atma_eval.bench.cpu import cpu
from atma_eval.bench.gpu import gpu
from atma_eval.console import run_module

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
    run_module(app)


if __name__ == "__main__":
    main()
