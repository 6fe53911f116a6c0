"""Base and new, case by case, whoever compared them: the gate's result or two sides of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from dtbench import errors
from dtbench.comparison.compare_launches import (
    BEYOND_LAUNCH_SPREAD,
    MIN_LAUNCHES,
    SAME_CONFIDENCE,
    SAME_WITHIN,
    SINGLE_LAUNCH,
)
from dtbench.comparison.run_comparison import Comparison
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import Gate
from dtbench.stats import MAX_P, MIN_CHANGE, MIN_CHANGE_S
from dtbench.text.units import format_seconds

ROW = "case-"  # before the number of a row, in the anchor that leads to it


@dataclass(frozen=True)
class Changes:
    """All of them, the gravest first. outcome: the verdict on the whole, one of OUTCOMES; thresholds: what the
    words mean here; bounds: what low and high are; notes: what to know of them, rises: what else the gate says, which
    are counts that rose; sides: what base and new are; ends: their names, base and new."""

    changes: tuple[ComparedCase, ...]
    outcome: str
    thresholds: tuple[str, ...]
    bounds: str
    notes: tuple[str, ...] = ()
    rises: tuple[str, ...] = ()
    sides: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        return OUTCOMES[self.outcome][0]

    @property
    def headline(self) -> str:
        return OUTCOMES[self.outcome][1]

    @property
    def tallies(self) -> list[tuple[Verdict, int, str]]:
        """Verdict, how many cases have it, and the anchor of the first."""
        verdicts = [change.verdict for change in self.changes]
        there = [verdict for verdict in Verdict if verdict in verdicts]
        return [(word, verdicts.count(word), f"{ROW}{verdicts.index(word)}") for word in there]


# Outcome -> (shape, headline).
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "slower": ("▲", "Slower"),
    "failed": ("✕", "Failed"),
    "missing": ("∅", "Incomplete"),
    "untrusted": ("?", "Not to be trusted"),
    "inconclusive": ("?", "Inconclusive"),
    "single": ("?", SINGLE_LAUNCH[0].upper() + SINGLE_LAUNCH[1:]),
    "machines": ("?", "Cannot tell: the machines differ"),
    "nothing": ("∅", "Nothing could be compared"),
    "ok": ("=", "No regression"),
}


def _sorted(changes: Sequence[ComparedCase]) -> tuple[ComparedCase, ...]:
    return tuple(sorted(changes, key=lambda c: (c.verdict.gravity, -abs(c.severity))))


def of_comparison(comparison: Comparison, ends: tuple[str, ...] = ()) -> Changes:
    """What `dtbench compare` finds."""
    changes = _sorted(comparison.rows)
    is_single = comparison.has_single_launches and not comparison.has_changes
    undecided = "machines" if comparison.machines_differ else "single" if is_single else "inconclusive"
    outcomes = {
        errors.EXIT_OK: "ok",
        errors.EXIT_REGRESSION: "slower" if comparison.counts[Verdict.SLOWER] else "failed",
        errors.EXIT_INCONCLUSIVE: undecided,
        errors.EXIT_NOTHING: "nothing",
    }
    outcome = outcomes[comparison.exit_code]
    thresholds = (
        (
            f"slower, faster: at least {MIN_LAUNCHES} launches on each side, an exact rank test at p < {MAX_P:g}, "
            f"and a change of more than {MIN_CHANGE:.0%} and {format_seconds(MIN_CHANGE_S)}; of "
            f"fewer launches a change {BEYOND_LAUNCH_SPREAD}"
        ),
        f"same: the {SAME_CONFIDENCE:.0%} interval of the ratio lies within ±{SAME_WITHIN:.0%}",
        "inconclusive: neither of these, or the machines of the two sides differ",
    )
    bounds = (
        "The ratio is Hodges-Lehmann’s, the median over all pairs of launches, not that of the medians beside it; the "
        "interval covers at most what so few launches allow."
    )
    return Changes(changes, outcome, thresholds, bounds, comparison.notes, ends=ends)


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
    arms = {side: of for side, of in (("base", gate.base), ("head", gate.head)) if of is not None}
    sides = tuple(
        (side, ", ".join(f"{k} {v}" for k, v in asdict(of).items() if v)) for side, of in arms.items()
    )
    notes = (*(f"Not to be trusted: {reason}" for reason in gate.trust.reasons), *gate.checks)
    undecided = "untrusted" if gate.trust.reasons else "inconclusive"
    outcomes = {0: "ok", 1: "slower", 3: undecided, 4: "missing", 5: "failed"}
    bounds = (
        "Hodges-Lehmann over pairs of launches; low and high are one-sided bounds at 95 %. The time of head is base’s "
        "median times this ratio."
    )
    changes = _sorted(gate.benchmarks)
    names = tuple((of.arm or of.commit or "").removeprefix("rev:") for of in arms.values())
    named = names if all(names) else ()
    return Changes(changes, outcomes[gate.exit_code], thresholds, bounds, notes, gate.notes, sides, named)


def observations_of(case: ComparedCase) -> str:
    """`10 pairs`, `5 + 5 launches, interval of 99%`."""
    if case.effect is not None and case.effect.pairs:
        return f"{case.effect.pairs} pairs"
    if case.stage or not (case.base_launches or case.head_launches):
        return ""
    confidence = case.effect.confidence if case.effect else None
    interval = "" if confidence is None else f", interval of {confidence:.0%}"
    return f"{case.base_launches} + {case.head_launches} launches{interval}"


def why(case: ComparedCase) -> str:
    """What rose, and the reason."""
    rises = [f"{name} {of.base:g} → {of.head:g}" for name, of in case.counters.items()]
    return "; ".join([*rises, *([case.reason] if case.reason else [])])
