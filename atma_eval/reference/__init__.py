"""Published figures of the ATMA study, to stand beside ours. Never paired with them, never tested against them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from atma_eval.metrics import METRICS, Unit, estimate
from atma_eval.stats import Estimate


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published row: a model's figures of one metric by length, in GPT-2 tokens.

    Attributes:
        study: training tokens, ``1B`` or ``10B``.
        attention: ``polar``, ``nope`` (softmax without positions) or ``rope``.
        metric: ``token_accuracy`` (0..1) or ``nll`` (nats per token).
        notes: ids of `notes`, conflicts that bear on the row.
    """

    name: str
    study: str
    attention: str
    memory: bool
    window: bool
    distractor: bool
    metric: str
    values: dict[int, float]
    num_trials: int
    num_documents: int
    source: str
    notes: tuple[str, ...]

    def estimate(self, length: int) -> Estimate | None:
        """The figure with Wilson's interval over trials where it is a share; a loss has no interval."""
        if length not in self.values:
            return None
        num = self.num_trials if self.metric == "token_accuracy" else self.num_documents
        return estimate([Unit(self.values[length], 1.0, self.source, None, num)], METRICS[self.metric])


@cache
def published() -> tuple[Published, ...]:
    """All rows, in the order of tables."""
    text = (files(__package__) / "published.csv").read_text(encoding="utf-8")
    return tuple(
        Published(
            name=row["name"],
            study=row["study"],
            attention=row["attention"],
            memory=row["memory"] == "1",
            window=row["window"] == "1",
            distractor=row["distractor"] == "1",
            metric=row["metric"],
            values={int(name): float(value) for name, value in row.items() if name.isdigit() and value},
            num_trials=int(row["num_trials"]),
            num_documents=int(row["num_documents"]),
            source=row["source"],
            notes=tuple(row["notes"].split()),
        )
        for row in csv.DictReader(text.splitlines())
    )


@cache
def texts() -> dict[str, Any]:
    """What is to be said: ``source``, ``differs``, ``missing`` by metric, ``notes`` by id."""
    return yaml.safe_load((files(__package__) / "notes.yaml").read_text(encoding="utf-8"))


def published_metric(name: str, *, retrieval: bool) -> str | None:
    """The published metric that comes nearest to one of ours; losses are of documents, not of needles."""
    if retrieval:
        return "token_accuracy" if name in ("exact", "first_token", "token_accuracy") else None
    return "nll" if name in ("nll", "perplexity") else None


def rows_like(configs: Iterable[dict[str, Any]], metric: str, *, distractor: bool) -> list[Published]:
    """Published rows of the architectures that these configurations have; without any, all that have no window.

    Runs that differ only in a regulariser stand beside the one they repeat, and both scales are given.
    """
    kinds = {
        (config.get("attn_type"), bool(config.get("mem_enabled")), config.get("attn_window") is not None)
        for config in configs
    }
    rows = [row for row in published() if row.metric == metric and (distractor or not row.distractor)]
    if not kinds:
        return [row for row in rows if not row.window]
    return [row for row in rows if (row.attention, row.memory, row.window) in kinds]
