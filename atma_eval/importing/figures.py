"""One published figure, and how it becomes a row: the mean of trials that nobody kept apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atma_eval.records import FIELDS, SCHEMA

# Protocols of the authors' own code; none is one of ours, so that no figure pairs with a row of ours.
NEEDLE, RETRIEVAL, LONGDOC = "authors-induction", "teacher-forced-needle-v2", "fixed-target-v1"
LOSSES = {  # the authors' key -> task and protocol
    "clean": ("perplexity", "authors-prefix-loss"),
    "junk": ("perplexity-junk", "authors-junk-loss"),
}
JUNK_TEXT = "kjj0/finewebedu10B-gpt2"
UNKNOWN_TEXT = "unknown"
VALUE_DIGITS = 5
# A share counts as k/n if n times it is this near to a whole k: float32 noise, or two decimals of a percentage.
COUNT_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One cell of a log.

    Attributes:
        num_trials: trials or documents the mean rests on.
        num_targets: tokens scored over all of them.
        nll: nats per target; ``None`` where the cell failed, and ``status`` says how.
        bits_per_byte: where the log has it without the number of bytes.
        accuracy: share of targets that were right, as the log has it.
        num_exact: trials of which every target was right.
    """

    task: str
    protocol: str
    length: int
    text_id: str
    num_trials: int
    num_targets: int
    nll: float | None
    control: str = "none"
    gap: int | None = None
    depth: float | None = None
    context_tokens: int | None = None
    seed: int | None = None
    num_bytes: int | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    num_exact: int | None = None
    status: str = "ok"
    error: str | None = None

    @property
    def cell(self) -> tuple[str, int, float | None, str]:
        return self.task, self.length, self.depth, self.control

    def counts(self) -> dict[str, int]:
        """What a row has no field for; the manifest keeps it by row key."""
        exact = {} if self.num_exact is None else {"num_exact": self.num_exact}
        return {"num_trials": self.num_trials, **exact}

    def row(self, model: str) -> dict[str, Any]:
        """The row, with ``run_id`` still to be filled in."""
        ok = self.status == "ok"
        status, error, nll = self.status, self.error, self.nll
        nll_sum = nll * self.num_targets if ok and nll is not None else None
        if ok and (nll_sum is None or not math.isfinite(nll_sum)):
            nll_sum, ok, status, error = None, False, "nan", "the log has no finite loss here"
        where = f"{self.length}" if self.depth is None or self.gap is not None else f"{self.length}@{self.depth:g}"
        num_bytes = self.num_bytes
        bits = self.bits_per_byte
        if num_bytes is None and bits is not None and math.isfinite(bits) and bits > 0 and nll_sum is not None:
            num_bytes = round(nll_sum / math.log(2) / bits)
        accuracy = exact_share(self.accuracy, self.num_targets) if ok else None
        values = {
            "schema": SCHEMA,
            "key": f"{model}/{self.task}/{where}/{self.control}",
            "model": model,
            "task": self.task,
            "protocol": self.protocol,
            "length": self.length,
            "gap": self.gap,
            "context_tokens": self.context_tokens,
            "num_bytes": num_bytes,
            "depth": self.depth,
            "seed": self.seed,
            "text_id": self.text_id,
            "status": status,
            "num_targets": self.num_targets,
            "nll_sum": nll_sum,
            "token_accuracy": accuracy,
            "control": self.control,
            "error": None if ok else error,
        }
        return {name: values.get(name) for name in FIELDS}


def loss_figure(
    key: str,
    length: int,
    *,
    text_id: str,
    num_trials: int,
    nll: float | None,
    num_targets: int | None = None,
    bits_per_byte: float | None = None,
    **failed: str,
) -> Figure:
    """Loss by length: each of ``num_trials`` documents scores ``length`` tokens after a start token."""
    task, protocol = LOSSES[key]
    return Figure(
        task=task,
        protocol=protocol,
        length=length,
        context_tokens=1,
        text_id=JUNK_TEXT if key == "junk" else text_id,
        num_trials=num_trials,
        num_targets=num_targets or num_trials * length,
        nll=nll,
        bits_per_byte=bits_per_byte,
        status=failed.get("status", "ok"),
        error=failed.get("error"),
    )


def needle_figure(
    gap: int,
    *,
    control: str = "none",
    text_id: str,
    num_trials: int,
    tokens_per_value: int,
    nll: float | None,
    accuracy: float | None,
    **failed: str,
) -> Figure:
    """The induction needle: always at the very start, ``gap`` tokens before the question."""
    return Figure(
        task="induction",
        protocol=NEEDLE,
        length=gap,
        gap=gap,
        depth=0.0 if control == "none" else None,
        control=control,
        text_id=text_id,
        num_trials=num_trials,
        num_targets=num_trials * tokens_per_value,
        nll=nll,
        accuracy=accuracy,
        status=failed.get("status", "ok"),
        error=failed.get("error"),
    )


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """What one file says of one model.

    ``name`` is for tables, with ``hint`` where another model has it already; ``identity`` tells checkpoints apart;
    ``details`` are for the manifest.
    """

    name: str
    hint: str
    identity: tuple[Any, ...]
    details: dict[str, Any]
    figures: list[Figure]


@dataclass(kw_only=True)
class Parsed:
    """What one file gave; ``known`` is whether it was of a kind we read at all."""

    models: list[ModelFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    known: bool = True

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def exact_share(share: float | None, n: int) -> float | None:
    """``k / n`` where the share is one but for rounding; otherwise as it is."""
    if share is None:
        return None
    k = round(share * n)
    return k / n if 0 <= k <= n and abs(share * n - k) <= COUNT_TOLERANCE else share


def value_tokens(shares: Sequence[float], num_trials: int, digits: int) -> int | None:
    """Scored tokens per value: one per digit, or two where the tokenizer parts the space from it.

    The logs do not say, but the accuracies do: they are multiples of one over all scored tokens. ``None`` where they
    fit neither.
    """
    for per_value in (digits, 2 * digits):
        n = num_trials * per_value
        if all(abs(share * n - round(share * n)) <= COUNT_TOLERANCE for share in shares):
            return per_value
    return None
