"""``atma-eval train``: from a recipe to a checkpoint folder. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atma_eval.commands.options import Device, Dtype, Quiet
from atma_eval.console import EXIT_INTERRUPTED, say


def train(
    recipe: Annotated[str, typer.Argument(help="A bundled recipe (a name in configs/train) or a .yaml file.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Checkpoint folder to write. Default: models/<recipe>.", metavar="DIR"),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the resumable state. Default: runs/<recipe>.", metavar="DIR")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop at this step; without it the same command goes on.", metavar="N")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    save_dtype: Annotated[str, typer.Option(help="Type of the written weights: fp32, bf16.", metavar="TYPE")] = "fp32",
    threads: Annotated[int, typer.Option(help="CPU threads; another number may change the last bits.")] = 1,
    trials: Annotated[
        int, typer.Option(help="Recall trials of the model card at gaps up to 4,096; 0 measures none.", metavar="N")
    ] = 100,
    long_trials: Annotated[int, typer.Option(help="Recall trials at longer gaps.", metavar="N")] = 20,
    quiet: Quiet = False,
) -> None:
    """Train a checkpoint from a recipe. Repeating a command continues an interrupted run, on a CPU to equal bits.

    The folder of the resumable state is one that --model takes: a run that is under way can be evaluated.
    Several GPUs or processes: torchrun --nproc-per-node N -m atma_eval.training RECIPE
    """
    from atma_eval.training.run import TrainSpec, train

    spec = TrainSpec(
        recipe=recipe,
        out=out,
        work=work,
        stop_after=stop_after,
        device=device,
        dtype=dtype,
        save_dtype=save_dtype,
        threads=threads,
        trials=trials,
        long_trials=long_trials,
        quiet=quiet,
    )
    try:
        train(spec)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
