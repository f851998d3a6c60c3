"""Finding logs and reading what is in them: blocks of a log, JSON of a matrix. Errors name file and line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atma_eval.bundled import given_path
from atma_eval.errors import UserError

_MARKER = re.compile(r"===([A-Z0-9_]+)===")
_ATTEMPT = re.compile(r"\.attempt-(\d+)")
# /home/name, /Users/name, /root and C:\Users\name say who somebody is, and nothing of a measurement
_HOME = re.compile(r"(?:[A-Za-z]:)?(?:[/\\](?:home|Users)[/\\][^/\\\s\"']+|/root(?=[/\s\"']|$))")


def mask(text: str) -> str:
    """The text without names of home folders."""
    return _HOME.sub("~", text)


@dataclass(frozen=True)
class Block:
    """One JSON value of a log and the line it stands on."""

    name: str
    line: int
    value: Any


@dataclass(frozen=True)
class LogFile:
    """A file to import; ``asked`` where the user named it himself, rather than a folder it lies in."""

    path: Path
    asked: bool

    @property
    def label(self) -> str:
        """Folder and name: enough to find it again, and no home folder."""
        parts = self.path.resolve().parts
        return mask("/".join(parts[-2:]) if len(parts) > 2 else self.path.name)


def find_logs(names: Sequence[str | Path]) -> tuple[list[LogFile], Counter[str]]:
    """Files to read, logs before JSON, and how many were left out, by reason.

    Folders stand for all ``.log`` and ``.json`` files below them. Left out are console logs, smoke logs, and all but
    the newest attempt of a log: the plain name where there is one, else the highest ``.attempt-N``.
    """
    found: dict[Path, LogFile] = {}
    for name in names:
        path = given_path(str(name))
        if path.is_dir():
            inside = sorted(p for pattern in ("*.log", "*.log.attempt-*", "*.json") for p in path.rglob(pattern))
            if not inside:
                raise UserError(f"{path} holds no .log and no .json file", "give logs, or a folder of them")
            for p in inside:
                found.setdefault(p.resolve(), LogFile(p, asked=False))
        elif path.is_file():
            found[path.resolve()] = LogFile(path, asked=True)
        else:
            raise UserError(f"no log at {name}", "give a .log or .json file, or a folder of them")
    left_out: Counter[str] = Counter()
    attempts: dict[Path, list[tuple[float, LogFile]]] = defaultdict(list)
    for file in found.values():
        name = file.path.name
        if ".console.log" in name:
            left_out["console logs"] += 1
        elif is_smoke(name):
            left_out["smoke logs"] += 1
        else:
            attempt = _ATTEMPT.search(name)
            base = file.path.resolve().with_name(_ATTEMPT.sub("", name))
            attempts[base].append((float(attempt[1]) if attempt else float("inf"), file))
    newest = []
    for same in attempts.values():
        newest.append(max(same, key=lambda pair: pair[0])[1])
        if len(same) > 1:
            left_out["superseded attempts"] += len(same) - 1
    # A log says more than the matrix gathered from it, and of a figure given twice the first is kept.
    return sorted(newest, key=lambda file: file.path.suffix == ".json"), left_out


def is_smoke(source: str) -> bool:
    """Whether a log is one of the short gates that precede a run; they rest on two samples."""
    return re.split(r"[/\\]", source)[-1].startswith("smoke_")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path, text: str) -> Any:
    """The JSON of a whole file; NaN and Infinity are read, as Python writes them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}: not JSON ({error.msg})", "the file was cut or edited: fetch it again"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deep", "it is of another kind: leave it out") from None


def read_blocks(path: Path, text: str) -> list[Block]:
    """Blocks of a log in order: a line ``===NAME===``, a line of JSON, a line ``===END===``."""
    lines = text.splitlines()
    blocks = []
    for i, line in enumerate(lines):
        marker = _MARKER.fullmatch(line.strip())
        if not marker or marker[1] == "END" or not marker[1].endswith("_JSON"):
            continue
        content = lines[i + 1] if i + 1 < len(lines) else ""
        try:
            blocks.append(Block(marker[1], i + 2, json.loads(content)))
        except (json.JSONDecodeError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            raise UserError(
                f"{path}, line {i + 2}: the block {marker[1]} is not JSON ({reason})",
                "the log was cut or edited: fetch it again, or leave it out",
            ) from None
    return blocks


def expect_dict(value: Any, what: str) -> dict[str, Any]:
    """``value`` as an object; ``None`` is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{what} is {short(value)}, not an object", "the file was edited: fetch it again")
    return value


def expect_list(value: Any, what: str) -> list[Any]:
    """``value`` as a list; ``None`` is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{what} is {short(value)}, not a list", "the file was edited: fetch it again")
    return value


def expect_number(value: Any, what: str) -> float | None:
    """``value`` as a number, NaN included; ``None`` stays."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{what} is {short(value)}, not a number or null", "the file was edited: fetch it again")
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def expect_count(value: Any, what: str) -> int | None:
    """``value`` as a whole number, 0 or more; ``None`` stays."""
    number = expect_number(value, what)
    if number is None:
        return None
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise UserError(f"{what} is {short(value)}, not a count", "the file was edited: fetch it again")
    return int(number)


def expect_share(value: Any, what: str) -> float | None:
    """A percentage as a share; ``None`` and NaN are none."""
    number = expect_number(value, what)
    if number is None or math.isnan(number):
        return None
    if not 0 <= number <= 100 + 1e-3:
        raise UserError(f"{what} is {short(value)}, not a percentage", "the file was edited: fetch it again")
    return number / 100


def expect_length(label: Any, what: str) -> int:
    """A length as the authors label it: ``2048``, ``2k``, ``1m``; k is 1,024."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", str(label))
    if not match or int(match[1]) < 1:
        raise UserError(f"{what}: {short(label)} is not a length", "allowed: a number of tokens, 2k, 1m")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
