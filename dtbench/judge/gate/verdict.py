"""From pairs of launches to verdicts. Pure: what the numbers say, by exact tests.

A pair is one launch of each arm, next to each other in time; what counts is the log of head / base. Nearly all
variance of a host latency lies between processes, so a launch is one observation, however many samples
it holds; and sittings drift (1.6% in a quarter of an hour with no change), so only neighbours are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dtbench import errors
from dtbench.judge.gate.benchmark import Benchmark
from dtbench.judge.verdicts import MAX_P, Verdict, smallest_change
from dtbench.stats import signed_rank_p, signed_rank_tails

# What a screen lets pass: three quarters of the change that matters, 1.5% where that is 2%.
SCREEN_SHARE = 0.75
# The chance that any benchmark of an unchanged run is called slower.
FAMILY_P = 0.05
BOUND_CONFIDENCE = 0.95
# Beyond this, a control or an arm against itself has moved, if every pair (or nearly) says so.
TRUST_CHANGE = 0.01
TRUST_P = 0.04  # one-sided: five pairs that all agree have 1/32
# Beyond this it has moved even if the pairs scatter: a machine that does so to what nobody touched shows nothing. Base
# against itself was 6 % off on one, and an unchanged benchmark was called faster.
TRUST_SCATTER = 0.03
# Normal quantiles of 99% (the test's level) and 80% (the power at which the smallest change is told).
_MDE_QUANTILES = 2.3263 + 0.8416


@dataclass(frozen=True)
class Effect:
    """What n pairs say. ratio: head / base (Hodges-Lehmann of the paired log ratios). low, high: its one-sided
    bounds at 95%, 0 and inf where there are too few pairs. sd: of the log ratios `logs`.
    """

    ratio: float
    low: float
    high: float
    sd: float
    pairs: int
    logs: tuple[float, ...] = ()

    @cached_property  # most effects are judged by their bounds alone, and the test takes a millisecond
    def p_slower(self) -> float:
        """The exact signed-rank test of head being slower."""
        return signed_rank_p(np.asarray(self.logs))

    @cached_property
    def p_faster(self) -> float:
        """The same of head being faster."""
        return signed_rank_p(-np.asarray(self.logs))

    @property
    def smallest_detectable(self) -> float:
        """The change that a run of so many pairs finds 4 times in 5, as a share."""
        return math.exp(_MDE_QUANTILES * self.sd / math.sqrt(self.pairs)) - 1


def effect_of(base: Sequence[float], head: Sequence[float]) -> Effect:
    """The paired effect of head against base.

    base, head: one estimate per launch, seconds, in pairs.

    Raises:
        ValueError: no pairs, sides of different length, or an estimate that is not positive and finite.
    """
    if len(base) != len(head) or not base:
        raise ValueError(f"got {len(base)} base and {len(head)} head launches: expected pairs")
    if not all(0 < t < math.inf for t in (*base, *head)):
        raise ValueError("got an estimate that is not positive and finite")
    logs = np.log(np.asarray(head)) - np.log(np.asarray(base))
    n = len(logs)
    walsh = np.sort(np.add.outer(logs, logs)[np.triu_indices(n)]) / 2
    k = _bound_rank(n)
    return Effect(
        ratio=math.exp(float(np.median(walsh))),
        low=math.exp(float(walsh[k - 1])) if k else 0.0,
        high=math.exp(float(walsh[-k])) if k else math.inf,
        sd=float(np.std(logs, ddof=1)) if n > 1 else math.inf,
        pairs=n,
        logs=tuple(float(x) for x in logs),
    )


@lru_cache(maxsize=256)
def _bound_rank(n: int) -> int:
    """The largest k for which the k-th Walsh average bounds the effect at 95%; 0 where none does."""
    return int(np.searchsorted(signed_rank_tails(n), 1 - BOUND_CONFIDENCE, side="right"))


# ------------------------------------------------------------------------------- one benchmark


def passes(benchmark: Benchmark, effect: Effect, base_s: float, share: float = SCREEN_SHARE) -> bool:
    """Whether the pairs show that the benchmark is not slower by more than its tolerance."""
    matters = smallest_change(base_s, benchmark.floor_s)
    return effect.ratio <= 1 + share * matters and effect.high < 1 + max(benchmark.tolerance, matters)


def alpha_of(benchmarks: int, looks: int) -> float:
    """The level of one test: 1%, or 5% over the family, split over the looks at it."""
    return min(MAX_P, FAMILY_P / max(benchmarks, 1)) / looks


@dataclass(frozen=True)
class Judged:
    """One benchmark's end. effect: of the pairs that decided. counters: name -> (base, head) of what rose.

    stage: "counters", "screen", "confirmed" or "".
    """

    benchmark: Benchmark
    verdict: Verdict
    reason: str = ""
    stage: str = ""
    effect: Effect | None = None
    base_s: float | None = None
    head_s: float | None = None
    alpha: float | None = None
    counters: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON values."""
        suite, name, impl, params = self.benchmark.key
        effect: dict[str, float | None] | None = None
        if self.effect is not None:
            names = ("ratio", "low", "high", "sd", "p_slower", "p_faster", "smallest_detectable")
            figures = {name: float(getattr(self.effect, name)) for name in names}
            effect = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            effect["pairs"] = self.effect.pairs
        own = {name: getattr(self, name) for name in ("reason", "stage", "base_s", "head_s", "alpha")}
        of_it = {name: getattr(self.benchmark, name) for name in ("tolerance", "floor_s", "estimator")}
        counters = {k: {"base": b, "head": h} for k, (b, h) in self.counters.items()}
        key = {"suite": suite, "name": name, "impl": impl, "params": dict(params)}
        return {**key, "verdict": self.verdict.name, **own, **of_it, "effect": effect, "counters": counters}


