"""The statistics of dtbench: pure functions of numbers.

    order.py        quantiles, and what stands for the samples of a launch
    rank_tests.py   whether launches differ, and by which ratio
    drift.py        whether plain torch and all beside it moved together
    pairs.py        what pairs of launches show, and the least that counts
    bootstrap.py    intervals of what is made of samples
    drops.py        where a bandwidth drops as sizes grow

Why these: 99% and more of the variance of a host-latency benchmark lies between processes, so what
is compared are launches (one estimate each), not samples; the minimum and the lower quartile are
steady estimators of a launch, the mean is not. Ratios are compared on the log scale, where 2x
faster and 2x slower are equally far from no change.
"""

from dtbench.records.judged import MIN_CHANGE, MIN_CHANGE_S, smallest_change
from dtbench.records.timing import SHARES, figures_of, quantile, summarize
from dtbench.stats.bootstrap import drawn_again, interval
from dtbench.stats.drift import FLOORS, drifts_of, has_drifted, shares
from dtbench.stats.drops import bandwidth_drops
from dtbench.stats.order import (
    blocks_of,
    estimate_s,
    estimates_s,
    order_statistic,
    quantiles_of,
)
from dtbench.stats.pairs import (
    FAMILY_P,
    LAUNCHES_DIFFER,
    MAX_P,
    Effect,
    alpha_of,
    effect_of,
    is_beyond_launches,
)
from dtbench.stats.rank_tests import hodges_lehmann_ratio, rank_test, signed_rank_p

__all__ = [
    "FAMILY_P",
    "FLOORS",
    "LAUNCHES_DIFFER",
    "MAX_P",
    "MIN_CHANGE",
    "MIN_CHANGE_S",
    "SHARES",
    "Effect",
    "alpha_of",
    "bandwidth_drops",
    "blocks_of",
    "drawn_again",
    "drifts_of",
    "effect_of",
    "estimate_s",
    "estimates_s",
    "figures_of",
    "has_drifted",
    "hodges_lehmann_ratio",
    "interval",
    "is_beyond_launches",
    "order_statistic",
    "quantile",
    "quantiles_of",
    "rank_test",
    "shares",
    "signed_rank_p",
    "smallest_change",
    "summarize",
]
