"""``atma-eval report``: one page about runs. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[str], typer.Argument(help="Folders that niah, ppl or run wrote.", metavar="RUN...")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Page to write.", metavar="FILE.html")],
    baseline: Annotated[
        str | None, typer.Option(help="Model that the others are compared with. Default: the first.", metavar="MODEL")
    ] = None,
) -> None:
    """One self-contained page: tables with intervals, pictures, controls, comparisons, and how it was all made.

    It needs no network, runs no script, and says under every picture what it supports and what it does not.
    """
    from atma_eval.console import say
    from atma_eval.errors import UserError
    from atma_eval.html_report import html_report
    from atma_eval.runs import read_models

    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: a report is a page", "give a file name that ends in .html")
    page = html_report(read_models(runs), baseline=baseline)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "give another file with -o") from None
    say(f"report in {out}")
