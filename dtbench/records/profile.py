"""The tables of `dtbench profile` for suite cases: time per stage of a call, or time per rank."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from dtbench.fields import Amount, Count, Real, Time
from dtbench.records.job import Job
from dtbench.text.units import significant

# Largest mismatch between the stages' sum and the whole call, after subtracting their errors. The threshold is the same
# as `stats.MIN_CHANGE`.
MAX_SUM_DIFFERENCE = 0.02
MIN_CPU_SHARE = 0.9  # below this share of CPU time, a profile is marked unreliable


class Stage(Struct, frozen=True, kw_only=True):
    """Time of one stage of a call, without the cost of recording.

    Attributes:
        stage: name of the stage.
        ns: nanoseconds per call.
        plus_minus_ns: its error.
    """

    stage: str
    ns: Real
    plus_minus_ns: Amount


class CallStages(Struct, frozen=True, kw_only=True):
    """Time of one impl of a case by stage, nanoseconds per call.

    Attributes:
        label: suite, case and params.
        impl: the impl.
        source: the instrument that recorded the calls.
        whole_ns: time of a call that is not recorded.
        recorded_ns: time of a recorded call.
        calls: number of recorded calls.
        rows: the stages.
        spans_per_call: number of recorded spans.
        fitted_to_calibrated: cost of recording a span in these calls, relative to its calibrated cost.
        floor_ns: time of the same op on plain tensors.
        unattributed_ns: whole_ns minus the sum of the stages; 0 unless the fitted cost reached its limit.
        on_cpu: share of the time in which this process had the CPU. It is the smaller of two values: during whole calls
            and during floor calls.
        caveat: why the times are unreliable; "" if they are not.
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
        reasons = {
            "the stages do not add up to the whole call within their errors": not self.adds_up,
            "the plain op alone took longer than the whole call": (self.floor_ns or 0.0)
            > (1 + MAX_SUM_DIFFERENCE) * self.whole_ns,
            f"other programs had the CPU for {1 - self.on_cpu:.0%} of the time": self.on_cpu < MIN_CPU_SHARE,
        }
        if any(reasons.values()):
            force_setattr(
                self,
                "caveat",
                f"unreliable: {'; '.join(reason for reason, applies in reasons.items() if applies)}; "
                "profile again on a quiet machine",
            )

    @property
    def adds_up(self) -> bool:
        """Whether the stages add up to the whole call within their errors."""
        error_ns = sum(row.plus_minus_ns for row in self.rows)
        excess_ns = [max(-row.ns, row.ns - self.whole_ns) - row.plus_minus_ns for row in self.rows]
        return max(abs(self.unattributed_ns) - error_ns, *excess_ns) <= MAX_SUM_DIFFERENCE * self.whole_ns

    def share(self, stage: Stage) -> float | None:
        """Returns a stage's share of the whole call; None if the stages do not add up."""
        return min(max(stage.ns / self.whole_ns, 0.0), 1.0) if self.adds_up and self.whole_ns else None


class CallsProfile(Struct, frozen=True, kw_only=True):
    """Table of calls by stage."""

    kind: Literal["profile of calls"] = "profile of calls"
    cases: tuple[CallStages, ...]


class RanksSection(Struct, frozen=True, kw_only=True):
    """One impl of a case on ranks.

    Attributes:
        job: its figures; each step is an iteration.
        plain_us: mean iteration time of the slowest rank without torch's profiler.
        profiled_us: the same with torch's profiler.
    """

    job: Job
    plain_us: Time
    profiled_us: Time

    @property
    def overhead_text(self) -> str:
        """A sentence about the profiler's overhead."""
        return (
            f"An iteration of the slowest rank takes {significant(self.plain_us)} µs without the profiler, "
            f"{significant(self.profiled_us)} µs with it ({self.profiled_us / self.plain_us - 1:+.0%})."
        )


class RanksProfile(Struct, frozen=True, kw_only=True):
    """Table of a profile on ranks."""

    kind: Literal["profile of ranks"] = "profile of ranks"
    sections: tuple[RanksSection, ...]
