"""The command line: its commands, and how a mistake ends it. Importing this module imports no torch."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from atma_eval import __version__
from atma_eval.commands.compare import compare
from atma_eval.commands.evaluate import niah, ppl, run
from atma_eval.commands.export import export
from atma_eval.commands.importing import import_logs
from atma_eval.commands.listing import list_all
from atma_eval.commands.plot import plot
from atma_eval.commands.report import report
from atma_eval.commands.score import score
from atma_eval.commands.train import train
from atma_eval.console import refuse
from atma_eval.errors import UserError

app = typer.Typer(
    name="atma-eval",
    help="Measure how long-context language models behave as the context grows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"atma-eval {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# in the order of --help
app.command()(niah)
app.command()(ppl)
app.command()(run)
app.command()(train)
app.command()(score)
app.command(name="list")(list_all)
app.command()(compare)
app.command()(plot)
app.command()(report)
app.command()(export)
app.command(name="import")(import_logs)


def main() -> None:
    """Entry point: user errors become two short lines and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the signs of a table gets question marks
    sys.argv[1:] = [_home(argument) for argument in sys.argv[1:]]
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except UserError as error:
        refuse(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        refuse(UserError("the output cannot be written: the disk is full", "finished rows of a run are safe"))


def _home(argument: str) -> str:
    """``--out=~/x`` with the home folder in it: a shell expands the sign only where it begins a word."""
    option, equals, value = argument.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("--") else argument
