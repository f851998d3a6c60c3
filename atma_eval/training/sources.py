"""Where the text of a training run comes from: documents, token shards, or a streamed data set. Imports no torch.

Documents are drawn at random and may carry records; shards and streams are read in order, once, then again.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from atma_eval.errors import UserError
from atma_eval.text import Document, open_text, stdlib_training
from atma_eval.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from atma_eval.training.recipe import Recipe, is_shards

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER = 20240520, 1, 256  # int32 words (protocols, section 3)
SCAN_TOKENS = 1 << 24  # of a shard, looked through at once
HASHED_BYTES = 1 << 20  # of the start of each shard, in the data hash


class Source(Protocol):
    """Tokens to train on."""

    def window(self, rng: Generator, length: int, position: int) -> np.ndarray:
        """``length`` ids: from a random place, or those after the first ``position`` of the source."""
        ...

    def describe(self) -> str:
        """One line for the model card: what was read, with a hash."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where a source that must be read from the front has got to; empty for the others."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Corpus:
    """Documents as one run of tokens, each behind the token that starts a document."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer | None = None, name: str = "text"):
        tokenizer = tokenizer or ByteTokenizer()
        self.documents, self.name, self.start_id = documents, name, tokenizer.start_id
        if isinstance(tokenizer, ByteTokenizer):
            arrays = [np.frombuffer(d.data, dtype=np.uint8) for d in documents]
        else:
            arrays = [tokenizer.encode(d.text) for d in documents]
        sizes = np.array([len(a) + 1 for a in arrays])
        self.starts = np.concatenate([[0], sizes.cumsum()[:-1]])
        self.tokens = np.full(sizes.sum(), self.start_id, dtype=np.int32)
        for start, array in zip(self.starts, arrays, strict=True):
            self.tokens[start + 1 : start + 1 + len(array)] = array

    def window(self, rng: Generator, length: int, position: int = 0) -> np.ndarray:
        """From a document's start or from anywhere, running on into the next documents."""
        start = int(rng.choice(self.starts) if rng.random() < 0.5 else rng.integers(len(self.tokens)))
        window = np.take(self.tokens, np.arange(start, start + length), mode="wrap")
        return np.where(np.arange(length) == 0, self.start_id, window)

    def describe(self) -> str:
        digest = hashlib.sha256(b"".join(bytes.fromhex(d.sha256) for d in self.documents)).hexdigest()
        num_bytes = sum(len(d.data) for d in self.documents)
        name = f"the training half of `stdlib` (Python {platform.python_version()})"
        name = name if self.name == "stdlib" else f"`{self.name}`"
        return (
            f"{name}, {len(self.documents):,} documents, {num_bytes:,} bytes; sha256 over the documents' sha256: "
            f"`{digest}`"
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Shards:
    """Files of token ids in the layout of the FineWeb-Edu shards, in the order of their names, as one run."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths
        self.arrays = [_read_shard(path) for path in paths]
        self.ends = np.cumsum([len(a) for a in self.arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _pieces(self, start: int, length: int) -> Iterator[np.ndarray]:
        while length > 0:
            start %= len(self)
            i = int(np.searchsorted(self.ends, start, side="right"))
            inside = start - (int(self.ends[i]) - len(self.arrays[i]))
            piece = self.arrays[i][inside : inside + length]
            yield piece
            start, length = start + len(piece), length - len(piece)

    def window(self, rng: Generator, length: int, position: int) -> np.ndarray:
        return np.concatenate([piece.astype(np.int64) for piece in self._pieces(position, length)])

    def largest(self, num_tokens: int) -> int:
        """The largest id among the first tokens."""
        num_tokens = min(num_tokens, len(self))
        starts = range(0, num_tokens, SCAN_TOKENS)
        parts = (self._pieces(start, min(SCAN_TOKENS, num_tokens - start)) for start in starts)
        return max(int(piece.max()) for pieces in parts for piece in pieces)

    def describe(self) -> str:
        digest = hashlib.sha256()
        for path, array in zip(self.paths, self.arrays, strict=True):
            digest.update(f"{path.name} {len(array)} ".encode() + array[: HASHED_BYTES // array.itemsize].tobytes())
        return (
            f"{len(self.paths):,} token shards, `{self.paths[0].name}` to `{self.paths[-1].name}`, "
            f"{len(self):,} tokens; sha256 over names, counts and first {HASHED_BYTES:,} bytes: `{digest.hexdigest()}`"
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _read_shard(path: Path) -> np.ndarray:
    """The ids of one file, mapped, not read."""
    try:
        header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(header) < SHARD_HEADER or header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        raise UserError(
            f"{path} is no token shard", f"it begins with 256 int32: {SHARD_MAGIC}, {SHARD_VERSION}, number of tokens"
        )
    count, width = int(header[2]), int(header[3]) or 2
    if width not in (2, 4):
        raise UserError(f"{path}: {width} bytes per token", "allowed: 2 (or 0, which means 2) and 4")
    if count < 1 or path.stat().st_size < 4 * SHARD_HEADER + count * width:
        raise UserError(f"{path} is cut short: its header counts {count:,} tokens of {width} bytes")
    return np.memmap(path, dtype=f"<u{width}", mode="r", offset=4 * SHARD_HEADER, shape=(count,))


class Stream:
    """A `datasets` set read row by row as it is needed, tokenised on the way.

    Under data-parallel training every rank reads and tokenises the whole stream and keeps its share.
    """

    def __init__(self, place: Mapping[str, str], tokenizer: Tokenizer):
        self.place, self.tokenizer = place, tokenizer
        self.name = " ".join(place[key] for key in ("dataset", "name") if key in place)
        self.revision = place.get("revision")  # resolved when the first row is read, so that a later one is the same
        self.num_rows, self.position = 0, 0  # rows taken; tokens before the buffer
        self.buffer = np.empty(0, dtype=np.int64)
        self._rows: Iterator[Any] | None = None

    def _open(self) -> Iterator[Any]:
        import datasets

        place = self.place
        try:
            self.revision = _commit_of(place["dataset"], self.revision)
            rows = datasets.load_dataset(
                place["dataset"],
                place.get("name"),
                split=place.get("split", "train"),
                revision=self.revision,
                streaming=True,
            )
            return iter(rows.skip(self.num_rows) if self.num_rows else rows)
        except Exception as error:  # the library lets those of many others through
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> UserError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        offline = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        what = "the Hugging Face hub cannot be reached for" if offline else "cannot read"
        return UserError(
            f"{what} the data set {self.name}: {lines[0]}",
            "check the name and the network (HF_HUB_OFFLINE must not be set), or train on token shards or text files",
        )

    def _document(self) -> np.ndarray:
        """The ids of the next row, behind the start token; from the first row again after the last."""
        column = self.place.get("column", "text")
        for _ in range(2):
            if self._rows is None:
                self._rows = self._open()
            try:
                row = next(self._rows, None)
            except Exception as error:
                raise self._unreachable(error) from None
            if row is None:
                self._rows, self.num_rows = None, 0
                continue
            self.num_rows += 1
            if not isinstance(row.get(column), str):
                raise UserError(f"{self.name} has no text column {column!r}", f"columns: {', '.join(row)}")
            return np.concatenate([[self.tokenizer.start_id], self.tokenizer.encode(row[column])])
        raise UserError(f"the data set {self.name} is empty")

    def window(self, rng: Generator, length: int, position: int) -> np.ndarray:
        if position < self.position:
            raise ValueError(f"a stream is read forwards: at {self.position}, asked for {position}")
        parts = [self.buffer]
        have = self.position + len(self.buffer)
        while have < position + length:
            parts.append(self._document())
            have += len(parts[-1])
        self.buffer = np.concatenate(parts)[position - self.position :]
        self.position = position
        return self.buffer[:length].copy()

    def describe(self) -> str:
        revision = f" at revision `{self.revision}`" if self.revision else ""
        return f"the data set `{self.name}`{revision}, streamed in its order, tokenizer `{self.tokenizer.fingerprint}`"

    def state_dict(self) -> dict[str, Any]:
        own = {"revision": self.revision, "num_rows": self.num_rows, "position": self.position}
        return {**own, "buffer": self.buffer.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.revision = state["revision"]
        self.num_rows, self.position = state["num_rows"], state["position"]
        self.buffer = np.array(state["buffer"], dtype=np.int64)
        self._rows = None


def _commit_of(dataset: str, revision: str | None) -> str | None:
    """The commit of a data set on the hub, so that what was read can be named; ``None`` for one on disk."""
    if Path(dataset).exists():
        return revision
    from huggingface_hub import HfApi

    return HfApi().dataset_info(dataset, revision=revision).sha


def open_source(recipe: Recipe) -> Source:
    """The data of a recipe, looked at before anything is trained: long enough, and ids within the vocabulary."""
    needed = max(stage.length for stage in recipe.stages) + 1
    vocab_size, data = recipe.model.vocab_size, recipe.data
    if isinstance(data, str) and is_shards(data):
        paths = [Path(p) for p in sorted(glob.glob(os.path.expanduser(data)))]
        if not paths:
            raise UserError(f"no token shards at {data!r}", "data takes a glob such as data/fineweb_train_*.bin")
        shards = Shards(paths)
        _long_enough(len(shards), needed, data)
        largest = shards.largest(recipe.num_tokens + 1)
        if largest >= vocab_size:
            raise _mismatch(f"{data} holds the id {largest}", vocab_size)
        return shards
    tokenizer = open_tokenizer(recipe.model.tokenizer or "byte")
    if tokenizer.vocab_size > vocab_size:
        raise _mismatch(f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids", vocab_size)
    if not isinstance(data, str):
        stream = Stream(data, tokenizer)
        stream.window(np.random.default_rng(0), needed, 0)  # a hub out of reach shows here
        return stream
    documents = stdlib_training() if data == "stdlib" else open_text(data).documents
    corpus = Corpus(documents, tokenizer, data)
    _long_enough(len(corpus.tokens), needed, data)
    return corpus


def _long_enough(num_tokens: int, needed: int, data: str) -> None:
    if num_tokens < needed:
        raise UserError(
            f"{data} has {num_tokens:,} tokens, too short for sequences of {needed - 1:,} and a target",
            "give more text, or shorten the stages",
        )


def _mismatch(what: str, vocab_size: int) -> UserError:
    return UserError(
        f"vocabulary mismatch: {what}, and the model's vocab_size is {vocab_size:,}",
        "vocab_size must be larger than every id of the data",
    )
