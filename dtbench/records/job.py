"""Figures of a training job, read from the traces of its ranks, and the analysis derived from them.

`job.json` in a profile's folder holds a `Job`. The terminal, the page, `--json` and `--base` read it.

All times are seconds, all bandwidths bytes/s. Concurrent kernels count once: two that run in the same millisecond are
1 ms of computation.
"""

from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dtbench.fields import Amount, Count, Real
from dtbench.records.comparison import Change, Verdict
from dtbench.text.units import format_bytes, format_ratio, format_seconds, format_size, plural


class StepParts(Struct, frozen=True, kw_only=True):
    """Time of one rank in one step, by activity.

    Attributes:
        step_s: duration of the step.
        computation_s: kernels that do not communicate; without a GPU, ops of torch.
        communication_s: collectives and point-to-point calls, including the time waiting for other ranks.
        exposed_s: communication that no computation overlaps. Copies do not hide communication.
        copy_s: memory copies and sets.
        idle_s: time without computation, communication and copies on any stream.
        host_bound_s: idle time in which the host had not launched the GPU's next kernel; None if the trace has no
            launches.
    """

    step_s: Amount
    computation_s: Amount
    communication_s: Amount
    exposed_s: Amount
    copy_s: Amount = 0.0
    idle_s: Amount = 0.0
    host_bound_s: Amount | None = None


class PhaseParts(Struct, frozen=True, kw_only=True):
    """Communication of one rank over one mesh dim in one phase of its steps.

    Attributes:
        phase: "forward", "backward", "optimizer", "other" between them, or "?" if the trace does not show it. It is the
            phase in which the host issued the calls.
        communication_s: time with at least one of these calls in progress, and none of an earlier phase in this list.
        exposed_s: the part of it that no computation overlaps, shared between mesh dims as in `DimParts`.
    """

    phase: str
    communication_s: Amount
    exposed_s: Amount


class DimParts(Struct, frozen=True, kw_only=True):
    """Communication of one rank over one mesh dim, summed over its steps, or over its trace if it has no steps.

    Attributes:
        mesh_dim: name of the mesh dim.
        communication_s: time with at least one call over it in progress.
        exposed_s: communication that no computation overlaps. Where calls over several dims are exposed at once, each
            dim gets an equal share, so the dims add up to the exposed communication of the rank.
        waiting_s: the part of exposed_s spent waiting for the last rank; None if no call shows it.
        phases: communication_s and exposed_s by phase.
    """

    mesh_dim: str
    communication_s: Amount
    exposed_s: Amount
    waiting_s: Amount | None = None
    phases: tuple[PhaseParts, ...] = ()


class RankJob(Struct, frozen=True, kw_only=True):
    """Figures of one rank.

    Attributes:
        rank: its global rank.
        source: file name of its trace.
        host: its host's name, if known.
        device: its GPU's name, or "cpu".
        steps: number of steps that the figures cover; the same on all ranks.
        excluded_steps: steps of the trace that no figure covers: partial steps and slow first steps.
        steps_source: how the steps were found: "ProfilerStep#", an annotation's name, or "repetition" of the
            collectives; "" without steps.
        step_s: mean duration of a step.
        span_s: duration of the whole trace. The sums from computation_s to host_bound_s also cover the whole trace.
            All are None if the job was read from logs of its calls.
        each_step: the covered steps, in order.
        dims: communication in these steps, by mesh dim.
        clock_offset_s: seconds added to its timestamps to align its clock with the first rank's.
        clock_error_s: estimated error of that offset; None if unknown.
    """

    rank: Count
    source: str = ""
    host: str = ""
    device: str = ""
    steps: Count = 0
    excluded_steps: Count = 0
    steps_source: str = ""
    step_s: Amount | None = None
    span_s: Amount | None = 0.0
    computation_s: Amount | None = 0.0
    communication_s: Amount | None = 0.0
    exposed_s: Amount | None = 0.0
    copy_s: Amount | None = 0.0
    idle_s: Amount | None = 0.0
    host_bound_s: Amount | None = None
    each_step: tuple[StepParts, ...] = ()
    dims: tuple[DimParts, ...] = ()
    clock_offset_s: Real = 0.0
    clock_error_s: Amount | None = None

    @property
    def mean_step(self) -> StepParts:
        """Means over its steps, or the figures of its whole trace if it has no steps."""
        names = StepParts.__struct_fields__
        steps = self.each_step or [
            StepParts(step_s=self.span_s or 0.0, **{name: getattr(self, name) for name in names[1:]})
        ]
        known = {
            name: [value for step in steps if (value := getattr(step, name)) is not None] for name in names
        }
        return StepParts(**{name: fmean(values) for name, values in known.items() if values})


