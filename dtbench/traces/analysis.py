"""A job beside what its links reach without it, what it would be worth to reach that, and what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from statistics import fmean, median
from typing import Literal

from msgspec.structs import replace

from dtbench.comparison.compare_launches import MIN_LAUNCHES, SINGLE_LAUNCH, compare_launches
from dtbench.comparison.references import System
from dtbench.cost.estimate import estimate_collective
from dtbench.errors import EXIT_OK, EXIT_REGRESSION, UsageError
from dtbench.grouping import group_by
from dtbench.records.comparison import Verdict
from dtbench.records.job import (
    CallChange,
    CallKind,
    Job,
    JobAnalysis,
    LateRank,
    LinkComparison,
    SavingEstimate,
    TimeChange,
)
from dtbench.records.topology import CalibratedTopology
from dtbench.text.units import format_size
from dtbench_core.cost.ring import RING_COLLECTIVES, busbw_factor

# Lateness is the cause of the others' exposed communication where it is at least so much of it, and so much of a step.
# Set, not fitted.
LATE_SHARE, LEAST_LATE = 0.5, 0.05
ABOVE_CALIBRATED = (
    "above 100%: measured in other bursts or under other load than the job's, so the two cannot be compared"
)

Topology = CalibratedTopology | Sequence[System]  # of public systems each has one number of ranks


def analyze(job: Job, topology: Topology | None = None, bases: Sequence[Job] = ()) -> JobAnalysis:
    """All that can be said of a job. bases: recordings that it is compared with. Raises: as `compare_recordings`."""
    links = () if topology is None else compare_links(job, topology)
    return replace(
        compare_recordings(bases, [job]) if bases else JobAnalysis(EXIT_OK),
        links=links,
        savings=estimate_savings(job, links),
        late_ranks=find_late_ranks(job),
    )


def compare_links(job: Job, topology: Topology) -> tuple[LinkComparison, ...]:
    """A row for each kind of call, in the job's order."""
    rows = []
    for kind, calls in group_by(job.collectives, lambda call: call.kind).items():
        moving = [call.transfer_s for call in calls if call.transfer_s]
        time_s = fmean(moving) if moving else min(call.best_s for call in calls)
        reference_s, beside, doubts = _reached(kind, topology)
        share = reference_s / time_s if reference_s and time_s else None
        doubts = ", ".join(filter(None, (doubts, ABOVE_CALIBRATED * bool(share and share > 1))))
        busbw = share and (kind.bytes or 0) * busbw_factor(kind.collective, kind.group_size or 1) / time_s
        rows.append(
            LinkComparison(
                kind,
                sum(call.count for call in calls),
                time_s,
                bool(moving),
                busbw,
                beside,
                reference_s,
                share,
                doubts,
            )
        )
    return tuple(rows)


def _reached(kind: CallKind, topology: Topology) -> tuple[float | None, str, str]:
    """(seconds of a call, beside what, doubts). Of several dims with as many ranks the slowest, which claims least."""
    size, ranks = kind.bytes, kind.group_size
    if not size or not ranks or ranks < 2:
        return (
            None,
            "",
            f"the trace says {size or 'no'} bytes over {ranks or 'unknown'} ranks: expected both, and 2 ranks or more",
        )
    if not isinstance(topology, CalibratedTopology):
        for system in topology:
            if system.ranks == ranks and (busbw := system.busbw(kind.collective, size)):
                return size * busbw_factor(kind.collective, ranks) / busbw, system.name, "another machine"
        return None, "", f"not published over {ranks} ranks: {', '.join(of.name for of in topology)}"
    named = [dim for dim in topology.dims if dim.name == kind.mesh_dim]
    fitting = named or [dim for dim in topology.dims if dim.ranks == ranks]
    if not fitting:
        dims = ", ".join(of.name for of in topology.dims)
        return None, "", f"the topology has {dims}, none of {ranks} ranks"
    dim = min(fitting, key=lambda dim: dim.bandwidth_GiBps)
    curve = dim.collectives.get(kind.collective)
    if kind.collective not in RING_COLLECTIVES and (curve is None or dim.ranks != ranks):
        return None, "", f"the topology has no {kind.collective} over {ranks} ranks of dim {dim.name}"
    at = estimate_collective(dim, kind.collective, ranks, size)
    least, most = map(format_size, curve.size_bytes if curve else dim.fitted_on.size_bytes)
    doubts = [f"dim matched by its {ranks} ranks"] * (not named) + ["by the ring formula"] * at.by_formula
    doubts += [f"extrapolated from {least} to {most}"] * (at.size_factor > 1)
    doubts += [f"extrapolated from {dim.ranks} ranks"] * (at.ranks_factor != 1)
    return at.time_us * 1e-6, f"dim {dim.name}", ", ".join(doubts)


