"""Finds ops of the dispatch suite whose second call with the same shapes misses the sharding cache.

Each library counts the sharding decisions that it makes. Times cannot decide: after a first call of milliseconds the
CPU's caches are cold, so the second call of an op that hits the cache takes 1.2 to 8 times as long as a cached call.
"""

from collections.abc import Iterable
from statistics import median

from dtbench.grouping import group_by
from dtbench.records.host_time import SecondCall
from dtbench.records.result import Result

DECISIONS = "decisions"  # counter of second calls


def second_calls(results: Iterable[Result]) -> list[SecondCall]:
    """Returns the second calls whose decisions were counted, in the order of the results.

    Launches are merged: the median of their times, and the largest of their counts.
    """
    timed = [r for r in results if r.suite == "dispatch" and r.status == "ok" and r.estimate_s is not None]
    cases = group_by(timed, lambda r: r.case_key)
    times_s = {key: median(r.estimate_s or 0.0 for r in launches) for key, launches in cases.items()}
    calls = []
    for (suite, op, impl, params), launches in cases.items():
        fields = dict(params)
        decisions = [count for r in launches if (count := r.counters.get(DECISIONS)) is not None]
        if fields.get("call") != "second" or not decisions:
            continue
        first, cached = (
            (suite, op, impl, tuple(sorted({**fields, "call": call}.items()))) for call in ("first", "cached")
        )
        calls.append(
            SecondCall(
                op,
                impl,
                str(fields.get("placements", "")),
                str(fields.get("pass", "")),
                int(max(decisions)),
                times_s[suite, op, impl, params],
                times_s.get(first),
                times_s.get(cached),
            )
        )
    return calls