class CallKind(Struct, frozen=True):
    """Properties by which calls are grouped.

    Attributes:
        mesh_dim: the name in the program's DeviceMesh; "group of 8" for a group without a name; "unknown group".
        collective: the name in nccl-tests ("all_reduce"), "send", "recv", or "unknown" if the trace does not show it.
        group_size: number of ranks in the process group; None if unknown.
        dtype: torch's name ("float32"); None if unknown.
        bytes: size of one call, the larger of input and output; None if unknown.
    """

    mesh_dim: str
    collective: str
    group_size: Count | None = None
    dtype: str | None = None
    bytes: Count | None = None

    def __str__(self) -> str:
        return f"{self.mesh_dim} {self.collective} of {format_size(self.bytes)} ({self.dtype or 'unknown dtype'})"


class Collective(CallKind, frozen=True, kw_only=True):
    """Calls of one kind on one rank.

    Attributes:
        rank: the rank.
        count: calls in the trace.
        in_steps: calls that the host issued within the covered steps; None without steps.
        timed: number of calls that the times below cover: those in steps, if there are any; None for all.
        time_s: sum over these calls, including the time waiting for other ranks.
        median_s, best_s: median and minimum over these calls.
        transfer_s: mean time from the last rank's arrival to the end of the call; None if traces of the group are
            missing.
        busbw: bus bandwidth at the mean time.
        callers: the ops that issued the calls, the most frequent first.
    """

    rank: Count
    count: Count
    in_steps: Count | None = None
    timed: Count | None = None
    time_s: Amount
    median_s: Amount
    best_s: Amount
    transfer_s: Amount | None = None
    busbw: Amount | None = None
    callers: tuple[str, ...] = ()

    @property
    def kind(self) -> CallKind:
        return CallKind(self.mesh_dim, self.collective, self.group_size, self.dtype, self.bytes)

    @property
    def calls_in_steps(self) -> int:
        """Calls in the covered steps, or in the whole trace if it has no steps."""
        return self.count if self.in_steps is None else self.in_steps

    @property
    def mean_s(self) -> float:
        """Mean time of a call."""
        return self.time_s / (self.timed or self.count or 1)


class Waits(Struct, frozen=True, kw_only=True):
    """Waiting times over one mesh dim, from the collectives in steps that the traces of all ranks of a group show.

    Attributes:
        mesh_dim: name of the mesh dim.
        group_size: number of ranks in its process groups.
        calls: number of these collectives.
        waiting_s: rank -> time it waited for the last rank.
        transfer_s: time from the last arrival to the end, summed over the calls.
        last_counts: rank -> calls in which it came last by more than the clock error.
        late_s: rank -> in those calls, its mean delay after the median arrival of the others.
        unclear: calls whose last rank the clock error hides.
    """

    mesh_dim: str
    group_size: Count
    calls: Count
    waiting_s: dict[str, Amount]
    transfer_s: Amount
    last_counts: dict[str, Count]
    late_s: dict[str, Amount]
    unclear: Count = 0


Bound = Literal["transfer", "arrival", "mixed", "inconclusive"]


class BoundVerdict(Struct, frozen=True):
    """Whether the transfer or the arrival of the last rank bounds one collective over one mesh dim.

    Attributes:
        mesh_dim: name of the mesh dim.
        collective: the name in nccl-tests.
        group_size: number of ranks in its process groups; None if unknown.
        bound: what takes most of its time; "mixed" if neither does.
        time_s: time in its calls in steps, summed over calls and ranks.
        calls: number of calls that the verdict is based on.
        waiting_share: share of the time before the last rank's arrival; None if unknown.
        late_rank: the rank that causes most of the waiting, if it is a single one.
        late_s: its mean delay after the median arrival of the others.
        late_share: share of the time spent waiting for it.
        slowdown: transfer time relative to the reference, over the calls that have one; None without a reference.
        reference: the topology's mesh dim, or the public system, of the reference.
        why: the reason if the verdict is inconclusive, or if no late rank is named.
    """

    mesh_dim: str
    collective: str
    group_size: Count | None
    bound: Bound
    time_s: Amount
    calls: Count = 0
    waiting_share: Amount | None = None
    late_rank: Count | None = None
    late_s: Amount | None = None
    late_share: Amount | None = None
    slowdown: Amount | None = None
    reference: str = ""
    why: str = ""

    def __str__(self) -> str:
        name = f"{self.mesh_dim} {self.collective}"
        if self.bound == "inconclusive":
            return f"what bounds {name} is inconclusive: {self.why}"
        source = "calibrated" if self.reference.startswith("dim ") else "published"
        slowdown = f"{format_ratio(self.slowdown)} the {source} time of {self.reference}" * bool(
            self.reference
        )
        waiting = f"{self.waiting_share or 0:.0%} of its time is waiting"
        if self.late_rank is None:
            waiting += " for the last rank" + f" ({self.why})" * bool(self.why)
        else:
            mostly = ", mostly" * (f"{self.late_share or 0:.0%}" != f"{self.waiting_share or 0:.0%}")
            waiting += f"{mostly} for rank {self.late_rank}, which comes {format_seconds(self.late_s)} late"
        if self.bound == "transfer":
            return f"{name} is bound by transfer: " + (
                f"it takes {slowdown}"
                if slowdown
                else f"{1 - (self.waiting_share or 0):.0%} of its time is transfer"
            )
        if self.bound == "arrival":
            return f"{name} is bound by arrival: {waiting}"
        return f"{name} is mixed: {waiting}, and the rest is transfer" + f", {slowdown}" * bool(slowdown)


