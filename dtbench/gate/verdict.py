"""Verdicts from pairs of launches, by exact tests.

Host latencies vary far more between processes than within one. So a launch counts as one observation, however many
samples it has. Times drift by 1.6% in a quarter of an hour without any change, so only simultaneous launches are
compared.
"""

import math
from collections.abc import Mapping, Sequence

from dtbench import errors
from dtbench.gate.benchmark import Benchmark
from dtbench.records.comparison import Change, ComparedCase, Counts, Verdict
from dtbench.records.gate import GateCode, Trust
from dtbench.stats import FLOORS, MAX_P, Effect, change_threshold, suite_drifts
from dtbench.text.units import format_change

# The screen passes a benchmark only if its slowdown is at most this share of the change that counts.
# Where 2% counts, that is 1.5%.
SCREEN_SHARE = 0.75
# The control, or base against itself, has moved if it changes by more than this and a test excludes chance.
TRUST_CHANGE = 0.01
TRUST_P = 0.04  # level of that one-sided test; five pairs that all agree have p = 1/32
# Beyond this change it has moved even if the pairs scatter. On one machine, base against itself was off by 6 %, and an
# unchanged benchmark was called faster.
TRUST_SCATTER = 0.03


def passes(benchmark: Benchmark, effect: Effect, base_s: float, share: float = SCREEN_SHARE) -> bool:
    """Whether the pairs exclude a slowdown as large as the tolerance, and their ratio is near or below 1.

    Args:
        share: largest accepted slowdown, as a share of the change that counts.
    """
    threshold = change_threshold(base_s, benchmark.floor_s)
    return effect.ratio <= 1 + share * threshold and effect.high < 1 + max(benchmark.tolerance, threshold)


def compared_case(
    benchmark: Benchmark,
    verdict: Verdict,
    reason: str = "",
    stage: str = "",
    figures: tuple[Effect | None, float | None, float | None] = (None, None, None),
    alpha: float | None = None,
    counters: Mapping[str, Counts] | None = None,
) -> ComparedCase:
    """Returns the record of a decided benchmark.

    Args:
        figures: the effect of the deciding pairs, and the seconds per call of base and head.
        alpha: significance level of the test.
        counters: counters that rose.
    """
    suite, name, impl, params = benchmark.key
    effect, base_s, head_s = figures
    return ComparedCase(
        suite=suite,
        name=name,
        impl=impl,
        params=dict(params),
        label=benchmark.label,
        verdict=verdict,
        reason=reason,
        stage=stage,
        estimator=benchmark.estimator,
        base_s=base_s,
        head_s=head_s,
        effect=None if effect is None else _change(effect, alpha),
        alpha=alpha,
        tolerance=benchmark.tolerance,
        floor_s=benchmark.floor_s,
        counters=dict(counters or {}),
    )


def _change(effect: Effect, alpha: float | None) -> Change:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return Change(
        ratio=effect.ratio,
        low=effect.low or None,
        high=finite(effect.high),
        sd=finite(effect.sd),
        p_slower=effect.p_slower,
        p_faster=effect.p_faster,
        smallest_detectable=finite(effect.smallest_detectable(alpha or MAX_P)),
        pairs=effect.pairs,
    )


# Counters whose rise counts as a slowdown, from `counting` and from workloads of suites. Other counters of a workload,
# such as times, are not compared.
_CALL_COUNTERS = ("collectives", "collective_bytes", "allocations", "allocated_bytes", "python_calls")
HARD_COUNTERS = (*_CALL_COUNTERS, "bytes_copied", "peak_bytes")


def rises(
    base: Mapping[str, float], head: Mapping[str, float], ignored: frozenset[str] = frozenset()
) -> dict[str, Counts]:
    """Returns the hard counters that are larger in head."""
    return {
        name: Counts(base[name], head[name])
        for name in HARD_COUNTERS
        if name not in ignored and head.get(name, -math.inf) > base.get(name, math.inf)
    }


def describe_counters(counters: Mapping[str, Counts]) -> str:
    """Formats counters, e.g. `python_calls 41 -> 43`."""
    return ", ".join(f"{name} {counts.base:g} -> {counts.head:g}" for name, counts in counters.items())


def has_moved(effect: Effect | None) -> bool:
    """Whether an unchanged benchmark changed by more than 1% beyond chance, or by more than 3%."""
    if effect is None:
        return False
    change = math.exp(abs(math.log(effect.ratio))) - 1
    p = effect.p_slower if effect.ratio > 1 else effect.p_faster
    return change > TRUST_SCATTER or (change > TRUST_CHANGE and p < TRUST_P)


def trust_of(control: Effect | None, null: Effect | None, ratios: Sequence[float] = ()) -> Trust:
    """Returns whether the times of a gate can be trusted. Not called if the gate timed no benchmark.

    Args:
        control: the effect on the control benchmarks.
        null: the effect of base against itself.
        ratios: head / base of each benchmark.
    """
    reasons = [
        f"{name} moved by {effect.ratio - 1:+.1%} over {effect.pairs} pairs"
        for name, effect in (
            ("the control, whose code is the same in both arms,", control),
            ("base, measured against itself,", null),
        )
        if effect is not None and has_moved(effect)
    ]
    if control is not None and has_moved(control):
        drifts = suite_drifts([("", FLOORS[0], control.ratio), *(("", "", ratio) for ratio in ratios)])
        reasons += [
            f"the machine drifted: everything became {format_change(description)} in head"
            for description in drifts.values()
        ]
    if control is None and null is None:
        reasons.append("neither the control nor base against itself was measured")
    return Trust(
        control=control.ratio if control else None,
        null=null.ratio if null else None,
        reasons=tuple(reasons),
        control_pairs=control.pairs if control else 0,
        null_pairs=null.pairs if null else 0,
    )


def exit_code_of(judged: Sequence[ComparedCase], trust: Trust, *, allow_new: bool = False) -> GateCode:
    """Returns the exit code of a gate.

    It is the first that applies: 1 for a regression, 5 for a failure, 4 for a benchmark in one arm only, 3 if undecided
    or untrusted, 4 if nothing was compared, else 0. Verdicts from counters hold even if the times cannot be trusted.
    """
    counted = any(j.verdict is Verdict.SLOWER and j.stage == "counters" for j in judged)
    verdicts = {j.verdict for j in judged}
    codes: list[tuple[object, GateCode]] = [
        (counted or (Verdict.SLOWER in verdicts and not trust.reasons), errors.EXIT_REGRESSION),
        (Verdict.FAILED in verdicts, errors.EXIT_CASE_FAILED),
        (Verdict.MISSING in verdicts or (Verdict.NEW in verdicts and not allow_new), errors.EXIT_NOTHING),
        (trust.reasons or Verdict.INCONCLUSIVE in verdicts, errors.EXIT_INCONCLUSIVE),
        # A gate without verdicts does not pass.
        (not verdicts & {Verdict.SAME, Verdict.FASTER}, errors.EXIT_NOTHING),
    ]
    return next((code for applies, code in codes if applies), errors.EXIT_OK)