def estimate_savings(job: Job, links: Sequence[LinkComparison]) -> tuple[SavingEstimate, ...]:
    """Bounds for each mesh dim of the rank whose communication is exposed the longest; what waits less here may wait
    more there. A call saves at most its time less what links reach; one without anything beside it saves nothing."""
    timed = [rank for rank in job.ranks if rank.each_step and rank.mean_step.step_s]
    rows: list[SavingEstimate] = []
    for rank in sorted(timed, key=lambda rank: rank.mean_step.exposed_s)[-1:]:
        steps, step_s = len(rank.each_step), rank.mean_step.step_s
        excess_s = {row.kind: max(0.0, row.time_s - row.reference_s) for row in links if row.reference_s}
        calls = group_by(
            (call for call in job.collectives if call.rank == rank.rank), lambda call: call.mesh_dim
        )
        for dim in rank.dims:
            exposed_s, waited_s = dim.exposed_s / steps, (dim.waiting_s or 0.0) / steps
            saved: dict[Literal["hidden", "calibrated", "no_late_rank"], float] = {"hidden": exposed_s}
            kinds = [(call.kind, call.calls_in_steps) for call in calls.get(dim.mesh_dim, ())]
            if beside := [count * excess_s[kind] for kind, count in kinds if kind in excess_s]:
                saved["calibrated"] = min(sum(beside) / steps, max(0.0, exposed_s - waited_s))
            if dim.waiting_s is not None:
                saved["no_late_rank"] = waited_s
            rows += [
                SavingEstimate(dim.mesh_dim, what, rank.rank, step_s, s, s / step_s)
                for what, s in saved.items()
            ]
    return tuple(rows)


def find_late_ranks(job: Job) -> tuple[LateRank, ...]:
    """The ranks whose lateness is most of the exposed communication of the others, the latest first.

    A late rank spends more of its step than the others outside exposed communication, and comes last more often than by
    chance: a rank that waits for it over one dim may come last over another, but its own work takes no longer.
    """
    means, found = {rank.rank: rank.mean_step for rank in job.ranks if rank.each_step}, list[LateRank]()
    for rank, step in means.items():
        others = [parts for number, parts in means.items() if number != rank]
        # A rank takes part in the collectives of its own group, of all groups over the dim.
        lasts = [
            (
                w.last_counts.get(f"{rank}", 0)
                * len({*w.waiting_s, *w.last_counts})
                / (w.calls * w.group_size),
                w.group_size,
                w.mesh_dim,
            )
            for w in job.waits
            if w.calls
        ]
        share, size, dim = max(lasts, default=(0.0, 1, ""))
        if not others or share <= 1 / size:
            continue
        late_s = step.step_s - step.exposed_s - median(parts.step_s - parts.exposed_s for parts in others)
        if late_s < max(LATE_SHARE * median(parts.exposed_s for parts in others), LEAST_LATE * step.step_s):
            continue
        parts = ("host_bound", "computation", "idle", "copy")
        longer_s = (
            (getattr(step, f"{part}_s") or 0.0) - median(getattr(of, f"{part}_s") or 0.0 for of in others)
            for part in parts
        )
        part = next((part for part, s in zip(parts, longer_s, strict=True) if s >= late_s / 2), "")
        found.append(LateRank(rank, late_s, part, dim, min(share, 1.0)))
    return tuple(sorted(found, key=lambda late: -late.late_s))


