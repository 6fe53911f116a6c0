"""The comparison of base and head that the page shows: a result of the gate, or a comparison of runs."""

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

ROW = "case-"  # prefix of a row's anchor, followed by its number


@dataclass(frozen=True)
class Changes:
    """Compared cases with explanations.

    Attributes:
        changes: the cases, the gravest verdict first.
        outcome: overall verdict, a key of `OUTCOMES`.
        thresholds: explanation of each verdict.
        bounds: explanation of the ratio and its bounds.
        notes: caveats.
        gate_notes: notes of the gate, e.g. counters that rose.
        sides: (side, description) of base and head.
        ends: names of base and head.
    """

    changes: tuple[ComparedCase, ...]
    outcome: str
    thresholds: tuple[str, ...]
    bounds: str
    notes: tuple[str, ...] = ()
    gate_notes: tuple[str, ...] = ()
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
        """(verdict, number of cases, anchor of the first one) for each verdict."""
        verdicts = [change.verdict for change in self.changes]
        return [
            (verdict, verdicts.count(verdict), f"{ROW}{verdicts.index(verdict)}")
            for verdict in Verdict
            if verdict in verdicts
        ]


# Outcome -> (shape, headline).
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "slower": ("▲", "Slower"),
    "failed": ("✕", "Failed"),
    "missing": ("∅", "Incomplete"),
    "untrusted": ("?", "Untrusted"),
    "inconclusive": ("?", "Inconclusive"),
    "single": ("?", SINGLE_LAUNCH[0].upper() + SINGLE_LAUNCH[1:]),
    "machines": ("?", "Cannot tell: the machines differ"),
    "nothing": ("∅", "Nothing could be compared"),
    "ok": ("=", "No regression"),
}


def _sorted(changes: Sequence[ComparedCase]) -> tuple[ComparedCase, ...]:
    return tuple(sorted(changes, key=lambda c: (c.verdict.gravity, -abs(c.severity))))


def changes_of_comparison(comparison: Comparison, ends: tuple[str, ...] = ()) -> Changes:
    """Returns the changes of a comparison of runs."""
    is_single = comparison.has_single_launches and not comparison.has_changes
    undecided = "machines" if comparison.machines_differ else "single" if is_single else "inconclusive"
    outcomes = {
        errors.EXIT_OK: "ok",
        errors.EXIT_REGRESSION: "slower" if comparison.counts[Verdict.SLOWER] else "failed",
        errors.EXIT_INCONCLUSIVE: undecided,
        errors.EXIT_NOTHING: "nothing",
    }
    return Changes(
        changes=_sorted(comparison.rows),
        outcome=outcomes[comparison.exit_code],
        thresholds=(
            (
                f"slower, faster: at least {MIN_LAUNCHES} launches on each side, an exact rank test with "
                f"p < {MAX_P:g}, and a change of more than {MIN_CHANGE:.0%} and {format_seconds(MIN_CHANGE_S)}; with "
                f"fewer launches, a change {BEYOND_LAUNCH_SPREAD}"
            ),
            f"same: the {SAME_CONFIDENCE:.0%} interval of the ratio lies within ±{SAME_WITHIN:.0%}",
            "inconclusive: none of these, or the machines of the two sides differ",
        ),
        bounds="The ratio is the Hodges-Lehmann estimate, the median over all pairs of launches, so it may differ "
        "from the ratio of the medians.",
        notes=comparison.notes,
        ends=ends,
    )


def changes_of_gate(gate: Gate) -> Changes:
    """Returns the changes in a result of `dtbench gate`."""
    tolerances = sorted({b.tolerance for b in gate.benchmarks})
    extremes = dict.fromkeys(tolerances[:1] + tolerances[-1:])
    tolerance = " to ".join(f"{share:.0%}" for share in extremes) or "5 %"
    arms = {side: arm for side, arm in (("base", gate.base), ("head", gate.head)) if arm is not None}
    outcomes = {
        0: "ok",
        1: "slower",
        3: "untrusted" if gate.trust.reasons else "inconclusive",
        4: "missing",
        5: "failed",
    }
    names = tuple((arm.arm or arm.commit or "").removeprefix("rev:") for arm in arms.values())
    return Changes(
        changes=_sorted(gate.benchmarks),
        outcome=outcomes[gate.exit_code],
        thresholds=(
            (
                f"slower, faster: an exact signed-rank test over pairs of launches with p < {MAX_P:g} (less if there "
                f"are many benchmarks), and a change of at least {MIN_CHANGE:.0%}, "
                f"{format_seconds(MIN_CHANGE_S)} and the benchmark's own floor; or a counter that rose"
            ),
            f"same: the upper bound of the change lies below the benchmark's tolerance ({tolerance})",
            "inconclusive: the measured pairs show none of these",
        ),
        bounds="The ratio is the Hodges-Lehmann estimate over pairs of launches, with one-sided bounds at 95 %. The "
        "time of head is the median of base times this ratio.",
        notes=(*(f"Untrusted: {reason}" for reason in gate.trust.reasons), *gate.checks),
        gate_notes=gate.notes,
        sides=tuple(
            (side, ", ".join(f"{k} {v}" for k, v in asdict(arm).items() if v)) for side, arm in arms.items()
        ),
        ends=names if all(names) else (),
    )


def observations_of(case: ComparedCase) -> str:
    """Describes the number of observations, e.g. "10 pairs" or "5 + 5 launches, interval of 99%"."""
    if case.effect is not None and case.effect.pairs:
        return f"{case.effect.pairs} pairs"
    if case.stage or not (case.base_launches or case.head_launches):
        return ""
    confidence = case.effect.confidence if case.effect else None
    interval = "" if confidence is None else f", interval of {confidence:.0%}"
    return f"{case.base_launches} + {case.head_launches} launches{interval}"


def reason_text(case: ComparedCase) -> str:
    """Describes the counters that rose, and the reason of the verdict."""
    rises = [f"{name} {counter.base:g} → {counter.head:g}" for name, counter in case.counters.items()]
    return "; ".join([*rises, *([case.reason] if case.reason else [])])
