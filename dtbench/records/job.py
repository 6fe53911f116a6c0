"""What `dtbench profile` says of a job from the traces of its ranks: the one struct that the terminal, the page,
`--json` and `--base` read, and `job.json` in a profile's folder.

All times are seconds. Intervals are united before they are added up: two kernels at once count once.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dtbench.fields import Amount, Count, Real
from dtbench.records.comparison import Change, Verdict
from dtbench.text.units import format_bytes, format_ratio, format_seconds, format_size


class StepParts(Struct, frozen=True, kw_only=True):
    """Where one step of a rank went. computation_s: kernels but for communication's (without a GPU: ops of torch).
    communication_s: collectives and point to point, waiting included; exposed_s: of that what no computation covers
    (copies hide nothing). copy_s: memory copies and sets. idle_s: what none of these covers, over all streams;
    host_bound_s: of that the time in which the GPU's next kernel had not been launched, None without launches."""

    step_s: Amount
    computation_s: Amount
    communication_s: Amount
    exposed_s: Amount
    copy_s: Amount = 0.0
    idle_s: Amount = 0.0
    host_bound_s: Amount | None = None


class DimParts(Struct, frozen=True, kw_only=True):
    """Communication of one rank over one mesh dim: the sum over its `each_step`; of the whole trace where it has none.

    Attributes:
        mesh_dim: its name.
        communication_s: while calls over it were under way.
        exposed_s: of that what no computation covers. Time that several dims expose at once counts for each in equal
            parts, so that the dims add up to the rank's exposed communication.
        waiting_s: of exposed_s the wait for the last rank; None where no call shows it.
    """

    mesh_dim: str
    communication_s: Amount
    exposed_s: Amount
    waiting_s: Amount | None = None


class RankJob(Struct, frozen=True, kw_only=True):
    """The trace of one rank.

    Attributes:
        source: the file's name.
        steps: how many steps the figures are of, the same on all ranks.
        left_out: further steps of the trace, of which no figure is: partial ones, and first ones that took far longer.
        steps_by: what told them: "ProfilerStep#", an annotation's name, "repetition", "" where there are none.
        step_s: their mean.
        span_s: of the whole trace, as the sums that follow: also outside steps.
        each_step: the steps of the figures, in order.
        dims: communication in these steps, by mesh dim.
        clock_off_s: what was added to its clock, +- clock_error_s.
    """

    rank: Count
    source: str = ""
    host: str = ""
    device: str = ""
    steps: Count = 0
    left_out: Count = 0
    steps_by: str = ""
    step_s: Amount | None = None
    span_s: Amount = 0.0
    computation_s: Amount = 0.0
    communication_s: Amount = 0.0
    exposed_s: Amount = 0.0
    copy_s: Amount = 0.0
    idle_s: Amount = 0.0
    host_bound_s: Amount | None = None
    each_step: tuple[StepParts, ...] = ()
    dims: tuple[DimParts, ...] = ()
    clock_off_s: Real = 0.0
    clock_error_s: Amount | None = None

    @property
    def mean_step(self) -> StepParts:
        """The mean of its steps, whose parts add up as those of one step do; without steps its whole trace."""
        names = StepParts.__struct_fields__
        parts = self.each_step or [
            StepParts(step_s=self.span_s, **{name: getattr(self, name) for name in names[1:]})
        ]
        given = {
            name: [value for part in parts if (value := getattr(part, name)) is not None] for name in names
        }
        return StepParts(**{name: fmean(values) for name, values in given.items() if values})


class CallKind(Struct, frozen=True):
    """Calls that are counted together.

    Attributes:
        mesh_dim: as the program's DeviceMesh names it, "group of 8" where it has no name, "unknown group".
        collective: nccl-tests' name ("all_reduce", ...), "send", "recv", or "unknown" where the trace does not say.
        group_size: ranks of the group; None where the trace does not say, as of the next two.
        dtype: as torch names it ("float32").
        bytes: per call, the larger of what goes in and comes out.
    """

    mesh_dim: str
    collective: str
    group_size: Count | None = None
    dtype: str | None = None
    bytes: Count | None = None

    @classmethod
    def of(cls, call: CallKind) -> CallKind:
        """The kind alone."""
        return cls(call.mesh_dim, call.collective, call.group_size, call.dtype, call.bytes)

    def __str__(self) -> str:
        return f"{self.mesh_dim} {self.collective} of {format_size(self.bytes)} ({self.dtype or 'unknown dtype'})"


