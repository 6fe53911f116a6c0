"""The file that `dtbench gate` writes."""

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
    """Whether the times of a gate can be trusted.

    Attributes:
        control: head / base of the control benchmarks; 1 is no change.
        null: base / base, a second launch of base against the first.
        reasons: not to trust the times.
        control_pairs: number of pairs behind `control`.
        null_pairs: number of pairs behind `null`.
    """

    control: Amount | None = None
    null: Amount | None = None
    reasons: tuple[str, ...] = ()
    control_pairs: Count = 0
    null_pairs: Count = 0


class ArmRecord(Struct, frozen=True, kw_only=True):
    """A side of a gate.

    Attributes:
        arm: as given, secrets masked.
        commit: of a revision.
        built: how it was built.
        python: version.
        torch: version.
    """

    arm: str | None = None
    commit: str | None = None
    built: str | None = None
    python: str | None = None
    torch: str | None = None


class Gate(Struct, frozen=True, kw_only=True):
    """The result of a gate.

    Attributes:
        exit_code: of the command.
        trust: whether the times can be trusted.
        notes: remarks for the reader.
        base: the base arm.
        head: the head arm.
        seed: of the random order of launches.
        launches: number of timed launches.
        duration_s: of the whole gate, seconds.
        allow_new: whether benchmarks that base lacks are accepted.
        benchmarks: the verdicts.
    """

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
        """Returns the number of benchmarks with this verdict."""
        return sum(j.verdict == verdict for j in self.benchmarks)

    @property
    def checks(self) -> list[str]:
        """Lines on the checks of the machine, and on names in the tables."""
        control, null = self.trust.control, self.trust.null
        moves = {
            f"control (operations that are the same in both arms), {self.trust.control_pairs} pairs": control,
            f"base/base (base against a second launch of itself), {self.trust.null_pairs} pairs": null,
        }
        lines = [
            f"{check.replace(', 0 pairs', '')}: {ratio - 1:+.2%}"
            for check, ratio in moves.items()
            if ratio is not None
        ]
        impls = {case.impl for case in self.benchmarks}
        return lines + [f"{impl}: {IMPL_WORDS[impl]}" for impl in ("local", "wrapped") if impl in impls]

    @property
    def summary_line(self) -> str:
        """The result in one line."""
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
        return f"gate: {meaning} ({', '.join(counts) or 'no verdicts'}); exit code {self.exit_code}"


def encode_gate(gate: Gate) -> str:
    """Returns the text of the file: the gate with the number of benchmarks per verdict."""
    fields = msgspec.to_builtins(gate)
    fields["counts"] = {v.value: gate.count(v) for v in Verdict}
    return json.dumps(fields, indent=2, allow_nan=False)
