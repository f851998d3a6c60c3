"""Intervals against values worked out by hand or taken from tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from atma_eval.stats import (
    Difference,
    EffectiveLength,
    Estimate,
    benjamini_hochberg,
    cluster_bootstrap,
    clustered_mean,
    clustered_share,
    design_effect,
    effective_length,
    independent_pairs,
    mcnemar,
    paired_mean,
    paired_proportion,
    pooled_proportion,
    pooled_seeds,
    ratio_mean,
    ratio_of_sums,
    sign_flip,
    smallest_difference,
    smallest_mean_difference,
    t_quantile,
    wilson,
)
from atma_eval.stats.bootstrap import resample
from atma_eval.stats.power import mcnemar_power


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


def test_clusters_that_agree_exactly_give_no_interval():
    """Totals of both documents happen to be equal: a width of zero would claim certainty."""
    assert clustered_mean([0.2, 0.6, 0.6, 0.2], list("aabb"))[:3] == (pytest.approx(0.4), None, None)
    assert clustered_share([1.0, 0.0, 0.0, 1.0], list("aabb"))[:3] == (0.5, None, None)
    assert clustered_mean([0.1] * 7, list("abcdefg")).low is None  # whose mean is not 0.1 to the last bit


def test_ratio_mean_by_hand():
    """Ratio 111 / 54; document residuals -0.8333, -1.8889, 2.7222 (scipy for the quantile 4.302653)."""
    estimate = ratio_mean([10.0, 22.0, 31.0, 8.0, 40.0], [5.0, 10.0, 16.0, 5.0, 18.0], list("aabcc"))
    assert estimate == pytest.approx((111 / 54, 1.8277255, 2.2833856, 5), rel=1e-6)
    assert ratio_mean([], [], []) == Estimate(None, None, None, 0)
    assert ratio_mean([1.0], [0.0], ["a"])[:3] == (None, None, None)
    assert ratio_mean([1.0, 2.0], [2.0, 4.0], list("ab"))[:3] == (0.5, None, None)
    assert ratio_mean([0.0, 9.0], [1.0, 1.0], list("ab")).low == 0.0
    assert ratio_mean([-5.0, 9.0], [1.0, 1.0], list("ab")).low < 0.0
    with pytest.raises(ValueError, match="differ in length"):
        ratio_mean([1.0, 2.0], [1.0, 1.0], ["a"])


def test_design_effect():
    """Copies count once: five of each value are worth a fifth, but for the degrees of freedom; never below one."""
    assert design_effect([0.0] * 5 + [1.0] * 5 + [1.0] * 5 + [0.0] * 5, np.repeat(range(4), 5)) == pytest.approx(
        (4 / 3) * 25 * (4 * 0.25) / 20**2 / (20 * 0.25 / 19 / 20)
    )
    assert design_effect([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], list("aabbcc")) == 1.0
    assert design_effect([1.0, 1.0], list("ab")) == design_effect([0.0, 1.0], list("aa")) == design_effect([], []) == 1


# -- bootstrap ------------------------------------------------------------------------------------------------------


def test_bootstrap_by_enumeration():
    """Two documents of means 1 and 4: a quarter of resamples are (1, 1), half (1, 4), a quarter (4, 4)."""
    estimate = cluster_bootstrap([1.0, 1.0, 3.0, 5.0], list("aabb"))
    assert estimate == (2.5, 1.0, 4.0, 4)
    assert cluster_bootstrap([1.0, 1.0, 3.0, 5.0], list("aabb"), studentised=True)[:3] == (2.5, None, None)
    # 3 of 27 resamples draw one document thrice: no spread to divide by, and more than the 2.5 % that may be cut off
    assert cluster_bootstrap([1.0, 2.0, 5.0], list("abc"), studentised=True).low is None
    assert cluster_bootstrap([1.0, 2.0, 5.0, 4.0], list("abcd"), studentised=True).low is not None


def test_bootstrap_draws_whole_documents():
    values, documents = [1.0, 2.0, 4.0, 3.0, 8.0, 5.0], list("abcdef")
    once = cluster_bootstrap(values, documents)
    copied = cluster_bootstrap(np.repeat(values, 9), np.repeat(documents, 9))
    assert copied[:3] == pytest.approx(once[:3])
    assert once.low < once.mean < once.high
    assert cluster_bootstrap(values, documents, seed=0) == once
    assert cluster_bootstrap(np.random.default_rng(5).normal(size=30), range(30), seed=1) != cluster_bootstrap(
        np.random.default_rng(5).normal(size=30), range(30), seed=2
    )


@pytest.mark.parametrize("studentised", [False, True])
def test_bootstrap_agrees_with_t_over_many_documents(studentised):
    rng = np.random.default_rng(1)
    over, under = rng.normal(20, 3, size=(2, 60))
    documents = list(range(60))
    by_t = clustered_mean(over, documents)
    assert cluster_bootstrap(over, documents, studentised=studentised)[:3] == pytest.approx(by_t[:3], abs=0.15)
    by_t = ratio_mean(over, under, documents)
    pairs = np.stack([over, under], axis=1)
    estimate = cluster_bootstrap(pairs, documents, statistic=ratio_of_sums, studentised=studentised)
    assert estimate[:3] == pytest.approx(by_t[:3], abs=0.01)


@pytest.mark.parametrize("studentised", [False, True])
def test_bootstrap_of_too_little(studentised):
    def bootstrap(*arguments, **options):
        return cluster_bootstrap(*arguments, studentised=studentised, **options)

    assert bootstrap([], []) == Estimate(None, None, None, 0)
    assert bootstrap([3.0], ["a"]) == (3.0, None, None, 1)
    assert bootstrap([3.0] * 4, list("abcd")) == (3.0, None, None, 4)
    assert bootstrap([0.0] * 4, list("abcd")) == (0.0, None, None, 4)
    assert bootstrap([[1.0, 0.0]], ["a"], statistic=ratio_of_sums)[:3] == (None, None, None)
    one_has_none = bootstrap([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]], list("abc"), statistic=ratio_of_sums)
    assert one_has_none.mean == 3.0
    # 1 of 256 resamples has nothing to divide by, and is left out
    pairs = [[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [4.0, 1.5]]
    estimate = cluster_bootstrap(pairs, list("abcd"), statistic=ratio_of_sums)
    assert estimate.low is not None and estimate.high < math.inf
    with pytest.raises(ValueError, match="differ in length"):
        bootstrap([1.0, 2.0], ["a"])


def test_coverage_with_few_documents():
    """Why tables use t over documents: what nominal 95 % really covers with 5 of them, and with 15."""
    rounds, nominal = 600, pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 600))
    forms = {
        "t": clustered_mean,
        "percentile": lambda v, c: cluster_bootstrap(v, c, num_resamples=600),
        "studentised": lambda v, c: cluster_bootstrap(v, c, num_resamples=600, studentised=True),
    }
    covered = {}
    for num_documents in (5, 15):
        rng = np.random.default_rng(num_documents)
        documents = np.repeat(range(num_documents), 3).tolist()
        shape = (rounds, len(documents))
        draws = np.repeat(rng.normal(size=(rounds, num_documents)), 3, axis=1) + 0.3 * rng.normal(size=shape)
        for name, form in forms.items():
            estimates = [form(values, documents) for values in draws]
            covered[name, num_documents] = np.mean([e.low <= 0 <= e.high for e in estimates])
        means = resample(num_documents, 600, 0) @ draws.reshape(rounds, num_documents, 3).mean(axis=2).T / num_documents
        low, high = np.quantile(means, [0.025, 0.975], axis=0)
        covered["plain", num_documents] = np.mean((low <= 0) & (high >= 0))
    assert covered["plain", 5] < 0.89  # the common percentile bootstrap, here only as a warning
    assert covered["t", 5] == nominal
    assert covered["t", 15] == nominal
    assert covered["studentised", 5] == nominal
    assert covered["studentised", 15] == nominal
    assert covered["percentile", 15] == nominal
    assert covered["plain", 5] + 0.03 < covered["percentile", 5] < 0.97


# -- paired differences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    # by hand: 2 (1 + 14 + 91) / 2^14, 2 / 2^9; the last from scipy.stats.binomtest
    [(12, 2, 212 / 2**14), (2, 12, 212 / 2**14), (9, 0, 2 / 2**9), (0, 0, 1.0), (4, 4, 1.0), (50, 30, 0.033001262842)],
)
def test_mcnemar(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == pytest.approx(p, rel=1e-3 if only_a == 50 else 1e-12)


def test_no_p_is_zero():
    assert 0 < mcnemar(3000, 0) < 1e-300
    assert 0 < sign_flip([2.0] * 1100) < 1e-300
    assert sign_flip(np.linspace(1, 2, 40), num_flips=99) == 0.01


def test_sign_flip():
    """All 2^n signs counted by hand for whole numbers; scipy.stats.permutation_test for the others (0.09375)."""
    assert sign_flip([3.0, 2.0, 1.0]) == 2 / 8
    assert sign_flip([3.0, -2.0, 1.0]) == 6 / 8  # |sum| of 2 or more: all but 3 - 2 - 1 and its mirror
    assert sign_flip([0.3, -0.1, 0.25, 0.4, 0.05, -0.02, 0.31]) == 0.09375
    assert sign_flip([0.1, 0.2, -0.3]) == 1.0  # a sum of rounding only
    assert sign_flip([]) == sign_flip([0.0, 0.0]) == sign_flip([5.0]) == 1.0
    totals = np.random.default_rng(0).normal(0.3, 1, size=16)
    exact = sign_flip(totals)
    sampled = sign_flip([*totals, 1e-9], seed=3, num_flips=40_000)  # one too many to try all
    assert sampled == pytest.approx(exact, abs=0.01)
    assert sign_flip([*totals, 1e-9], seed=3, num_flips=40_000) == sampled
    whole = [2, -1, 4, 1, 3, -2]
    assert sign_flip(whole) == pytest.approx(sign_flip([value * 0.7 for value in whole]))


def paired(both, only_a, only_b, neither):
    a = [True] * both + [True] * only_a + [False] * only_b + [False] * neither
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    # From the formula written apart with scipy's Wilson limits. The first is of Newcombe's 1998 paper (0.0569, 0.3404).
    [
        ((36, 12, 2, 0), 0.056930, 0.340428),
        ((19, 12, 2, 1), 0.089651, 0.472756),
        ((20, 0, 0, 12), -0.063775, 0.063775),
        ((0, 5, 3, 24), -0.120000, 0.242827),
        ((50, 0, 0, 0), -0.071348, 0.071348),
        ((0, 30, 0, 0), 0.839468, 1.0),
        ((16, 4, 4, 16), -0.140410, 0.140410),
    ],
)
def test_newcombe_paired_interval(cells, low, high):
    a, b = paired(*cells)
    n = len(a)
    difference = paired_proportion(a, b, list(range(n)))
    assert difference.low == pytest.approx(low, abs=2e-6)
    assert difference.high == pytest.approx(high, abs=2e-6)
    assert difference.mean == pytest.approx((cells[1] - cells[2]) / n)
    assert difference.p == mcnemar(cells[1], cells[2])
    assert (difference.n, difference.num_clusters) == (n, n)
    other = paired_proportion(b, a, list(range(n)))
    assert (other.mean, -other.high, -other.low) == pytest.approx((-difference.mean, low, high), abs=2e-6)


def test_paired_proportion_always_has_a_width():
    """Every table of up to 7 trials, on documents of their own, on 3 documents, and on one."""
    for n in range(1, 8):
        for both, only_a, only_b in itertools.product(range(n + 1), repeat=3):
            if (neither := n - both - only_a - only_b) < 0:
                continue
            a, b = paired(both, only_a, only_b, neither)
            for documents in (list(range(n)), [i % 3 for i in range(n)], [0] * n):
                d = paired_proportion(a, b, documents)
                assert -1 <= d.low <= d.mean <= d.high <= 1
                assert d.high - d.low > 0.1
                assert 0 < d.p <= 1
    assert paired_proportion([], [], []) == Difference(None, None, None, None, 0, 0)


def test_trials_of_one_document_are_not_independent_evidence():
    a, b = [True] * 8, [False, False, False, False, True, False, False, True]
    alone = paired_proportion(a, b, list(range(8)))
    shared = paired_proportion(a, b, list("aabbccdd"))
    assert shared.mean == alone.mean
    assert shared.low < alone.low
    assert alone.p == 2 / 2**6
    assert shared.p == 2 / 2**4  # four documents, all for a
    assert shared.num_clusters == 4
    one = paired_proportion(a, b, ["a"] * 8)
    assert one == alone._replace(num_clusters=1)
    # copies of each trial, a document each, tell nothing new
    copied = paired_proportion(np.repeat(a, 5), np.repeat(b, 5), np.repeat(range(8), 5).tolist())
    assert copied.p == alone.p
    assert copied.high - copied.low > 0.95 * (alone.high - alone.low)


def test_pairs_of_several_seeds_are_worth_no_less_than_those_of_one():
    """Seeds that err apart make means that vary less, so documents that differ inflate them less."""
    rng = np.random.default_rng(0)
    documents = list(np.repeat(range(8), 4))
    skill = np.repeat(rng.uniform(0.3, 1.0, 8), 4)
    a, b, c = (rng.random((2, 32)) < share for share in (skill, skill, 0.3))
    alone = independent_pairs(a[0], c[0], documents)
    assert alone == pytest.approx(32 / design_effect(a[0].astype(float) - c[0], documents))
    assert independent_pairs(a[0], a[0], documents) == 32
    shared = [independent_pairs(x[0], y[0], documents) for x, y in ((a, c), (b, c))]
    pooled = independent_pairs((a[0] * 1.0 + b[0]) / 2, c.mean(axis=0), documents)
    assert min(shared) < pooled <= 32


def test_coverage_of_paired_proportions_over_shared_documents():
    """16 documents of 4 trials whose difficulty differs: nominal 95 %, true difference 0.3; no false alarms at 0."""
    rng = np.random.default_rng(2)
    documents = np.repeat(range(16), 4).tolist()
    covered, alarms, rounds = 0, 0, 300
    for _ in range(rounds):
        better, worse, same = (np.repeat(rng.beta(2 * m, 2 * (1 - m), size=16), 4) for m in (0.8, 0.5, 0.8))
        a, b, c = (rng.random(64) < p for p in (better, worse, same))
        d = paired_proportion(a, b, documents)
        covered += d.low <= 0.3 <= d.high
        alarms += paired_proportion(a, c, documents).p <= 0.05
    assert 0.93 <= covered / rounds <= 0.99
    assert alarms / rounds <= 0.07


def test_paired_mean_by_hand():
    """Differences 1, 2, 3 of three documents: 2 +- 4.302653 x 1 / sqrt 3; p 2 / 8."""
    difference = paired_mean([3.0, 4.0, 5.0], [2.0, 2.0, 2.0], list("abc"), seed=0)
    half = 4.302653 / math.sqrt(3)
    assert difference == pytest.approx((2.0, 2 - half, 2 + half, 0.25, 3, 3), abs=1e-5)
    assert difference.low < 0  # all differences are positive; the interval is not clipped as a loss's own is
    weighted = paired_mean([3.0, 4.0], [1.0, 1.0], list("ab"), weights=[1.0, 3.0])
    as_ratio = ratio_mean([2.0, 9.0], [1.0, 3.0], list("ab"))
    assert weighted.mean == as_ratio.mean == 2.75
    assert weighted.high == pytest.approx(as_ratio.high)
    assert paired_mean([2.0, 1.0, 0.0], [0.0, 0.0, 1.0], list("abc"), weights=[1.0, 1.0, 4.0]).p == 1.0
    assert paired_mean([2.0, 1.0, 0.0], [0.0, 0.0, 1.0], list("abc")).p == 6 / 8
    copied = paired_mean(np.repeat([3.0, 4.0, 5.0], 4), [2.0] * 12, np.repeat(list("abc"), 4).tolist())
    assert copied[:4] == pytest.approx(difference[:4])


def test_paired_mean_of_too_little():
    assert paired_mean([], [], []) == Difference(None, None, None, None, 0, 0)
    assert paired_mean([1.5, 0.3], [1.5, 0.3], list("ab")) == (0.0, None, None, 1.0, 2, 2)
    assert paired_mean([0.1 + 0.2], [0.3], ["a"]) == (0.0, None, None, 1.0, 1, 1)  # equal but for rounding
    assert paired_mean([2.0], [1.0], ["a"]) == (1.0, None, None, 1.0, 1, 1)
    constant = paired_mean([0.3, 0.5, 0.7], [0.1, 0.3, 0.5], list("abc"))
    assert constant.low is None and constant.p == 0.25
    one = paired_mean([3.0, 4.0, 5.0], [2.0] * 3, list("aaa"))
    assert one == paired_mean([3.0, 4.0, 5.0], [2.0] * 3, list("abc"))._replace(num_clusters=1)


def test_benjamini_hochberg():
    """By hand: p m / rank, never above that of a larger p. Agrees with scipy.stats.false_discovery_control."""
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.005, 0.8]) == pytest.approx([0.025, 0.05, 0.05, 0.025, 0.8])
    with_gap = benjamini_hochberg([0.001, 0.02, None, 0.02, 0.02, 0.9, 0.04])
    assert with_gap[2] is None
    assert [p for p in with_gap if p is not None] == pytest.approx([0.006, 0.03, 0.03, 0.03, 0.9, 0.048])
    assert benjamini_hochberg([0.04, 0.041]) == pytest.approx([0.041, 0.041])
    assert benjamini_hochberg([None]) == [None]
    assert benjamini_hochberg([0.2]) == [0.2]
    assert benjamini_hochberg([]) == []


# -- what could have been resolved ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "difference", "discordance", "power"),
    # summed with scipy.stats.binom and binomtest over every number of discordant pairs
    [(32, 0.25, 0.3, 0.7101078), (20, 0.4, 0.4, 0.8744010), (40, 0.1, 0.2, 0.1724272)],
)
def test_mcnemar_power(n, difference, discordance, power):
    assert mcnemar_power(n, difference, discordance) == pytest.approx(power, abs=1e-6)


def test_smallest_difference():
    assert smallest_difference(5, 0.5) is None  # 5 pairs all for one model have p = 2 / 32
    assert smallest_difference(0, 0.0) is None
    # 6 of 6 must differ one way: d^6 = 0.8
    assert smallest_difference(6, 0.0) == pytest.approx(0.8 ** (1 / 6), abs=2e-4)
    for n in (16, 32, 100, 400):
        for discordance in (0.0, 0.2, 1.0):
            d = smallest_difference(n, discordance)
            assert d is not None and d > 0
            assert mcnemar_power(n, d, max(discordance, d)) >= 0.8
            assert mcnemar_power(n, d - 2e-3, max(discordance, d - 2e-3)) < 0.8
    assert smallest_difference(32, 0.6) > smallest_difference(32, 0.3)
    assert smallest_difference(100, 0.3) < smallest_difference(32, 0.3)
    assert smallest_difference(32, 0.3, power=0.95) > smallest_difference(32, 0.3)
    assert smallest_difference(32, 0.3, alpha=0.001) > smallest_difference(32, 0.3)
    # many pairs: the normal approximation (Connor 1987), z sqrt(psi) + z' sqrt(psi - d^2) over sqrt n
    d = smallest_difference(2000, 0.3)
    assert d == pytest.approx((1.96 * math.sqrt(0.3) + 0.8416 * math.sqrt(0.3 - d * d)) / math.sqrt(2000), rel=0.03)


def test_smallest_mean_difference():
    """(2.776445 + 0.940965) / sqrt 5; scipy's noncentral t needs 1.682 and, for 8 clusters, 1.1560."""
    assert smallest_mean_difference(1.0, 5) == pytest.approx(1.662476, rel=1e-5)
    assert smallest_mean_difference(0.5, 8) == pytest.approx(0.5 * 1.15603, rel=0.01)
    assert smallest_mean_difference(1.0, 1) is None
    assert smallest_mean_difference(0.0, 9) is None
    assert smallest_mean_difference(1.0, 5, power=0.9) > smallest_mean_difference(1.0, 5)


