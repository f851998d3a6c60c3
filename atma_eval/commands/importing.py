"""``atma-eval import``: the ATMA authors' logs as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_logs(
    log: Annotated[
        list[str],
        typer.Argument(help="Logs, results.json, benchmark_matrix.json, or folders of them.", metavar="LOG..."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the run to write.", metavar="RUN_DIR")],
) -> None:
    """Read the ATMA authors' logs and matrices into a run, so that published figures stand in the same tables.

    Each figure is one row, the mean of trials nobody kept apart. Smoke logs and superseded attempts are left out and
    counted.
    """
    from atma_eval.console import say
    from atma_eval.importing import import_logs as read
    from atma_eval.words import plural

    done = read(log, out)
    for file, count in done.rows_by_file.items():
        say(f"{file}: {plural(count, 'row')}")
    if done.left_out:
        say("left out: " + ", ".join(f"{count} {reason}" for reason, count in done.left_out.items()))
    for note in done.notes:
        say(f"note: {note}")
    say(f"{plural(done.num_rows, 'row')} of {plural(len(done.models), 'model')} in {done.path}")
    typer.echo(done.path)