# ------------------------------------------------------------------------------------ counters

# What a call does, as `counting` and the suites' workloads count it. Times among a workload's counters
# are no counts and are not gated.
HARD_COUNTERS = (
    "collectives",
    "collective_bytes",
    "allocations",
    "allocated_bytes",
    "python_calls",
    "bytes_copied",
    "peak_bytes",
)


def rises(
    base: Mapping[str, float], head: Mapping[str, float], ignored: frozenset[str] = frozenset()
) -> dict[str, tuple[float, float]]:
    """The hard counters that head has more of: name -> (base, head)."""
    shared = [name for name in HARD_COUNTERS if name in base and name in head and name not in ignored]
    return {name: (base[name], head[name]) for name in shared if head[name] > base[name]}


def words_of(counters: Mapping[str, tuple[float, float]]) -> str:
    """`python_calls 41 -> 43`."""
    return ", ".join(f"{name} {b:g} -> {h:g}" for name, (b, h) in counters.items())


# ------------------------------------------------------------------------------------ trust


@dataclass(frozen=True)
class Trust:
    """What nothing touched, and an arm against itself: by how much each moved. reasons: why not to trust."""

    control: Effect | None
    null: Effect | None
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON values."""
        effects = {"control": self.control, "null": self.null}
        return {k: e and e.ratio for k, e in effects.items()} | {"reasons": list(self.reasons)}


def has_moved(effect: Effect | None) -> bool:
    """Whether something that stayed the same seems to have changed: by more than 1% and not by chance, or by 3%."""
    if effect is None:
        return False
    change = math.exp(abs(math.log(effect.ratio))) - 1
    p = effect.p_slower if effect.ratio > 1 else effect.p_faster
    return change > TRUST_SCATTER or (change > TRUST_CHANGE and p < TRUST_P)


def trust_of(control: Effect | None, null: Effect | None, measured: bool) -> Trust:
    """The verdict on the whole run. measured: whether any benchmark was timed."""
    reasons: list[str] = []
    names = (("the control, which no arm touches,", control), ("base, measured against itself,", null))
    for name, effect in names:
        if has_moved(effect):
            assert effect is not None
            reasons.append(f"{name} moved by {effect.ratio - 1:+.1%} over {effect.pairs} pairs")
    if measured and control is None and null is None:
        reasons.append("neither the control nor base against itself was measured")
    return Trust(control, null, tuple(reasons))


# ------------------------------------------------------------------------------------ the run


def exit_code_of(judged: Sequence[Judged], trust: Trust, *, allow_new: bool = False) -> int:
    """1 a regression, 5 a failure, 4 missing, 3 undecided or not to be trusted, 0 all judged and none slower.

    A machine that cannot be trusted takes back what its times say, not what was counted.
    """
    counted = any(j.verdict is Verdict.REGRESSION and j.stage == "counters" for j in judged)
    verdicts = {j.verdict for j in judged}
    if counted or (Verdict.REGRESSION in verdicts and not trust.reasons):
        return errors.EXIT_REGRESSION
    if Verdict.FAILED in verdicts:
        return errors.EXIT_CASE_FAILED
    if Verdict.MISSING in verdicts or (Verdict.NEW in verdicts and not allow_new):
        return errors.EXIT_NOTHING
    if trust.reasons or Verdict.INCONCLUSIVE in verdicts:
        return errors.EXIT_INCONCLUSIVE
    # Where nothing was judged there is no reason to be content.
    if not verdicts & {Verdict.PASS, Verdict.IMPROVED}:
        return errors.EXIT_NOTHING
    return errors.EXIT_OK
