"""A run's folder: append-only rows, the manifest of how they came about, and loss curves.

Rows are appended and flushed one by one. After any interruption the folder opens again: a torn last line is cut
off, rows already there are known by their keys, and a request that would mix unlike rows is refused.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from atma_eval.errors import UserError
from atma_eval.files import replacing

SCHEMA = 1
# Every row has all of these, in this order; null where there is nothing to say.
FIELDS = (
    "schema run_id key model task protocol length gap context_tokens num_bytes depth trial seed text_id status "
    "num_targets nll_sum target_ids predicted_ids nll token_accuracy first_token_correct exact control "
    "sample_hash elapsed_s peak_memory_bytes error"
).split()
# What may differ between a run and the same run interrupted and resumed.
VOLATILE_FIELDS = ("run_id", "elapsed_s", "peak_memory_bytes")
# What must agree before rows of a model may be added to those already there.
MODEL_IDENTITY = tuple(
    "fingerprint revision config dtype device implementations q2_floor tokenizer_fingerprint".split()
)
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "tiktoken")


def not_finite(token: str) -> None:
    """For ``json.loads(parse_constant=)``: NaN and Infinity are not JSON."""
    raise ValueError(f"{token} is not JSON")


def _parse(line: str) -> dict[str, Any]:
    row = json.loads(line, parse_constant=not_finite)
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ValueError("not a record")
    return row


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a ``records.jsonl`` and the number of bytes they take; an unfinished last line is left out.

    Raises `UserError` with file and line where an earlier line is damaged or a key stands twice.
    """
    data = path.read_bytes() if path.is_file() else b""
    whole = data.rfind(b"\n") + 1
    rows: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            row = _parse(line.decode("utf-8"))
        except ValueError as error:  # also UnicodeDecodeError and JSONDecodeError
            raise UserError(
                f"{path}, line {number}: not a record ({error})", "remove the line; its row is computed again"
            ) from None
        if row["key"] in seen:
            raise UserError(f"{path}, line {number}: the key {row['key']} stands on line {seen[row['key']]} already")
        if row.get("schema") != SCHEMA:
            raise UserError(f"{path}, line {number}: schema {row.get('schema')!r}, this version reads {SCHEMA}")
        seen[row["key"]] = number
        rows.append(row)
    return rows, whole


