"""Intervals on means, shares and ratios. Every interval is 95 % two-sided unless told otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054
ROUNDING = 1e-12  # a spread below this share of the values is rounding, not evidence

Values = Sequence[float] | np.ndarray


class Estimate(NamedTuple):
    """A mean with its interval and the number of values it rests on; ``None`` where there is none."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


def wilson(successes: float, n: float, z: float = Z_95) -> Estimate:
    """Wilson's score interval for a proportion (Wilson 1927); never of zero width.

    Takes trials as independent. Counts may be fractions, as effective sample sizes are; ``n`` is then rounded down in
    what is returned.
    """
    if n == 0:
        return Estimate(None, None, None, 0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, p * (1 - p) / n) + z * z / (4 * n * n))
    # at none and all right one end is exactly the proportion; rounding must not push it past
    return Estimate(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), int(n))


@functools.cache
def t_quantile(degrees: int, probability: float = 0.975) -> float:
    """Quantile above the median of Student's t, by bisection on its numerically integrated density."""
    grid = np.linspace(0.0, 1.0, 2001)

    def cdf(t: float) -> float:
        # t = tan(angle) sqrt(df): the density becomes cos(angle)^(df - 1), smooth on a finite range
        top = np.arctan(t / np.sqrt(degrees))
        part = np.trapezoid(np.cos(grid * top) ** (degrees - 1), dx=top / 2000)
        whole = np.trapezoid(np.cos(grid * np.pi / 2) ** (degrees - 1), dx=np.pi / 2 / 2000)
        return 0.5 + 0.5 * float(part / whole)

    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < probability else (low, middle)
    return (low + high) / 2


def cluster_index(clusters: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    """The number of each value's cluster [n], and how many there are.

    Where all values share one cluster, each is its own: what follows then speaks of that cluster only.
    """
    seen: dict[Hashable, int] = {}
    index = np.array([seen.setdefault(cluster, len(seen)) for cluster in clusters], dtype=np.intp)
    return (index, len(seen)) if len(seen) != 1 else (np.arange(len(index)), len(index))


def linearised(
    numerators: np.ndarray, denominators: np.ndarray, clusters: Sequence[Hashable]
) -> tuple[float, float | None]:
    """Ratio of two sums and the half width of its t interval over clusters; ``None`` where there is no width."""
    if len(numerators) != len(denominators) or len(numerators) != len(clusters):
        raise ValueError("values and clusters differ in length")
    index, num_clusters = cluster_index(clusters)
    ratio = float(numerators.sum() / denominators.sum())
    if num_clusters < 2:
        return ratio, None
    totals = np.bincount(index, weights=numerators - ratio * denominators)
    error = math.sqrt(num_clusters / (num_clusters - 1) * float(np.sum(totals**2)))
    if error <= ROUNDING * float(np.sum(np.abs(numerators))):  # a width of zero would claim certainty
        return ratio, None
    return ratio, t_quantile(num_clusters - 1) * error / float(denominators.sum())


def ratio_mean(numerators: Values, denominators: Values, clusters: Sequence[Hashable]) -> Estimate:
    """Sum of numerators over sum of denominators, as bits over bytes, with a t interval over clusters (documents).

    The standard error is that of a linearised ratio: with r the ratio and e_g the total of ``numerator - r
    denominator`` in cluster g, ``sqrt(G / (G - 1) sum e_g^2) / sum of denominators`` (Cochran 1977, section 6), with
    G - 1 degrees of freedom. One cluster: its values are taken on their own, and the interval speaks of that cluster
    only. One value, or clusters that agree exactly, give no interval. It misleads where the denominators vary so much
    that one document decides the ratio. Where no numerator is negative the interval is not either.
    """
    over, under = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(over) == 0 or under.sum() <= 0:
        return Estimate(None, None, None, len(over))
    ratio, half = linearised(over, under, clusters)
    if half is None:
        return Estimate(ratio, None, None, len(over))
    low = ratio - half
    return Estimate(ratio, max(0.0, low) if np.all(over >= 0) else low, ratio + half, len(over))


def clustered_mean(values: Values, clusters: Sequence[Hashable]) -> Estimate:
    """Mean of all values, with a t interval that takes values of one cluster (a document) as dependent.

    `ratio_mean` with denominators of one: what stands there holds here. Unlike a bootstrap it stays wide when there
    are few clusters (see `cluster_bootstrap`). Clusters whose totals happen to agree exactly give no interval.
    """
    return ratio_mean(values, np.ones(len(values)), clusters)


def clustered_share(values: Values, clusters: Sequence[Hashable]) -> Estimate:
    """`clustered_mean` of values between 0 and 1; where all are 0 or all are 1, Wilson's interval over the values."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) and np.all(x == x[0]) and x[0] in (0.0, 1.0):
        return wilson(int(x.sum()), len(x))
    mean, low, high, n = clustered_mean(values, clusters)
    if low is None or high is None:
        return Estimate(mean, None, None, n)
    return Estimate(mean, max(0.0, low), min(1.0, high), n)


def design_effect(values: Values, clusters: Sequence[Hashable], *, variance: float | None = None) -> float:
    """How many times larger clusters make the variance of the mean than independent values would; at least 1.

    n values are worth ``n / design_effect`` independent ones (Kish 1965): of their own variance, or of the ``variance``
    given, as that of single seeds where values are means over seeds. 1 where it cannot be told: values that are all
    equal, one cluster, or one value in each. With few clusters it is a noisy figure: pair it with t quantiles.
    """
    x = np.asarray(values, dtype=np.float64)
    index, num_clusters = cluster_index(clusters)
    if num_clusters < 2 or num_clusters == len(x) or np.all(x == x[0]):
        return 1.0
    totals = np.bincount(index, weights=x - x.mean())
    clustered = num_clusters / (num_clusters - 1) * float(np.sum(totals**2)) / len(x) ** 2
    return max(1.0, clustered / ((float(x.var(ddof=1)) if variance is None else variance) / len(x)))
