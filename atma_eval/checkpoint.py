"""Open a model: find it by name, check it without torch, load it strictly, and know it by its fingerprint.

A name is a bundled checkpoint, a folder (ours: ``config.json`` + ``weights.safetensors``; the ATMA authors':
``config.json`` + ``weights.pt``), or ``random:CONFIG.json`` for random weights of a given shape. Nothing from a
checkpoint is executed: safetensors first, and pickles only with torch's weights-only reader.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pickletools
import platform
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atma_eval.bundled import bundled_models, bundled_shapes, given_path
from atma_eval.errors import UserError, did_you_mean
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import ModelSpec, check_device
from atma_eval.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    import torch

    from atma_eval.models.atma import Atma

RANDOM_SEED = 0
MAX_LISTED_KEYS = 12
SMALL_MODEL = 20_000_000  # parameters
RESTART_FILE = re.compile(r"-step-\d+\.pt$")
FOVEAL_HINT = (
    "it is a Foveal continual-pretraining restart file, whose attention sits under attn.base; "
    "export the plain model from it first"
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model found and checked, not yet loaded. ``weights`` is ``None`` for random weights."""

    label: str
    path: Path
    weights: Path | None
    config: AtmaConfig
    spec: ModelSpec

    @property
    def architecture(self) -> str:
        if self.config.attn_type == "none":
            return "memory only"
        return self.config.attn_type + (" + memory" if self.config.mem_enabled else "")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one asked for, else the one the config names, else GPT-2's for a folder: the authors ship a stub."""
        name = self.spec.tokenizer or self.config.tokenizer or ("gpt2" if self.weights is not None else "byte")
        tokenizer = open_tokenizer(name)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(
                f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} tokens, the model {self.config.vocab_size}",
                "give the tokenizer the model was trained with by --tokenizer",
            )
        return tokenizer


def find_model(spec: ModelSpec) -> ModelSource:
    """Resolve a ``--model`` value; raises `UserError` before anything heavy is imported."""
    name = spec.name
    check_device(spec.device)
    if name.startswith("random:"):
        shape = name.removeprefix("random:")
        path = bundled_shapes().get(shape) or given_path(shape)
        config = _read_config(path)
        label, weights = f"random:{path.stem}", None
    else:
        path, label = _find_folder(name)
        config = _read_config(path / "config.json")
        weights = next((path / n for n in ("weights.safetensors", "weights.pt") if (path / n).is_file()), None)
        if weights is None:
            _refuse_restart_folder(path)
            raise UserError(f"{path} has no weights", "expected weights.safetensors, or the authors' weights.pt")
    return ModelSource(label=label, path=path, weights=weights, config=config, spec=spec)


def _find_folder(name: str) -> tuple[Path, str]:
    bundled = bundled_models()
    if name in bundled:
        return bundled[name], name
    if name.startswith("hf:"):
        raise UserError(
            f"cannot load {name}: Hugging Face models are not supported by this version",
            "download an ATMA checkpoint folder and give its path",
        )
    path = given_path(name)
    if path.is_file():
        if RESTART_FILE.search(path.name):
            raise UserError(f"{path} cannot be evaluated", FOVEAL_HINT)
        raise UserError(f"{path} is a file", "--model takes the folder that holds config.json and the weights")
    if not name or not path.is_dir():
        raise UserError(f"unknown model {name!r}", did_you_mean(name, bundled) + "; or a folder, or random:CONFIG.json")
    if not (path / "config.json").is_file():
        _refuse_restart_folder(path)
        raise UserError(f"{path} has no config.json", "a checkpoint folder holds config.json and the weights")
    return path, path.resolve().name


def _refuse_restart_folder(path: Path) -> None:
    restart = next((p for p in sorted(path.iterdir()) if RESTART_FILE.search(p.name)), None)
    if restart is not None:
        raise UserError(f"{restart} cannot be evaluated", FOVEAL_HINT)


