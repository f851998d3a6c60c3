"""Where the files that travel with the package are: presets, models, suites, recipes."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def bundled(kind: str) -> Path:
    """The folder of ``tasks``, ``models`` or ``configs``: inside an installed wheel, or beside the package in a checkout."""
    installed = _PACKAGE / "bundled" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def bundled_models() -> dict[str, Path]:
    """Bundled checkpoints by name."""
    return {p.parent.name: p.parent for p in sorted(bundled("models").glob("*/config.json"))}


def bundled_presets() -> dict[str, Path]:
    """Bundled task presets by name."""
    return {p.stem: p for p in sorted(bundled("tasks").glob("*.yaml"))}


def bundled_suites() -> dict[str, Path]:
    """Bundled suites for ``atma-eval run`` by name."""
    return {p.stem: p for p in sorted(bundled("configs").glob("*.yaml"))}