class RunDirectory:
    """A run's folder, opened for appending and locked against a second writer."""

    def __init__(self, path: Path):
        self.path = path
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        self._new_file = not (path / "records.jsonl").exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / "records.jsonl").open("a+b")
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}", "give another folder with -o") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(
                f"another atma-eval is writing to {path}", "wait for it, or give another folder with -o"
            ) from None
        try:
            self.rows, whole = read_rows(path / "records.jsonl")
            self.manifest = self._read_manifest()
            self._curves = self._read_curves()
        except BaseException:
            self._file.close()
            raise
        self.torn_bytes = os.fstat(self._file.fileno()).st_size - whole
        if self.torn_bytes and not self.manifest:
            self._file.close()
            raise UserError(f"{path}/records.jsonl is not of a run of ours", "give another folder with -o")
        if self.torn_bytes:
            self._file.truncate(whole)
        self.keys = {row["key"] for row in self.rows}
        import jsonlines  # here, so that reading a run does not need it

        self._writer = jsonlines.Writer(self._file, dumps=_dumps, flush=True)

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        if not path.is_file():
            if self.rows:
                raise UserError(f"{self.path} has records but no manifest.json", "give another folder with -o")
            return {}
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}", "restore it, or give another folder with -o") from None
        if not isinstance(manifest, dict) or not {"run_id", "models", "tasks", "invocations"} <= manifest.keys():
            raise UserError(f"{path} is not the manifest of a run", "restore it, or give another folder with -o")
        return manifest

    def _read_curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        path = self.path / "curves.npz"
        return read_curves(path) if path.is_file() else {}

    # -- writing ------------------------------------------------------------------------------------------

    def append(self, row: dict[str, Any], curve: tuple[np.ndarray, np.ndarray] | None = None) -> dict[str, Any]:
        """Write one row, its curve first: a row that is there always has its curve."""
        if row["key"] in self.keys:
            raise AssertionError(f"row {row['key']} is already written")
        row = {name: row.get(name) for name in FIELDS}
        try:
            if curve is not None:
                self._curves[row["key"]] = curve
                self._write_curves()
            self._writer.write(row)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}", "rows written so far are safe") from None
        self.keys.add(row["key"])
        self.rows.append(row)
        return row

    def _write_curves(self) -> None:
        keys = sorted(self._curves)
        with replacing(self.path / "curves.npz") as partial, partial.open("wb") as file:
            np.savez(
                file,
                keys=np.array(keys),
                nll_sums=np.stack([self._curves[key][0] for key in keys]),
                num_targets=np.stack([self._curves[key][1] for key in keys]),
            )

    def agree(self, models: dict[str, Any], tasks: dict[str, Any]) -> None:
        """Take over what a request resolved to, or refuse it where rows of another kind are here already.

        ``models`` maps labels to details; ``tasks`` maps labels to tasks to ``protocol``, ``window``, ``text``,
        ``lengths`` and ``trials``. Models, lengths and trials may be added.
        """
        differences = []
        known_models, known_tasks = self.manifest.get("models", {}), self.manifest.get("tasks", {})
        begun = {(row["model"], row["task"]) for row in self.rows}  # what was asked and has no row binds nobody
        begun_models = {model for model, _ in begun}
        for label, details in models.items():
            if label not in begun_models:
                continue
            for name in MODEL_IDENTITY:
                before, now = known_models.get(label, details).get(name), details[name]
                if before != now:
                    differences.append(f"{name} of model {label} (was {_short(before)}, now {_short(now)})")
        for label, by_task in tasks.items():
            for task, asked in by_task.items():
                known = known_tasks.get(label, {}).get(task)
                if known is not None and (label, task) in begun:
                    differences += [f"{what} of task {task}" for what in _task_differences(known, asked)]
        if differences:
            raise UserError(
                f"{self.path} holds rows that this request would not fit: " + "; ".join(dict.fromkeys(differences)),
                "ask for the same again (models, lengths and trials may be added), or give another folder with -o",
            )
        merged_tasks = {label: dict(by_task) for label, by_task in known_tasks.items()}
        for label, by_task in tasks.items():
            for task, asked in by_task.items():
                known = merged_tasks.setdefault(label, {}).get(task, asked)
                if any(_task_differences(known, asked)):
                    known = asked
                longer = max(known["text"]["documents"], asked["text"]["documents"], key=len)
                merged_tasks[label][task] = {
                    **asked,
                    "lengths": sorted({*known["lengths"], *asked["lengths"]}),
                    "trials": max(known["trials"], asked["trials"]),
                    "text": {**asked["text"], "documents": longer},
                }
        self._write_manifest(models={**known_models, **models}, tasks=merged_tasks)

    def _write_manifest(self, **sections: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        base = self.manifest or {"schema": SCHEMA, "run_id": uuid.uuid4().hex[:12], "created": now, "invocations": []}
        invocation = {
            "time": now,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "version": _version("atma-eval"),
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        }
        self.manifest = {
            **base,
            "updated": now,
            "parity": None,
            **sections,
            "invocations": [*base["invocations"], invocation],
        }
        with replacing(self.path / "manifest.json") as partial:
            partial.write_text(json.dumps(self.manifest, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @property
    def run_id(self) -> str:
        return self.manifest["run_id"]

    @property
    def curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Loss sums and target counts by position bucket, by row key."""
        return self._curves

    def close(self) -> None:
        """Release the folder; what was made for a request that came to nothing is taken away again."""
        self._file.close()
        if self._new_file and not self.rows and not self.manifest:
            with contextlib.suppress(OSError):
                (self.path / "records.jsonl").unlink()
                for folder in self._created:
                    folder.rmdir()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dumps(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def read_curves(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """``curves.npz``: loss sums and target counts by position bucket, by row key."""
    try:
        with np.load(path) as file:
            rows = zip(file["keys"], file["nll_sums"], file["num_targets"], strict=True)
            return {str(key): (sums, counts) for key, sums, counts in rows}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged: {error}", "restore it, or give another folder with -o") from None


def _task_differences(known: dict[str, Any], asked: dict[str, Any]) -> Iterable[str]:
    for name in sorted({*known["protocol"], *asked["protocol"]}):
        if known["protocol"].get(name) != asked["protocol"].get(name):
            yield f"{name} (was {_short(known['protocol'].get(name))}, now {_short(asked['protocol'].get(name))})"
    if known["window"] != asked["window"]:
        yield f"window (was {_short(known['window'])}, now {_short(asked['window'])})"
    before, now = ([(d["text_id"], d["sha256"]) for d in t["text"]["documents"]] for t in (known, asked))
    # a task that only ever appends documents may have fewer or more of them; dealt-out pools must be equal
    shared = min(len(before), len(now)) if asked["text"]["documents_may_grow"] else max(len(before), len(now))
    if before[:shared] != now[:shared]:
        sources = (known["text"]["source"], asked["text"]["source"])
        yield (
            f"text documents (was {len(before)} of {sources[0]}, now {len(now)} of {sources[1]}: "
            "another text, --docs or longest length leaves other documents)"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout this package runs from; ``None`` where it is installed, whatever folder that is in."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