def _read_config(path: Path) -> AtmaConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no object of fields")
    return AtmaConfig.from_dict(values, str(path))


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what the manifest says of it."""

    label: str
    model: Atma
    details: dict[str, Any]


def load_model(source: ModelSource, window: str | int) -> LoadedModel:
    """Load weights strictly and place them. ``window`` is ``train``, ``full`` or a number of keys."""
    import torch

    from atma_eval.models.atma import Atma

    device = _device(source.spec.device)
    name = source.spec.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, name)
    trained = source.config.attn_window
    applied = trained if window == "train" else None if window == "full" else int(window)
    if source.config.attn_type == "none":
        applied = None  # memory alone has no keys to look at through a window
    config = dataclasses.replace(source.config, attn_window=applied)
    try:
        with torch.device("meta"):
            model = Atma(config, q2_floor=source.spec.q2_floor)
        if source.weights is None:
            model = model.to_empty(device="cpu").init_weights(RANDOM_SEED)
    except (MemoryError, RuntimeError) as error:
        raise UserError(f"cannot build the model of {source.path}: {_first_line(error)}", "is it too large?") from None
    if source.weights is None:
        described = json.dumps([dataclasses.asdict(source.config), RANDOM_SEED], sort_keys=True)
        fingerprint = "random-" + hashlib.sha256(described.encode()).hexdigest()[:32]
    else:
        fingerprint = _fingerprint(source.weights)
        weights = _read_weights(source.weights)
        _check_keys(weights, {k: v.shape for k, v in model.state_dict().items()}, source.weights)
        model.load_state_dict(weights, strict=True, assign=True)
    model.cast(dtype).to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        _share_cpu(model)
    return LoadedModel(
        label=source.label,
        model=model,
        details={
            "fingerprint": fingerprint,
            "path": str(source.path),
            "architecture": source.architecture,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "config": dataclasses.asdict(source.config),
            "trained_window": trained,
            "window": applied,
            "dtype": name,
            "q2_floor": source.spec.q2_floor,
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "implementations": _implementations(config),
        },
    )


def _implementations(config: AtmaConfig) -> dict[str, str]:
    """Which code computes each operation of the model."""
    operations = {"conv"}
    if config.attn_type != "none":
        operations.add("polar" if config.attn_type == "polar" else "softmax")
    if config.mem_enabled:
        operations.add("delta")
    return dict.fromkeys(sorted(operations), "torch")


@functools.cache
def _num_threads() -> int:
    import torch

    return torch.get_num_threads()  # as the machine or OMP_NUM_THREADS has it, before anything is changed


def _share_cpu(model: Atma) -> None:
    """Attention blocks on all threads; single operations of a small model are too short to share."""
    import torch

    from atma_eval.kernels.tiles import use_workers

    use_workers(_num_threads())
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    torch.set_num_threads(1 if small else _num_threads())


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} was asked for; torch sees {torch.cuda.device_count()} GPUs", "use --device cpu")
    return device


def _fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _read_weights(path: Path) -> dict[str, Any]:
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
        raise UserError(f"{path} cannot be read: it is truncated or corrupt ({error})") from None


def _read_pickle(path: Path) -> dict[Any, Any]:
    import torch

    _refuse_restart_file(path)
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises several kinds for damaged or unsafe pickles
        raise UserError(
            f"{path} cannot be read with the weights-only loader: {_first_line(error)}", "is the file complete?"
        ) from None
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        values = values["model"]
    if not isinstance(values, dict) or not all(isinstance(v, torch.Tensor) for v in values.values()):
        raise UserError(f"{path} holds no state dict", "expected name -> tensor, or that under the key model")
    return values


def _first_line(error: Exception) -> str:
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


def _check_keys(weights: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Every key must be there, none else, each of the right shape; all faults in one error."""
    faults = []
    for title, keys in (
        ("missing", expected.keys() - weights.keys()),
        ("unexpected", weights.keys() - expected.keys()),
    ):
        if keys:
            faults.append(f"{len(keys)} {title}: {_listing(keys)}")
    wrong = {
        f"{key} is {list(weights[key].shape)}, not {list(shape)}"
        for key, shape in expected.items()
        if key in weights and weights[key].shape != shape
    }
    coded = {
        f"{key} is {weights[key].dtype}" for key in expected if key in weights and not weights[key].is_floating_point()
    }
    if coded:
        faults.append(f"{len(coded)} not of floating point: {_listing(coded)}")
    if wrong:
        faults.append(f"{len(wrong)} of another shape: {_listing(wrong)}")
    if faults:
        raise UserError(f"{path} does not fit its config.json: " + "; ".join(faults), _family_hint(weights))


def _listing(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f", and {len(names) - MAX_LISTED_KEYS} more" if len(names) > MAX_LISTED_KEYS else ""
    return ", ".join(names[:MAX_LISTED_KEYS]) + more


def _family_hint(weights: dict[str, Any]) -> str:
    keys = list(weights)
    if any("attn.base." in key for key in keys):
        return FOVEAL_HINT
    if any(key.endswith(("A_log", "dt_bias", "r_proj.weight")) for key in keys):
        return "these keys belong to a Raven checkpoint, a separate model family that is not supported"
    return "check attn_type, mem_enabled and the sizes in config.json against the weights"
