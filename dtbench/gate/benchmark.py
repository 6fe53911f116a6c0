"""Selections, orders and listings of benchmarks, exchanged between a gate and its launches. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec

from dtbench.records.result import CaseKey
from dtbench.suite import RunOptions

Key = CaseKey

# The smallest slowdown that the verdict "same" must exclude, unless the benchmark sets its own. Processes differ by 1.5
# to 2%. With this noise, five pairs of launches usually exclude slowdowns from 5% on.
DEFAULT_TOLERANCE = 0.05
# Name of the counter with the rough time of one call, seconds. The value of base decides how both arms are sampled.
CALL_S = "call_s"


class SuiteSelection(NamedTuple):
    """Cases of one suite.

    Attributes:
        suite: a name, or the path of a .py file.
        text: what the case's line in `dtbench list` must contain.
    """

    suite: str
    text: str = ""


@dataclass(frozen=True)
class Benchmark:
    """An impl of a case, and the parameters of its verdict.

    Attributes:
        key: suite, case, impl and params.
        label: see `label_of`.
        world: "simulated" or "ranks" (real ones).
        estimator: the order statistic that represents the samples of a launch.
        tolerance: the smallest relative slowdown that the verdict "same" must exclude.
        floor_s: changes below this many seconds do not count.
    """

    key: Key
    label: Annotated[str, msgspec.Meta(min_length=1)]
    world: Literal["simulated", "ranks"]
    estimator: Literal["min", "p25"]
    tolerance: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_TOLERANCE
    floor_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def case_label(self) -> str:
        """The case's line in `dtbench list`."""
        return self.label.rpartition(" [")[0]


def label_of(case_label: str, impl: str) -> str:
    """Returns the label of a benchmark, in tables and in messages between a gate and its launches."""
    return f"{case_label} [{impl}]"


@dataclass(frozen=True)
class Order:
    """The work of one launch: list and count, or time.

    Attributes:
        mode: "count" or "time".
        selections: the selected cases.
        options: options of the arm's run.
        without: labels of benchmarks that are listed but not counted.
        call_s: for a timed launch: label -> rough time of one call in base, seconds. Other benchmarks are not timed.
        top: for a counting launch of a revision: top folder of the working tree, else "".
    """

    mode: Literal["count", "time"]
    selections: tuple[SuiteSelection, ...]
    options: RunOptions
    without: tuple[str, ...] = ()
    call_s: Mapping[str, float] = field(default_factory=dict)
    top: str = ""


@dataclass(frozen=True)
class Listing:
    """The benchmarks of an arm.

    Attributes:
        benchmarks: all benchmarks of the selections, and the control benchmarks.
        problems: reasons why selections have no benchmark.
        working_tree_files: files that the launch imported from the working tree although the revision contains them.
    """

    benchmarks: tuple[Benchmark, ...]
    problems: tuple[str, ...]
    working_tree_files: tuple[str, ...] = ()
