"""What every task deals in: samples to score, and the rows that come of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from atma_eval.text import Document, TextSource
from atma_eval.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One token sequence and the range of it to score.

    ``span`` is ``(start, stop)``: targets are ``tokens[start:stop]``, each predicted from all tokens before it.
    ``key`` is unique within a task.
    """

    key: str
    tokens: np.ndarray
    span: tuple[int, int]
    length: int
    trial: int
    text_id: str
    control: str = "none"
    gap: int | None = None
    depth: float | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Scored:
    """Losses in nats and argmax ids of a sample's targets, in order."""

    nll: np.ndarray
    argmax: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TaskText:
    """The documents a task uses, tokenized once: ids after the start token, and the bytes behind each id.

    ``num_own`` counts the tokens a document has of itself; ids beyond them repeat it.
    """

    documents: tuple[Document, ...]
    ids: tuple[np.ndarray, ...]
    num_bytes: tuple[np.ndarray, ...]
    num_own: tuple[int, ...]
    num_too_short: int = 0  # documents of the source that were left out for it

    @property
    def repeated(self) -> bool:
        return any(len(ids) > own for ids, own in zip(self.ids, self.num_own, strict=True))

    def text_id(self, index: int, num_tokens: int) -> str:
        """What a row calls the first ``num_tokens`` tokens of a document."""
        return self.documents[index].text_id + (" (repeated)" if num_tokens > self.num_own[index] else "")

    def pick(self, order: Sequence[int]) -> TaskText:
        """The same text with only these documents, in this order."""
        return TaskText(
            documents=tuple(self.documents[i] for i in order),
            ids=tuple(self.ids[i] for i in order),
            num_bytes=tuple(self.num_bytes[i] for i in order),
            num_own=tuple(self.num_own[i] for i in order),
            num_too_short=self.num_too_short,
        )


class Task(Protocol):
    """A frozen task: what is asked, and with which protocol."""

    name: str
    lengths: tuple[int, ...]
    seed: int
    docs: int | None

    def num_trials(self, text: TaskText) -> int:
        """How many samples of the task itself, controls apart, each length has over these documents."""
        ...

    @property
    def chance(self) -> dict[str, float] | None:
        """Scores of guessing, by metric; ``None`` where there is no such thing."""
        ...

    @property
    def documents_may_grow(self) -> bool:
        """Whether more documents only add rows; not so where trials are dealt out among them."""
        ...

    def protocol(self) -> dict[str, Any]:
        """What decides a row besides model, task, text, length and trial; equal protocols give equal rows."""
        ...

    def select(self, source: TextSource, tokenizer: Tokenizer) -> TaskText:
        """Choose and tokenize the documents; `UserError` where there are too few or too short ones."""
        ...

    def groups(self, tokenizer: Tokenizer, text: TaskText) -> Iterator[list[Sample]]:
        """The samples, one group at a time, in the order to compute them; a group shares a tree, the unit of work."""
        ...

    def outcome(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        """The fields of a row that come of the scores."""
        ...

    def curve(self, scored: Scored) -> tuple[np.ndarray, np.ndarray] | None:
        """Loss sums and target counts by position bucket, for tasks that have them."""
        ...