# -- effective length -------------------------------------------------------------------------------------------------

LENGTHS = (2048, 4096, 8192, 16384)


def right(*counts, n=32):
    return [[1] * count + [0] * (n - count) for count in counts]


@pytest.mark.parametrize(
    ("counts", "length", "censored"),
    # of 32: Wilson's low of 32 is 0.893, of 31 0.843, of 20 0.453; 85 % of 1 is 0.85
    [
        ((32, 32, 20, 0), 4096, False),
        ((32, 31, 32, 32), 2048, False),  # all shorter lengths must hold too
        ((32, 32, 32, 32), 16384, True),
        ((31, 32, 32, 32), 16384, True),  # 0.843 of 0.85 x 0.969
        ((21, 32, 32, 32), None, False),  # the shortest fails itself: low 0.483, reference 0.656
        ((0, 0, 0, 0), None, False),  # 85 % of nothing is held by nothing
        ((0, 32, 32, 32), None, False),
    ],
)
def test_effective_length(counts, length, censored):
    result = effective_length(LENGTHS, right(*counts), list(range(32)))
    assert result.length == length
    assert result.censored is censored
    assert result.reference == counts[0] / 32


def test_effective_length_of_little():
    assert effective_length([], [], []) == EffectiveLength(None, None, None, None, False)
    assert effective_length(LENGTHS, [[]] * 4, []) == EffectiveLength(None, None, None, None, False)
    assert effective_length(LENGTHS, [[1]] * 4, ["a"]).length is None
    assert effective_length(LENGTHS, right(21, 21, 21, 21, n=21), list(range(21))).length is None
    assert effective_length(LENGTHS, right(22, 22, 22, 22, n=22), list(range(22))).length == 16384
    assert effective_length(LENGTHS[:1], right(32), list(range(32))) == (2048, 2048, 2048, 1.0, True, False)


