"""What `dtbench gate` writes."""

from __future__ import annotations

import json
from typing import Literal

import msgspec
from msgspec import Struct

from dtbench import errors
from dtbench.fields import Amount, Count
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.suite import IMPL_WORDS

GateCode = Literal[0, 1, 3, 4, 5]


class Trust(Struct, frozen=True, kw_only=True):
    """By what the control and base against itself moved (1 is not at all), over how many pairs, and why not to trust
    the times."""

    control: Amount | None = None
    null: Amount | None = None
    reasons: tuple[str, ...] = ()
    control_pairs: Count = 0
    null_pairs: Count = 0


class ArmRecord(Struct, frozen=True, kw_only=True):
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
    base: ArmRecord | None = None
    head: ArmRecord | None = None
    seed: int | None = None
    launches: Count = 0
    duration_s: Amount | None = None
    allow_new: bool = False
    benchmarks: tuple[ComparedCase, ...]

    def count(self, verdict: Verdict) -> int:
        """How many benchmarks have this verdict."""
        return sum(j.verdict == verdict for j in self.benchmarks)

    @property
    def checks(self) -> list[str]:
        """By what that moved which no change moves, and what names in the tables mean."""
        control, null = self.trust.control, self.trust.null
        moves = {
            f"control (plain operations that neither arm touches), {self.trust.control_pairs} pairs": control,
            f"base/base (base against a second launch of itself), {self.trust.null_pairs} pairs": null,
        }
        there = {what.replace(", 0 pairs", ""): of for what, of in moves.items() if of is not None}
        lines = [f"{what}: {of - 1:+.2%}" for what, of in there.items()]
        impls = {judged.impl for judged in self.benchmarks}
        return lines + [f"{impl}: {IMPL_WORDS[impl]}" for impl in ("local", "wrapped") if impl in impls]

    @property
    def sentence(self) -> str:
        """The end in one line."""
        counts = [f"{self.count(v)} {v}" for v in Verdict if self.count(v)]
        meaning = {
            errors.EXIT_OK: "no regression",
            errors.EXIT_REGRESSION: "a regression",
            errors.EXIT_INCONCLUSIVE: "UNTRUSTED" if self.trust.reasons else "inconclusive",
            errors.EXIT_NOTHING: "a benchmark is missing in one arm"
            if self.benchmarks
            else "nothing was compared",
            errors.EXIT_CASE_FAILED: "a benchmark failed",
        }[self.exit_code]
        return f"gate: {meaning} ({', '.join(counts) or 'nothing was judged'}); exit code {self.exit_code}"


def text_of(gate: Gate) -> str:
    """Returns the text of the file: the gate with the number of benchmarks per verdict."""
    fields = msgspec.to_builtins(gate)
    fields["counts"] = {v.value: gate.count(v) for v in Verdict}
    return json.dumps(fields, indent=2, allow_nan=False)
