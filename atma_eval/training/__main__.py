"""``python -m atma_eval.training RECIPE``: `atma-eval train` without the command line, for ``torchrun -m``.

``torchrun --nproc-per-node 2 -m atma_eval.training RECIPE`` trains data-parallel. The same command resumes an
interrupted run; a finished run only measures and writes its folder again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atma_eval.console import run_module
from atma_eval.training.run import TrainSpec, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m atma_eval.training", description="Train a checkpoint.")
    parser.add_argument("recipe", help="bundled name or path")
    parser.add_argument("--out", type=Path, help="checkpoint folder to write (default: models/<name of the recipe>)")
    parser.add_argument("--work", type=Path, help="resumable state (default: runs/<name of the recipe>)")
    parser.add_argument("--stop-after", type=int, help="stop at this step, to go on later")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--dtype", default="auto", help="auto (fp32 on a CPU, bf16 on a GPU), fp32, bf16")
    parser.add_argument("--save-dtype", default="fp32", help="type of the written weights: fp32, bf16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number may change the last bits")
    parser.add_argument("--trials", type=int, default=100, help="recall trials of the model card, up to gaps of 4,096")
    parser.add_argument("--long-trials", type=int, default=20, help="recall trials at longer gaps")
    train(TrainSpec(**vars(parser.parse_args())))


if __name__ == "__main__":
    run_module(main)
