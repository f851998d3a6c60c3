"""The batch of a step: windows of text, in which records are planted as the mixture says.

What is drawn depends on (seed, step) alone, and what is read in order on the position of the step, so that a resumed
run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atma_eval.training.sources import Source
from atma_eval.training.synthetic import how_many, plant


class Batch(NamedTuple):
    """``inputs`` and ``targets`` ``[B, T]``; ``is_value`` marks the targets that are value digits of a query."""

    inputs: Tensor
    targets: Tensor
    is_value: Tensor

    def weights(self, value_weight: float) -> Tensor:
        """The weight of each target in the loss."""
        return 1.0 + (value_weight - 1.0) * self.is_value.float()

    def take(self, sequences: slice) -> Batch:
        return Batch(*(part[sequences] for part in self))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device) for part in self))


def draw_batch(
    source: Source,
    mixture: Mapping[str, float],
    *,
    num_sequences: int,
    length: int,
    seed: int,
    step: int,
    position: int = 0,
) -> Batch:
    """The batch of one step. ``mixture`` gives the share of each of `synthetic.KINDS`.

    ``position`` is how many tokens earlier steps have taken; sources that are read in order go on from there.
    """
    rng = np.random.default_rng([seed, step])
    shares = np.array(list(mixture.values()), dtype=float)
    tokens = np.empty((num_sequences, length + 1), dtype=np.int64)
    is_value = np.empty((num_sequences, length + 1), dtype=bool)
    for i in range(num_sequences):
        kind = rng.choice(list(mixture), p=shares / shares.sum())
        text = source.window(rng, length + 1, position + i * length)
        num_records, num_queries = how_many(rng, kind, length)
        tokens[i], is_value[i] = plant(rng, text, num_records, num_queries, length + 1)
    inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    return Batch(inputs, targets, torch.from_numpy(is_value[:, 1:]))
