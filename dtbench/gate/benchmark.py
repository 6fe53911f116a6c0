"""What a gate and its launches tell each other: selections, orders, and the benchmarks (case and impl) of an arm.
No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from dtbench.records.atomic import replace_file
from dtbench.suite import CaseKey, RunOptions
from dtbench.suite.errors import UnreadableRunError

Key = CaseKey

# The largest slowdown that a PASS has to exclude, unless the benchmark says otherwise. Process-to-process
# noise of 1.5 to 2% makes 5% the least that five pairs of launches exclude most of the time.
DEFAULT_TOLERANCE = 0.05
# Beside the counters of a counting launch: what a call took, seconds, roughly; base's says how both arms sample.
CALL_S = "call_s"
# Of the files of a launch: the order, what it found, what it says, the label in hand (for the gate to name when it
# dies), the benchmarks of its arm.
ORDER, RESULTS, LOG, IN_HAND, LISTING = ".full-order.json", ".jsonl", ".log", ".now", ".listing.json"
_Module = Annotated[str, msgspec.Meta(pattern=r"^torch(\.[A-Za-z_]\w*)+$")]


class Selection(NamedTuple):
    """Cases of one suite: suite is a name or the path of a .py file, text what the case's line holds."""

    suite: str
    text: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One impl of a case, and how its launches are judged.

    label: the case's line in `list` and the impl, see `label_of`. estimator: the order statistic that stands for a
    launch. tolerance: the largest slowdown that a PASS has to exclude. floor_s: smaller changes are none.
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
    """What a launch is to do: to list and count, or to time. arm: its identity.

    without: labels not to count. call_s: label -> what a call takes in base, of what is to be timed.
    """

    mode: Literal["count", "time"]
    arm: str
    selections: tuple[Selection, ...]
    plan: RunOptions
    without: tuple[str, ...] = ()
    call_s: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """The same text for the same order."""
        return msgspec.json.encode(self, order="deterministic").decode()

    def portable(self) -> str:
        """What is compared when a gate goes on: without the folders that each gate makes anew."""
        named = tuple(Selection(Path(s.suite).name, s.text) for s in self.selections)
        return replace(self, selections=named).to_json()


@dataclass(frozen=True)
class Listing:
    """An arm's benchmarks, and why a selection has none. python: its version, "3.11". loaded: by the label of a
    benchmark, the modules of torch that it was the first to load; by "", those that the suites load.
    """

    benchmarks: tuple[Benchmark, ...]
    problems: tuple[str, ...]
    python: str
    torch: str
    loaded: Mapping[str, tuple[_Module, ...]] = field(default_factory=dict)


def write_listing(path: Path, listing: Listing) -> None:
    """Writes what `read_listing` reads."""
    replace_file(path, msgspec.json.encode(listing))


def read_listing(path: Path) -> Listing:
    """The listing that a worker wrote.

    Raises:
        UnreadableRunError: no listing, or a damaged one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Listing)
    except (OSError, ValueError) as error:
        raise UnreadableRunError(f"{path} is no listing of an arm: {error}") from error
