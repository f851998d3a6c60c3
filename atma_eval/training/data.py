"""Byte batches for training: text with key-value records planted in it and asked for later.

A record is ``#4821=59034.``; a query is the same bytes again, of which the model is to produce the value. Every
sequence begins with the document-start token. Batches are drawn from (seed, step) alone, so that a resumed run
sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from atma_eval.text import Document

DOCUMENT_START = 256
KEY_DIGITS, VALUE_DIGITS = 4, 5
CUE_BYTES = KEY_DIGITS + 2  # "#4821="
RECORD_BYTES = CUE_BYTES + VALUE_DIGITS + 1
SHORTEST_WITH_RECORDS = 4 * RECORD_BYTES  # two records and their queries
KINDS = {
    "records": "nothing but records and repeated queries",
    "plain": "text alone",
    "single": "text, one record, one query",
    "several": "text, two or more records, one query of each",
}
TEXT_BYTES_PER_RECORD = 64  # "several" plants at most one record and its query per so many tokens


class Batch(NamedTuple):
    """``inputs`` and ``targets`` ``[B, T]``; ``values`` marks the targets that are value digits of a query."""

    inputs: Tensor
    targets: Tensor
    values: Tensor

    def weights(self, value_weight: float) -> Tensor:
        """The weight of each target in the loss."""
        return 1.0 + (value_weight - 1.0) * self.values.float()


class Corpus:
    """Documents as one run of tokens, each behind the document-start token."""

    def __init__(self, documents: Sequence[Document]):
        arrays = [np.frombuffer(d.data, dtype=np.uint8) for d in documents]
        sizes = np.array([len(a) + 1 for a in arrays])
        self.starts = np.concatenate([[0], sizes.cumsum()[:-1]])
        self.tokens = np.full(sizes.sum(), DOCUMENT_START, dtype=np.int16)
        for start, array in zip(self.starts, arrays, strict=True):
            self.tokens[start + 1 : start + 1 + len(array)] = array

    def window(self, rng: Generator, length: int) -> np.ndarray:
        """``length`` tokens from a document's start or from anywhere, running on into the next documents."""
        start = int(rng.choice(self.starts) if rng.random() < 0.5 else rng.integers(len(self.tokens)))
        window = np.take(self.tokens, np.arange(start, start + length), mode="wrap")
        return np.where(np.arange(length) == 0, DOCUMENT_START, window)


def record(key: int, value: int) -> bytes:
    return b"#%0*d=%0*d." % (KEY_DIGITS, key, VALUE_DIGITS, value)


def plant(
    rng: Generator, text: np.ndarray, num_records: int, num_queries: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Spread records and queries over a text that opens with the document-start token.

    Returns ``length`` tokens and a mask of the value digits of queries. Every record is asked for at least once,
    and chance asks again up to ``num_queries``. In every second sequence the first record stands right behind the
    start and a query of it ends the sequence, which is how the evaluation asks.
    """
    keys = rng.choice(10**KEY_DIGITS, size=num_records, replace=False)
    values = rng.integers(10**VALUE_DIGITS, size=num_records)
    planted = [record(int(key), int(value)) for key, value in zip(keys, values, strict=True)]
    places = np.sort(rng.random((num_records, 2)), axis=1)
    at_ends = num_records > 0 and rng.random() < 0.5
    if at_ends:
        places[0] = 0.0, 1.0
    again = rng.integers(max(1, num_records), size=num_queries - num_records)
    events = [(place, is_query, i) for i, pair in enumerate(places) for is_query, place in zip((False, True), pair)]
    events += [(rng.uniform(places[i, 0], 1.0), True, i) for i in again]
    body = length - 1 - len(events) * RECORD_BYTES + at_ends  # at the ends, the last value digit is the last token

    pieces, masks, used = [text[:1]], [np.zeros(1, dtype=bool)], 1
    for place, is_query, i in sorted(events):
        until = 1 + round(place * body)
        pieces += [text[used:until], np.frombuffer(planted[i], dtype=np.uint8)]
        mask = np.zeros(until - used + RECORD_BYTES, dtype=bool)
        mask[-VALUE_DIGITS - 1 : -1] = is_query
        masks.append(mask)
        used = until
    pieces.append(text[used : 1 + body])
    masks.append(np.zeros(len(pieces[-1]), dtype=bool))
    return np.concatenate(pieces)[:length], np.concatenate(masks)[:length]


def _how_many(rng: Generator, kind: str, length: int) -> tuple[int, int]:
    """Records and queries of a sequence of this kind."""
    if kind == "records":
        fit = length // RECORD_BYTES
        num_records = int(rng.integers(1, fit // 2 + 1, size=2).min())  # few records are learnt first
        return num_records, fit - num_records
    if kind == "several":
        num_records = int(rng.integers(2, max(2, length // TEXT_BYTES_PER_RECORD) + 1))
        return num_records, num_records
    return (1, 1) if kind == "single" else (0, 0)


def draw_batch(
    corpus: Corpus, mixture: Mapping[str, float], *, num_sequences: int, length: int, seed: int, step: int
) -> Batch:
    """The batch of one step. ``mixture`` gives the share of each of `KINDS`."""
    rng = np.random.default_rng([seed, step])
    shares = np.array(list(mixture.values()), dtype=float)
    tokens = np.empty((num_sequences, length + 1), dtype=np.int64)
    values = np.empty((num_sequences, length + 1), dtype=bool)
    for i in range(num_sequences):
        kind = rng.choice(list(mixture), p=shares / shares.sum())
        text = corpus.window(rng, length + 1)
        num_records, num_queries = _how_many(rng, kind, length)
        tokens[i], values[i] = plant(rng, text, num_records, num_queries, length + 1)
    inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    return Batch(inputs, targets, torch.from_numpy(values[:, 1:]))
