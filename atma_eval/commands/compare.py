"""``atma-eval compare``: models of one or more runs against each other."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class By(StrEnum):
    LENGTH = "length"
    DEPTH = "depth"
    POSITION = "position"
    BUCKET = "bucket"


class Format(StrEnum):
    TERMINAL = "terminal"
    MARKDOWN = "md"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


class Seeds(StrEnum):
    POOLED = "pooled"
    APART = "apart"


class Against(StrEnum):
    PAPER = "paper"


def compare(
    runs: Annotated[list[str], typer.Argument(help="Folders that niah, ppl or run wrote.", metavar="RUN")],
    task: Annotated[str | None, typer.Option(help="One task only. Default: all.", metavar="NAME")] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="exact, first_token, token_accuracy, nll, uplift; nll, perplexity, bits_per_byte. Default: the first.",
            metavar="NAME",
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The model others are held against. Default: the first.", metavar="NAME")
    ] = None,
    by: Annotated[
        By, typer.Option(help="Columns: lengths; or depths, tokens of the value, or position buckets, at each.")
    ] = By.LENGTH,
    seeds: Annotated[
        Seeds, typer.Option(help="Seeds of one recipe (names equal up to -s2) in one line, or each its own.")
    ] = Seeds.POOLED,
    against: Annotated[
        Against | None, typer.Option(help="Published figures beside ours, never paired with them.")
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: as -o ends (.md, .tex, .csv, .json), else terminal.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write there instead of to the terminal.", metavar="FILE")
    ] = None,
) -> None:
    """Models against each other on the same samples: estimates, paired differences, and which of them are real.

    Works from the records alone. Differences are from a baseline, with p adjusted over the whole call; runs that
    asked different things are refused, saying what differs.
    """
    from atma_eval.compare import CompareSpec
    from atma_eval.compare import compare as compare_models
    from atma_eval.compare.formats import write
    from atma_eval.console import say
    from atma_eval.errors import UserError
    from atma_eval.runs import read_models

    if against is not None and by is not By.LENGTH:
        raise UserError(f"there are no published figures by {by.value}", "leave out --by, or --against")
    spec = CompareSpec(task=task, metric=metric, baseline=baseline, by=by.value, pool=seeds is Seeds.POOLED)
    comparison = compare_models(read_models(runs), spec)
    for note in comparison.notes:
        say(f"note: {note}")
    write(comparison, form.value if form else None, out, against_paper=against is not None)
    if out is not None:
        say(f"wrote {out}")
