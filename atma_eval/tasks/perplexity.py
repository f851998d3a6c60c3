"""Loss by length: nested prefixes of whole documents, each token scored once (protocols, section 2).

Length ``L`` scores the first ``L`` tokens of a document after the start token, so it takes ``L + 1`` ids. Prefixes are
nested: one pass of the longest gives every shorter length, and the loss by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from atma_eval.tasks.base import Sample, Scored, TaskText
from atma_eval.tasks.documents import select_documents
from atma_eval.text import TextSource
from atma_eval.tokenizer import Tokenizer

VERSION = 1
NUM_BUCKETS = 24  # bucket k holds target positions p (from 1) with 2^k <= p < 2^(k+1); the last also all beyond


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The task: ``docs`` documents, drawn by seed (``None``: all that are long enough), at each of ``lengths``."""

    name: str
    lengths: tuple[int, ...]
    seed: int
    docs: int | None = None
    docs_at_most: bool = True
    repeat: bool = False
    chance: ClassVar[None] = None
    documents_may_grow: ClassVar[bool] = True

    def num_trials(self, text: TaskText) -> int:
        return len(text.documents)  # ``docs`` is what was asked for: a text may have fewer

    def protocol(self) -> dict[str, Any]:
        return {"protocol": f"perplexity-prefix-v{VERSION}", "seed": self.seed, "repeat": self.repeat}

    def select(self, source: TextSource, tokenizer: Tokenizer) -> TaskText:
        return select_documents(
            source,
            tokenizer,
            required=max(self.lengths),
            docs=self.docs,
            docs_at_most=self.docs_at_most,
            repeat=self.repeat,
            shuffle=str(self.seed),
            what=self.name,
        )

    def groups(self, tokenizer: Tokenizer, text: TaskText) -> Iterator[list[Sample]]:
        for trial, (document, ids, num_bytes) in enumerate(zip(text.documents, text.ids, text.num_bytes, strict=True)):
            tokens = np.concatenate([[tokenizer.start_id], ids]).astype(np.int32)
            yield [
                Sample(
                    key=f"{length}/{document.text_id}",
                    tokens=tokens[: length + 1],
                    span=(1, length + 1),
                    length=length,
                    trial=trial,
                    text_id=text.text_id(trial, length),
                    num_bytes=int(num_bytes[:length].sum()),
                )
                for length in self.lengths
            ]

    def outcome(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        return {"nll_sum": float(scored.nll.sum(dtype=np.float64))}

    def curve(self, scored: Scored) -> tuple[np.ndarray, np.ndarray] | None:
        return position_buckets(scored.nll)


def position_buckets(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of losses in log2 buckets of the target position (1-based), each ``[NUM_BUCKETS]``."""
    bucket = np.minimum(np.floor(np.log2(np.arange(1, len(nll) + 1))).astype(int), NUM_BUCKETS - 1)
    sums = np.bincount(bucket, weights=nll.astype(np.float64), minlength=NUM_BUCKETS)
    return sums, np.bincount(bucket, minlength=NUM_BUCKETS)
