"""Runs as their readers see them: rows of one or many folders, checked, with names that tell models apart.

Everything works from ``records.jsonl`` alone; the manifest and the loss curves add what they can. Needs no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atma_eval.bundled import given_path
from atma_eval.errors import UserError
from atma_eval.metrics import Row, is_retrieval
from atma_eval.records import FIELDS, not_finite, read_curves, read_rows
from atma_eval.words import first_few, plural

RECORDS = "records.jsonl"
STATUSES = ("ok", "oom", "nan", "too_long", "error")
CONTROLS = ("none", "absent", "format")
LONGEST = 2**40
# what the reporting side relies on; the rest of a row may be anything
_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "task": (str,),
    "protocol": (str,),
    "length": (int,),
    "control": (str,),
    "status": (str,),
    "text_id": (str,),
    "num_targets": (int,),
    "trial": (int, type(None)),
    "gap": (int, type(None)),
    "depth": (int, float, type(None)),
    "num_bytes": (int, type(None)),
    "nll_sum": (int, float, type(None)),
    "token_accuracy": (int, float, type(None)),
    "exact": (bool, type(None)),
    "first_token_correct": (bool, type(None)),
    "sample_hash": (str, type(None)),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One folder: its rows, its manifest (empty where there is none), and what is to be said of it.

    ``notes`` are sentences: half a last line, cells that are not finished, a manifest that is missing.
    """

    path: Path
    rows: list[Row]
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def imported(self) -> bool:
        """Whether its rows were read from somebody else's logs."""
        return self.manifest.get("source") == "imported"

    @cached_property
    def curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Loss sums and target counts by position bucket, by row key."""
        path = self.path / "curves.npz"
        return read_curves(path) if path.is_file() else {}

    def model(self, label: str) -> dict[str, Any]:
        """What the manifest says of a model; empty where it says nothing."""
        return self.manifest.get("models", {}).get(label, {})


def read_run(name: str | Path) -> Run:
    """A run by its folder or its ``records.jsonl``.

    Raises `UserError` where there is nothing to read, or with file and line where a row is damaged.
    """
    path = given_path(str(name))
    if path.name == RECORDS and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise UserError(f"no run at {name}", "give the folder that niah, ppl or run wrote, such as results/reference")
    records = path / RECORDS
    if not records.is_file():
        raise UserError(f"{path} holds no {RECORDS}", "give the folder that niah, ppl or run wrote")
    rows, whole = read_rows(records)
    notes = []
    if records.stat().st_size > whole:
        notes.append(f"{records} ends in half a row, which is left out")
    if not rows:
        raise UserError(f"{records} holds no whole row", "run the command again that made it")
    for number, row in enumerate(rows, start=1):
        _check(row, f"{records}, line {number}")
    manifest = _manifest(path / "manifest.json")
    if not manifest:
        notes.append(f"{path} has no manifest: models are told apart by name alone")
    if manifest.get("source") == "imported":
        rows = _with_counts(rows, manifest.get("counts", {}), path)
    return Run(path=path, rows=rows, manifest=manifest, notes=(*notes, *_unfinished(path, rows, manifest)))


def _check(row: Row, where: str) -> None:
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise UserError(f"{where}: the row has no {', '.join(missing)}", "restore the line, or remove it")
    for name, types in _TYPES.items():
        if type(row[name]) not in types:
            allowed = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise UserError(f"{where}: {name} is {row[name]!r}, not {allowed}", "restore the line, or remove it")
    for name, fits, allowed in (
        ("length", 1 <= row["length"] <= LONGEST, "a number of tokens"),
        ("status", row["status"] in STATUSES, ", ".join(STATUSES)),
        ("control", row["control"] in CONTROLS, ", ".join(CONTROLS)),
        ("depth", row["depth"] is None or 0 <= row["depth"] <= 1, "between 0 and 1"),
        ("token_accuracy", row["token_accuracy"] is None or 0 <= row["token_accuracy"] <= 1, "between 0 and 1"),
        ("nll_sum", row["nll_sum"] is None or row["nll_sum"] >= 0, "a loss, never negative"),
    ):
        if not fits:
            raise UserError(f"{where}: {name} is {row[name]!r}; allowed: {allowed}", "restore the line, or remove it")
    if row["status"] == "ok" and (row["nll_sum"] is None or row["num_targets"] < 1):
        raise UserError(f"{where}: a row that is ok has no loss", "restore the line, or remove it")


def _with_counts(rows: list[Row], counts: Any, path: Path) -> list[Row]:
    """Imported rows with ``num_trials``, and ``num_exact`` where known: a row of our own needs no field for them."""
    for key, count in counts.items() if isinstance(counts, dict) else [("", counts)]:
        trials = count.get("num_trials") if isinstance(count, dict) else None
        if type(trials) is not int or any(type(n) is not int or not 0 <= n <= trials for n in count.values()):
            raise UserError(f"{path / 'manifest.json'}: counts of {key} are {count!r}", "import the logs again")
    return [{**row, **counts.get(row["key"], {})} for row in rows]


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_finite)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", "restore it, or remove it: rows can be read without") from None
    if not isinstance(manifest, dict) or not _well_formed(manifest):
        raise UserError(f"{path} is not the manifest of a run", "restore it, or remove it: rows can be read without")
    return manifest


def _well_formed(manifest: dict[str, Any]) -> bool:
    """Whether what readers take from a manifest has the shape that a run writes."""
    models, tasks = manifest.get("models", {}), manifest.get("tasks", {})
    if not isinstance(models, dict) or not isinstance(tasks, dict):
        return False
    if not all(isinstance(part, dict) for part in (*models.values(), *tasks.values())):
        return False
    asked = [task for by_task in tasks.values() for task in by_task.values()]
    return all(
        isinstance(task, dict)
        and type(task.get("trials")) is int
        and isinstance(task.get("lengths"), list)
        and all(type(length) is int for length in task["lengths"])
        for task in asked
    )


def _unfinished(path: Path, rows: list[Row], manifest: dict[str, Any]) -> list[str]:
    """A sentence for each model and task that has begun and not ended, and one for those of a task without any row.

    Controls are not counted: a task's rows are up to three times as many.
    """
    counts = Counter((row["model"], row["task"], row["length"]) for row in rows if row["control"] == "none")
    nouns = {row["task"]: "trial" if is_retrieval(row) else "document" for row in rows}
    notes = []
    waiting: dict[str, list[str]] = {}
    for model, tasks in manifest.get("tasks", {}).items():
        for task, asked in tasks.items():
            wanted = asked["trials"] * len(asked["lengths"])
            there = sum(counts[model, task, length] for length in asked["lengths"])
            if there == 0:
                waiting.setdefault(task, []).append(model)
            elif there < wanted:
                of = plural(wanted, nouns.get(task, "sample"))
                notes.append(f"{path} is unfinished: {there:,} of {of} of {task} for {model}, not counting controls")
    for task, models in waiting.items():
        notes.append(f"{path} is unfinished: nothing of {task} yet for {first_few(models)}")
    return notes


@dataclass(frozen=True, kw_only=True)
class ModelRows:
    """The rows of one model under the name that tables give it."""

    name: str
    label: str  # as in its rows
    run: Run
    rows: list[Row]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self.rows))

    def asked(self, task: str) -> dict[str, Any]:
        """What the manifest says was asked of the model: protocol, window, text; empty where it says nothing."""
        return self.run.manifest.get("tasks", {}).get(self.label, {}).get(task, {})

    def window(self, task: str) -> int | str | None:
        """Keys that attention could see, or ``full``; ``None`` where no manifest tells."""
        asked = self.asked(task)
        return None if "window" not in asked else asked["window"] or "full"

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer; ``None`` where no manifest tells."""
        return self.details.get("tokenizer_fingerprint") or None

    @property
    def training_length(self) -> int | None:
        """Tokens of a training sequence, as the manifest has it."""
        return self.details.get("training_length") or (self.details.get("config") or {}).get("training_length")

    @property
    def details(self) -> dict[str, Any]:
        """From the manifest; empty where there is none."""
        return self.run.model(self.label)


