"""The run folder of an import: ``records.jsonl`` and ``manifest.json``."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from atma_eval import __version__
from atma_eval.errors import UserError
from atma_eval.files import replacing
from atma_eval.importing.figures import Figure
from atma_eval.records import SCHEMA, git_commit

SOURCE = "imported"


def write_run(
    out: Path,
    models: list[tuple[str, dict[str, Any], list[Figure]]],
    *,
    files: dict[str, int],
    left_out: dict[str, int],
    notes: list[str],
) -> int:
    """Write rows and manifest of (label, details, figures) of each model; returns the number of rows.

    The run's id is made of its rows, so the same logs give the same records. An import that is there is replaced; a
    folder with other records is refused.
    """
    _check_ours(out)
    rows, counts = [], {}
    for label, _, figures in models:
        for figure in figures:
            row = figure.row(label)
            rows.append(row)
            if row["status"] == "ok":
                counts[row["key"]] = figure.counts()
    run_id = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    text = "".join(json.dumps({**row, "run_id": run_id}, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = {
        "schema": SCHEMA,
        "run_id": run_id,
        "created": now,
        "updated": now,
        "source": SOURCE,
        "parity": None,
        "models": {label: details for label, details, _ in models},
        "tasks": {},  # what was asked for is known of our own runs only
        "counts": counts,
        "files": files,
        "left_out": left_out,
        "notes": notes,
        "invocations": [
            {
                "time": now,
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "version": __version__,
                "git_commit": git_commit(),
                "python": platform.python_version(),
                "platform": platform.platform(),
                "packages": {},
            }
        ],
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        # The manifest takes its place first: rows never stand without what marks them as imported.
        with replacing(out / "records.jsonl") as records, replacing(out / "manifest.json") as described:
            records.write_text(text, encoding="utf-8")
            described.write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}", "give another folder with -o") from None
    return len(rows)


def _check_ours(out: Path) -> None:
    """Refuse a folder with records or a manifest that no import wrote."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder", "give another folder with -o")
    manifest = out / "manifest.json"
    if not manifest.exists() and not (out / "records.jsonl").exists():
        return
    try:
        source = json.loads(manifest.read_text(encoding="utf-8")).get("source")
    except (OSError, ValueError, AttributeError):
        source = None
    if source != SOURCE:
        raise UserError(f"{out} holds a run that is not an import", "give another folder with -o")
