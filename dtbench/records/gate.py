"""What `dtbench gate` writes: its result, and what it goes on from."""

from __future__ import annotations

import json
from typing import Literal

import msgspec
from msgspec import Struct

from dtbench.records.judged import Judged, Verdict
from dtbench.suite import RunOptions, errors
from dtbench.suite.fields import Amount, Count

GateCode = Literal[0, 1, 3, 4, 5]


class Trust(Struct, frozen=True, kw_only=True):
    """By what the control and base against itself moved (1 is not at all), over how many pairs, and why not to trust
    the times."""

    control: Amount | None = None
    null: Amount | None = None
    reasons: tuple[str, ...] = ()
    control_pairs: Count = 0
    null_pairs: Count = 0


class Arm(Struct, frozen=True, kw_only=True):
    """A revision or environment, and how it was built."""

    arm: str | None = None
    commit: str | None = None
    built: str | None = None
    python: str | None = None
    torch: str | None = None


class Gate(Struct, frozen=True, kw_only=True):
    """A gate's end. notes: what a reader has to know beside the verdicts. allow_new: what base lacks is no fault."""

    kind: Literal["gate"] = "gate"
    schema: Literal[1] = 1
    exit_code: GateCode
    trust: Trust
    notes: tuple[str, ...] = ()
    base: Arm | None = None
    head: Arm | None = None
    seed: int | None = None
    launches: Count = 0
    reused_launches: Count = 0
    duration_s: Amount | None = None
    allow_new: bool = False
    benchmarks: tuple[Judged, ...]

    def count(self, verdict: Verdict) -> int:
        """How many benchmarks have this verdict."""
        return sum(j.verdict == verdict for j in self.benchmarks)

    @property
    def sentence(self) -> str:
        """The end in one line."""
        said = (
            ", ".join(f"{self.count(v)} {v.name}" for v in Verdict if self.count(v)) or "nothing was judged"
        )
        meaning = {
            errors.EXIT_OK: "no regression",
            errors.EXIT_REGRESSION: "a regression",
            errors.EXIT_INCONCLUSIVE: "UNTRUSTED" if self.trust.reasons else "inconclusive",
            errors.EXIT_NOTHING: "a benchmark is missing in one arm",
            errors.EXIT_CASE_FAILED: "a benchmark failed",
        }
        return f"gate: {meaning[self.exit_code]} ({said}); exit code {self.exit_code}"


def text_of(gate: Gate) -> str:
    """The file: verdicts by their names, and how many there are of each."""
    made = msgspec.to_builtins(gate)
    for row, judged in zip(made["benchmarks"], gate.benchmarks, strict=True):
        row["verdict"] = judged.verdict.name
    made["counts"] = {v.name: gate.count(v) for v in Verdict}
    return json.dumps(made, indent=2, allow_nan=False)


class State(Struct, frozen=True, kw_only=True):
    """What a gate was asked for, which one that goes on with its folder has to be asked for too; and the seed of
    its order. base, head: identities of the arms. selections: suite, text."""

    kind: Literal["gate state"] = "gate state"
    base: str
    head: str
    selections: tuple[tuple[str, str], ...]
    plan: RunOptions
    cpu: str | None
    host: str
    seed: int
