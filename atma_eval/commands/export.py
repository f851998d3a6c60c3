"""``atma-eval export``: a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run, or its records.jsonl.", metavar="RUN")],
    to: Annotated[str, typer.Option("--to", help="lm-eval, every-eval-ever, csv, parquet.", metavar="FORMAT")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write to.", metavar="DIR")],
) -> None:
    """Write a run for lm-evaluation-harness readers, Every Eval Ever, or as flat CSV or Parquet tables.

    Every figure comes with its interval; a cell that failed has none. Files of an earlier export are replaced,
    others never.
    """
    from atma_eval.console import say
    from atma_eval.export import export_run
    from atma_eval.export.tables import READ_CSV

    read, files = export_run(run, to, out)
    for note in read.notes:
        say(f"note: {note}")
    for file in files:
        typer.echo(file)
    if to == "csv":
        say(f"the status nan is a word: read with {READ_CSV}")
