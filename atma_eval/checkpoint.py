"""Open a model: find it by name, check it without torch, load it strictly, and know it by its fingerprint.

A name is a bundled checkpoint, a folder (ours: ``config.json`` + ``weights.safetensors``; the ATMA authors':
``config.json`` + ``weights.pt``; that of a training run: ``config.json`` + ``last.pt``), or ``random:CONFIG.json``
for random weights of a given shape. Nothing from a checkpoint is executed: safetensors first, and pickles only with
torch's weights-only reader.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atma_eval.bundled import MODEL_ALIASES, bundled_models, bundled_shapes, given_path
from atma_eval.errors import UserError, did_you_mean
from atma_eval.kernels.choice import Choice, choose
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import ModelSpec, check_device
from atma_eval.tokenizer import Tokenizer, open_tokenizer
from atma_eval.weights import FOVEAL_HINT, check_keys, fingerprint, first_line, read_weights

if TYPE_CHECKING:
    import torch

    from atma_eval.models.atma import Atma

RANDOM_SEED = 0
WEIGHT_FILES = ("weights.safetensors", "weights.pt", "last.pt")  # the last: a training run that is under way
SMALL_MODEL = 20_000_000  # parameters
RESTART_FILE = re.compile(r"-step-\d+\.pt$")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model found and checked, not yet loaded. ``weights`` is ``None`` for random weights."""

    label: str
    path: Path
    weights: Path | None
    config: AtmaConfig
    spec: ModelSpec

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
        if not path.is_file():
            allowed = did_you_mean(shape, bundled_shapes())
            raise UserError(f"no configuration {shape!r} for random weights", f"{allowed}; or a path to a config.json")
        config = _read_config(path)
        label, weights = f"random:{path.stem}", None
    else:
        path, label = _find_folder(name)
        config = _read_config(path / "config.json")
        weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
        if weights is None:
            _refuse_restart_folder(path)
            raise UserError(f"{path} has no weights", "expected weights.safetensors, or the authors' weights.pt")
    return ModelSource(label=label, path=path, weights=weights, config=config, spec=spec)


def _find_folder(name: str) -> tuple[Path, str]:
    bundled = bundled_models()
    name = MODEL_ALIASES.get(name, name)
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


def describe_model(source: ModelSource, window: str | int) -> dict[str, Any]:
    """What the manifest says of a model: found out, and its weight file checked, without loading it.

    ``window`` is ``train``, ``full`` or a number of keys.
    """
    import torch

    from atma_eval.models.atma import Atma

    device = _device(source.spec.device)
    dtype = source.spec.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    config = _windowed(source, window)
    choice = _choice(source, dtype, device)
    try:
        with torch.device("meta"):
            skeleton = Atma(config)
    except (MemoryError, RuntimeError) as error:
        raise UserError(f"cannot build the model of {source.path}: {first_line(error)}", "is it too large?") from None
    if source.weights is None:
        described = json.dumps([dataclasses.asdict(source.config), RANDOM_SEED], sort_keys=True)
        identity = "random-" + hashlib.sha256(described.encode()).hexdigest()[:32]
    else:
        expected = {name: value.shape for name, value in skeleton.state_dict().items()}
        check_keys(read_weights(source.weights), expected, source.weights)
        identity = fingerprint(source.weights)
    return {
        "fingerprint": identity,
        "path": "bundled" if bundled_models().get(source.label) == source.path else str(source.path),
        "architecture": source.config.architecture,
        "num_parameters": sum(p.numel() for p in skeleton.parameters()),
        "config": dataclasses.asdict(source.config),
        "trained_window": source.config.attn_window,
        "window": config.attn_window,
        "dtype": dtype,
        "q2_floor": source.spec.q2_floor,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "implementations": _implementations(config, choice),
        "not_triton_because": choice.because,
    }


def load_model(source: ModelSource, window: str | int, details: dict[str, Any] | None = None) -> LoadedModel:
    """Load weights strictly and place them; ``details`` are those of `describe_model`, where they are known."""
    import torch

    from atma_eval.models.atma import Atma

    details = details or describe_model(source, window)
    device = _device(source.spec.device)
    with torch.device("meta"):
        choice = _choice(source, details["dtype"], device)
        model = Atma(_windowed(source, window), q2_floor=source.spec.q2_floor, choice=choice)
    if source.weights is None:
        try:
            model = model.to_empty(device="cpu").init_weights(RANDOM_SEED)
        except (MemoryError, RuntimeError) as error:
            raise UserError(f"cannot build {source.label}: {first_line(error)}", "is it too large?") from None
    else:
        model.load_state_dict(read_weights(source.weights), strict=True, assign=True)
    model.cast(getattr(torch, details["dtype"])).to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        _share_cpu(model)
    return LoadedModel(label=source.label, model=model, details=details)


def _windowed(source: ModelSource, window: str | int) -> AtmaConfig:
    """The config with the window that is to be applied."""
    config = source.config
    if isinstance(window, int) and config.attn_type == "none":
        raise UserError(
            f"window {window} was asked for, but {source.label} has no attention to apply it to (memory only)",
            "leave --window out, or leave that model out",
        )
    if window == "train":
        return config
    return dataclasses.replace(config, attn_window=None if window == "full" else int(window))


def _choice(source: ModelSource, dtype: str, device: torch.device) -> Choice:
    import torch

    config = source.config
    taps = (config.conv_kernel_size, config.attn_kernel_size)
    return choose(source.spec.impl, dtype=getattr(torch, dtype), head_dim=config.head_dim, device=device, num_taps=taps)


def _implementations(config: AtmaConfig, choice: Choice) -> dict[str, str]:
    """Which code computes each operation of the model."""
    operations = {"conv"}
    if config.attn_type != "none":
        operations.add("polar" if config.attn_type == "polar" else "softmax")
    if config.mem_enabled:
        operations.add("delta")
    return {operation: choice.describe(operation) for operation in sorted(operations)}


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