class Collective(CallKind, frozen=True, kw_only=True):
    """Calls of one rank that agree in all but time.

    count: calls of the trace; in_steps: those that were issued within a step of the figures, None without
    steps. timed: the number of calls that the times sum up, in steps where there are any; None: all. time_s: of
    them together; median_s, best_s: of one. busbw: bytes/s, by their mean. moving_s: mean of what is left of a call
    without the wait for the last rank, where all ranks of its group are there. asked_by: the ops that asked for them,
    the most frequent first.
    """

    rank: Count
    count: Count
    in_steps: Count | None = None
    timed: Count | None = None
    time_s: Amount
    median_s: Amount
    best_s: Amount
    moving_s: Amount | None = None
    busbw: Amount | None = None
    asked_by: tuple[str, ...] = ()

    @property
    def stepped(self) -> int:
        """Calls of steps; all where none are told."""
        return self.count if self.in_steps is None else self.in_steps

    @property
    def each_s(self) -> float:
        """Mean seconds of a call."""
        return self.time_s / (self.timed or self.count or 1)


class Waits(Struct, frozen=True, kw_only=True):
    """Waiting times in the collectives over one mesh dim that all ranks of their group show, within steps.

    calls: so many. waiting_s: rank -> what it spent waiting for the last one; moving_s: from the last arrival to the
    end, of all calls. last: rank -> how often it came last by more than the clocks' error; late_s: rank -> by how much
    then, mean, behind the median of the others. unclear: how often the clocks cannot tell.
    """

    mesh_dim: str
    group_size: Count
    calls: Count
    waiting_s: dict[str, Amount]
    moving_s: Amount
    last: dict[str, Count]
    late_s: dict[str, Amount]
    unclear: Count = 0


class Lane(Struct, frozen=True, kw_only=True):
    """Intervals of one rank in the step that is drawn, (start, end) from the step's begin on the common clock.
    name: "communication DIM", "computation", "copy", or "exposed"."""

    rank: Count
    name: str
    intervals: tuple[tuple[Real, Real], ...]


class Job(Struct, frozen=True, kw_only=True):
    """What the traces of a job come to. world_size: as the traces say, more than `ranks` where some are missing.
    aligned_by: how the ranks' clocks were brought together. notes: what is missing, left out or not told, a sentence
    each. drawn_step: its number; lanes: from its earliest begin. command: what `profile -- COMMAND` ran."""

    kind: Literal["job"] = "job"
    schema: Literal[1] = 1
    label: str = ""
    command: tuple[str, ...] = ()
    world_size: Count
    backend: str = ""
    torch: str = ""
    ranks: Annotated[tuple[RankJob, ...], Meta(min_length=1)]
    collectives: tuple[Collective, ...]
    waits: tuple[Waits, ...] = ()
    aligned_by: str = ""
    drawn_step: Count | None = None
    drawn_s: Amount = 0.0
    lanes: tuple[Lane, ...] = ()
    notes: tuple[str, ...] = ()


class LinkRow(Struct, frozen=True):
    """Calls of all ranks beside what links reach without the job. time_s: of one, `moving`: the mean without the wait
    for the last rank, else the shortest, which may hold some wait. reached_s: by `beside`, a dim of a topology or a
    public system. share: of its bandwidth. doubts: how that was extrapolated, or why there is none."""

    kind: CallKind
    count: Count
    time_s: Amount
    moving: bool
    busbw: Amount | None
    beside: str
    reached_s: Amount | None
    share: Amount | None
    doubts: str


