"""One model held against another on the samples both have: difference, significance, and what could have been seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atma_eval import stats
from atma_eval.compare.pairing import Pairs, Units, pair
from atma_eval.metrics import MAX_EXPONENT, Metric
from atma_eval.stats import Difference

ALPHA = 0.05
FEWEST_DOCUMENTS = 6  # a sign-flip test over fewer cannot fall below 0.05


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A model less another (of perplexity: over it) on the samples both have.

    Attributes:
        difference: with interval, p before adjustment, and the numbers of pairs and documents.
        p_adjusted: Benjamini-Hochberg over all tests of its kind in one call.
        smallest: difference that as many samples, as discordant, would resolve with 80 % power, before adjustment.
        num_left_out: samples that only one side has.
        null: value of no difference: 0, or 1 of a ratio.
        binary: whether every trial is right or wrong, and p is McNemar's.
    """

    difference: Difference
    p_adjusted: float | None
    smallest: float | None
    num_left_out: int
    null: float
    binary: bool

    @property
    def resolved(self) -> bool:
        """Whether the adjusted p is below 0.05 and the interval, where there is one, leaves out no difference."""
        _, low, high, *_ = self.difference
        excludes = low is None or high is None or not low <= self.null <= high
        return self.p_adjusted is not None and self.p_adjusted < ALPHA and excludes


def contrast(a: Units, b: Units, metric: Metric, *, retrieval: bool) -> Contrast | None:
    """``a`` less ``b``; ``None`` where no sample pairs.

    Trials right or wrong: a paired score interval, widened where trials of a document go together, and exact McNemar
    over trials; of seeds that disagree on one, sign flips over documents. Else: mean over samples, clustered by
    document. p is not adjusted yet.
    """
    pairs = pair(a, b, retrieval=retrieval)
    if not pairs.a:
        return None
    binary = metric.kind == "proportion" and all(value in (0.0, 1.0) for value in (*pairs.a, *pairs.b))
    if metric.kind == "proportion":
        difference, smallest = _of_proportions(pairs, binary)
    else:
        weights = pairs.weights if metric.kind == "ratio" else None
        difference = stats.paired_mean(pairs.a, pairs.b, pairs.documents, weights=weights)
        smallest = _smallest_mean(difference)
        if metric.kind == "share":
            difference = _clipped(difference)
    null = 0.0
    if metric.kind == "exponential":
        mean, low, high, p, n, num_clusters = difference
        difference = Difference(_exp(mean), _exp(low), _exp(high), p, n, num_clusters)
        smallest, null = _exp(smallest), 1.0
    return Contrast(
        difference=difference,
        p_adjusted=None,
        smallest=smallest,
        num_left_out=pairs.num_left_out,
        null=null,
        binary=binary,
    )


def _of_proportions(pairs: Pairs, binary: bool) -> tuple[Difference, float | None]:
    a, b = pairs.a, pairs.b
    only_a, only_b = (sum(x * (1 - y) for x, y in zip(*sides, strict=True)) for sides in ((a, b), (b, a)))
    difference = stats.paired_proportion(a, b, pairs.documents)
    independent = round(stats.independent_pairs(a, b, pairs.documents))
    smallest = stats.smallest_difference(independent, (only_a + only_b) / len(a))
    return difference._replace(p=stats.mcnemar(round(only_a), round(only_b))) if binary else difference, smallest


def _smallest_mean(of: Difference) -> float | None:
    """From the width of the interval, which holds the spread of the document means."""
    clusters = of.num_clusters if of.num_clusters > 1 else of.n
    if of.mean is None or of.high is None or clusters < 2:
        return None
    error = (of.high - of.mean) / stats.t_quantile(clusters - 1)
    return stats.smallest_mean_difference(error * math.sqrt(clusters), clusters)


def _clipped(of: Difference) -> Difference:
    """No two shares lie further apart than 1."""
    low, high = (None if bound is None else max(-1.0, min(1.0, bound)) for bound in (of.low, of.high))
    return of._replace(low=low, high=high)


def _exp(value: float | None) -> float | None:
    return None if value is None or value > MAX_EXPONENT else math.exp(value)


def adjust(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """The same with p adjusted over all of them."""
    adjusted = stats.benjamini_hochberg([c.difference.p for c in contrasts])
    return [replace(c, p_adjusted=p) for c, p in zip(contrasts, adjusted, strict=True)]
