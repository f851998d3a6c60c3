"""Several training seeds of one recipe: what they agree on, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from atma_eval.stats.intervals import Estimate, clustered_mean, clustered_share, wilson


class SeedSpread(NamedTuple):
    """Least and greatest mean of the seeds and their standard deviation; ``None`` where there is none."""

    low: float | None
    high: float | None
    sd: float | None
    num_seeds: int


def between_seeds(means: Sequence[float]) -> SeedSpread:
    """Spread of the seeds' means, each over the same trials: what another training run would change.

    ``sd`` divides by seeds less one; ``None`` with one seed, or where all agree, since a spread of exactly 0 would
    claim that seeds do not matter. It holds some noise of the trials too, though the part that all seeds share, hard
    and easy trials, cancels. With 3 seeds the true value may well be half or three times as much (chi-squared).
    """
    if len(means) == 0:
        return SeedSpread(None, None, None, 0)
    low, high = float(min(means)), float(max(means))
    sd = float(np.std(np.asarray(means, dtype=np.float64), ddof=1)) if high > low else None
    return SeedSpread(low, high, sd, len(means))


def pooled_seeds(
    values_by_seed: Sequence[Sequence[float]], clusters_by_seed: Sequence[Sequence[Hashable]], *, bounded: bool = False
) -> Estimate:
    """Mean over all trials of all seeds, with a t interval over documents: a document is one cluster in all seeds.

    More seeds do not multiply the evidence, since they read the same documents. The interval is for the average of
    *these* seeds on other documents; how other seeds would do is `between_seeds`. ``bounded``: scores between 0 and 1;
    where all are 0 or all are 1, Wilson's interval over the trials of the seed that has most, as if there were one.
    """
    values = [value for seed in values_by_seed for value in seed]
    clusters = [cluster for seed in clusters_by_seed for cluster in seed]
    if not bounded:
        return clustered_mean(values, clusters)
    if values and min(values) == max(values) and values[0] in (0, 1):
        most = max(len(seed) for seed in values_by_seed)
        return wilson(most * values[0], most)._replace(n=len(values))
    return clustered_share(values, clusters)
