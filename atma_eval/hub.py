"""Models of the Hugging Face hub: from its local cache where that has them, else downloaded into it.

Only what an evaluation reads is fetched: config, tokenizer, and safetensors weights. A small request with a short limit
goes first, so that a hub that cannot be reached is an error after seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from atma_eval.errors import UserError

PREFIX = "hf:"
TIMEOUT_S = 5
CONFIG, TOKENIZER_FILES = "config.json", ("tokenizer.json", "tokenizer_config.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME_HINT = "write hf:owner/name or hf:owner/name@revision"
SAFETENSORS_HINT = "only safetensors weights are read; save them once by transformers' save_pretrained"
_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at one commit, and the folder of the cache that holds its files."""

    name: str
    commit: str
    folder: Path

    def fetch_weights(self) -> None:
        """Download what is missing of the weights of this commit; raises `UserError` where it cannot."""
        if not missing_weights(self.folder):
            return
        files = _files(self.name, self.commit)
        _refuse_formats(PREFIX + self.name, files)
        if WEIGHTS not in files:
            _download(self.name, self.commit, INDEX)
        for file in missing_weights(self.folder):
            _download(self.name, self.commit, file)


def find_repository(name: str, *, with_tokenizer: bool = True) -> Repository:
    """Resolve ``hf:owner/name[@revision]`` to a commit, with its config and tokenizer at hand, weights not yet."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"bad model {name!r}", NAME_HINT)
    repository, revision = match["repository"], match["revision"] or "main"
    files = (CONFIG, *TOKENIZER_FILES) if with_tokenizer else (CONFIG,)
    try:
        folder = _cached(repository, revision, files)
    except ValueError as error:  # names that the hub does not allow, such as two dots in a row
        raise UserError(f"bad model {name!r}: {' '.join(str(error).split())}", NAME_HINT) from None
    if folder is None:
        _refuse_formats(name, _files(repository, revision))
        # By the name of the revision, so that the cache knows it later; the rest by the commit it stands for.
        folder = Path(_download(repository, revision, CONFIG)).parent
        for file in files[1:]:
            _download(repository, folder.name, file)
    return Repository(name=repository, commit=folder.name, folder=folder)


def _cached(repository: str, revision: str, files: tuple[str, ...]) -> Path | None:
    """The folder of the cache that holds ``files``, or knows of those it does not hold that there are none."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(repository, file, revision=revision) for file in files]
    return Path(found[0]).parent if isinstance(found[0], str) and None not in found else None


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that transformers reads: the only one, or those of an index; maybe none.

    The only one goes first there: saving a model once more leaves the index of earlier shards behind.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is damaged", "copy or download it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index} names {name!r}, which is no safetensors file beside it")
    return names


def missing_weights(folder: Path) -> list[str]:
    """Which weight files are not in the folder; `WEIGHTS` where it does not say what there should be."""
    return [name for name in weight_files(folder) or [WEIGHTS] if not (folder / name).is_file()]


def _refuse_formats(name: str, files: list[str]) -> None:
    """Repositories that could never be evaluated, by the names of their files."""
    kinds = sorted({Path(file).suffix for file in files} & {".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack"})
    others = f"; it has {', '.join(kinds)}" if kinds else ""
    if CONFIG not in files:
        raise UserError(f"cannot load {name}: the repository has no config.json{others}", SAFETENSORS_HINT)
    if WEIGHTS not in files and INDEX not in files:
        raise UserError(f"cannot load {name}: the repository has no model.safetensors{others}", SAFETENSORS_HINT)


def _files(repository: str, revision: str) -> list[str]:
    """Names of the files the hub has. The first request of all, with a short limit."""
    from huggingface_hub import HfApi

    request = partial(HfApi().model_info, repository, revision=revision, timeout=TIMEOUT_S)
    return [sibling.rfilename for sibling in _asked(repository, revision, request).siblings or []]


def _download(repository: str, revision: str, file: str) -> str:
    """Fetch a file into the cache and return its path; one that the repository lacks is noted there, and is ``""``."""
    from huggingface_hub import errors, hf_hub_download

    def request() -> str:
        try:
            return hf_hub_download(repository, file, revision=revision)
        except errors.RemoteEntryNotFoundError:
            return ""

    return _asked(repository, revision, request)


def _asked(repository: str, revision: str, request: Callable[[], Result]) -> Result:
    """A request to the hub, whose failures become short errors."""
    from huggingface_hub import errors

    copy = "give the folder of a local copy"
    try:
        return request()
    except errors.GatedRepoError:
        reason, hint = "its owner must grant access first", f"ask on its page and run `hf auth login`, or {copy}"
    except errors.RevisionNotFoundError:
        reason, hint = f"it has no revision {revision!r}", "give a branch, a tag or a full commit hash after the @"
    except errors.RepositoryNotFoundError:
        reason, hint = "the hub has no such model, or it is private", f"check the name, or {copy}"
    except errors.OfflineModeIsEnabled:
        reason, hint = "it is not whole in the local cache, and HF_HUB_OFFLINE is set", f"unset it, or {copy}"
    except Exception as error:  # no network, a proxy, a full disk: the library and its client raise many kinds
        reason = " ".join(f"a request to the hub failed ({type(error).__name__}: {error}".split())[:200] + ")"
        hint = f"it is not whole in the local cache either; {copy}"
    raise UserError(f"cannot load {PREFIX}{repository}@{revision}: {reason}", hint)