def read_models(names: Sequence[str | Path]) -> list[ModelRows]:
    """Models of all given runs, in order.

    A label whose task stands in two runs is told apart by the run's folder, and folders of one name by those above
    them; where the tasks differ, as after ``niah`` and ``ppl``, both keep the name.
    """
    runs = [read_run(name) for name in names]
    for i, run in enumerate(runs):
        if any(run.path.resolve() == other.path.resolve() for other in runs[:i]):
            raise UserError(f"the run {run.path} is given twice")
    found = [
        ModelRows(name=label, label=label, run=run, rows=[row for row in run.rows if row["model"] == label])
        for run in runs
        for label in dict.fromkeys(row["model"] for row in run.rows)
    ]
    count = Counter((model.label, task) for model in found for task in model.tasks)
    folders = _short_paths([run.path.resolve() for run in runs])
    return [
        replace(model, name=f"{model.label} ({folders[model.run.path.resolve()]})")
        if any(count[model.label, task] > 1 for task in model.tasks)
        else model
        for model in found
    ]


def _short_paths(paths: Sequence[Path]) -> dict[Path, str]:
    """The last folders of each path, as many as tell it from the others."""
    names = {}
    for path in paths:
        count = 1
        while sum(other.parts[-count:] == path.parts[-count:] for other in paths) > 1:
            count += 1
        names[path] = "/".join(path.parts[-count:])
    return names
