"""Models of the *transformers* library: a folder that its ``save_pretrained`` wrote, or a repository of the hub.

The class is the one that ``config.json`` names, taken from the library itself: code beside a checkpoint is never run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atma_eval import hub
from atma_eval.errors import UserError
from atma_eval.source import device_name, find_device, find_dtype, fitting, share_cpu
from atma_eval.spec import ModelSpec
from atma_eval.tokenizer import JsonTokenizer, Tokenizer, open_tokenizer
from atma_eval.weights import fingerprint, first_line, listing

if TYPE_CHECKING:
    from atma_eval.models.huggingface import HuggingFaceModel

CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the library's names of causal language models end
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
INSTALL_HINT = "pip install 'atma-eval[hf]'"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource:
    """A `ModelSource`. ``config`` is config.json as it stands; ``repository`` is ``None`` for a folder."""

    label: str
    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    repository: hub.Repository | None = None

    @classmethod
    def checked(cls, **fields: Any) -> HuggingFaceSource:
        """A source whose request and config were found to be possible."""
        source = cls(**fields)
        source._check_request()
        source._check_config()
        if source.repository is None and (missing := hub.missing_weights(source.path)):
            binary = ", its .bin files are pickles" if any(source.path.glob("*.bin")) else ""
            raise UserError(f"{source.path} has no {', '.join(missing)}{binary}", hub.SAFETENSORS_HINT)
        return source

    def _check_request(self) -> None:
        if self.spec.q2_floor is not None:
            raise UserError(
                f"--q2-floor {self.spec.q2_floor:g} was asked for, but {self.label} has no polar attention",
                "leave it out, or leave that model out",
            )
        if self.spec.impl == "triton":
            raise UserError(
                f"--impl triton was asked for, but {self.label} is computed by the transformers library",
                "leave it out, or leave that model out",
            )

    def _check_config(self) -> None:
        """Refuse by name what is no causal language model of the library, by config.json alone."""
        config, where = self.config, f"{self.path / 'config.json'}"
        found = config.get("architectures")
        name = found[0] if isinstance(found, list) and len(found) == 1 else None
        if not isinstance(name, str):
            raise UserError(
                f"{where}: architectures is {found!r}, which does not name the class of the model",
                'write the class that it was saved from, such as ["LlamaForCausalLM"]',
            )
        if config.get("is_encoder_decoder") or not name.endswith(CAUSAL):
            raise UserError(
                f"{self.label} is a {name} (model_type {config.get('model_type')}), not a causal language model",
                f"supported: text models of transformers whose class ends with {' or '.join(CAUSAL)}",
            )
        if config.get("quantization_config") is not None:
            raise UserError(
                f"{self.label} is quantised (quantization_config in its config.json), which is not supported",
                "take the repository of its full weights",
            )
        if not isinstance(config.get("vocab_size"), int):
            raise UserError(f"{where}: vocab_size is {config.get('vocab_size')!r}", "allowed: a whole number")
        if importlib.util.find_spec("transformers") is None:
            raise UserError(f"{self.label} needs the transformers library", INSTALL_HINT)
        import transformers

        if name not in dir(transformers):  # asking for the attribute would load torch
            code = "its code lies beside it (auto_map) and is never run" if "auto_map" in config else "see config.json"
            raise UserError(
                f"{self.label} is a {name}, which transformers {transformers.__version__} does not have ({code})",
                "a newer version of transformers may have it",
            )

    @property
    def architecture(self) -> str:
        """Name of the class."""
        return self.config["architectures"][0]

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def training_length(self) -> int | None:
        """The longest sequence the config speaks of."""
        found = (self.config.get(name) for name in LENGTH_FIELDS)
        return next((value for value in found if isinstance(value, int)), None)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one asked for, else the folder's ``tokenizer.json``, without its chat template."""
        if self.spec.tokenizer is not None:
            return fitting(open_tokenizer(self.spec.tokenizer), self.vocab_size)
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{self.label} has no tokenizer.json", "give --tokenizer PATH of the one it was trained with"
            )
        return fitting(JsonTokenizer(path, self.label), self.vocab_size)

    def check_window(self, window: str | int) -> None:
        if window != "train":
            raise UserError(
                f"window {window} was asked for, but {self.label} is run by transformers as its config.json says",
                "leave --window out, or give --window train where the preset sets another",
            )

    def describe(self, window: str | int) -> dict[str, Any]:
        self.check_window(window)
        if self.repository is not None:
            self.repository.fetch_weights()
        weights = [self.path / name for name in hub.weight_files(self.path)]
        for path in weights:
            _check_header(path)
        import torch

        device = find_device(self.spec.device)
        with _own_errors(f"cannot build the model of {self.path}"), torch.device("meta"):
            causal, config = self._class_and_config()
            skeleton = causal(config)
        hashes = [fingerprint(self.path / "config.json"), *sorted(map(fingerprint, weights))]
        return {
            "fingerprint": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
            "path": str(self.path),
            "revision": self.repository.commit if self.repository is not None else None,
            "architecture": self.architecture,
            "num_parameters": sum(p.numel() for p in skeleton.parameters()),
            "training_length": self.training_length,
            # NaN and infinities, which some configs have and JSON has not, as the words they are
            "config": json.loads(json.dumps(self.config), parse_constant=str),
            "trained_window": getattr(config, "sliding_window", None),
            "window": getattr(config, "sliding_window", None),
            "dtype": find_dtype(self.spec.dtype, device),
            "q2_floor": None,
            "device": device.type,
            "device_name": device_name(device),
            "implementations": {"model": "transformers", "attention": _attention(causal)},
            "not_triton_because": "transformers computes it",
        }

    def load(self, window: str | int, details: dict[str, Any]) -> HuggingFaceModel:
        import torch

        from atma_eval.models.huggingface import HuggingFaceModel, check_model

        with _own_errors(f"cannot load {self.label}"):
            causal, config = self._class_and_config()
            loaded, report = causal.from_pretrained(
                self.path,
                config=config,
                dtype=getattr(torch, details["dtype"]),
                attn_implementation=_attention(causal),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            faults = [
                f"{len(report[kind])} {kind.removesuffix('_keys')}: {listing(map(str, report[kind]))}"
                for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
                if report.get(kind)
            ]
            if faults:
                raise UserError(f"the weights of {self.label} do not fit its config.json: " + "; ".join(faults))
            loaded = loaded.to(find_device(self.spec.device)).eval().requires_grad_(False)
        if details["device"] == "cpu":
            share_cpu(details["num_parameters"])
        model = HuggingFaceModel(loaded)
        check_model(model, self.label)
        return model

    def _class_and_config(self) -> tuple[Any, Any]:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        causal = getattr(transformers, self.architecture)
        kind = causal.config_class.model_type
        if kind != self.config["model_type"]:
            where, given = self.path / "config.json", self.config["model_type"]
            raise UserError(f"{where}: model_type is {given!r}, but a {self.architecture} is of {kind!r}")
        return causal, causal.config_class.from_pretrained(self.path, local_files_only=True)


def _attention(causal: Any) -> str:
    """PyTorch's fused attention, where the class can use it: soft caps and sinks, for example, it cannot."""
    return "sdpa" if causal._supports_sdpa else "eager"


def _check_header(path: Path) -> None:
    """A safetensors file whose size fits its header; reads no weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: it is truncated or corrupt ({first_line(error)})", "copy or download it again"
        ) from None


@contextmanager
def _own_errors(what: str) -> Iterator[None]:
    """The library raises every kind of error for a config or weights that do not fit; a user gets one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {first_line(error)}") from None
