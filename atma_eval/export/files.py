"""Writing an export: all files or none, and never over somebody else's.

A hidden index in the folder holds the hash of each file that an export wrote. A file may be replaced if it is still
what an export left there; anything else is somebody's work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from atma_eval.errors import UserError

INDEX = ".atma-eval-export.json"
_TEMPORARY = ".atma-eval-tmp"


def write_files(folder: Path, name: str, files: Iterable[tuple[str, bytes]]) -> list[Path]:
    """Write files (path below ``folder``, content) of the export ``name``, in order.

    Files that an earlier export of this name left and this one does not make are removed. Contents are written beside
    their places first; only when all are on disk is anything replaced.
    """
    made = dict(files)
    index = _read_index(folder)
    targets = {path: folder / path for path in made}
    stale = [path for path, entry in index.items() if entry["format"] == name and path not in made]
    new = {path: {"format": name, "sha256": [hashlib.sha256(content).hexdigest()]} for path, content in made.items()}
    temporary: list[Path] = []
    try:
        for path, target in targets.items():
            if target.exists() and _hash(target) not in index.get(path, {}).get("sha256", []):
                raise UserError(
                    f"{target} exists and is not an export of ours, or was edited since",
                    "move it away, or give another folder with -o",
                )
        for path, content in made.items():
            targets[path].parent.mkdir(parents=True, exist_ok=True)
            beside = targets[path].with_name(targets[path].name + _TEMPORARY)
            temporary.append(beside)
            beside.write_bytes(content)
        # Until the last file is in place either content is ours, whenever this is interrupted.
        either = {
            path: {"format": name, "sha256": [*index.get(path, {}).get("sha256", []), *entry["sha256"]]}
            for path, entry in new.items()
        }
        _write_index(folder, {**index, **either})
        for beside, target in zip(temporary, targets.values(), strict=True):
            beside.replace(target)
        for path in stale:
            if (folder / path).is_file() and _hash(folder / path) in index[path]["sha256"]:
                (folder / path).unlink()
        _write_index(folder, {**{p: entry for p, entry in index.items() if p not in stale}, **new})
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or folder}: {error.strerror}", "give another folder with -o"
        ) from None
    finally:
        for beside in temporary:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
    return list(targets.values())


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read_index(folder: Path) -> dict[str, dict]:
    path = folder / INDEX
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else {}
        return {str(name): {"format": str(e["format"]), "sha256": list(e["sha256"])} for name, e in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # then nothing there is known to be ours


def _write_index(folder: Path, files: dict[str, dict]) -> None:
    beside = folder / (INDEX + _TEMPORARY)
    beside.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / INDEX)
