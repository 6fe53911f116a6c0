"""What `dtbench profile` writes of a suite's cases: the table of calls or of ranks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from dtbench.fields import Amount, Count, Real, Time
from dtbench.records.job import Job
from dtbench.text.units import significant

# The change that counts elsewhere (`stats.MIN_CHANGE`); and a CPU's share for calls beside the kernel's own work.
ADDS_UP_WITHIN, ALONE = 0.02, 0.9


class Stage(Struct, frozen=True, kw_only=True):
    """A stage of a call, ns, without what recording cost. plus_minus_ns: how well that is known."""

    stage: str
    ns: Real
    plus_minus_ns: Amount


class CallStages(Struct, frozen=True, kw_only=True):
    """Where the time of one impl of a case goes, ns per call.

    source: what recorded the calls, so many of them. whole_ns: of a call that nobody recorded; recorded_ns: of one that
    was. unattributed_ns: what the rows leave of the whole, 0 unless the fit was out of reach. fitted_to_calibrated: the
    cost of recording a span here, over that of recording one alone. floor_ns: of plain tensors. on_cpu:
    the share of whole_ns, or if smaller of floor_ns, in which this process ran. caveat: why not to trust the times.
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
    on_cpu: Amount = 1.0
    caveat: str = ""

    def __post_init__(self) -> None:
        doubts = {
            "the stages do not add up to the whole call within their errors": not self.adds_up,
            "the plain op alone took longer than the whole call": (self.floor_ns or 0.0)
            > (1 + ADDS_UP_WITHIN) * self.whole_ns,
            f"other programs had the CPU for {1 - self.on_cpu:.0%} of the time": self.on_cpu < ALONE,
        }
        if any(doubts.values()):
            doubted = "; ".join(words for words, holds in doubts.items() if holds)
            force_setattr(self, "caveat", f"unreliable: {doubted}; profile again on a quiet machine")

    @property
    def adds_up(self) -> bool:
        """Whether the stages and the whole agree within the errors that stand beside the stages."""
        doubt_ns = sum(row.plus_minus_ns for row in self.rows)
        beyond_ns = [max(-row.ns, row.ns - self.whole_ns) - row.plus_minus_ns for row in self.rows]
        return max(abs(self.unattributed_ns) - doubt_ns, *beyond_ns) <= ADDS_UP_WITHIN * self.whole_ns

    def share(self, stage: Stage) -> float | None:
        """A stage's part of the whole call; None where they do not add up."""
        return min(max(stage.ns / self.whole_ns, 0.0), 1.0) if self.adds_up and self.whole_ns else None


class CallsProfile(Struct, frozen=True, kw_only=True):
    """The table of a profile of calls."""

    kind: Literal["profile of calls"] = "profile of calls"
    cases: tuple[CallStages, ...]


class RanksSection(Struct, frozen=True, kw_only=True):
    """An impl of a case on ranks; a step of the job is an iteration. plain_us, profiled_us: an iteration of the slowest
    rank without and with the profiler, means."""

    job: Job
    plain_us: Time
    profiled_us: Time

    @property
    def overhead_text(self) -> str:
        return (
            f"An iteration of the slowest rank takes {significant(self.plain_us)} µs without the profiler, "
            f"{significant(self.profiled_us)} µs with it ({self.profiled_us / self.plain_us - 1:+.0%})."
        )


class RanksProfile(Struct, frozen=True, kw_only=True):
    """The table of a profile of ranks."""

    kind: Literal["profile of ranks"] = "profile of ranks"
    sections: tuple[RanksSection, ...]
