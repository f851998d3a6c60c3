"""Documents: where background text comes from, as exact bytes with hashes.

Sources, by the value of ``--text``: ``stdlib`` (modules of Python's own standard library, on every machine), a
file, a folder, or a ``.jsonl`` file with a ``text`` field. A document is the unit of everything: a haystack, a
perplexity score, a cluster of the statistics.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atma_eval.bundled import given_path
from atma_eval.errors import UserError

# Held-out documents: modules over 66 KB that CPython 3.11 and later carry whatever its packager left out.
# Every other module of the library is the training half, so the rule needs no list of its own for that.
STDLIB_HELD_OUT = (
    "inspect typing pydoc email/_header_value_parser tarfile doctest unittest/mock urllib/request argparse _pyio "
    "pickletools subprocess difflib logging/__init__ enum mailbox ipaddress asyncio/base_events "
    "xml/etree/ElementTree http/cookiejar"
).split()
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex", ".html", ".text"}


@dataclass(frozen=True)
class Document:
    """One text, as its original UTF-8 bytes."""

    text_id: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def text(self) -> str:
        return self.data.decode("utf-8")


@dataclass(frozen=True)
class TextSource:
    """The documents of one ``--text`` value, in a fixed order."""

    name: str
    documents: tuple[Document, ...]
    details: dict[str, Any]

    def manifest(self, used: list[Document]) -> dict[str, Any]:
        """What a run records: the source, and the hash of every document it uses."""
        documents = [{"text_id": d.text_id, "num_bytes": len(d.data), "sha256": d.sha256} for d in used]
        return {"source": self.name, **self.details, "documents": documents}


def read_document(path: Path, text_id: str) -> Document:
    """A UTF-8 file, byte for byte."""
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x})") from None
    return Document(text_id, data)


def _stdlib_root() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "typing.py").is_file():
        raise UserError(
            f"this Python carries no readable standard library at {root}", "use --text FILE or another Python"
        )
    return root


def stdlib_held_out() -> tuple[Document, ...]:
    """The held-out modules, in the order of `STDLIB_HELD_OUT`; a module this Python lacks is left out."""
    root = _stdlib_root()
    paths = [root / f"{name}.py" for name in STDLIB_HELD_OUT]
    return tuple(read_document(path, f"stdlib/{path.relative_to(root)}") for path in paths if path.is_file())


def stdlib_training() -> tuple[Document, ...]:
    """Every other module of the library, tests apart, sorted by name."""
    root = _stdlib_root()
    held_out = {root / f"{name}.py" for name in STDLIB_HELD_OUT}
    documents = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if path in held_out or NOT_LIBRARY & set(inside.parts) or path.stat().st_size == 0:
            continue
        try:
            documents.append(read_document(path, f"stdlib/{inside}"))
        except UserError:  # a handful of modules are kept in other encodings on purpose
            continue
    return tuple(documents)


def _jsonl(path: Path) -> tuple[Document, ...]:
    documents = []
    seen: set[str] = set()
    # JSON strings may hold other line separators as they are; only a newline ends a row
    for number, line in enumerate(read_document(path, path.name).text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f"{path}, line {number}: no text", 'each line is an object with a string field "text"')
        text_id = str(row["id"]) if row.get("id") is not None else f"{path.stem}/{number}"
        if text_id in seen:
            raise UserError(f"{path}, line {number}: the id {text_id!r} stands on an earlier line too")
        seen.add(text_id)
        try:
            documents.append(Document(text_id, row["text"].encode()))
        except UnicodeEncodeError:
            raise UserError(
                f"{path}, line {number}: the text holds half a surrogate pair, which is not UTF-8"
            ) from None
    return tuple(documents)


def open_text(name: str) -> TextSource:
    """The documents behind a ``--text`` value; raises `UserError` where there is no text."""
    if name == "stdlib":
        return TextSource(name, stdlib_held_out(), {"python": platform.python_version()})
    path = given_path(name)
    if name and path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        documents = tuple(read_document(p, str(p.relative_to(path))) for p in files)
        if not documents:
            raise UserError(f"{name} has no text files", f"files ending in {' '.join(sorted(TEXT_SUFFIXES))} are read")
    elif path.is_file():
        documents = _jsonl(path) if path.suffix in (".jsonl", ".ndjson") else (read_document(path, path.name),)
    else:
        raise UserError(f"no text at {name!r}", "a text is stdlib, a file, a folder, or a .jsonl with a text field")
    documents = tuple(d for d in documents if d.data)
    if not documents:
        raise UserError(f"{name} is empty", "give a text with something in it, or --text stdlib")
    return TextSource(str(path), documents, {})