class Lane(Struct, frozen=True, kw_only=True):
    """Intervals of one activity of one rank in the drawn step.

    Attributes:
        rank: the rank.
        name: "communication DIM", "computation", "copy" or "exposed".
        intervals: (start, end), seconds since the earliest start of the step on any rank.
    """

    rank: Count
    name: str
    intervals: tuple[tuple[Real, Real], ...]


class InjectedDelay(Struct, frozen=True, kw_only=True):
    """A delay that `dtbench profile --delay` injected before the first collective of each step of one rank.

    Attributes:
        rank: the delayed rank.
        delay_s: duration of a delay.
        count: delays in its trace; 0 if that trace is missing.
    """

    rank: Count
    delay_s: Amount
    count: Count

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was delayed by {format_seconds(self.delay_s)} before its first collective of each "
            f"step, as --delay requested: {plural(self.count, 'delay')} in its trace (a step ends with the "
            "optimizer's step(); only collectives of torch.distributed are delayed)"
        )


class Job(Struct, frozen=True, kw_only=True):
    """Figures of a job.

    Attributes:
        label: its name in tables.
        command: the command that `dtbench profile -- COMMAND` ran; empty for other traces.
        world_size: number of ranks of the job, more than `ranks` if traces are missing.
        backend: the default process group's backend.
        torch: version of torch, if known.
        ranks: figures of each rank.
        collectives: calls of each rank by kind.
        waits: waiting times by mesh dim.
        bounds: what bounds each collective whose arrivals the traces show, without references.
        aligned_by: how the ranks' clocks were aligned; "" if they were not.
        drawn_step: index of the step that `lanes` show; None without steps.
        drawn_s: end of the last interval in `lanes`.
        lanes: activities of each rank in that step.
        delay: the injected delay, if any.
        notes: what is missing, excluded or unknown, one sentence each.
    """

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
    bounds: tuple[BoundVerdict, ...] = ()
    aligned_by: str = ""
    drawn_step: Count | None = None
    drawn_s: Amount = 0.0
    lanes: tuple[Lane, ...] = ()
    delay: InjectedDelay | None = None
    notes: tuple[str, ...] = ()

    @property
    def lacks_times(self) -> bool:
        """Whether it was read from logs of calls, so that steps, computation and exposed communication are unknown."""
        return any(rank.span_s is None for rank in self.ranks)


class LinkComparison(Struct, frozen=True):
    """In-job time of one kind of call, compared with the calibrated or published time of the same size.

    Attributes:
        kind: mesh dim, collective, group size, dtype and bytes.
        count: calls in the traces of all ranks.
        time_s: time of a call: the mean without waiting for the last rank if `excludes_waiting`, else the minimum.
        excludes_waiting: whether the traces show the waiting time.
        busbw: bus bandwidth at time_s; None without a reference.
        reference: the topology's mesh dim, or the public system, that `reference_s` comes from.
        reference_s: time of such a call according to the reference; None if it does not cover the call.
        share: reference_s / time_s.
        caveat: how `reference_s` was extrapolated, or why it is missing.
    """

    kind: CallKind
    count: Count
    time_s: Amount
    excludes_waiting: bool
    busbw: Amount | None
    reference: str
    reference_s: Amount | None
    share: Amount | None
    caveat: str


class SavingEstimate(Struct, frozen=True):
    """Upper bound on the step time that one improvement would save on the rank with the most exposed communication.

    Attributes:
        mesh_dim: the mesh dim whose communication would improve.
        assumption: "hidden": computation overlaps all of it; "calibrated": its links reach their reference bandwidth;
            "no_late_rank": no rank waits for the last one. The latter two add up to "hidden" at most.
        rank: that rank.
        step_s: its mean step time.
        saved_s: time saved per step.
        share: saved_s / step_s.
    """

    mesh_dim: str
    assumption: Literal["hidden", "calibrated", "no_late_rank"]
    rank: Count
    step_s: Amount
    saved_s: Amount
    share: Amount


