"""Base and new, case by case, whoever compared them: the gate's result or two sides of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from dtbench import errors
from dtbench.files.gate import Benchmark, Gate
from dtbench.judge.compare import MIN_LAUNCHES, SAME_CONFIDENCE, SAME_WITHIN, Comparison, Row
from dtbench.judge.verdicts import MAX_P, MIN_CHANGE, MIN_CHANGE_S, Verdict, smallest_change
from dtbench.model import Param
from dtbench.units import format_seconds

# Word -> (shape, what it means).
WORDS: Mapping[Verdict, tuple[str, str]] = {
    Verdict.REGRESSION: ("▲", "slower"),
    Verdict.FAILED: ("✕", "failed or gave wrong data"),
    Verdict.MISSING: ("∅", "measured before, missing now"),
    Verdict.INCONCLUSIVE: ("?", "inconclusive: neither a change nor sameness is shown"),
    Verdict.IMPROVED: ("▼", "faster"),
    Verdict.NEW: ("+", "new"),
    Verdict.PASS: ("=", "same"),
}
GRAVE = (Verdict.REGRESSION, Verdict.FAILED, Verdict.MISSING)


@dataclass(frozen=True)
class Change:
    """One case and impl. verdict: one of WORDS. ratio: new over base, low and high its bounds (None: open).
    matters: the least change that counts, as a share. noise: spread of the log ratios over pairs.
    observations: such as "10 pairs"."""

    verdict: Verdict
    suite: str
    name: str
    impl: str
    params: Mapping[str, Param]
    reason: str = ""
    base_s: float | None = None
    now_s: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    matters: float | None = None
    noise: float | None = None
    observations: str = ""
    estimator: str = ""

    @property
    def words(self) -> str:
        params = ", ".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.name} ({params})" if params else self.name

    @property
    def severity(self) -> float:
        """The change over the least that counts; positive is slower."""
        return (self.ratio - 1) / self.matters if self.ratio is not None and self.matters else 0.0


@dataclass(frozen=True)
class Changes:
    """All of them, the gravest first. outcome: the verdict on the whole, one of OUTCOMES; thresholds: what the
    words mean here; bounds: what low and high are; sides: what base and new are."""

    changes: tuple[Change, ...]
    outcome: str
    thresholds: tuple[str, ...]
    bounds: str
    notes: tuple[str, ...] = ()
    sides: tuple[tuple[str, str], ...] = ()


# Outcome -> (shape, headline).
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "slower": ("▲", "Slower"),
    "failed": ("✕", "Failed"),
    "missing": ("∅", "Incomplete"),
    "untrusted": ("?", "Not to be trusted"),
    "inconclusive": ("?", "Inconclusive"),
    "nothing": ("∅", "Nothing could be compared"),
    "ok": ("=", "No regression"),
}


def _sorted(changes: Sequence[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda c: (c.verdict.gravity, -abs(c.severity))))


# ------------------------------------------------------------------------------------ two sides of runs


def of_comparison(comparison: Comparison) -> Changes:
    """What `dtbench compare` finds."""
    changes = _sorted([_of_row(row) for row in comparison.rows])
    outcomes = {
        errors.EXIT_OK: "ok",
        errors.EXIT_REGRESSION: "slower" if comparison.count(Verdict.REGRESSION) else "failed",
        errors.EXIT_INCONCLUSIVE: "inconclusive",
        errors.EXIT_NOTHING: "nothing",
    }
    outcome = outcomes[comparison.exit_code]
    thresholds = (
        (
            f"slower, faster: at least {MIN_LAUNCHES} launches on each side, an exact rank test at p < {MAX_P:g}, "
            f"and a change of more than {MIN_CHANGE:.0%} and {format_seconds(MIN_CHANGE_S)}"
        ),
        f"same: the {SAME_CONFIDENCE:.0%} interval of the ratio lies within ±{SAME_WITHIN:.0%}",
        "inconclusive: neither of these",
    )
    bounds = "Hodges-Lehmann over launches; the interval covers at most what so few launches allow."
    return Changes(changes, outcome, thresholds, bounds, comparison.notes)


def _of_row(row: Row) -> Change:
    suite, name, impl, params = row.key
    matters = smallest_change(row.base_s) if row.base_s else None
    observations = f"{row.base_launches} + {row.new_launches} launches"
    if row.confidence is not None:
        observations += f", interval of {row.confidence:.0%}"
    return Change(
        row.verdict,
        suite,
        name,
        impl,
        dict(params),
        row.reason,
        row.base_s,
        row.new_s,
        row.ratio,
        row.low,
        row.high,
        matters,
        None,
        observations,
        row.estimator,
    )


# ------------------------------------------------------------------------------------ the gate's result


def of_gate(gate: Gate) -> Changes:
    """What `dtbench gate` wrote as JSON."""
    tolerances = sorted({b.tolerance for b in gate.benchmarks})
    ends = dict.fromkeys(tolerances[:1] + tolerances[-1:])
    tolerance = " to ".join(f"{x:.0%}" for x in ends) or "5 %"
    thresholds = (
        (
            f"slower, faster: an exact signed-rank test over pairs of launches at p < {MAX_P:g} (less where many "
            f"benchmarks are judged at once), and a change of at least {MIN_CHANGE:.0%}, "
            f"{format_seconds(MIN_CHANGE_S)} and the benchmark's own floor; or more of what is counted"
        ),
        f"same: the upper bound of the change lies below the benchmark's tolerance, {tolerance} here",
        "inconclusive: neither, within the pairs that were measured",
    )
    sides = tuple(
        (side, ", ".join(f"{key} {value}" for key, value in asdict(of).items() if value))
        for side, of in (("base", gate.base), ("head", gate.head))
        if of is not None
    )
    moves = (("the control", gate.trust.control), ("base against itself", gate.trust.null))
    notes = (
        *(f"Not to be trusted: {reason}" for reason in gate.trust.reasons),
        *(f"{words} moved by {ratio - 1:+.2%}" for words, ratio in moves if ratio is not None),
        *gate.notes,
    )
    undecided = "untrusted" if gate.trust.reasons else "inconclusive"
    outcomes = {0: "ok", 1: "slower", 3: undecided, 4: "missing", 5: "failed"}
    bounds = "Hodges-Lehmann over pairs of launches; low and high are one-sided bounds at 95 %."
    changes = _sorted([_of_benchmark(b) for b in gate.benchmarks])
    return Changes(changes, outcomes[gate.exit_code], thresholds, bounds, notes, sides)


def _of_benchmark(of: Benchmark) -> Change:
    rises = [f"{name} {rise.base:g} → {rise.head:g}" for name, rise in of.counters.items()]
    effect = of.effect
    return Change(
        Verdict[of.verdict],
        of.suite,
        of.name,
        of.impl,
        of.params,
        "; ".join([*rises, *([of.reason] if of.reason else [])]),
        of.base_s,
        of.head_s,
        effect.ratio if effect else None,
        (effect.low or None) if effect else None,  # 0: no bound yet
        effect.high if effect else None,
        smallest_change(of.base_s, of.floor_s or 0.0) if of.base_s else None,
        effect.sd if effect else None,
        f"{effect.pairs:.0f} pairs" if effect else "",
        of.estimator or "",
    )
