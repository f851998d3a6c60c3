"""Intervals on means. numpy only; every interval is 95 % two-sided unless told otherwise."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054


class Estimate(NamedTuple):
    """A mean with its interval and the number of independent things it rests on; ``None`` where there is none."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


def wilson(successes: int, n: int, z: float = Z_95) -> Estimate:
    """Wilson's score interval for a proportion; never of zero width."""
    if n == 0:
        return Estimate(None, None, None, 0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, float(centre - half)), min(1.0, float(centre + half)), n)


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


def clustered_mean(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Mean of all values, with a t interval that takes values of one cluster (a document) as dependent.

    The standard error is that of cluster totals about the mean (linearised), with as many degrees of freedom as
    clusters less one; unlike a bootstrap it stays wide when there are few. Where there is one cluster the values are
    taken on their own, and the interval speaks of that cluster only. One value, or values that are all equal, give
    no interval. Where no value is negative, as losses are not, the interval is not either.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) == 0:
        return Estimate(None, None, None, 0)
    mean = float(x.mean())
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) == 1:
        names, index = np.arange(len(x)), np.arange(len(x))
    if len(names) < 2 or np.all(x == x[0]):  # a width of exactly zero would claim certainty
        return Estimate(mean, None, None, len(x))
    totals = np.bincount(index, weights=x - mean)
    error = np.sqrt(len(names) / (len(names) - 1) * np.sum(totals**2)) / len(x)
    half = t_quantile(len(names) - 1) * float(error)
    low = mean - half
    return Estimate(mean, max(0.0, low) if np.all(x >= 0) else low, mean + half, len(x))


def clustered_share(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """`clustered_mean` of values between 0 and 1; where all are 0 or all are 1, Wilson's interval over the values."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) and np.all(x == x[0]) and x[0] in (0.0, 1.0):
        return wilson(int(x.sum()), len(x))
    mean, low, high, n = clustered_mean(values, clusters)
    if low is None or high is None:
        return Estimate(mean, None, None, n)
    return Estimate(mean, max(0.0, low), min(1.0, high), n)
