"""How far a model really sees, as one figure with an interval."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from atma_eval.stats.bootstrap import resample
from atma_eval.stats.intervals import ROUNDING, Z_95, cluster_index, t_quantile, wilson


class EffectiveLength(NamedTuple):
    """Effective length with its interval, in tokens; ``None`` stands for *below the shortest length measured*.

    ``reference`` is the score at the shortest length (``None``: nothing was scored). ``censored``: the longest length
    scored still holds, so the effective length is at least ``length``. ``too_few``: no length holds, though some
    trials are right, and as few trials could not have shown the shortest to hold even if all were right.
    """

    length: int | None
    low: int | None
    high: int | None
    reference: float | None
    censored: bool
    too_few: bool = False


def effective_length(
    lengths: Sequence[int],
    values_by_length: Sequence[Sequence[float | None]],
    clusters: Sequence[Hashable],
    *,
    share: float = 0.85,
    num_resamples: int = 2000,
    seed: int = 0,
) -> EffectiveLength:
    """Longest length such that there, and at every shorter one, a score's lower bound is at least ``share`` of the
    score at the shortest length.

    ``values_by_length[i][j]`` is the score of trial j at ``lengths[i]``, between 0 and 1, higher is better; ``None``
    where it was not scored (a length at which nothing was ends the walk). ``clusters[j]`` is the trial's document.

    * The *lower bound* is that of the tables' two-sided 95 % interval: Wilson over trials, taken as independent, where
      all scores are 0 or 1, else t over documents (`clustered_share`); no interval means not shown, so not held. The
      reference is the mean itself, without a bound. So a perfect score needs 22 trials to hold 85 % of itself, and a
      short run shortens the figure: it is cautious. A reference of 0 is held by no length.
    * The *interval* is the 2.5 and 97.5 % quantile of this same rule on ``num_resamples`` resamples of documents, the
      same at all lengths, since a trial is one unit over all of them (one document: trials are resampled). It tells
      how far the figure would move with other documents, on the grid of lengths measured; it is not an interval for a
      length between them. One length alone says that the grid is coarser than the noise: the score gives way somewhere
      before the next length. With few documents, or where all trials agree, it is too short, as of any bootstrap.
    """
    order = np.argsort(lengths, kind="stable")
    known = [int(lengths[i]) for i in order]
    table = np.array([[np.nan if v is None else v for v in values_by_length[i]] for i in order], dtype=np.float64)
    if table.size == 0 or np.all(np.isnan(table[0])):
        return EffectiveLength(None, None, None, None, False)
    if table.shape != (len(known), len(clusters)):
        raise ValueError("values_by_length must hold one score of each trial for each length")
    unscored = np.flatnonzero(np.all(np.isnan(table), axis=1))
    table = table[: unscored[0] if len(unscored) else None]  # [num_lengths, num_trials]

    index, num_clusters = cluster_index(clusters)
    scored = ~np.isnan(table)
    sums = np.stack([np.bincount(index, weights=np.where(ok, row, 0.0)) for row, ok in zip(table, scored)], axis=1)
    nums = np.stack([np.bincount(index, weights=ok.astype(np.float64)) for ok in scored], axis=1)  # [G, num_lengths]
    right_or_wrong = np.all(~scored | (table == 0) | (table == 1), axis=1)  # [num_lengths]

    def held(counts: np.ndarray) -> np.ndarray:
        """How many lengths hold in each resample [R], from how often clusters were drawn [R, G]."""
        means, lows = _lower_bounds(counts, sums, nums, right_or_wrong)
        reference = means[:, :1]
        holds = (lows >= share * reference) & (reference > 0)
        return np.cumprod(holds, axis=1).sum(axis=1)

    num_held = int(held(np.ones((1, num_clusters)))[0])
    draws = held(resample(num_clusters, num_resamples, seed))
    low, high = (int(np.quantile(draws, q, method="inverted_cdf")) for q in (0.025, 0.975))

    def name(num: int) -> int | None:
        return known[num - 1] if num else None

    reference = float(np.nanmean(table[0]))
    num_trials = int(scored[0].sum())
    best_low = wilson(num_trials, num_trials).low
    assert best_low is not None  # the first length has trials
    too_few = num_held == 0 and reference > 0 and best_low < share
    return EffectiveLength(name(num_held), name(low), name(high), reference, num_held == len(table), too_few)


def _lower_bounds(
    counts: np.ndarray, sums: np.ndarray, nums: np.ndarray, right_or_wrong: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and lower bound in each resample at each length [R, num_lengths]; -inf where there is no interval.

    `wilson` and `clustered_share` of `atma_eval.stats.intervals` for many resamples at once, from cluster sums.
    """
    n = counts @ nums
    some = n > 0
    n = np.where(some, n, 1.0)
    means = (counts @ sums) / n
    z2 = Z_95 * Z_95
    spread = np.sqrt(np.maximum(0.0, means * (1 - means)) / n + z2 / (4 * n * n))
    by_trials = np.maximum(0.0, (means + z2 / (2 * n) - Z_95 * spread) / (1 + z2 / n))

    num_clusters = np.broadcast_to(counts @ (nums > 0), n.shape)  # drawn clusters that have scores
    of_totals = counts @ sums**2 - 2 * means * (counts @ (sums * nums)) + means**2 * (counts @ nums**2)
    inflation = num_clusters / np.maximum(num_clusters - 1, 1)
    error = np.sqrt(np.maximum(0.0, of_totals) * inflation) / n
    degrees = np.maximum(num_clusters - 1, 1).astype(int)
    quantiles = np.array([0.0] + [t_quantile(k) for k in range(1, int(degrees.max()) + 1)])
    by_documents = np.maximum(0.0, means - quantiles[degrees] * error)
    # the three terms of of_totals cancel to about 1e-8 of the mean where all agree
    no_spread = (error <= 1e-6 * means) | (num_clusters < 2)
    by_documents = np.where(no_spread, -np.inf, by_documents)

    all_alike = no_spread & ((means <= 0) | (means >= 1 - ROUNDING))
    lows = np.where(right_or_wrong | all_alike, by_trials, by_documents)
    return means, np.where(some, lows, -np.inf)
