"""Several training seeds of one recipe, taken together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from atma_eval.stats.intervals import Estimate, clustered_mean, clustered_share, wilson


def pooled_proportion(values_by_seed: Sequence[Sequence[float]]) -> Estimate:
    """Share of right trials (1, else 0) of all seeds, with Wilson's interval over the trials of the seed that has most.

    As if one seed had scored the mean: more seeds do not multiply the evidence, since they read the same trials, and a
    t interval is too short near 0 and 1, where few documents differ: of a true share of 0.95 (16 documents, 2 trials
    each, 2 seeds) it holds 0.82 to 0.86, and this 0.95 or more.
    """
    values = [value for seed in values_by_seed for value in seed]
    most = max((len(seed) for seed in values_by_seed), default=0)
    return wilson(most * sum(values) / max(1, len(values)), most)._replace(n=len(values))


def pooled_seeds(
    values_by_seed: Sequence[Sequence[float]], clusters_by_seed: Sequence[Sequence[Hashable]], *, bounded: bool = False
) -> Estimate:
    """Mean over all trials of all seeds, with a t interval over documents: a document is one cluster in all seeds.

    More seeds do not multiply the evidence, since they read the same documents. The interval is for the average of
    *these* seeds on other documents; how others would do, their spread tells. ``bounded``: scores between 0 and 1;
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
