"""Open a model: find it by name, check it without torch, load it strictly, and know it by its fingerprint.

A name is a bundled checkpoint; a folder (ours: ``config.json`` + ``weights.safetensors``; the ATMA authors':
``config.json`` + ``weights.pt``; that of a training run: ``config.json`` + ``last.pt``; one of the transformers
library); ``hf:owner/name[@revision]`` for one of the Hugging Face hub; or ``random:CONFIG.json`` for random weights of
a given shape. Nothing from a checkpoint is executed: safetensors first, and the ATMA authors' pickles only with torch's
weights-only reader.

This module finds; how a family is described and loaded stands in `checkpoint_atma` and `checkpoint_huggingface`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from atma_eval import hub
from atma_eval.bundled import MODEL_ALIASES, bundled_models, bundled_shapes, given_path
from atma_eval.checkpoint_atma import AtmaSource
from atma_eval.checkpoint_huggingface import HuggingFaceSource
from atma_eval.errors import UserError, did_you_mean
from atma_eval.models.config import AtmaConfig
from atma_eval.source import LoadedModel, ModelSource
from atma_eval.spec import ModelSpec, check_device
from atma_eval.weights import FOVEAL_HINT

WEIGHT_FILES = ("weights.safetensors", "weights.pt", "last.pt")  # the last: a training run that is under way
RESTART_FILE = re.compile(r"-step-\d+\.pt$")
HUGGING_FACE_FIELD = "model_type"  # in every config.json that transformers writes, in none of ATMA's


def find_model(spec: ModelSpec) -> ModelSource:
    """Resolve a ``--model`` value; raises `UserError` before anything heavy is imported."""
    name = spec.name
    check_device(spec.device)
    if name.startswith(hub.PREFIX):
        repository = hub.find_repository(name, with_tokenizer=spec.tokenizer is None)
        config = _read_config(repository.folder / "config.json")
        return HuggingFaceSource.checked(
            label=name, path=repository.folder, config=config, spec=spec, repository=repository
        )
    if name.startswith("random:"):
        shape = name.removeprefix("random:")
        path = bundled_shapes().get(shape) or given_path(shape)
        if not path.is_file():
            allowed = did_you_mean(shape, bundled_shapes())
            raise UserError(f"no configuration {shape!r} for random weights", f"{allowed}; or a path to a config.json")
        atma = AtmaConfig.from_dict(_read_config(path), str(path))
        return AtmaSource(label=f"random:{path.stem}", path=path, weights=None, config=atma, spec=spec)
    path, label = _find_folder(name)
    config = _read_config(path / "config.json")
    if HUGGING_FACE_FIELD in config:
        return HuggingFaceSource.checked(label=label, path=path, config=config, spec=spec)
    atma = AtmaConfig.from_dict(config, str(path / "config.json"))
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        _refuse_restart_folder(path)
        raise UserError(f"{path} has no weights", "expected weights.safetensors, or the authors' weights.pt")
    return AtmaSource(label=label, path=path, weights=weights, config=atma, spec=spec)


def load_model(source: ModelSource, window: str | int, details: dict[str, Any] | None = None) -> LoadedModel:
    """Load weights strictly and place them; ``details`` are those of `ModelSource.describe`, if known."""
    details = details or source.describe(window)
    return LoadedModel(label=source.label, model=source.load(window, details), details=details)


def _find_folder(name: str) -> tuple[Path, str]:
    bundled = bundled_models()
    name = MODEL_ALIASES.get(name, name)
    if name in bundled:
        return bundled[name], name
    path = given_path(name)
    if path.is_file():
        if RESTART_FILE.search(path.name):
            raise UserError(f"{path} cannot be evaluated", FOVEAL_HINT)
        if path.suffix == ".gguf":
            raise UserError(f"{path} is a GGUF file, which is not supported", hub.SAFETENSORS_HINT)
        raise UserError(f"{path} is a file", "--model takes the folder that holds config.json and the weights")
    if not name or not path.is_dir():
        raise UserError(
            f"unknown model {name!r}",
            did_you_mean(name, bundled) + "; or a folder, hf:owner/name, or random:CONFIG.json",
        )
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} holds an adapter, not a model", "merge it into its base model and save that")
    if not (path / "config.json").is_file():
        _refuse_restart_folder(path)
        if any(path.glob("*.gguf")):
            raise UserError(f"{path} holds GGUF files, which are not supported", hub.SAFETENSORS_HINT)
        raise UserError(
            f"{path} has no config.json",
            "a folder holds config.json and the weights; a training run writes both with its first checkpoint",
        )
    return path, path.resolve().name


def _refuse_restart_folder(path: Path) -> None:
    restart = next((p for p in sorted(path.iterdir()) if RESTART_FILE.search(p.name)), None)
    if restart is not None:
        raise UserError(f"{restart} cannot be evaluated", FOVEAL_HINT)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no object of fields")
    return values
