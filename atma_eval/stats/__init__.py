"""From scores to claims: intervals, paired differences, their significance and what a design could have resolved.

numpy only, no torch. Values are trials or documents; *clusters* name what they share (the document), so that values of
one cluster are never taken for independent evidence. Two rules hold everywhere: where there is too little to tell an
interval it is ``None``, and no interval has a width of zero.
"""

from atma_eval.stats.bootstrap import cluster_bootstrap, mean_of_sums, ratio_of_sums
from atma_eval.stats.intervals import (
    Z_95,
    Estimate,
    clustered_mean,
    clustered_share,
    design_effect,
    ratio_mean,
    t_quantile,
    wilson,
)
from atma_eval.stats.length import EffectiveLength, effective_length
from atma_eval.stats.paired import (
    Difference,
    benjamini_hochberg,
    independent_pairs,
    mcnemar,
    paired_mean,
    paired_proportion,
    sign_flip,
)
from atma_eval.stats.power import smallest_difference, smallest_mean_difference
from atma_eval.stats.seeds import pooled_proportion, pooled_seeds

__all__ = [
    "Z_95",
    "Difference",
    "EffectiveLength",
    "Estimate",
    "benjamini_hochberg",
    "cluster_bootstrap",
    "clustered_mean",
    "clustered_share",
    "design_effect",
    "effective_length",
    "independent_pairs",
    "mcnemar",
    "mean_of_sums",
    "paired_mean",
    "paired_proportion",
    "pooled_proportion",
    "pooled_seeds",
    "ratio_mean",
    "ratio_of_sums",
    "sign_flip",
    "smallest_difference",
    "smallest_mean_difference",
    "t_quantile",
    "wilson",
]
