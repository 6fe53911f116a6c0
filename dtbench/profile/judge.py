"""A job beside what its links reach without it, what it would be worth to reach that, and what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from statistics import median
from typing import Literal

from msgspec.structs import replace

from dtbench.comparison.references import System
from dtbench.comparison.runs import BEYOND_LAUNCHES, MIN_LAUNCHES, ONE_LAUNCH, judge_launches
from dtbench.cost.price import estimate
from dtbench.records.job import Job, RankJob
from dtbench.records.judged import Verdict
from dtbench.records.judged_job import CallChange, CallKind, Judgement, LinkRow, TimeChange, Worth
from dtbench.records.topology import CalibratedTopology
from dtbench.suite.errors import EXIT_OK, EXIT_REGRESSION, UsageError
from dtbench.suite.grouping import group_by
from dtbench.text.units import format_size
from dtbench_core.cost.ring import RING_COLLECTIVES, busbw_factor

Topology = CalibratedTopology | Sequence[System]  # of public systems each has one number of ranks


def judged(job: Job, topology: Topology | None = None, bases: Sequence[Job] = ()) -> Judgement:
    """All that can be said of a job. bases: recordings that it is compared with. Raises: as `changes`."""
    links = () if topology is None else beside_links(job, topology)
    changed = changes(bases, [job]) if bases else Judgement(EXIT_OK)
    return replace(changed, links=links, worth=worth(job, links))


def _median(rank: RankJob, part: str) -> float:
    return float(median(getattr(step, part) for step in rank.each_step))


def beside_links(job: Job, topology: Topology) -> tuple[LinkRow, ...]:
    """A row for each kind of call, in the job's order."""
    rows = []
    for kind, calls in group_by(job.collectives, CallKind.of).items():
        moving = [call.moving_s for call in calls if call.moving_s]
        time_s = median(moving) if moving else min(call.best_s for call in calls)
        reached_s, beside, doubts = _reached(kind, topology)
        share = reached_s / time_s if reached_s and time_s else None
        busbw = share and (kind.bytes or 0) * busbw_factor(kind.collective, kind.group_size or 1) / time_s
        count = sum(call.count for call in calls)
        rows.append(LinkRow(kind, count, time_s, bool(moving), busbw, beside, reached_s, share, doubts))
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
    at = estimate(dim, kind.collective, ranks, size)
    least, most = map(format_size, curve.size_bytes if curve else dim.fitted_on.size_bytes)
    doubts = [f"dim matched by its {ranks} ranks"] * (not named) + ["by the ring formula"] * at.by_formula
    doubts += [f"extrapolated from {least} to {most}"] * (at.size_factor > 1)
    doubts += [f"extrapolated from {dim.ranks} ranks"] * (at.ranks_factor != 1)
    return at.time_us * 1e-6, f"dim {dim.name}", ", ".join(doubts)


def worth(job: Job, links: Sequence[LinkRow]) -> tuple[Worth, ...]:
    """What each mesh dim could give back of a step of the rank whose steps are longest: bounds, for what waits less
    here may wait more there. All waiting of the trace is taken for that of its steps.
    hidden, links: no more than is exposed; never below the rank's computation, which is taken to stay as it is.
    links: a call saves its time less what is reached; waits stay; a call without anything beside it saves nothing.
    on time: the rank waits for no other, and where it was last it comes with the median of the others; never below the
    median computation of all ranks, for who is late may compute more. Needs waits.
    """
    timed = [rank for rank in job.ranks if rank.each_step and _median(rank, "step_s")]
    slowest = sorted(timed, key=lambda rank: _median(rank, "step_s"))[-1:]
    rows: list[Worth] = []
    for rank, dim in ((one, dim) for one in slowest for dim in one.dims):
        name, steps, step_s = str(rank.rank), len(rank.each_step), _median(rank, "step_s")
        room_s = step_s - _median(rank, "computation_s")
        exposed_s = max(0.0, min(dim.exposed_s / steps, _median(rank, "exposed_s"), room_s))
        saved: dict[Literal["hidden", "links", "on time"], float] = {"hidden": exposed_s}
        excess_s = {row.kind: max(0.0, row.time_s - row.reached_s) for row in links if row.reached_s}
        calls = [call for call in job.collectives if (call.rank, call.mesh_dim) == (rank.rank, dim.mesh_dim)]
        if beside := [
            call.stepped * excess_s[CallKind.of(call)] for call in calls if CallKind.of(call) in excess_s
        ]:
            saved["links"] = min(sum(beside) / steps, exposed_s)
        if waits := [of for of in job.waits if of.mesh_dim == dim.mesh_dim and name in of.waiting_s]:
            waited_s = sum(of.waiting_s[name] for of in waits) / steps
            late_s = sum(of.last.get(name, 0) * of.late_s.get(name, 0.0) for of in waits) / steps
            room_s = step_s - median(_median(one, "computation_s") for one in timed)
            saved["on time"] = max(0.0, min(min(waited_s, exposed_s) + late_s, room_s))
        rows += [Worth(dim.mesh_dim, what, rank.rank, step_s, s, s / step_s) for what, s in saved.items()]
    return tuple(rows)


def changes(bases: Sequence[Job], heads: Sequence[Job]) -> Judgement:
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
    code = EXIT_REGRESSION if calls or any(row.verdict is Verdict.REGRESSION for row in times) else EXIT_OK
    return Judgement(code, calls=tuple(calls), times=times, ranks=tuple(sorted(ranks)))


def _per_step(job: Job, ranks: Set[int], whole: bool) -> dict[tuple[CallKind, int], float]:
    steps = {rank.rank: max(len(rank.each_step), 1) for rank in job.ranks if rank.rank in ranks}
    calls: Counter[tuple[CallKind, int]] = Counter()
    for call in job.collectives:
        if call.rank in steps:
            calls[CallKind.of(call), call.rank] += call.stepped
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
    """A part of a step that grew beyond what launches differ by is slower where the step is: how much parts of equal
    steps differ between launches is not known."""
    sides = [[[rank for rank in job.ranks if rank.rank in ranks] for job in side] for side in (bases, heads)]
    step_verdict = Verdict.INCONCLUSIVE
    for part in ("step_s", "computation_s", "exposed_s", "idle_s"):
        at = -1 if part == "step_s" else len(ranks) // 2
        base, head = ([sorted(_median(rank, part) for rank in job)[at] for job in side] for side in sides)
        verdict, why, effect = judge_launches(base, head)
        if part == "step_s":
            step_verdict = verdict
        elif why == BEYOND_LAUNCHES and verdict is not step_verdict:
            verdict, why = Verdict.INCONCLUSIVE, ONE_LAUNCH
        why = f"cannot tell: one launch each, record {MIN_LAUNCHES} a side" if why == ONE_LAUNCH else why
        yield TimeChange(part, verdict, why, median(base), median(head), effect)
