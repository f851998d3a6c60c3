"""Checkpoints of the ATMA family: described and loaded strictly, from safetensors or the authors' pickles."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atma_eval.bundled import bundled_models
from atma_eval.errors import UserError
from atma_eval.kernels.choice import Choice, choose
from atma_eval.models.config import AtmaConfig
from atma_eval.source import device_name, find_device, find_dtype, fitting, share_cpu
from atma_eval.spec import ModelSpec
from atma_eval.tokenizer import Tokenizer, open_tokenizer
from atma_eval.weights import check_keys, fingerprint, first_line, read_weights

if TYPE_CHECKING:
    import torch

    from atma_eval.models.atma import Atma

RANDOM_SEED = 0


@dataclass(frozen=True, kw_only=True)
class AtmaSource:
    """A `ModelSource`. ``weights`` is ``None`` for random weights."""

    label: str
    path: Path
    weights: Path | None
    config: AtmaConfig
    spec: ModelSpec

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def training_length(self) -> int | None:
        return self.config.training_length

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one asked for, else the one the config names, else GPT-2's for a folder: the authors ship a stub."""
        name = self.spec.tokenizer or self.config.tokenizer or ("gpt2" if self.weights is not None else "byte")
        return fitting(open_tokenizer(name), self.vocab_size)

    def describe(self, window: str | int) -> dict[str, Any]:
        import torch

        from atma_eval.models.atma import Atma

        device = find_device(self.spec.device)
        dtype = find_dtype(self.spec.dtype, device)
        config = self._windowed(window)
        choice = self._choice(dtype, device)
        try:
            with torch.device("meta"):
                skeleton = Atma(config)
        except (MemoryError, RuntimeError) as error:
            raise UserError(f"cannot build the model of {self.path}: {first_line(error)}", "is it too large?") from None
        if self.weights is None:
            described = json.dumps([dataclasses.asdict(self.config), RANDOM_SEED], sort_keys=True)
            identity = "random-" + hashlib.sha256(described.encode()).hexdigest()[:32]
        else:
            expected = {name: value.shape for name, value in skeleton.state_dict().items()}
            check_keys(read_weights(self.weights), expected, self.weights)
            identity = fingerprint(self.weights)
        return {
            "fingerprint": identity,
            "path": "bundled" if bundled_models().get(self.label) == self.path else str(self.path),
            "revision": None,
            "architecture": self.config.architecture,
            "num_parameters": sum(p.numel() for p in skeleton.parameters()),
            "training_length": self.training_length,
            "config": dataclasses.asdict(self.config),
            "trained_window": self.config.attn_window,
            "window": config.attn_window,
            "dtype": dtype,
            "q2_floor": self.spec.q2_floor,
            "device": device.type,
            "device_name": device_name(device),
            "implementations": _implementations(config, choice),
            "not_triton_because": choice.because,
        }

    def load(self, window: str | int, details: dict[str, Any]) -> Atma:
        import torch

        from atma_eval.models.atma import Atma

        device = find_device(self.spec.device)
        with torch.device("meta"):
            choice = self._choice(details["dtype"], device)
            model = Atma(self._windowed(window), q2_floor=self.spec.q2_floor, choice=choice)
        try:
            if self.weights is None:
                model = model.to_empty(device="cpu").init_weights(RANDOM_SEED)
            else:
                weights = read_weights(self.weights)
                _check_unchanged(self.weights, details["fingerprint"])
                model.load_state_dict(weights, strict=True, assign=True)
            model.cast(getattr(torch, details["dtype"])).to(device).eval().requires_grad_(False)
        except (MemoryError, RuntimeError) as error:
            raise UserError(f"cannot build {self.label}: {first_line(error)}", "is it too large?") from None
        if device.type == "cpu":
            share_cpu(sum(p.numel() for p in model.parameters()))
        return model

    def check_window(self, window: str | int) -> None:
        if isinstance(window, int) and self.config.attn_type == "none":
            raise UserError(
                f"window {window} was asked for, but {self.label} has no attention to apply it to (memory only)",
                "leave --window out, or leave that model out",
            )

    def _windowed(self, window: str | int) -> AtmaConfig:
        """The config with the window that is to be applied."""
        self.check_window(window)
        config = self.config
        if window == "train":
            return config
        return dataclasses.replace(config, attn_window=None if window == "full" else int(window))

    def _choice(self, dtype: str, device: torch.device) -> Choice:
        import torch

        config = self.config
        taps = (config.conv_kernel_size, config.attn_kernel_size)
        return choose(
            self.spec.impl, dtype=getattr(torch, dtype), head_dim=config.head_dim, device=device, num_taps=taps
        )


def _check_unchanged(path: Path, identity: str) -> None:
    """A model may be loaded hours after it was described, and a training run writes its file anew all the time."""
    if fingerprint(path) != identity:
        raise UserError(
            f"{path} was replaced after this command began, so its rows would not be those of one model",
            "rows written so far are safe; to evaluate a training run as it is now, copy its folder",
        )


def _implementations(config: AtmaConfig, choice: Choice) -> dict[str, str]:
    """Which code computes each operation of the model."""
    operations = {"conv"}
    if config.attn_type != "none":
        operations.add("polar" if config.attn_type == "polar" else "softmax")
    if config.mem_enabled:
        operations.add("delta")
    return {operation: choice.describe(operation) for operation in sorted(operations)}
