"""What a design could have resolved: so that "no difference seen" is not read as "no difference"."""

from __future__ import annotations

import functools
import math

import numpy as np

from atma_eval.stats.intervals import t_quantile


@functools.lru_cache(maxsize=4096)
def smallest_difference(n: int, discordance: float, *, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """Smallest difference of two paired proportions that exact McNemar finds with ``power`` in ``n`` pairs.

    ``discordance`` is the share of pairs seen on which just one model is right. A difference needs at least as many
    such pairs, so for each difference tried the larger of the two is taken: where none was seen the answer is that of
    pairs that all speak for one model, never 0. The power is exact and unconditional (Duffy 1984): over the binomial
    number of discordant pairs, the chance that exact McNemar rejects. ``None`` where even a difference of 1 would stay
    below (n < 6 at 5 %). Pairs are taken as independent: give ``n / design_effect`` where trials share documents. It
    misleads as any power taken from data does: the discordance seen may be luck, and too small is too hopeful.
    """
    if n <= 0 or mcnemar_power(n, 1.0, 1.0, alpha) < power:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        enough = mcnemar_power(n, middle, max(discordance, middle), alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def mcnemar_power(n: int, difference: float, discordance: float, alpha: float = 0.05) -> float:
    """Chance that exact McNemar on ``n`` pairs has p <= ``alpha``, given the true difference and discordant share."""
    middle, spread = n * discordance, 8 * math.sqrt(n * discordance * (1 - discordance)) + 8
    num_discordant = np.arange(max(0, math.floor(middle - spread)), min(n, math.ceil(middle + spread)) + 1)
    k = np.arange(num_discordant[-1] // 2 + 1)
    weights = _binomial(np.array([n]), num_discordant, discordance)
    tail = np.cumsum(_binomial(num_discordant[:, None], k, 0.5), axis=1)
    rejects = 2 * tail <= alpha * (1 + 1e-12)  # never past the middle, where tails hold a half or more
    against = (1 - difference / discordance) / 2  # of a discordant pair, that it speaks for the worse model
    both_tails = _binomial(num_discordant[:, None], k, against) + _binomial(num_discordant[:, None], k, 1 - against)
    return float(weights @ np.sum(np.where(rejects, both_tails, 0.0), axis=1))


@functools.cache
def _log_factorials(size: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size)))])


def _binomial(n: np.ndarray, k: np.ndarray, q: float) -> np.ndarray:
    """Binomial chances, 0 where k > n."""
    table = _log_factorials(1 << int(max(n.max(), k.max()) + 1).bit_length())
    left = np.maximum(n - k, 0)
    if q <= 0 or q >= 1:
        return np.where(k == (0 if q <= 0 else n), 1.0, 0.0) * np.ones(np.broadcast(n, k).shape)
    log = table[n] - table[k] - table[left] + k * math.log(q) + left * math.log1p(-q)
    return np.where(k <= n, np.exp(log), 0.0)


def smallest_mean_difference(
    sd_of_cluster_differences: float, num_clusters: int, *, power: float = 0.8, alpha: float = 0.05
) -> float | None:
    """Smallest mean difference a paired t test over clusters finds with ``power``.

    ``(t(1 - alpha / 2) + t(power)) sd / sqrt(G)`` with G - 1 degrees of freedom; close to the noncentral t (a few per
    cent from 5 clusters on, rougher below). ``sd_of_cluster_differences`` is the standard deviation of the document
    means of the paired difference. ``None`` with fewer than 2 clusters or no spread, where nothing can be said.
    """
    if num_clusters < 2 or sd_of_cluster_differences <= 0:
        return None
    quantiles = t_quantile(num_clusters - 1, 1 - alpha / 2) + t_quantile(num_clusters - 1, power)
    return quantiles * sd_of_cluster_differences / math.sqrt(num_clusters)
