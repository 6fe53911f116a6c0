"""The files of `dtbench gate`: its result, and the history of `--history`.

A history consists of JSON Lines, one revision per line, all from one kind of machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dtbench import errors
from dtbench.errors import UnreadableRunError
from dtbench.fields import Amount, Count
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.read import BadFieldError, abbreviate, convert, decode, read_lines
from dtbench.suite import IMPL_WORDS

GateCode = Literal[0, 1, 3, 4, 5]

# Limits of history files.
MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 16 * 2**20

_Seconds = Annotated[float, Meta(gt=0, lt=1e6, description="seconds above 0")]


class Trust(Struct, frozen=True, kw_only=True):
    """Evidence on whether the times of a gate can be trusted.

    Attributes:
        control: time of head / time of base of the control benchmarks, which are the same in both; 1 means no change.
        null: the same ratio for a second launch of base against the first.
        reasons: reasons not to trust the times.
        control_pairs: number of pairs of launches behind `control`.
        null_pairs: number of pairs of launches behind `null`.
    """

    control: Amount | None = None
    null: Amount | None = None
    reasons: tuple[str, ...] = ()
    control_pairs: Count = 0
    null_pairs: Count = 0


class ArmRecord(Struct, frozen=True, kw_only=True):
    """One arm of a gate: base or head.

    Attributes:
        arm: the arm as the user gave it, with secrets masked.
        commit: commit of a revision; None for other arms.
        built: how the arm was built.
        python: version of Python.
        torch: version of torch.
    """

    arm: str | None = None
    commit: str | None = None
    built: str | None = None
    python: str | None = None
    torch: str | None = None


class Gate(Struct, frozen=True, kw_only=True):
    """The result of a gate.

    Attributes:
        exit_code: exit code of the command.
        trust: whether the times can be trusted.
        notes: remarks for the reader.
        base: the base arm.
        head: the head arm.
        seed: seed of the random order of launches.
        launches: number of timed launches.
        duration_s: duration of the whole gate in seconds.
        allow_new: whether benchmarks that base lacks are accepted.
        benchmarks: the comparisons of all benchmarks.
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
        return sum(case.verdict == verdict for case in self.benchmarks)

    @property
    def checks(self) -> list[str]:
        """Lines about the control and base/base checks, followed by explanations of names in the tables."""
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
        return lines + [
            f"{impl}: {IMPL_WORDS[impl]}"
            for impl in ("local", "wrapped")
            if any(case.impl == impl for case in self.benchmarks)
        ]

    @property
    def summary_line(self) -> str:
        """The result in one line."""
        counts = [f"{self.count(verdict)} {verdict}" for verdict in Verdict if self.count(verdict)]
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
    """Encodes the gate, with the number of benchmarks per verdict, as JSON."""
    return json.dumps(
        {
            **msgspec.to_builtins(gate),
            "counts": {verdict.value: gate.count(verdict) for verdict in Verdict},
        },
        indent=2,
        allow_nan=False,
    )


class HistoryLine(Struct, frozen=True, kw_only=True):
    """The times of one revision.

    Attributes:
        machine: facts about the machine that must agree for times to be comparable.
        time: when it was measured, ISO 8601.
        revision: commit or name of the revision.
        torch: version of torch.
        times_s: benchmark -> seconds per call.
    """

    kind: Literal["history"] = "history"
    schema: Literal[1] = 1
    machine: Mapping[str, object]
    time: str = ""
    revision: str
    torch: str | None = None
    times_s: Mapping[str, _Seconds]


def read_history(path: Path, machine: Mapping[str, object] | None = None) -> list[HistoryLine]:
    """Reads the revisions in a file, oldest first. An incomplete last line is dropped.

    Args:
        machine: facts that each line's machine must equal; None takes those of the first line.

    Raises:
        UnreadableRunError: the file is damaged, too large, of a newer schema, or from another machine.
    """
    lines: list[HistoryLine] = []
    try:
        for number, data in read_lines(path, "a history of `dtbench gate`", MAX_FILE_BYTES, MAX_LINE_BYTES):
            if not data.endswith(b"\n"):
                break
            try:
                line = convert(decode(data), HistoryLine)
            except BadFieldError as error:
                raise BadFieldError(f"line {number}: {error}") from error
            machine = line.machine if machine is None else machine
            if line.machine != machine:
                raise BadFieldError(
                    f"line {number} was measured on {abbreviate(line.machine)}, expected {abbreviate(dict(machine))}: "
                    "times of different machines cannot be compared"
                )
            lines.append(line)
    except ValueError as error:
        raise UnreadableRunError(f"{path} is not a history of `dtbench gate`: {error}") from error
    return lines
