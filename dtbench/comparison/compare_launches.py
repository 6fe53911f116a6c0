"""Compares the launches of one case on two sides, base and head.

Host latencies vary far more between processes than within one. A launch therefore counts as one observation, however
many samples it has. With one launch on each side, 32% of identical pairs differ by 5% in their means.

"slower" and "faster" need five launches on each side, the fewest for which the exact rank test can reach p < .01
(1/252). Fewer launches suffice if the two sides differ by more than launches of one build ever did. "same" needs an
interval that lies within 5% of no change.
"""

from collections.abc import Sequence
from statistics import median

from dtbench.records.comparison import Change, Verdict
from dtbench.stats import (
    MAX_LAUNCH_SPREAD,
    MAX_P,
    MIN_CHANGE,
    MIN_CHANGE_S,
    RatioEstimate,
    exceeds_launch_spread,
    hodges_lehmann_ratio,
    rank_test,
)

MIN_LAUNCHES = 5
# Most launches per case and side that are compared. The test uses all pairs of launches, so very many would take hours.
MAX_LAUNCHES = 500
SAME_WITHIN = 0.05
SAME_CONFIDENCE = 0.95
BEYOND_LAUNCH_SPREAD = f"beyond the {MAX_LAUNCH_SPREAD:g}x by which launches of one build have differed"
SINGLE_LAUNCH = f"cannot tell: one launch on each side; use --launches {MIN_LAUNCHES} or more"


def compare_launches(base: Sequence[float], head: Sequence[float]) -> tuple[Verdict, str, Change | None]:
    """Compares the estimates of all launches, in seconds.

    Returns:
        (verdict, reason, change). The reason is "" if the verdict needs none. The change has an interval and p values;
        it is None if a launch measured 0 s.
    """
    if min(*base, *head) <= 0:
        return Verdict.INCONCLUSIVE, "a launch measured 0 s: below the resolution of the clock", None
    base, head = base[:MAX_LAUNCHES], head[:MAX_LAUNCHES]
    estimate = hodges_lehmann_ratio(base, head)
    test = rank_test(base, head)
    has_enough = min(len(base), len(head)) >= MIN_LAUNCHES
    is_relevant = (
        max(estimate.ratio, 1 / estimate.ratio) - 1 > MIN_CHANGE
        and abs(estimate.ratio - 1) * median(base) > MIN_CHANGE_S
    )
    verdict, reason = Verdict.INCONCLUSIVE, ""
    if has_enough and is_relevant and test.p_slower < MAX_P and estimate.ratio > 1:
        verdict = Verdict.SLOWER
    elif has_enough and is_relevant and test.p_faster < MAX_P and estimate.ratio < 1:
        verdict = Verdict.FASTER
    elif _shows_sameness(estimate):
        verdict = Verdict.SAME
    elif not has_enough and exceeds_launch_spread(base, head):
        verdict = Verdict.SLOWER if estimate.ratio > 1 else Verdict.FASTER
        reason = BEYOND_LAUNCH_SPREAD
    elif len(base) == len(head) == 1:
        reason = SINGLE_LAUNCH
    elif not has_enough:
        reason = f"cannot tell: fewer than {MIN_LAUNCHES} launches on a side"
    else:
        reason = "shows neither a change of 2% and 0.2 µs nor sameness within 5%"
    return verdict, reason, Change(**vars(estimate), **vars(test))


def _shows_sameness(estimate: RatioEstimate) -> bool:
    """Whether an interval of at least `SAME_CONFIDENCE` lies within `SAME_WITHIN` of no change."""
    low, high, confidence = estimate.low, estimate.high, estimate.confidence
    if low is None or high is None or confidence is None or confidence < SAME_CONFIDENCE:
        return False
    return low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN
