"""Recall by step of several trainings in one picture: ``python -m atma_eval.training.curves FOLDER... --out FILE.png``.

Each folder holds the ``loss.csv`` that `atma-eval train` writes. A name that ends in ``-long`` has the colour of the
one without, and a broken line.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from atma_eval.console import run_module
from atma_eval.errors import UserError

LONGER = "-long"


def read_recall(folder: Path) -> tuple[list[int], list[float]]:
    """Steps, and the share of value digits that were right since the step before; reports without any left out."""
    path = folder / "loss.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(int(row["step"]), float(row["recall"])) for row in csv.DictReader(file) if row["recall"]]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "atma-eval train writes it") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is no table of losses by step", "expected the columns step and recall") from None
    if not rows:
        raise UserError(f"{path} has no recall in it", "only recipes that plant records measure it")
    steps, recall = zip(*rows, strict=True)
    return list(steps), list(recall)


def draw(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: Path) -> None:
    """A small picture of ``(steps, recall)`` by name; the suffix of ``path`` is its format."""
    from matplotlib import color_sequences
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    families = list(dict.fromkeys(name.removesuffix(LONGER) for name in curves))
    colors = dict(zip(families, itertools.cycle(color_sequences["tab10"])))
    for name, (steps, recall) in curves.items():
        style = "--" if name.endswith(LONGER) else "-"
        axis.plot(steps, recall, style, linewidth=1, color=colors[name.removesuffix(LONGER)], label=name)
    axis.set(ylim=(0, 1.02), xlabel="step", ylabel="value digits right")
    axis.set_xlim(left=0)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m atma_eval.training.curves", description="Draw recall by step.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="checkpoint folder with a loss.csv")
    parser.add_argument("--out", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    asked = parser.parse_args()
    draw({folder.resolve().name: read_recall(folder) for folder in asked.folders}, asked.out)


if __name__ == "__main__":
    run_module(main)
