"""A run in the formats of other tools: lm-evaluation-harness, Every Eval Ever, CSV and Parquet. Needs no torch.

What a run does not hold is left out, never filled in: a cell that failed has no figure, a row of an imported run no
sample. Every figure comes with its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from atma_eval.errors import UserError, did_you_mean
from atma_eval.export.every_eval_ever import every_eval_ever_files
from atma_eval.export.files import write_files
from atma_eval.export.lm_eval import lm_eval_files
from atma_eval.export.tables import check_types, csv_files, parquet_files
from atma_eval.runs import RECORDS, ModelRows, Run, read_models

# name of a format -> the files it makes of a run: path below the folder, and content
FORMATS: dict[str, Callable[[list[ModelRows]], Iterator[tuple[str, bytes]]]] = {
    "lm-eval": lm_eval_files,
    "every-eval-ever": every_eval_ever_files,
    "csv": csv_files,
    "parquet": parquet_files,
}


def export_run(run: str | Path, to: str, out: Path) -> tuple[Run, list[Path]]:
    """Write ``run`` in the format ``to`` below the folder ``out``; returns the run and the files written.

    Files of an earlier export are replaced. Raises `UserError` for an unknown format, a run that cannot be read, and
    where a file stands that is not ours or was edited since.
    """
    if to not in FORMATS:
        raise UserError(f"unknown format {to!r}", did_you_mean(to, FORMATS))
    if (out / RECORDS).exists():
        raise UserError(f"{out} is the folder of a run", "give the export a folder of its own with -o")
    models = read_models([run])
    check_types(row for model in models for row in model.rows)
    files = list(FORMATS[to](models))
    if not files:
        raise UserError(
            f"no cell of {run} was scored, and {to} has no place for that", "csv and parquet keep such rows"
        )
    return models[0].run, write_files(out, to, files)
