"""Analyzes a job: compares its calls with calibrated links and a base, estimates savings, and finds late ranks."""

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
    Collective,
    Job,
    JobAnalysis,
    LateRank,
    LinkComparison,
    SavingEstimate,
    TimeChange,
)
from dtbench.records.topology import CalibratedTopology
from dtbench.text.units import format_seconds, format_size
from dtbench.traces.arrivals import judge_bounds
from dtbench_core.cost.ring import RING_COLLECTIVES, busbw_factor

# A rank is late only if its extra time outside exposed communication reaches two limits, chosen by hand. They are
# LATE_SHARE of the others' median exposed communication, and MIN_LATE_STEP_SHARE of its own step.
LATE_SHARE, MIN_LATE_STEP_SHARE = 0.5, 0.05
ABOVE_CALIBRATED = (
    "above 100%: the reference was measured with other bursts of traffic or another load than the job's, so the two "
    "cannot be compared"
)

# A calibrated topology, or published systems, each of which was measured with a single number of ranks.
Topology = CalibratedTopology | Sequence[System]


def analyze(job: Job, topology: Topology | None = None, bases: Sequence[Job] = ()) -> JobAnalysis:
    """Analyzes a job, and compares it with bandwidths and bases if there are any.

    Raises:
        UsageError: as in `compare_recordings`.
    """
    links, late_ranks = () if topology is None else compare_links(job, topology), find_late_ranks(job)
    # Over another dim, a late rank makes its group late, so that each group waits for another rank.
    cause = " and ".join(
        f"rank {late.rank} delays the others by {format_seconds(late.late_s)} a step" for late in late_ranks
    )
    return replace(
        compare_recordings(bases, [job]) if bases else JobAnalysis(EXIT_OK),
        links=links,
        savings=tuple(estimate_savings(job, links)),
        late_ranks=late_ranks,
        bounds=tuple(
            replace(verdict, why=cause)
            if cause and (verdict.bound, verdict.late_rank) == ("arrival", None)
            else verdict
            for verdict in judge_bounds(job, links)
        ),
    )


def compare_links(job: Job, topology: Topology) -> tuple[LinkComparison, ...]:
    """Compares each kind of call with the topology, in the job's order."""
    return tuple(
        _compare_link(kind, calls, topology)
        for kind, calls in group_by(job.collectives, lambda call: call.kind).items()
    )


def _compare_link(kind: CallKind, calls: Sequence[Collective], topology: Topology) -> LinkComparison:
    transfers_s = [call.transfer_s for call in calls if call.transfer_s]
    time_s = fmean(transfers_s) if transfers_s else min(call.best_s for call in calls)
    reference_s, reference, caveat = _find_reference(kind, topology)
    share = reference_s / time_s if reference_s and time_s else None
    return LinkComparison(
        kind=kind,
        count=sum(call.count for call in calls),
        time_s=time_s,
        excludes_waiting=bool(transfers_s),
        busbw=share and (kind.bytes or 0) * busbw_factor(kind.collective, kind.group_size or 1) / time_s,
        reference=reference,
        reference_s=reference_s,
        share=share,
        caveat=", ".join(filter(None, (caveat, ABOVE_CALIBRATED * bool(share and share > 1)))),
    )


def _find_reference(kind: CallKind, topology: Topology) -> tuple[float | None, str, str]:
    """Returns the reference time of a call in seconds, its source, and a caveat."""
    size, ranks = kind.bytes, kind.group_size
    if not size or not ranks or ranks < 2:
        caveat = (
            f"the trace shows {size or 'no'} bytes and {ranks or 'an unknown number of'} ranks: "
            "expected a known size and at least 2 ranks"
        )
        return None, "", caveat
    if not isinstance(topology, CalibratedTopology):
        for system in topology:
            if system.ranks == ranks and (busbw := system.busbw(kind.collective, size)):
                return size * busbw_factor(kind.collective, ranks) / busbw, system.name, "another machine"
        names = ", ".join(system.name for system in topology)
        caveat = f"no published bandwidth over {ranks} ranks for this collective and size (systems: {names})"
        return None, "", caveat
    named = [dim for dim in topology.dims if dim.name == kind.mesh_dim]
    candidates = named or [dim for dim in topology.dims if dim.ranks == ranks]
    if not candidates:
        names = ", ".join(dim.name for dim in topology.dims)
        return None, "", f"the topology has no mesh dim of {ranks} ranks (dims: {names})"
    # The slowest of several dims gives the most cautious reference.
    dim = min(candidates, key=lambda dim: dim.bandwidth_GiBps)
    curve = dim.collectives.get(kind.collective)
    if kind.collective not in RING_COLLECTIVES and (curve is None or dim.ranks != ranks):
        return None, "", f"the topology has no {kind.collective} over {ranks} ranks of dim {dim.name}"
    price = estimate_collective(dim, kind.collective, ranks, size)
    smallest, largest = map(format_size, curve.size_bytes if curve else dim.fitted_on.size_bytes)
    caveats = {
        f"dim matched by its {ranks} ranks": not named,
        "by the ring formula": price.by_formula,
        f"extrapolated from {smallest} to {largest}": price.size_factor > 1,
        f"extrapolated from {dim.ranks} ranks": price.ranks_factor != 1,
    }
    caveat = ", ".join(text for text, applies in caveats.items() if applies)
    return price.time_us * 1e-6, f"dim {dim.name}", caveat


