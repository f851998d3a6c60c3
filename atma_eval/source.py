"""What every family of models offers the rest of the program, and what all of them share: devices, types, threads."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atma_eval.errors import UserError
from atma_eval.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from atma_eval.session import LanguageModel

SMALL_MODEL = 20_000_000  # parameters


class ModelSource(Protocol):
    """A model found and checked without torch, not yet loaded."""

    @property
    def label(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def training_length(self) -> int | None: ...

    def check_window(self, window: str | int) -> None:
        """Raise `UserError` for a window that the model cannot be given."""
        ...

    def describe(self, window: str | int) -> dict[str, Any]:
        """What the manifest says of the model: found out, and its weight files checked, without loading it.

        ``window`` is ``train``, ``full`` or a number of keys.
        """
        ...

    def load(self, window: str | int, details: dict[str, Any]) -> LanguageModel:
        """The model on its device, ready to run, as ``details`` of `describe` have it."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what the manifest says of it."""

    label: str
    model: Any  # a LanguageModel
    details: dict[str, Any]


def fitting(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer itself, where a model of ``vocab_size`` knows all its ids."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            "give the tokenizer the model was trained with by --tokenizer",
        )
    return tokenizer


def find_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name} was asked for; torch sees {torch.cuda.device_count()} GPUs", "use --device cpu")
    return device


def find_dtype(name: str, device: torch.device) -> str:
    """``auto`` is fp32 on a CPU, where it is the fast type, and bf16 on a GPU."""
    if name != "auto":
        return name
    return "float32" if device.type == "cpu" else "bfloat16"


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


@functools.cache
def _num_threads() -> int:
    import torch

    return torch.get_num_threads()  # as the machine or OMP_NUM_THREADS has it, before anything is changed


def share_cpu(num_parameters: int) -> None:
    """Attention blocks on all threads; single operations of a small model are too short to share."""
    import torch

    from atma_eval.kernels.tiles import use_workers

    use_workers(_num_threads())
    torch.set_num_threads(1 if num_parameters < SMALL_MODEL else _num_threads())