def test_effective_length_skips_what_was_not_scored():
    values = right(32, 32, 32, 32)
    values[3] = [None] * 32
    assert effective_length(LENGTHS, values, list(range(32))) == (8192, 8192, 8192, 1.0, True, False)
    values = right(32, 32, 32, 32)
    values[1] = [1] * 16 + [None] * 16  # 16 right trials are too few
    assert effective_length(LENGTHS, values, list(range(32))).length == 2048
    values[0] = [None] * 32
    assert effective_length(LENGTHS, values, list(range(32))) == EffectiveLength(None, None, None, None, False)


def test_effective_length_uses_the_bounds_of_the_tables():
    """Any share just below a bound holds, just above does not; for right or wrong and for scores between."""
    rng = np.random.default_rng(4)
    documents = [i % 8 for i in range(32)]
    between = [rng.uniform(m - 0.2, m, size=32).tolist() for m in (1.0, 0.9, 0.7)]
    for values, bound in ((between, clustered_share), (right(31, 28, 20), lambda v, _: wilson(sum(v), len(v)))):
        reference = np.mean(values[0])
        for i in range(3):
            low = bound(values[i], documents).low / reference
            for share, num in ((low - 1e-6, i + 1), (low + 1e-6, i)):
                result = effective_length(LENGTHS[:3], values, documents, share=share)
                assert result.length == (LENGTHS[num - 1] if num else None)
        shuffled = effective_length(LENGTHS[2::-1], values[::-1], documents)
        assert shuffled == effective_length(LENGTHS[:3], values, documents)


