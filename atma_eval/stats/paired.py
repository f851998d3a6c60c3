"""Differences of two models on the same samples, and what many such tests amount to."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from atma_eval.stats.intervals import (
    ROUNDING,
    Z_95,
    Values,
    cluster_index,
    design_effect,
    linearised,
    t_quantile,
    wilson,
)

MOST_ENUMERATED = 16  # clusters whose 2^16 signs are all tried
CHUNK = 1 << 22


class Difference(NamedTuple):
    """First less second: mean, 95 % interval, two-sided p, number of pairs and of clusters (documents) behind them.

    ``None`` where undefined.
    """

    mean: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    num_clusters: int


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of McNemar's test (1947): pairs only one of two models got right, by the binomial with 1/2.

    Twice the smaller tail, at most 1; 1 where no pair differs. Takes pairs as independent.
    """
    num, tail, ways = only_a + only_b, 0, 1
    for k in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (num - k) // (k + 1)
    return min(1.0, max(2 * tail / 2**num, sys.float_info.min))


def sign_flip(totals: Values, *, seed: int = 0, num_flips: int = 9999) -> float:
    """Two-sided p of a sum of cluster totals when the sign of each was a coin toss (Fisher 1935).

    Exchanging the two models on one document turns that document's sign, so this is exact, whatever the distribution,
    where the models are alike. All signs are tried for whole numbers and for up to 16 totals that are not 0; beyond, a
    seeded sample of ``num_flips``, the observed one counted in, so that p is never 0. With G totals p is at least
    ``2 / 2^G``: below 6 documents none falls under 0.05. Totals of -1 and 1 make it `mcnemar`.
    """
    x = np.abs(np.asarray(totals, dtype=np.float64))
    observed = abs(float(np.sum(totals)))
    x = x[x > 0]
    if len(x) == 0:
        return 1.0
    if np.all(x == 1):
        num_agree = (len(x) + round(observed)) // 2
        return mcnemar(num_agree, len(x) - num_agree)
    if np.all(x == np.rint(x)) and x.sum() * len(x) < CHUNK:
        return _whole_sign_flip(x.astype(np.int64), round(observed))
    enough = observed - 1e-9 * float(x.sum())  # sums that differ by rounding are equal
    if len(x) <= MOST_ENUMERATED:
        sums = x[:1]  # the other sign of the first mirrors everything
        for value in x[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= enough))
    rng = np.random.default_rng(seed)
    hits, step = 1, max(1, CHUNK // len(x))
    for start in range(0, num_flips, step):
        signs = rng.integers(0, 2, size=(min(step, num_flips - start), len(x))) * 2.0 - 1.0
        hits += int(np.sum(np.abs(signs @ x) >= enough))
    return hits / (num_flips + 1)


def _whole_sign_flip(x: np.ndarray, observed: int) -> float:
    """The exact distribution of sums of whole numbers under random signs, one number at a time."""
    top = int(x.sum())
    chance = np.zeros(2 * top + 1)
    chance[top] = 1.0
    for value in x:
        chance = 0.5 * (np.roll(chance, value) + np.roll(chance, -value))  # never wraps: no sum passes the top
    p = float(chance[: top - observed + 1].sum() + chance[top + observed :].sum())
    return min(1.0, max(p, sys.float_info.min))


def paired_proportion(a: Values, b: Values, clusters: Sequence[Hashable]) -> Difference:
    """Difference of two shares of right trials, ``a`` less ``b``, on the same trials; its interval has always a width.

    A trial is right (1) or wrong (0), or as often right as its seeds were: then the counts are those expected of one
    seed drawn for each trial, for more seeds do not multiply the evidence.

    Interval: Newcombe's hybrid score interval for paired data (1998, Statistics in Medicine 17, 2635, method 10): the
    Wilson limits of both shares, combined with their correlation phi, a positive one reduced by a continuity
    correction. Trials of one document are dependent until shown otherwise: all counts are scaled to the effective
    number of trials ``n / design effect x (t(n - 1) / t(G - 1))^2`` (Korn and Graubard 1998), the design effect that
    of the differences, never under 1; the second factor pays for its being estimated from only G documents. With one
    trial in each document it is Newcombe's own.

    p: `sign_flip` over documents, which is exact McNemar where each document has one trial. So 2 to 5 documents never
    reach p < 0.05. One document: its trials are taken on their own, and both speak of that document only. To speak of
    the documents at hand only, however many, give each trial a cluster of its own.

    It misleads where no pair differs and trials of a document are in fact copies: the design effect cannot show then.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, num_given = len(x), len(set(clusters))
    if len(y) != n or len(clusters) != n:
        raise ValueError("values and clusters differ in length")
    if n == 0:
        return Difference(None, None, None, None, 0, 0)
    index, num_clusters = cluster_index(clusters)
    d = x - y
    p = sign_flip(np.bincount(index, weights=d))
    scale = independent_pairs(x, y, clusters) / n
    if 1 < num_clusters < n:
        scale *= (t_quantile(n - 1) / t_quantile(num_clusters - 1)) ** 2
    cells = (x * y, x * (1 - y), (1 - x) * y, (1 - x) * (1 - y))
    both, only_a, only_b, neither = (scale * float(np.sum(cell)) for cell in cells)
    low, high = _newcombe(both, only_a, only_b, neither)
    return Difference(float(d.mean()), low, high, p, n, num_given)


def independent_pairs(a: Values, b: Values, clusters: Sequence[Hashable]) -> float:
    """How many independent pairs of trials, right or wrong, those of `paired_proportion` are worth; at most all."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, d = len(x), x - y
    of_one = float(np.sum(x * (1 - y) + (1 - x) * y) - d.sum() ** 2 / n) / max(1, n - 1)
    return n / design_effect(d, clusters, variance=of_one)


def _newcombe(both: float, only_a: float, only_b: float, neither: float, z: float = Z_95) -> tuple[float, float]:
    n = both + only_a + only_b + neither
    p1, low1, high1, _ = wilson(both + only_a, n, z)
    p2, low2, high2, _ = wilson(both + only_b, n, z)
    assert p1 is not None and low1 is not None and high1 is not None  # n > 0
    assert p2 is not None and low2 is not None and high2 is not None
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    cross = both * neither - only_a * only_b
    if cross > 0:
        cross = max(cross - n / 2, 0.0)
    phi = cross / math.sqrt(product) if product > 0 else 0.0

    def width(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    difference = p1 - p2
    return difference - width(p1 - low1, high2 - p2), difference + width(high1 - p1, p2 - low2)


def paired_mean(
    a: Values,
    b: Values,
    clusters: Sequence[Hashable],
    *,
    weights: Values | None = None,
    seed: int = 0,
) -> Difference:
    """Mean difference of a score (nll, token accuracy), ``a`` less ``b``, paired by sample, clustered by document.

    With ``weights`` the difference of weighted means: bits per byte with bytes as weights, or nll with tokens.
    Interval: t over clusters, linearised (see `ratio_mean`). p: `sign_flip` over clusters, exact for few of them,
    where a bootstrap is too bold; interval and p may disagree near 0.05, more so with few documents or skewed
    differences. (For a bootstrap interval, give the differences to `cluster_bootstrap`.) Values identical throughout
    give 0 with no interval and p = 1; any other constant difference gives no interval either. One cluster: samples are
    taken on their own, and both speak of that document only.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    d = x - y
    d[np.abs(d) <= ROUNDING * np.maximum(np.abs(x), np.abs(y))] = 0.0
    w = np.ones(len(d)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(d) != len(clusters) or len(d) != len(w):
        raise ValueError("values, weights and clusters differ in length")
    num_given = len(set(clusters))
    if len(d) == 0 or w.sum() <= 0:
        return Difference(None, None, None, None, len(d), num_given)
    mean, half = linearised(d * w, w, clusters)
    p = sign_flip(np.bincount(cluster_index(clusters)[0], weights=d * w), seed=seed)
    if half is None:
        return Difference(mean, None, None, p, len(d), num_given)
    return Difference(mean, mean - half, mean + half, p, len(d), num_given)


def benjamini_hochberg(p_values: Sequence[float | None]) -> list[float | None]:
    """p adjusted so that calling all below q different leaves a share of at most q falsely called (1995).

    ``p m / rank``, made monotone from the largest down; m counts the tests that have a p, and ``None`` stays ``None``.
    Holds for independent and for positively dependent tests, as nested lengths of one model are.
    """
    known = [i for i, p in enumerate(p_values) if p is not None]
    order = sorted(known, key=lambda i: p_values[i] or 0.0, reverse=True)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 1.0
    for place, i in enumerate(order):
        least = min(least, (p_values[i] or 0.0) * len(order) / (len(order) - place))
        adjusted[i] = least
    return adjusted
