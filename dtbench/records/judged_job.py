"""A job's calls beside its links and beside another recording of it. Times are seconds, bandwidths bytes/s."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.fields import Amount, Count
from dtbench.records.comparison import Change, Verdict
from dtbench.records.job import CallKind
from dtbench.text.units import format_bytes, format_ratio, format_seconds, format_size


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
