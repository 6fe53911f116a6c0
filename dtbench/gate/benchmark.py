"""What a gate and its launches tell each other: selections, orders and the benchmarks of an arm. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec

from dtbench.records.result import CaseKey
from dtbench.suite import RunOptions

Key = CaseKey

# The largest slowdown that a PASS has to exclude, unless the benchmark says otherwise. Process-to-process
# noise of 1.5 to 2% makes 5% the least that five pairs of launches exclude most of the time.
DEFAULT_TOLERANCE = 0.05
# Beside the counters of a counting launch: what a call took, seconds, roughly; base's says how both arms sample.
CALL_S = "call_s"


class Selection(NamedTuple):
    """Cases of one suite: suite is a name or the path of a .py file, text what the case's line holds."""

    suite: str
    text: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One impl of a case, and how its launches are judged.

    label: see `label_of`. estimator: the order statistic that is taken of a launch's samples. tolerance: the largest
    slowdown that a PASS has to exclude. floor_s: smaller changes are none.
    """

    key: Key
    label: Annotated[str, msgspec.Meta(min_length=1)]
    world: Literal["simulated", "ranks"]
    estimator: Literal["min", "p25"]
    tolerance: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_TOLERANCE
    floor_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def case_label(self) -> str:
        """The case's line in `list`."""
        return self.label.rpartition(" [")[0]


def label_of(case_label: str, impl: str) -> str:
    """What names a benchmark to people, and between a gate and its launches."""
    return f"{case_label} [{impl}]"


@dataclass(frozen=True)
class Order:
    """What a launch is to do: to list and count, or to time.

    without: labels not to count. call_s: label -> what a call takes in base, of what is to be timed.
    """

    mode: Literal["count", "time"]
    selections: tuple[Selection, ...]
    plan: RunOptions
    without: tuple[str, ...] = ()
    call_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """An arm's benchmarks, and why a selection has none."""

    benchmarks: tuple[Benchmark, ...]
    problems: tuple[str, ...]
