"""Intervals against values worked out by hand or taken from tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atma_eval.stats import clustered_mean, clustered_share, t_quantile, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # 74 of 80: the published 92.5 % (protocols, W1); the others from the closed form at p = 0 and 1
    [(74, 80, 0.846, 0.965), (0, 5, 0.0, 3.8415 / 8.8415), (5, 5, 5 / 8.8415, 1.0), (1, 1, 1 / 4.8415, 1.0)],
)
def test_wilson(successes, n, low, high):
    estimate = wilson(successes, n)
    assert estimate.mean == successes / n
    assert estimate.low == pytest.approx(low, abs=5e-4)
    assert estimate.high == pytest.approx(high, abs=5e-4)
    assert estimate.low < estimate.high


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (100, 1.9840)])
def test_t_quantile(degrees, value):
    assert t_quantile(degrees) == pytest.approx(value, abs=2e-4)


def test_one_value_per_cluster_is_the_plain_t_interval():
    values = [1.0, 2.0, 4.0, 7.0]
    estimate = clustered_mean(values, list("abcd"))
    half = 3.18245 * np.std(values, ddof=1) / math.sqrt(4)
    assert estimate.mean == 3.5
    assert estimate.high - estimate.mean == pytest.approx(half, rel=1e-4)
    assert estimate.n == 4


def test_values_of_one_cluster_count_once():
    """Copies of a document's value tell nothing new: the interval is as wide as with one value each."""
    once = clustered_mean([1.0, 2.0, 4.0], list("abc"))
    copied = clustered_mean([1.0] * 9 + [2.0] * 9 + [4.0] * 9, list("a" * 9 + "b" * 9 + "c" * 9))
    assert copied.high - copied.low == pytest.approx(once.high - once.low)
    assert copied.n == 27


def test_too_little_for_an_interval():
    assert wilson(0, 0).mean is None
    assert clustered_mean([], []).mean is None
    assert clustered_mean([1.0], ["a"])[:3] == (1.0, None, None)
    assert clustered_mean([1.0, 2.0], ["a", "a"]) == clustered_mean([1.0, 2.0], ["a", "b"])
    assert clustered_mean([2.0, 2.0], ["a", "b"])[:3] == (2.0, None, None)
    assert clustered_share([1.0, 1.0, 1.0], list("abc")) == wilson(3, 3)
    wide = clustered_share([1.0, 1.0, 0.2], list("abc"))
    assert (wide.low, wide.high) == (0.0, 1.0)


def test_coverage_of_the_clustered_interval():
    """Nominal 95 % holds where trials share documents, as it would not if they were taken as independent."""
    rng = np.random.default_rng(0)
    hits, rounds = 0, 400
    documents = [str(i) for i in range(6) for _ in range(5)]
    for _ in range(rounds):
        values = np.repeat(rng.normal(size=6), 5) + 0.3 * rng.normal(size=30)
        estimate = clustered_mean(values.tolist(), documents)
        hits += estimate.low <= 0 <= estimate.high
    assert 0.92 <= hits / rounds <= 0.98
