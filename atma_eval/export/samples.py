"""What the sample formats share: when a run was made, and token ids as text."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from atma_eval.runs import ModelRows, Run


def run_time(run: Run) -> datetime.datetime:
    """When rows were last added, so that two exports of one run are equal: by the manifest, else by the file."""
    for name in ("updated", "created"):
        try:
            return datetime.datetime.fromisoformat(run.manifest[name]).astimezone(datetime.UTC)
        except (KeyError, TypeError, ValueError):
            continue
    seconds = (run.path / "records.jsonl").stat().st_mtime
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def last_invocation(run: Run) -> dict[str, Any]:
    invocations = run.manifest.get("invocations")
    last = invocations[-1] if isinstance(invocations, list) and invocations else None
    return last if isinstance(last, dict) else {}


def tokens_text(ids: Sequence[int] | None, tokenizer: str | None) -> str:
    """Token ids as text where they are bytes; otherwise the ids, separated by spaces. Rows hold no other text."""
    ids = list(ids or [])
    if tokenizer == "byte" and all(0 <= i < 256 for i in ids):
        return bytes(ids).decode("utf-8", errors="backslashreplace")
    return " ".join(str(i) for i in ids)


def source_of(model: ModelRows, task: str) -> str:
    """The text a task was built from: what the manifest calls it, else the documents' common name in the rows."""
    text = model.asked(task).get("text")
    if isinstance(text, dict) and isinstance(text.get("source"), str):
        return text["source"]
    names = {row["text_id"] for row in model.rows if row["task"] == task}
    return names.pop() if len(names) == 1 else f"{len(names)} documents"


def safe_name(name: str) -> str:
    """As a file name that every system takes; a long one is cut, and a hash keeps it apart from its like."""
    safe = re.sub(r'[<>:"/\\|?*\[\]\x00-\x1f]+', "__", name).rstrip(". ") or "_"
    if len(safe.encode()) <= 100 and safe.lower() not in ("data", ".", ".."):
        return safe
    return safe.encode()[:80].decode(errors="ignore") + "-" + sha256(name)[:8]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
