"""What is not ok, told once per cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtbench.model import Result, Run


@dataclass(frozen=True)
class Fault:
    """A reason that one or several results gave for not being ok, and which results those are."""

    reason: str
    results: list[str]


@dataclass(frozen=True)
class Faults:
    caption: str
    faults: list[Fault]


def failures_of(runs: Sequence[Run]) -> list[Faults]:
    """What is not ok, by status and reason: a cause that meets many cases is told once."""
    found = []
    for status, caption in (
        ("wrong", "Wrong data: timed, but the result was not what it should be"),
        ("failed", "Failed"),
        ("skipped", "Skipped"),
    ):
        by_reason: dict[str, list[str]] = {}
        for run in runs:
            for result in run.results:
                if result.status == status:
                    by_reason.setdefault(result.reason or "no reason given", []).append(_named(result))
        if by_reason:
            found.append(Faults(caption, [Fault(reason, named) for reason, named in by_reason.items()]))
    return found


def _named(result: Result) -> str:
    params = ", ".join(f"{k}={v}" for k, v in result.params.items())
    rank = "" if result.rank is None else f", rank {result.rank}"
    named = f"{result.suite} {result.name}, {result.impl}{f' ({params})' if params else ''}"
    return f"{named}{rank}, launch {result.launch}"
