"""The ATMA authors' logs and matrices as a run of ours, so that published figures stand in the same tables.

Each figure becomes a row: the mean of trials that nobody kept apart. Such a row has no trial, no sample hash and no
token lists; its ``protocol`` is the authors', so it pairs with nothing of ours. How many trials it rests on, and how
many of them were exact, no row has a field for: the manifest holds them, as ``counts`` by row key, beside
``"source": "imported"``, and `runs.read_run` puts them back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atma_eval.errors import UserError
from atma_eval.importing import ablation, benchmarks, checkpoints, matrix
from atma_eval.importing.figures import Figure, ModelFigures, Parsed
from atma_eval.importing.files import LogFile, find_logs, read_blocks, read_json, read_text
from atma_eval.importing.folder import write_run

_KINDS = (
    "expected: a log with ABLATION_EVAL_JSON or RETRIEVAL/LONGDOC_RESULTS_JSON blocks, ablation/results.json, "
    "benchmark_matrix.json, or checkpoint results"
)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import did: rows by file, models in order, what was left out by reason, and notes."""

    path: Path
    num_rows: int
    models: list[str]
    rows_by_file: dict[str, int]
    left_out: dict[str, int]
    notes: list[str]


@dataclass
class _Model:
    label: str
    details: dict[str, Any]
    figures: dict[tuple[Any, ...], Figure]


def import_logs(logs: Sequence[str | Path], out: Path) -> Imported:
    """Read ``logs`` (files, or folders of them) into the run folder ``out``; an import there is replaced.

    Raises `UserError` where a file the user named holds nothing to import, is cut or edited, or ``out`` holds a run
    of another kind.
    """
    files, left_out = find_logs(logs)
    models: dict[tuple[Any, ...], _Model] = {}
    notes: list[str] = []
    by_file: dict[str, int] = {}
    for file in files:
        parsed = _parse(file)
        if not parsed.known:
            if file.asked:
                raise UserError(f"{file.path}: nothing to import", _KINDS)
            left_out["files of another kind"] += 1
            continue
        left_out.update(parsed.left_out)
        notes += parsed.notes
        by_file[file.label] = sum(_add(models, found, file, left_out) for found in parsed.models)
        if file.asked and not parsed.models and not parsed.left_out:
            raise UserError(f"{file.path}: nothing to import ({'; '.join(parsed.notes) or 'it is empty'})", _KINDS)
    if not models:
        said = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "nothing"
        raise UserError(f"nothing to import; left out: {said}", _KINDS)
    found = [(model.label, model.details, list(model.figures.values())) for model in models.values()]
    num_rows = write_run(out, found, files=by_file, left_out=dict(left_out), notes=notes)
    return Imported(
        path=out,
        num_rows=num_rows,
        models=[label for label, _, _ in found],
        rows_by_file=by_file,
        left_out=dict(left_out),
        notes=notes,
    )


def _parse(file: LogFile) -> Parsed:
    text = read_text(file.path)
    if file.path.suffix == ".json":
        data = read_json(file.path, text)
        if isinstance(data, list) and any(isinstance(entry, dict) and "run_id" in entry for entry in data):
            return ablation.parse_results(file, data)
        if isinstance(data, dict) and isinstance(data.get("rows"), list):
            return matrix.parse_matrix(file, data["rows"])
        if isinstance(data, dict) and "checkpoints" in data:
            return checkpoints.parse_checkpoints(file, data)
        return Parsed(known=False)
    blocks = read_blocks(file.path, text)
    names = {block.name for block in blocks}
    if names & benchmarks.MARKERS:
        return benchmarks.parse_log(file, blocks)
    if names & {ablation.CONFIG, ablation.EVAL, ablation.ERROR}:
        return ablation.parse_log(file, blocks)
    return Parsed(known=False)


def _add(models: dict[tuple[Any, ...], _Model], found: ModelFigures, file: LogFile, left_out: Counter[str]) -> int:
    """Add what a file says of a model; returns the number of new cells.

    Files speak of one model if they name the same checkpoint and agree on every cell both have; the cells both have
    are kept once. Where they disagree, the second is a model of its own.
    """
    identity = found.identity
    while identity in models and any(
        not _same(models[identity].figures[figure.cell], figure)
        for figure in found.figures
        if figure.cell in models[identity].figures
    ):
        identity = (*identity, file.label)
    if identity not in models:
        taken = {model.label for model in models.values()}
        details = {"fingerprint": None, **found.details, "source_log": file.label}
        models[identity] = _Model(_label(found, file, taken), details, {})
    mine = models[identity].figures
    before = len(mine)
    for figure in found.figures:
        mine.setdefault(figure.cell, figure)
    if twice := len(found.figures) - (len(mine) - before):
        left_out["figures given twice"] += twice
    return len(mine) - before


def _same(one: Figure, other: Figure) -> bool:
    """Whether two figures of a cell are one, but for rounding and what one file does not say."""
    if one.status != other.status or one.num_trials != other.num_trials:
        return False
    pairs = ((one.nll, other.nll), (one.accuracy, other.accuracy), (one.num_exact, other.num_exact))
    return all(a is None or b is None or a == b or abs(a - b) <= 1e-4 * max(1.0, abs(a)) for a, b in pairs)


def _label(found: ModelFigures, file: LogFile, taken: set[str]) -> str:
    """The name with ``(imported)``; where it is taken, with what tells the checkpoint or the file apart."""
    suffixes = ("imported", f"imported, {found.hint}", f"imported, {file.label}")
    numbered = (f"imported, {file.label}, {number}" for number in itertools.count(2))
    return next(
        label for suffix in itertools.chain(suffixes, numbered) if (label := f"{found.name} ({suffix})") not in taken
    )