def estimate_savings(job: Job, links: Sequence[LinkComparison]) -> Iterator[SavingEstimate]:
    """Computes upper bounds of the savings over each mesh dim, on the rank with the most exposed communication.

    These are bounds, since a rank that waits less over one dim may wait more over another. A call saves at most its
    excess over the reference; calls without a reference save nothing.
    """
    timed = [rank for rank in job.ranks if rank.each_step and rank.mean_step.step_s]
    for rank in sorted(timed, key=lambda rank: rank.mean_step.exposed_s)[-1:]:
        steps, step_s = len(rank.each_step), rank.mean_step.step_s
        excess_s = {row.kind: max(0.0, row.time_s - row.reference_s) for row in links if row.reference_s}
        calls_by_dim = group_by(
            (call for call in job.collectives if call.rank == rank.rank), lambda call: call.mesh_dim
        )
        for dim in rank.dims:
            exposed_s, waiting_s = dim.exposed_s / steps, (dim.waiting_s or 0.0) / steps
            saved: dict[Literal["hidden", "calibrated", "no_late_rank"], float] = {"hidden": exposed_s}
            if excesses_s := [
                call.calls_in_steps * excess_s[call.kind]
                for call in calls_by_dim.get(dim.mesh_dim, ())
                if call.kind in excess_s
            ]:
                saved["calibrated"] = min(sum(excesses_s) / steps, max(0.0, exposed_s - waiting_s))
            if dim.waiting_s is not None:
                saved["no_late_rank"] = waiting_s
            yield from (
                SavingEstimate(dim.mesh_dim, assumption, rank.rank, step_s, saved_s, saved_s / step_s)
                for assumption, saved_s in saved.items()
            )


def find_late_ranks(job: Job) -> tuple[LateRank, ...]:
    """Returns the ranks whose lateness causes most of the exposed communication of the others, the latest first.

    A late rank spends more time outside exposed communication than the others. It arrives last at collectives more
    often than by chance. The first condition excludes ranks that arrive last over one dim because they waited over
    another.
    """
    means, late_ranks = {rank.rank: rank.mean_step for rank in job.ranks if rank.each_step}, list[LateRank]()
    for rank, step in means.items():
        peer_steps = [peer for number, peer in means.items() if number != rank]
        # The calls cover all groups over the dim, but a rank takes part only in those of its own group.
        last_shares = [
            (
                waits.last_counts.get(f"{rank}", 0)
                * len({*waits.waiting_s, *waits.last_counts})
                / (waits.calls * waits.group_size),
                waits.group_size,
                waits.mesh_dim,
            )
            for waits in job.waits
            if waits.calls
        ]
        last_share, group_size, dim = max(last_shares, default=(0.0, 1, ""))
        if not peer_steps or last_share <= 1 / group_size:
            continue
        late_s = step.step_s - step.exposed_s - median(peer.step_s - peer.exposed_s for peer in peer_steps)
        if late_s < max(
            LATE_SHARE * median(peer.exposed_s for peer in peer_steps), MIN_LATE_STEP_SHARE * step.step_s
        ):
            continue
        excess_s = {
            part: (getattr(step, f"{part}_s") or 0.0)
            - median(getattr(peer, f"{part}_s") or 0.0 for peer in peer_steps)
            for part in ("host_bound", "computation", "idle", "copy")
        }
        part = next((part for part, s in excess_s.items() if s >= late_s / 2), "")
        late_ranks.append(LateRank(rank, late_s, part, dim, min(last_share, 1.0)))
    return tuple(sorted(late_ranks, key=lambda late: -late.late_s))


def compare_recordings(bases: Sequence[Job], heads: Sequence[Job]) -> JobAnalysis:
    """Compares recordings of base and head on the ranks that all of them have.

    The calls per step of a kind have changed if no recording of base has the same number as any recording of head. Each
    recording is one launch, whatever its number of steps.

    Raises:
        UsageError: no rank is in all recordings, or only some recordings have steps.
    """
    steps = [{rank.rank: len(rank.each_step) for rank in job.ranks} for job in (*bases, *heads)]
    ranks = set.intersection(*map(set, steps))
    lengths = {counts[rank] for counts in steps for rank in ranks}
    if not (bases and heads and lengths) or (0 in lengths and len(lengths) > 1):
        raise UsageError(
            "no rank is in all recordings, or only some recordings have steps: record base and head in the same way"
        )
    base_calls, head_calls = (
        [_calls_per_step(job, ranks, len(lengths) > 1) for job in side] for side in (bases, heads)
    )
    call_changes = tuple(_compare_calls(base_calls, head_calls))
    time_changes = () if 0 in lengths else tuple(_compare_times(bases, heads, ranks))
    return JobAnalysis(
        EXIT_REGRESSION
        if call_changes or any(row.verdict is Verdict.SLOWER for row in time_changes)
        else EXIT_OK,
        call_changes=call_changes,
        time_changes=time_changes,
        compared_ranks=tuple(sorted(ranks)),
    )


