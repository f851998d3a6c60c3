"""What every task deals in: samples to score, and the rows that come of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from atma_eval.text import Document, TextSource
from atma_eval.tokenizer import Tokenizer

CONTROLS = ("none", "absent", "format")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One token sequence and the range of it to score.

    ``span`` is ``(start, stop)``: targets are ``tokens[start:stop]``, each predicted from all tokens before it.
    ``key`` is unique within a task; samples of one ``group`` share a prefix tree, the unit of work.
    """

    key: str
    group: str
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
        )


class Task(Protocol):
    """A frozen task: what is asked, and with which protocol."""

    name: str
    family: str
    lengths: tuple[int, ...]
    seed: int

    @property
    def num_trials(self) -> int: ...

    def protocol(self) -> dict[str, Any]:
        """Everything that decides a row besides model, text, length and trial; equal protocols give equal rows."""
        ...

    def required_tokens(self) -> int:
        """Tokens after the start token that a document must have."""
        ...

    def select(self, source: TextSource, tokenizer: Tokenizer) -> TaskText:
        """Choose and tokenize the documents; `UserError` where there are too few or too short ones."""
        ...

    def groups(self, tokenizer: Tokenizer, text: TaskText) -> Iterator[list[Sample]]:
        """The samples, one group at a time, in the order to compute them."""
        ...

    def outcome(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        """The fields of a row that come of the scores."""
        ...
