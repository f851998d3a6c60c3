"""A byte trigram with interpolated back-off: the loss that a trained checkpoint has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atma_eval.text import Document

TUNING_EVERY = 20  # every so-many-th piece of text fits the interpolation weights and is not counted
NUM_BUCKETS = 16  # weights depend on how often the context was seen, in powers of two
EM_ROUNDS = 30


def _pieces(documents: Sequence[Document]) -> list[bytes]:
    """The documents, those of a short list cut up, so that every so-many-th piece can be held back."""
    if len(documents) >= TUNING_EVERY:
        return [d.data for d in documents]
    sizes = [-(-len(d.data) // TUNING_EVERY) for d in documents]
    cut = [d.data[start : start + size] for d, size in zip(documents, sizes) for start in range(0, len(d.data), size)]
    return [piece for piece in cut if len(piece) > 2]


class ByteTrigram:
    """``p(c | a b)`` as a mixture of trigram, bigram, unigram and uniform; one set of shares per context count.

    An order that never saw the context leaves its share to the others.
    """

    def __init__(self, documents: Sequence[Document]):
        pieces = _pieces(documents)
        counted = [piece for i, piece in enumerate(pieces) if i % TUNING_EVERY] or pieces
        tuning = pieces[::TUNING_EVERY]
        trigrams = np.zeros(256**3, dtype=np.int64)
        for piece in counted:
            a = np.frombuffer(piece, dtype=np.uint8).astype(np.int64)
            np.add.at(trigrams, (a[:-2] * 256 + a[1:-1]) * 256 + a[2:], 1)
        self.trigrams = trigrams.reshape(256, 256, 256)
        self.contexts = self.trigrams.sum(2)
        self.bigrams = self.trigrams.sum(0)
        self.singles = self.bigrams.sum(1)
        self.unigrams = self.bigrams.sum(0)
        self.shares = np.full((NUM_BUCKETS, 4), 0.25)
        pairs = [self._experts(piece) for piece in tuning]
        experts, _, buckets = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        for _ in range(EM_ROUNDS):
            posterior = experts * self.shares[buckets]
            posterior /= posterior.sum(1, keepdims=True)
            for bucket in range(NUM_BUCKETS):
                inside = posterior[buckets == bucket]
                if len(inside):
                    self.shares[bucket] = inside.mean(0)

    def _experts(self, data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Probability of each byte from the third on, by each order; which orders saw its context; and its bucket."""
        a = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
        first, second, third = a[:-2], a[1:-1], a[2:]
        pairs, singles = self.contexts[first, second], self.singles[second]
        columns = [
            self.trigrams[first, second, third] / np.maximum(pairs, 1),
            self.bigrams[second, third] / np.maximum(singles, 1),
            self.unigrams[third] / self.unigrams.sum(),
            np.full(len(third), 1 / 256),
        ]
        bucket = np.minimum(np.log2(pairs + 1).astype(int), NUM_BUCKETS - 1)
        always = np.ones(len(third), dtype=bool)
        return np.stack(columns, axis=1), np.stack([pairs > 0, singles > 0, always, always], axis=1), bucket

    def nll(self, data: bytes) -> np.ndarray:
        """Nats of each byte from the third on."""
        experts, known, buckets = self._experts(data)
        shares = self.shares[buckets] * known
        return -np.log((experts * shares).sum(1) / shares.sum(1))
