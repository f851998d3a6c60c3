"""Weight files, read without running anything from them: safetensors, or pickles with torch's weights-only reader.

Every key of a model must be there, none else, each of the right shape; prefixes that wrappers leave are stripped.
"""

from __future__ import annotations

import hashlib
import pickletools
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atma_eval.errors import UserError
from atma_eval.words import first_few

MAX_LISTED_KEYS = 12
FOVEAL_HINT = (
    "it is a Foveal continual-pretraining restart file, whose attention sits under attn.base; "
    "export the plain model from it first"
)


def fingerprint(path: Path) -> str:
    """SHA-256 of a weight file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_weights(path: Path) -> dict[str, Any]:
    """A flat state dict from either format, known prefixes stripped."""
    values = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    weights = {_strip_prefixes(str(key)): value for key, value in values.items()}
    if len(weights) < len(values):
        raise UserError(f"{path} holds some keys twice, with and without a prefix")
    return weights


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: it is truncated or corrupt ({first_line(error)})", "copy or download it again"
        ) from None


def _read_pickle(path: Path) -> dict[Any, Any]:
    import torch

    _refuse_restart_file(path)
    try:
        # files of old torch are no zip archives, and cannot be mapped
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises several kinds for damaged or unsafe pickles
        raise UserError(
            f"{path} cannot be read with the weights-only loader: {first_line(error)}", "is the file complete?"
        ) from None
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        values = values["model"]
    if not isinstance(values, dict) or not all(isinstance(v, torch.Tensor) for v in values.values()):
        raise UserError(f"{path} holds no state dict", "expected name -> tensor, or that under the key model")
    return values


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _strip_prefixes(key: str) -> str:
    while (stripped := key.removeprefix("_orig_mod.").removeprefix("module.")) != key:
        key = stripped
    return key


def _refuse_restart_file(path: Path) -> None:
    """Name a Foveal restart file as such, from the strings of its pickle alone: nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            strings = {arg for _, arg, _ in pickletools.genops(archive.read(member)) if isinstance(arg, str)}
    except Exception:  # no zip, or a damaged one, which raises a dozen kinds: the loader says what is wrong
        return
    if "optimizers" in strings or any("attn.base." in s for s in strings):
        raise UserError(f"{path} cannot be evaluated", FOVEAL_HINT)


def check_keys(weights: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Every key must be there, none else, each of the right shape; all faults in one error."""
    faults = []
    for title, keys in (
        ("missing", expected.keys() - weights.keys()),
        ("unexpected", weights.keys() - expected.keys()),
    ):
        if keys:
            faults.append(f"{len(keys)} {title}: {listing(keys)}")
    wrong = {
        f"{key} is {list(weights[key].shape)}, not {list(shape)}"
        for key, shape in expected.items()
        if key in weights and weights[key].shape != shape
    }
    coded = {
        f"{key} is {weights[key].dtype}" for key in expected if key in weights and not weights[key].is_floating_point()
    }
    if coded:
        faults.append(f"{len(coded)} not of floating point: {listing(coded)}")
    if wrong:
        faults.append(f"{len(wrong)} of another shape: {listing(wrong)}")
    if faults:
        raise UserError(f"{path} does not fit its config.json: " + "; ".join(faults), _family_hint(weights))


def listing(names: Iterable[str]) -> str:
    """Sorted names, the first dozen of them."""
    return first_few(sorted(names), MAX_LISTED_KEYS)


def _family_hint(weights: dict[str, Any]) -> str:
    keys = list(weights)
    if any("attn.base." in key for key in keys):
        return FOVEAL_HINT
    if any(key.endswith(("A_log", "dt_bias", "r_proj.weight")) for key in keys):
        return "these keys belong to a Raven checkpoint, a separate model family that is not supported"
    return "check attn_type, mem_enabled and the sizes in config.json against the weights"