# Kind and rank -> calls per step.
_CallCounts = Mapping[tuple[CallKind, int], float]


def _calls_per_step(job: Job, ranks: Set[int], round_down: bool) -> _CallCounts:
    """Counts the calls per step.

    Args:
        round_down: whether to round down, needed if recordings have different numbers of steps. Calls that do not
            repeat every step would otherwise give different fractions.
    """
    steps = {rank.rank: max(len(rank.each_step), 1) for rank in job.ranks if rank.rank in ranks}
    calls = group_by(
        (call for call in job.collectives if call.rank in steps), lambda call: (call.kind, call.rank)
    )
    counts = {key: sum(call.calls_in_steps for call in repeats) for key, repeats in calls.items()}
    return {
        (kind, rank): count // steps[rank] if round_down else count / steps[rank]
        for (kind, rank), count in counts.items()
        if count
    }


def _compare_calls(bases: Sequence[_CallCounts], heads: Sequence[_CallCounts]) -> list[CallChange]:
    """Returns the changes of calls.

    Removed and added calls are one change if their number is the same and only dtype or bytes differ. A pair that
    differs in dtype is preferred.
    """
    ranks_by_change: dict[tuple[CallKind, float, float], list[int]] = {}
    keys = dict.fromkeys(key for counts in (*bases, *heads) for key in counts)
    for kind, rank in sorted(keys, key=lambda key: (key[0].bytes or 0, key[1])):
        base, head = ([counts.get((kind, rank), 0) for counts in side] for side in (bases, heads))
        if set(base).isdisjoint(head):
            ranks_by_change.setdefault((kind, base[0], head[0]), []).append(rank)
    rows = [
        CallChange(kind, kind, (base_count, head_count), tuple(ranks))
        for (kind, base_count, head_count), ranks in ranks_by_change.items()
    ]
    for removed in [row for row in rows if not row.per_step[1]]:
        base_kind, count = removed.base, removed.per_step[0]
        added = [
            row
            for row in rows
            if row.per_step == removed.per_step[::-1]
            and row.ranks == removed.ranks
            and replace(row.head, dtype=base_kind.dtype, bytes=base_kind.bytes) == base_kind
        ]
        for match in sorted(added, key=lambda row: row.head.dtype == base_kind.dtype)[:1]:
            rows[rows.index(removed)] = CallChange(base_kind, match.head, (count, count), removed.ranks)
            rows.remove(match)
    return rows


def _compare_times(bases: Sequence[Job], heads: Sequence[Job], ranks: Set[int]) -> Iterator[TimeChange]:
    """Compares the time of each activity per step.

    Before the test, the base's median step time is added to the time of a single activity. Its change is thus judged
    relative to a whole step, because the scatter of single activities between launches is unknown.
    """
    sides = [[_times_per_step(job, ranks) for job in side] for side in (bases, heads)]
    base_step_s = median(times["step_s"] for times in sides[0])
    for part in dict.fromkeys(part for side in sides for times in side for part in times):
        base, head = ([times.get(part, 0.0) for times in side] for side in sides)
        added_s = 0.0 if part == "step_s" else base_step_s
        verdict, why, effect = compare_launches([s + added_s for s in base], [s + added_s for s in head])
        why = (
            f"cannot tell: one launch on each side; record {MIN_LAUNCHES} or more"
            if why == SINGLE_LAUNCH
            else why
        )
        yield TimeChange(part, verdict, why, median(base), median(head), effect)


def _times_per_step(job: Job, ranks: Set[int]) -> dict[str, float]:
    """Returns seconds per step: each activity's mean over the ranks, and the lateness of each dim's latest rank."""
    means = [rank.mean_step for rank in job.ranks if rank.rank in ranks]
    times = {
        part: fmean(getattr(step, part) for step in means)
        for part in ("step_s", "computation_s", "exposed_s", "idle_s")
    }
    steps = max(len(rank.each_step) for rank in job.ranks)
    for waits in job.waits:
        late_s = (
            (count * waits.late_s.get(rank, 0.0) / steps, rank) for rank, count in waits.last_counts.items()
        )
        times |= {f"lateness of rank {rank} over {waits.mesh_dim}": s for s, rank in sorted(late_s)[-1:]}
    return times