class LateRank(Struct, frozen=True):
    """A rank that the others wait for because its own work takes longer.

    Attributes:
        rank: its global rank.
        late_s: its step without exposed communication, minus the median of the same over the other ranks.
        part: the activity that accounts for at least half of late_s: "computation", "copy", "idle", "host_bound" (idle
            because the host had not launched the next kernel), or "".
        mesh_dim: the dim over which it came last most often.
        last_share: share of the collectives of its own group over that dim in which it came last.
    """

    rank: Count
    late_s: Amount
    part: str
    mesh_dim: str
    last_share: Amount

    def __str__(self) -> str:
        activity = {
            "computation": "computes",
            "copy": "copies",
            "idle": "is idle",
            "host_bound": "is idle, waiting for its host to launch kernels,",
        }.get(self.part, "works")
        return (
            f"rank {self.rank} is late by {format_seconds(self.late_s)} a step: it {activity} longer than the others. "
            f"They wait for it: it came last in {self.last_share:.0%} of its collectives over {self.mesh_dim}"
        )


class VolumeComparison(Struct, frozen=True, kw_only=True):
    """Bytes of one rank's collectives over one mesh dim per step, compared with what the layout requires.

    Attributes:
        mesh_dim: the planner's name of the mesh dim.
        measured_bytes: bytes per step in the trace.
        required_bytes: bytes per step by the planner's volumes.
        ratio: measured_bytes / required_bytes.
        dtypes: dtypes of the calls in the trace.
    """

    mesh_dim: str
    measured_bytes: Amount
    required_bytes: Amount
    ratio: Amount
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.mesh_dim} transfers {format_bytes(self.measured_bytes)} a step "
            f"({', '.join(self.dtypes) or 'nothing'}), {self.ratio:.2f}x the {format_bytes(self.required_bytes)} that "
            "the layout requires"
        )


class CallChange(Struct, frozen=True):
    """Calls of a kind whose number differs between base and head, or that another kind replaces.

    Attributes:
        base: kind of the calls in the base.
        head: kind of the calls in the head; differs from `base` if they replace those of the base.
        per_step: calls per step and rank in base and head; per trace if the traces have no steps.
        ranks: the ranks with this change.
    """

    base: CallKind
    head: CallKind
    per_step: tuple[Amount, Amount]
    ranks: tuple[Count, ...]

    def __str__(self) -> str:
        if self.base == self.head:
            return f"{self.base}: {self.per_step[1]:g} calls instead of {self.per_step[0]:g}"
        base_bytes, head_bytes = self.base.bytes, self.head.bytes
        ratio = f", {format_ratio(head_bytes / base_bytes)} the bytes" if base_bytes and head_bytes else ""
        return (
            f"{self.head} instead of {format_size(base_bytes)} ({self.base.dtype or 'unknown dtype'}){ratio}"
        )


class TimeChange(Struct, frozen=True):
    """Time of one activity per step in base and head, as the mean over steps and ranks.

    Attributes:
        part: a field of `StepParts`, or "lateness of rank 2 over dp".
        verdict: slower or faster if the change of this activity alone makes a step slower or faster.
        why: the reason for the verdict.
        base_s, head_s: medians over the recordings of each side.
        effect: ratio of head to base of a step that differs in this activity alone.
    """

    part: str
    verdict: Verdict
    why: str
    base_s: Amount
    head_s: Amount
    effect: Change | None


class JobAnalysis(Struct, frozen=True):
    """Conclusions from the figures of a job and from comparing it with links, a layout and a base.

    Attributes:
        exit_code: 1 if calls differ from the base or a time is slower, else 0. Links and late ranks do not count.
        links: comparisons with calibrated or published bandwidths.
        savings: upper bounds on what improvements would save.
        call_changes: calls that differ from the base.
        time_changes: times compared with the base.
        compared_ranks: ranks that all recordings of base and head have.
        volumes: bytes compared with what the layout requires.
        late_ranks: ranks that cause most of the exposed communication of the others, the latest first.
        bounds: what bounds each collective, those with the most time first.
    """

    exit_code: Count
    links: tuple[LinkComparison, ...] = ()
    savings: tuple[SavingEstimate, ...] = ()
    call_changes: tuple[CallChange, ...] = ()
    time_changes: tuple[TimeChange, ...] = ()
    compared_ranks: tuple[Count, ...] = ()
    volumes: tuple[VolumeComparison, ...] = ()
    late_ranks: tuple[LateRank, ...] = ()
    bounds: tuple[BoundVerdict, ...] = ()
