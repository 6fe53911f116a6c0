"""What `dtbench gate` writes: its result as JSON, as far as a report takes it, and what it goes on from."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.fields import Amount, Count
from dtbench.model import Param, Plan


class Effect(Struct, frozen=True, kw_only=True):
    """Head over base, with one-sided bounds at 95 %, over pairs of launches; sd is of the logarithm."""

    ratio: Amount
    pairs: Count
    low: Amount | None = None
    high: Amount | None = None
    sd: Amount | None = None


class Counts(Struct, frozen=True):
    """What was counted per call, in either arm."""

    base: int | float
    head: int | float


class Benchmark(Struct, frozen=True, kw_only=True):
    """A verdict on one impl of a case, and what it rests on; seconds per call."""

    suite: str
    name: str
    impl: str
    params: dict[str, Param]
    verdict: Literal["REGRESSION", "FAILED", "MISSING", "INCONCLUSIVE", "IMPROVED", "NEW", "PASS"]
    tolerance: Amount
    counters: dict[str, Counts]
    reason: str | None = None
    estimator: str | None = None
    floor_s: Amount | None = None
    base_s: Amount | None = None
    head_s: Amount | None = None
    effect: Effect | None = None


class Trust(Struct, frozen=True, kw_only=True):
    """By what the control and base against itself moved (1 is not at all), and why not to trust the times."""

    reasons: tuple[str, ...] = ()
    control: Amount | None = None
    null: Amount | None = None


class Arm(Struct, frozen=True, kw_only=True):
    """A revision or environment, and how it was built."""

    arm: str | None = None
    commit: str | None = None
    built: str | None = None
    python: str | None = None
    torch: str | None = None


class Gate(Struct, frozen=True, kw_only=True):
    """The whole file."""

    kind: Literal["gate"]
    schema: Literal[1]
    exit_code: Literal[0, 1, 3, 4, 5]
    trust: Trust
    benchmarks: tuple[Benchmark, ...]
    notes: tuple[str, ...] = ()
    base: Arm | None = None
    head: Arm | None = None


class State(Struct, frozen=True, kw_only=True):
    """What a gate was asked for, which one that goes on with its folder has to be asked for too; and the seed of
    its order. base, head: identities of the arms. selections: suite, text."""

    kind: Literal["gate state"] = "gate state"
    base: str
    head: str
    selections: tuple[tuple[str, str], ...]
    plan: Plan
    cpu: str | None
    host: str
    seed: int