def test_too_few_trials_are_told_from_a_failure():
    """21 of 21 cannot hold 85 % of itself, whatever the model is; 0 of 21 is no matter of numbers."""
    documents = list(range(21))
    assert effective_length(LENGTHS, right(21, 21, 21, 21, n=21), documents).too_few
    assert effective_length(LENGTHS, right(5, 0, 0, 0, n=21), documents).too_few
    assert not effective_length(LENGTHS, right(0, 0, 0, 0, n=21), documents).too_few
    assert not effective_length(LENGTHS, right(5, 0, 0, 0, n=32), list(range(32))).too_few
    assert not effective_length(LENGTHS, right(22, 22, 22, 22, n=22), list(range(22))).too_few


def test_interval_of_the_effective_length():
    """One document of 8 fails at 8192: the figure moves with how often it is drawn, at all lengths at once."""
    documents = [f"d{i % 8}" for i in range(64)]
    good = [[1] * 64, [1] * 64, [int(i % 8 < 7) for i in range(64)], [0] * 64]
    result = effective_length(LENGTHS, good, documents)
    # resampling 8 documents, none of the failing one is drawn with chance (7/8)^8 = 0.34
    assert (result.length, result.low, result.high) == (4096, 4096, 8192)
    assert effective_length(LENGTHS, good, documents, seed=0) == result
    by_trial = effective_length(LENGTHS, good, ["one document"] * 64)
    assert (by_trial.low, by_trial.high) == (4096, 8192)
    # Every length fails on the same document: a resample holds at all of 20 lengths or, two of it drawn (chance 0.26),
    # at none. Were lengths resampled apart, all would hold with chance 0.74^20.
    same = [[int(i % 8 < 7) for i in range(64)]] * 20
    joint = effective_length(range(1, 21), same, documents)
    assert (joint.length, joint.low, joint.high) == (20, None, 20)


