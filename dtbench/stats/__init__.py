"""The statistics of dtbench, and the analysis of runs.

    order.py              quantiles, the estimate of a launch, intervals from resampling
    rank_tests.py         whether launches or pairs of launches differ, and by which ratio
    exchanges.py          cost of unequal parts in an all-to-all, and the size from which a payload pays
    drift.py              changes that plain torch shares with all other implementations
    drops.py              sizes at which bandwidth drops
    frame.py              runs as pandas data frames
    layout.py             placement of process groups on hosts
    host_time.py          misses of the sharding cache, leaks, costs of sharded groups
    dispatch_headline.py  the ops that summarize the dispatch suite

At least 99% of the variance of a host latency lies between processes. Comparisons therefore use one estimate per launch
instead of samples. The minimum and the lower quartile are stable estimators of a launch, the mean is not. Ratios are
compared on the log scale, where 2x faster and 2x slower are equally far from no change.
"""

from dtbench.records.comparison import MIN_CHANGE, MIN_CHANGE_S, change_threshold
from dtbench.records.timing import SHARES, quantile, summarize, timing_quantiles
from dtbench.stats.drift import FLOORS, is_explained_by_drift, suggests_drift, suite_drifts
from dtbench.stats.drops import bandwidth_drops
from dtbench.stats.order import (
    batch_quantiles,
    estimate_s,
    estimates_s,
    index_blocks,
    interval,
    order_statistic,
    resample,
    resampled_ratio,
    variants,
)
from dtbench.stats.rank_tests import (
    FAMILY_P,
    MAX_LAUNCH_SPREAD,
    MAX_P,
    Effect,
    RatioEstimate,
    exceeds_launch_spread,
    hodges_lehmann_ratio,
    paired_effect,
    rank_test,
    signed_rank_p,
    significance_level,
)

__all__ = [
    "FAMILY_P",
    "FLOORS",
    "MAX_LAUNCH_SPREAD",
    "MAX_P",
    "MIN_CHANGE",
    "MIN_CHANGE_S",
    "SHARES",
    "Effect",
    "RatioEstimate",
    "bandwidth_drops",
    "batch_quantiles",
    "change_threshold",
    "estimate_s",
    "estimates_s",
    "exceeds_launch_spread",
    "hodges_lehmann_ratio",
    "index_blocks",
    "interval",
    "is_explained_by_drift",
    "order_statistic",
    "paired_effect",
    "quantile",
    "rank_test",
    "resample",
    "resampled_ratio",
    "signed_rank_p",
    "significance_level",
    "suggests_drift",
    "suite_drifts",
    "summarize",
    "timing_quantiles",
    "variants",
]