def compare_recordings(bases: Sequence[Job], heads: Sequence[Job]) -> JobAnalysis:
    """What differs on the ranks that all recordings of both sides have. Calls do where no recording of the base has as
    many as one of the head; between recordings of several lengths whole calls a step count, for those outside steps do
    not grow with them. A recording is one launch, whatever its steps.

    Raises:
        UsageError: no rank is in all recordings, or only some have steps.
    """
    steps = [{rank.rank: len(rank.each_step) for rank in job.ranks} for job in (*bases, *heads)]
    ranks = set.intersection(*map(set, steps))
    lengths = {of[rank] for of in steps for rank in ranks}
    if not (bases and heads and lengths) or (0 in lengths and len(lengths) > 1):
        raise UsageError("no rank is in all recordings, with steps or without: record both sides alike")
    sides = ([_per_step(job, ranks, len(lengths) > 1) for job in side] for side in (bases, heads))
    calls, times = _calls(*sides), () if 0 in lengths else tuple(_times(bases, heads, ranks))
    code = EXIT_REGRESSION if calls or any(row.verdict is Verdict.SLOWER for row in times) else EXIT_OK
    return JobAnalysis(
        code, call_changes=tuple(calls), time_changes=times, compared_ranks=tuple(sorted(ranks))
    )


def _per_step(job: Job, ranks: Set[int], whole: bool) -> dict[tuple[CallKind, int], float]:
    steps = {rank.rank: max(len(rank.each_step), 1) for rank in job.ranks if rank.rank in ranks}
    calls: Counter[tuple[CallKind, int]] = Counter()
    for call in job.collectives:
        if call.rank in steps:
            calls[call.kind, call.rank] += call.calls_in_steps
    return {key: n // steps[key[1]] if whole else n / steps[key[1]] for key, n in calls.items() if n}


def _calls(*sides: Sequence[Mapping[tuple[CallKind, int], float]]) -> list[CallChange]:
    """As many calls that are gone and that are new are one change, of dtype if there is one, else of bytes."""
    alike: dict[tuple[CallKind, float, float], list[int]] = {}
    keys = dict.fromkeys(key for side in sides for calls in side for key in calls)
    for kind, rank in sorted(keys, key=lambda key: (key[0].bytes or 0, key[1])):
        base, head = ([calls.get((kind, rank), 0) for calls in side] for side in sides)
        if set(base).isdisjoint(head):
            alike.setdefault((kind, base[0], head[0]), []).append(rank)
    rows = [CallChange(kind, kind, (old, new), tuple(on)) for (kind, old, new), on in alike.items()]
    for gone in [row for row in rows if not row.per_step[1]]:
        old, calls = gone.base, gone.per_step[0]
        fits = [row for row in rows if row.per_step == gone.per_step[::-1] and row.ranks == gone.ranks]
        fits = [row for row in fits if replace(row.head, dtype=old.dtype, bytes=old.bytes) == old]
        for new in sorted(fits, key=lambda row: row.head.dtype == old.dtype)[:1]:
            rows[rows.index(gone)] = CallChange(old, new.head, (calls, calls), gone.ranks)
            rows.remove(new)
    return rows


def _times(bases: Sequence[Job], heads: Sequence[Job], ranks: Set[int]) -> Iterator[TimeChange]:
    """A part of a step is judged by what it adds to a step of the base: how far parts alone differ between launches of
    one build is unknown."""
    sides = [[_figures(job, ranks) for job in side] for side in (bases, heads)]
    usual_s = median(figures["step_s"] for figures in sides[0])
    for part in dict.fromkeys(part for side in sides for figures in side for part in figures):
        base, head = ([figures.get(part, 0.0) for figures in side] for side in sides)
        beside_s = 0.0 if part == "step_s" else usual_s
        verdict, why, effect = compare_launches([s + beside_s for s in base], [s + beside_s for s in head])
        why = f"cannot tell: one launch on each side, record {MIN_LAUNCHES}" if why == SINGLE_LAUNCH else why
        yield TimeChange(part, verdict, why, median(base), median(head), effect)


def _figures(job: Job, ranks: Set[int]) -> dict[str, float]:
    """The parts of a step, means over the ranks, and for each dim the lateness per step of the rank that adds most."""
    means = [rank.mean_step for rank in job.ranks if rank.rank in ranks]
    figures = {
        part: fmean(getattr(step, part) for step in means)
        for part in ("step_s", "computation_s", "exposed_s", "idle_s")
    }
    steps = max(len(rank.each_step) for rank in job.ranks)
    for waits in job.waits:
        late_s = (
            (count * waits.late_s.get(rank, 0.0) / steps, rank) for rank, count in waits.last_counts.items()
        )
        figures |= {f"lateness of rank {rank} over {waits.mesh_dim}": s for s, rank in sorted(late_s)[-1:]}
    return figures
