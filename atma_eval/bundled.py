"""Where files are: presets, models, suites and recipes that travel with the package, and what a user names."""

from __future__ import annotations

import os
from pathlib import Path

from atma_eval.errors import UserError

_PACKAGE = Path(__file__).resolve().parent

MODEL_ALIASES = {"atma-demo": "atma"}


def bundled(kind: str) -> Path:
    """The folder of ``tasks``, ``models`` or ``configs``: inside an installed wheel, else beside the package."""
    installed = _PACKAGE / "bundled" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def given_path(name: str) -> Path:
    """A path a user typed, ``~`` expanded. Afterwards it may be asked what stands there without an exception."""
    path = Path(os.path.expanduser(name))
    try:
        path.exists()
    except OSError as error:  # too long a name, or a folder that may not be entered
        raise UserError(f"cannot look at {name!r}: {error.strerror}") from None
    return path


def bundled_models() -> dict[str, Path]:
    """Bundled checkpoints by name."""
    return {p.parent.name: p.parent for p in sorted(bundled("models").glob("*/config.json"))}


def bundled_presets() -> dict[str, Path]:
    """Bundled task presets by name."""
    return {p.stem: p for p in sorted(bundled("tasks").glob("*.yaml"))}


def bundled_shapes() -> dict[str, Path]:
    """Bundled configurations for ``random:NAME``, models of random weights."""
    return {p.stem: p for p in sorted((bundled("configs") / "shapes").glob("*.json"))}


def bundled_suites() -> dict[str, Path]:
    """Bundled suites for ``atma-eval run`` by name."""
    return {p.stem: p for p in sorted(bundled("configs").glob("*.yaml"))}
