"""What `dtbench profile` writes of a suite's cases: the table of calls or of ranks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.records.job import Job
from dtbench.suite.fields import Amount, Count, Real, Time
from dtbench.text.units import significant


class Stage(Struct, frozen=True, kw_only=True):
    """A stage of a call, ns, without what recording cost. plus_minus_ns: how well that is known."""

    stage: str
    ns: Real
    plus_minus_ns: Amount


class CallStages(Struct, frozen=True, kw_only=True):
    """Where the time of one impl of a case goes, ns per call.

    source: what recorded the calls, so many of them. whole_ns: of a call that nobody recorded; recorded_ns: of one that
    was. unattributed_ns: what the rows leave of the whole, 0 unless the fit was out of reach. fitted_to_calibrated: the
    cost of recording a span here, over that of recording one alone. floor_ns: of plain tensors.
    """

    label: str
    impl: str
    source: str
    whole_ns: Time
    recorded_ns: Amount
    calls: Count
    rows: tuple[Stage, ...]
    spans_per_call: Amount
    fitted_to_calibrated: Amount
    floor_ns: Amount | None = None
    unattributed_ns: Real


class Calls(Struct, frozen=True, kw_only=True):
    """The table of a profile of calls."""

    kind: Literal["profile of calls"] = "profile of calls"
    cases: tuple[CallStages, ...]


class Section(Struct, frozen=True, kw_only=True):
    """An impl of a case on ranks; a step of the job is an iteration. plain_us, profiled_us: an iteration of the slowest
    rank without and with the profiler, means."""

    job: Job
    plain_us: Time
    profiled_us: Time

    @property
    def overhead_words(self) -> str:
        return (
            f"An iteration of the slowest rank takes {significant(self.plain_us)} µs without the profiler, "
            f"{significant(self.profiled_us)} µs with it ({self.profiled_us / self.plain_us - 1:+.0%})."
        )


class RanksProfile(Struct, frozen=True, kw_only=True):
    """The table of a profile of ranks."""

    kind: Literal["profile of ranks"] = "profile of ranks"
    sections: tuple[Section, ...]