class Worth(Struct, frozen=True):
    """Upper bound on the time saved per step on `rank`, whose communication is exposed the longest.

    Attributes:
        mesh_dim: the dim whose communication would improve.
        what: "hidden": computation covers all of it; "links": its links reach what they reach without the job;
            "on time": no rank waits for the last one.
        rank: the rank.
        step_s: its mean step.
        saved_s: "hidden": its exposed communication over the dim, to which the two others add up at most.
        share: saved_s / step_s.
    """

    mesh_dim: str
    what: Literal["hidden", "links", "on time"]
    rank: Count
    step_s: Amount
    saved_s: Amount
    share: Amount


class LateRank(Struct, frozen=True):
    """A rank that the others wait for because its own work takes longer.

    Attributes:
        rank: its number.
        late_s: its step without exposed communication, less the median of that of the other ranks; seconds.
        part: the part of its step that makes at least half of that: "computation", "copy", "idle", "host_bound" (idle
            because the host had not launched the next kernel), or "".
        mesh_dim: the dim over which it came last most often.
        last: in which share of its own group's collectives it did.
    """

    rank: Count
    late_s: Amount
    part: str
    mesh_dim: str
    last: Amount

    def __str__(self) -> str:
        doing = {"computation": "computes", "copy": "copies", "idle": "is idle", "": "works"}
        why = doing.get(self.part, "is idle, waiting for its host to launch kernels,")
        return (
            f"rank {self.rank} is late by {format_seconds(self.late_s)} a step: it {why} longer than the others. "
            f"They wait for it: it came last in {self.last:.0%} of its collectives over {self.mesh_dim}"
        )


class Needed(Struct, frozen=True, kw_only=True):
    """Bytes of a rank's collectives over a mesh dim in a step: carried, and needed by the layout; share: of that."""

    mesh_dim: str
    carried: Amount
    needed: Amount
    share: Amount
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.mesh_dim} carries {format_bytes(self.carried)} a step ({', '.join(self.dtypes) or 'nothing'}), "
            f"{self.share:.2f}x the {format_bytes(self.needed)} that the layout needs"
        )


class CallChange(Struct, frozen=True):
    """Calls that differ; per_step: in base and in head, of each of `ranks`, in all where traces have no steps. Where
    base and head are of two kinds, the latter take the place of the former."""

    base: CallKind
    head: CallKind
    per_step: tuple[Amount, Amount]
    ranks: tuple[Count, ...]

    def __str__(self) -> str:
        if self.base == self.head:
            return f"{self.base}: {self.per_step[1]:g} calls instead of {self.per_step[0]:g}"
        old, new = self.base.bytes, self.head.bytes
        ratio = f", {format_ratio(new / old)} the bytes" if old and new else ""
        return f"{self.head} instead of {format_size(old)} ({self.base.dtype or 'unknown dtype'}){ratio}"


class TimeChange(Struct, frozen=True):
    """A part of a step in base and in head, the mean over steps and ranks.

    Attributes:
        part: as `StepParts` names it, or "lateness of rank 2 over dp", which is per step, too.
        verdict: slower or faster where the part, all else unchanged, makes a step so.
        why: the reason.
        base_s, head_s: the medians over recordings.
        effect: head over base of such a step.
    """

    part: str
    verdict: Verdict
    why: str
    base_s: Amount
    head_s: Amount
    effect: Change | None


class Judgement(Struct, frozen=True):
    """All that is said of a job. calls, times: what differs from others on `ranks`. exit_code: 1 where calls differ or
    a time is slower, else 0: times that show nothing fail nothing, and links are no gate. late: the ranks that cause
    most of the exposed communication of the others, by waiting; the latest first."""

    exit_code: Count
    links: tuple[LinkRow, ...] = ()
    worth: tuple[Worth, ...] = ()
    calls: tuple[CallChange, ...] = ()
    times: tuple[TimeChange, ...] = ()
    ranks: tuple[Count, ...] = ()
    needed: tuple[Needed, ...] = ()
    late: tuple[LateRank, ...] = ()
