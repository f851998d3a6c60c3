"""``atma-eval plot``: pictures of runs. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[str], typer.Argument(help="Folders that niah, ppl or run wrote.", metavar="RUN...")],
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="heatmap, accuracy, nll, position, forest. Repeats. Default: what suits the tasks.", metavar="KIND"
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="One task. Default: all.", metavar="NAME")] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="exact, first_token, token_accuracy, nll, uplift, bits_per_byte, perplexity.", metavar="NAME"
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Model that a forest plot compares with. Default: the first.", metavar="MODEL")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Picture to write: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Sketch it in the terminal (what is done without -o).")
    ] = False,
) -> None:
    """Pictures of what was measured: by length, by depth, by position, and paired differences.

    Every picture says its n and what its bands are. Without -o FILE it is sketched in the terminal.
    """
    from atma_eval.console import say, wide_console
    from atma_eval.plots.builders import build_charts
    from atma_eval.runs import read_models
    from atma_eval.words import plural

    if out is not None:
        from atma_eval.plots.files import suffix_of

        suffix_of(out)  # a name that cannot be is refused before the work
    models = read_models(runs)
    charts = build_charts(models, kinds=kind or (), task=task, metric=metric, baseline=baseline)
    notes = [note for model in models for note in model.run.notes] + [note for chart in charts for note in chart.notes]
    for note in dict.fromkeys(notes):
        say(f"note: {note}")
    if terminal or out is None:
        from atma_eval.plots.sketch import Sketch

        wide_console().print(Sketch(charts))
    if out is not None:
        from atma_eval.plots.files import save

        save(charts, out)
        say(f"{plural(len(charts), 'picture')} in {out}")