def test_effective_length_of_scores_that_agree():
    """No spread over documents is no interval, so nothing is held, but for all right, where Wilson's is."""
    documents = [i % 8 for i in range(64)]
    assert effective_length(LENGTHS, [[0.6] * 64] * 4, documents) == (
        None,
        None,
        None,
        pytest.approx(0.6),
        False,
        False,
    )
    # one document of 8 is half right: 0.9375 - 2.365 x 0.0625 is below 85 % of it; without that document (chance 0.34)
    # a resample is all right
    half = [[0.5 if i % 8 == 7 else 1.0 for i in range(64)]] * 4
    result = effective_length(LENGTHS, half, documents)
    assert (result.length, result.low, result.high) == (None, None, 16384)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_pooled_seeds():
    """The same documents under every seed: as wide as the mean over seeds of each document, not narrower."""
    first, second, documents = [1.0, 2.0, 4.0], [2.0, 3.0, 8.0], list("abc")
    pooled = pooled_seeds([first, second], [documents, documents])
    alone = clustered_mean(np.mean([first, second], axis=0), documents)
    assert pooled[:3] == pytest.approx(alone[:3])
    assert pooled.n == 6
    assert pooled_seeds([], []) == Estimate(None, None, None, 0)
    assert pooled_seeds([[1.0]], [["a"]])[:3] == (1.0, None, None)
    all_right = pooled_seeds([[1.0] * 8] * 3, [list("abcdefgh")] * 3, bounded=True)
    assert all_right == wilson(8, 8)._replace(n=24)
    assert pooled_seeds([[0.0]], [["a"]], bounded=True) == wilson(0, 1)
    assert pooled_seeds([[1.0, 0.0]] * 2, [list("ab")] * 2, bounded=True).high == 1.0


def test_pooled_proportion():
    assert pooled_proportion([[1.0] * 8] * 3) == wilson(8, 8)._replace(n=24)
    assert pooled_proportion([[1.0] * 8, [0.0] * 8]) == wilson(4, 8)._replace(n=16)
    assert pooled_proportion([[1.0, 1.0, 0.0], [0.0]])[:3] == wilson(1.5, 3)[:3]  # a seed that is not finished
    assert pooled_proportion([]) == Estimate(None, None, None, 0)
