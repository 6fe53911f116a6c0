"""Base and new, case by case, whoever compared them: the gate's result or two sides of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench import errors
from dtbench.files.read import BadFieldError, shown
from dtbench.judge.compare import MIN_LAUNCHES, SAME_CONFIDENCE, SAME_WITHIN, Comparison, Row
from dtbench.judge.verdicts import MAX_P, MIN_CHANGE, MIN_CHANGE_S, Verdict, smallest_change
from dtbench.model import Param
from dtbench.show.report import fields as f
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

    def count(self, verdict: str) -> int:
        return sum(c.verdict == verdict for c in self.changes)


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


def of_gate(gate: Mapping[str, Any]) -> Changes:
    """What `dtbench gate` wrote as JSON.

    Raises:
        BadFieldError: it is not that.
    """
    if gate.get("schema") != 1:
        raise BadFieldError(f"schema is {shown(gate.get('schema'))}, expected 1: upgrade dtbench to read it")
    trust = f.mapping(gate, "trust")
    reasons = f.texts(trust, "reasons")
    changes = _sorted([_of_benchmark(b) for b in f.mappings(gate, "benchmarks")])
    thresholds = (
        (
            f"slower, faster: an exact signed-rank test over pairs of launches at p < {MAX_P:g} (less where many "
            f"benchmarks are judged at once), and a change of at least {MIN_CHANGE:.0%}, "
            f"{format_seconds(MIN_CHANGE_S)} and the benchmark's own floor; or more of what is counted"
        ),
        f"same: the upper bound of the change lies below the benchmark's tolerance, {_tolerances(gate)} here",
        "inconclusive: neither, within the pairs that were measured",
    )
    sides = tuple(
        (side, _arm(f.mapping(gate, side))) for side in ("base", "head") if gate.get(side) is not None
    )
    moved = [
        f"{words} moved by {ratio - 1:+.2%}"
        for words, key in (("the control", "control"), ("base against itself", "null"))
        if (ratio := f.optional(trust, key, least=0)) is not None
    ]
    notes = (*(f"Not to be trusted: {reason}" for reason in reasons), *moved, *f.texts(gate, "notes"))
    code = f.number(gate, "exit_code")
    outcomes = {
        0: "ok",
        1: "slower",
        3: "untrusted" if reasons else "inconclusive",
        4: "missing",
        5: "failed",
    }
    if code not in outcomes:
        raise BadFieldError(f"exit_code is {shown(gate['exit_code'])}, expected 0, 1, 3, 4 or 5")
    bounds = "Hodges-Lehmann over pairs of launches; low and high are one-sided bounds at 95 %."
    return Changes(changes, outcomes[int(code)], thresholds, bounds, notes, sides)


def _tolerances(gate: Mapping[str, Any]) -> str:
    found = sorted({f.number(b, "tolerance", least=0) for b in f.mappings(gate, "benchmarks")})
    return " to ".join(f"{x:.0%}" for x in dict.fromkeys(found[:1] + found[-1:])) or "5 %"


def _arm(arm: Mapping[str, Any]) -> str:
    known = [(key, arm.get(key)) for key in ("arm", "commit", "built", "python", "torch")]
    return ", ".join(f"{key} {value}" for key, value in known if isinstance(value, str) and value)


def _of_benchmark(of: Mapping[str, Any]) -> Change:
    verdict = f.text(of, "verdict")
    if verdict not in Verdict.__members__:
        raise BadFieldError(f"verdict is {shown(verdict)}, expected one of {', '.join(Verdict.__members__)}")
    base_s, now_s = f.optional(of, "base_s", least=0), f.optional(of, "head_s", least=0)
    floor_s = f.optional(of, "floor_s", least=0) or 0.0
    matters = smallest_change(base_s, floor_s) if base_s else None
    rises = [
        f"{name} {f.number(f.as_mapping(pair, name), 'base'):g} → {f.number(pair, 'head'):g}"
        for name, pair in f.mapping(of, "counters").items()
    ]
    params = f.mapping(of, "params")
    for name, value in params.items():
        if not isinstance(value, str | int | float):
            raise BadFieldError(f"param {shown(name)} is {shown(value)}, expected text or a number")
    change = Change(
        Verdict[verdict],
        f.text(of, "suite"),
        f.text(of, "name"),
        f.text(of, "impl"),
        params,
        "; ".join([*rises, *([f.text(of, "reason")] if of.get("reason") else [])]),
        base_s,
        now_s,
        matters=matters,
        estimator=f.text(of, "estimator") if of.get("estimator") else "",
    )
    if of.get("effect") is None:
        return change
    effect = f.mapping(of, "effect")
    return Change(
        **{
            **vars(change),
            "ratio": f.number(effect, "ratio", least=0),
            "low": f.optional(effect, "low", least=0) or None,  # 0: no bound yet
            "high": f.optional(effect, "high", least=0),
            "noise": f.optional(effect, "sd", least=0),
            "observations": f"{f.number(effect, 'pairs', least=0):.0f} pairs",
        }
    )
