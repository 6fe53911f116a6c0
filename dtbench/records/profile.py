"""What `dtbench profile` writes: the table of calls or of ranks, and traces (Trace Event Format), as far as they are
read again."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.suite.fields import Amount, Count, Rank, Real, Time

# What an iteration of a rank is wrapped in: the name of a user annotation, then the section and the number.
ITERATION = "dtbench iteration"
# Lanes that are added to each rank of a trace, above its threads and streams, by their thread ids.
LANES = {1: "communication", 2: "compute", 3: "exposed communication"}


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


class IterationParts(Struct, frozen=True, kw_only=True):
    """Where one iteration of a rank went, us: all of it, communication, compute, both at once, communication alone,
    neither."""

    whole: Real
    compute: Real
    communication: Real
    overlap: Real
    exposed: Real
    host: Real


class Skew(Struct, frozen=True, kw_only=True):
    """The arrivals at the collectives of one kind. mean_us, p95_us: from the first rank's arrival to the last one's.
    late: rank -> how often it was the last; unclear: how often the clocks cannot tell. latest: who was last most often;
    None where the clocks never tell."""

    kind: str
    count: Count
    mean_us: Amount
    p95_us: Amount
    late: dict[Rank, Count]
    unclear: Count
    latest: Count | None = None


class RankSection(Struct, frozen=True, kw_only=True):
    """An impl of a case on ranks. parts_us: rank -> means over the iterations, None where it recorded none. unmatched:
    iterations in which the ranks' collectives differ. plain_us, profiled_us: an iteration of the slowest rank without
    and with the profiler, medians; overhead: what that adds, as a share. gpu: rank -> counter -> mean."""

    label: str
    iterations: Count
    parts_us: dict[Rank, IterationParts | None]
    skews: tuple[Skew, ...]
    unmatched: Count
    plain_us: Time
    profiled_us: Time
    gpu: dict[Rank, dict[str, Real]] = {}
    overhead: Real


class RanksProfile(Struct, frozen=True, kw_only=True):
    """The table of a profile of ranks. clock_us: rank -> how far its times may be off rank 0's; throttled: rank -> why
    its GPU was."""

    kind: Literal["profile of ranks"] = "profile of ranks"
    sections: tuple[RankSection, ...]
    clock_us: dict[Rank, Amount]
    throttled: dict[Rank, tuple[str, ...]] = {}
