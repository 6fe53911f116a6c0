"""A job's traces, or what an earlier profile of them said, as one `Job`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from msgspec.structs import asdict

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.file_kinds import JOB_FILE
from dtbench.grouping import group_by
from dtbench.records.job import CallKind, Collective, DimParts, Job, Lane, RankJob, StepParts
from dtbench.records.read import BadFieldError, into, read_json
from dtbench.text.units import format_seconds, plural
from dtbench.traces.clock_alignment import AlignedJob, align_clocks
from dtbench.traces.communication import UNKNOWN, Call, ProcessGroup, busbw_of, whole
from dtbench.traces.intervals import Intervals, difference, intervals, length, shares, union, within
from dtbench.traces.kineto import told
from dtbench.traces.rank_trace import RankTrace, read_rank
from dtbench.traces.steps import Steps, outlying_first, whole_steps

_MOST_DRAWN = 300  # intervals of a lane: more cannot be told apart on a page, which has 2 MB for them all
_MOST_CALLERS = 3
_P2P = ("send", "recv")
_MOST_JOB = 256 * 2**20
_NO_TRACES = (JOB_FILE, "table.json")  # what a profile's folder has beside them
_TRACES = re.compile(r"\.json(\.gz)?$|\.trace(\.gz)?$")


def read_job(paths: Sequence[Path], label: str = "", command: Sequence[str] = ()) -> Job:
    """What the traces say aligned. paths: files, or folders of them.

    Raises:
        UsageError: there are none, or two of one rank.
        UnreadableRunError: one is no trace.
    """
    files = list(_files(paths))
    if not files:
        raise UsageError(
            f"no traces in {', '.join(map(str, paths))}: expected *.json or *.json.gz of torch.profiler"
        )
    traces: dict[int, RankTrace] = {}
    for number, file in enumerate(files):
        trace = read_rank(file, number)
        if trace.rank in traces:
            raise UsageError(
                f"{file} and {traces[trace.rank].source} are both of rank {trace.rank}: "
                "expected the traces of one run"
            )
        traces[trace.rank] = trace
    _same_groups(traces.values())
    in_order = [traces[rank] for rank in sorted(traces)]
    in_order[0].notes[:0] = _keep_same_steps(in_order)
    return job_of(in_order, label or files[0].parent.name, command)


def load_job(path: Path) -> Job:
    """Of a profile's folder, or its job.json.

    Raises:
        UnreadableRunError: it is none.
    """
    file = path / JOB_FILE if path.is_dir() else path
    try:
        return into(read_json(file, "a job of `dtbench profile`", _MOST_JOB), Job)
    except BadFieldError as error:
        raise UnreadableRunError(f"{file} is no job of `dtbench profile`: {error}") from error


def _files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(
                f for f in path.iterdir() if _TRACES.search(f.name) and f.name not in _NO_TRACES
            )
        else:
            yield path


def job_of(traces: Sequence[RankTrace], label: str = "", command: Sequence[str] = ()) -> Job:
    """traces: by rank."""
    aligned = align_clocks(traces)
    drawn, lanes = _drawn(traces, aligned)
    world_size = max(max(t.world_size, t.rank + 1) for t in traces)
    notes = [note for trace in traces for note in trace.notes]
    if len(traces) < world_size:
        notes.insert(
            0,
            f"traces of {len(traces)} of {world_size} ranks: "
            "who waits for whom is told where all of a group are there",
        )
    elif aligned.unaligned:
        apart = ", ".join(map(str, sorted(aligned.unaligned)[:8])) + ", ..." * (len(aligned.unaligned) > 8)
        notes.append(
            f"ranks that share no collective with rank {traces[0].rank} have clocks of their own: {apart}"
        )
    return Job(
        label=label,
        command=tuple(command),
        world_size=world_size,
        backend=traces[0].backend,
        torch=traces[0].torch,
        ranks=tuple(_rank_job(trace, aligned, traces[0]) for trace in traces),
        collectives=tuple(row for trace in traces for row in _rows(trace, aligned)),
        waits=tuple(aligned.waits),
        aligned_by=aligned.method,
        drawn_step=drawn,
        drawn_s=max([0.0, *(end for lane in lanes for _, end in lane.intervals)]),
        lanes=tuple(lanes),
        notes=tuple(_folded(notes)),
    )


def _folded(notes: Sequence[str]) -> Iterable[str]:
    """Notes of many ranks that say the same, once."""
    for text, same in group_by(notes, lambda note: re.sub(r"^rank \d+: ", "", note)).items():
        if len(same) < 2 or not same[0].startswith("rank "):
            yield same[0]
        else:
            ranks = [note.partition(":")[0].removeprefix("rank ") for note in same]
            yield f"ranks {', '.join(ranks[:8])}{', ...' if len(ranks) > 8 else ''}: {text}"


def _same_groups(traces: Iterable[RankTrace]) -> None:
    """gloo's groups are told of all ranks or of none: else two recordings of one job would differ."""
    gloo = [trace for trace in traces if trace.backend == "gloo" or not trace.on_gpu]
    if any(not call.group.key and call.collective not in _P2P for trace in gloo for call in trace.calls):
        for trace in gloo:
            trace.calls = [call._replace(group=ProcessGroup("")) for call in trace.calls]
            trace.notes.append(
                f"rank {trace.rank}: the groups of gloo's calls are not told; "
                "`dtbench profile -- COMMAND` records them"
            )


def _keep_same_steps(traces: Sequence[RankTrace]) -> Iterable[str]:
    """Takes from the traces the steps that no figure is of, and yields which and why: partial ones, and first ones that
    took far longer. Where a rank has no steps, all figures are of whole traces."""
    if not all(trace.steps.marks for trace in traces):
        for trace in traces:
            trace.steps = Steps()
        return
    for trace in traces:
        yield from (f"rank {trace.rank}: {text}" for text, holds in _without_partial(trace) if holds)
    took_s = [
        max(stop - start for start, stop in of_ranks) / 1e6
        for of_ranks in zip(*(trace.steps.marks for trace in traces), strict=False)
    ]
    skipped = 0 if traces[0].window.get("warm") else outlying_first(took_s)
    for trace in traces:
        trace.steps = trace.steps.part(skipped, len(trace.steps.marks))
    if skipped:
        longest, usual = map(format_seconds, (max(took_s[:skipped]), median(took_s[skipped:])))
        yield (
            f"left out of all figures: the first {plural(skipped, 'step')} "
            f"(up to {longest}, later ones {usual}: warm-up or compilation)"
        )


def _without_partial(trace: RankTrace) -> list[tuple[str, bool]]:
    """Takes from its steps those that are not whole, as the recording says, else by what they hold. Returns notes, each
    with whether it holds."""
    steps, had = trace.steps, len(trace.steps.marks)
    asked, recorded = (whole(trace.window.get(key)) or 0 for key in ("asked", "whole"))
    # Unknown ones may have been launched before the trace began.
    calls = Counter(
        steps.places([call.issued for call in trace.calls if call.collective != UNKNOWN]).tolist()
    )
    works = [calls[place] + bool(len(within(trace.compute, *mark))) for place, mark in enumerate(steps.marks)]
    begin, end = (0, min(max(recorded, 1), had)) if asked else whole_steps(works)
    trace.steps = steps.part(begin, end)
    return [
        (
            f"{recorded} of the {asked} steps asked for were recorded: {told(trace.window.get('why'))}",
            recorded < asked,
        ),
        ("the first step has no mark of its begin and is left out of all figures", steps.left_out > 0),
        (
            f"a partial step, the {'first' if begin else 'last'}, is left out of all figures",
            end - begin < had,
        ),
    ]


def messages_of(calls: Iterable[Call]) -> Intervals:
    """When any of them was under way."""
    return union(intervals((call.start, call.end) for call in calls))


def _rank_job(trace: RankTrace, aligned: AlignedJob, first: RankTrace) -> RankJob:
    messages = messages_of(trace.calls)
    spanned = asdict(_parts(trace, messages, *trace.span))
    shift, error = (
        None if trace.rank in aligned.unaligned else by_rank.get(trace.rank)
        for by_rank in (aligned.offset_us, aligned.error_us)
    )
    each_step = tuple(_parts(trace, messages, *mark) for mark in trace.steps.marks)
    return RankJob(
        rank=trace.rank,
        source=trace.source,
        host=trace.host,
        device=trace.device,
        steps=len(each_step),
        excluded_steps=trace.steps.left_out,
        steps_source=trace.steps.by,
        step_s=fmean(step.step_s for step in each_step) if each_step else None,
        span_s=spanned.pop("step_s"),
        **spanned,
        each_step=each_step,
        dims=_dims(trace, aligned),
        clock_offset_s=0.0 if shift is None else (shift + first.zero_us - trace.zero_us) / 1e6,
        clock_error_s=None if error in (None, float("inf")) else error / 1e6,
    )


def _dims(trace: RankTrace, aligned: AlignedJob) -> tuple[DimParts, ...]:
    by_dim = group_by(enumerate(trace.calls), lambda numbered: numbered[1].group.mesh_dim)
    steps = union(intervals(trace.steps.marks or (trace.span,)))
    rows, exposed = [], list[Intervals]()
    for dim, calls in sorted(by_dim.items()):
        messages = messages_of(call for _, call in calls)
        messages = difference(messages, difference(messages, steps))
        known = [(call, aligned.transfer_us.get((trace.rank, at))) for at, call in calls]
        waits = union(intervals((call.start, call.end - us) for call, us in known if us is not None))
        uncovered = difference(messages, trace.compute)
        moving = difference(uncovered, waits)
        exposed += [difference(uncovered, moving), moving]
        rows.append((dim, length(messages) / 1e6, any(us is not None for _, us in known)))
    exposed_s = [us / 1e6 for us in shares(exposed)]
    return tuple(
        DimParts(
            mesh_dim=dim,
            communication_s=took_s,
            exposed_s=wait_s + move_s,
            waiting_s=wait_s if waits else None,
        )
        for (dim, took_s, waits), wait_s, move_s in zip(rows, exposed_s[::2], exposed_s[1::2], strict=True)
    )


def _parts(trace: RankTrace, messages: Intervals, start: float, end: float) -> StepParts:
    compute, copies = within(trace.compute, start, end), within(trace.copies, start, end)
    own = within(messages, start, end)
    idle = difference(intervals([(start, end)]), union(np.concatenate([compute, copies, own])))
    return StepParts(
        step_s=(end - start) / 1e6,
        computation_s=length(compute) / 1e6,
        communication_s=length(own) / 1e6,
        exposed_s=length(difference(own, compute)) / 1e6,
        copy_s=length(copies) / 1e6,
        idle_s=length(idle) / 1e6,
        host_bound_s=_host_bound_us(trace, idle) / 1e6 if len(trace.launched) else None,
    )


def _host_bound_us(trace: RankTrace, idle: Intervals) -> float:
    """Of each gap what passed until the host launched the kernel that ends it."""
    at = np.searchsorted(trace.launched[:, 0], idle[:, 1] - 1e-3)
    at = at[at < len(trace.launched)]
    starts, ends = idle[: len(at)].T
    return float(np.clip(np.minimum(trace.launched[at, 1], ends) - starts, 0, None).sum())


def _kind(call: Call) -> CallKind:
    return CallKind(call.group.mesh_dim, call.collective, call.group.size, call.dtype, call.bytes)


def _rows(trace: RankTrace, aligned: AlignedJob) -> Iterable[Collective]:
    # Steps and calls by when the host began them: the GPU runs behind.
    in_steps = trace.steps.places([call.issued for call in trace.calls]) >= 0
    rows = []
    for kind, all_places in group_by(range(len(trace.calls)), lambda at: _kind(trace.calls[at])).items():
        stepped = [at for at in all_places if in_steps[at]]
        which = stepped or all_places
        calls = [trace.calls[at] for at in which]
        seconds = [(call.end - call.start) / 1e6 for call in calls]
        moving = [us for at in which if (us := aligned.transfer_us.get((trace.rank, at))) is not None]
        callers = Counter(call.caller for call in calls if call.caller)
        rows.append(
            Collective(
                rank=trace.rank,
                **asdict(kind),
                count=len(all_places),
                in_steps=len(stepped) if trace.steps.host else None,
                timed=len(which),
                time_s=sum(seconds),
                median_s=median(seconds),
                best_s=min(seconds),
                transfer_s=fmean(moving) / 1e6 if len(moving) == len(calls) else None,
                busbw=busbw_of(kind.collective, kind.group_size, kind.bytes, sum(seconds) / len(seconds)),
                callers=tuple(caller for caller, _ in callers.most_common(_MOST_CALLERS)),
            )
        )
    return sorted(rows, key=lambda row: -row.time_s)


def _drawn(traces: Sequence[RankTrace], aligned: AlignedJob) -> tuple[int | None, list[Lane]]:
    """The step in the middle of those that all ranks have, as lanes from its earliest begin."""
    steps = min(len(trace.steps.marks) for trace in traces)
    if not steps:
        return None, []
    number, lanes = steps // 2, []
    begins = {t.rank: t.steps.marks[number][0] for t in traces}
    # A rank whose clock is its own is drawn as if its step began with the first rank's.
    shifts = aligned.offset_us | {rank: begins[traces[0].rank] - begins[rank] for rank in aligned.unaligned}
    earliest = min(at + shifts[rank] for rank, at in begins.items())
    for trace in traces:
        start, end = trace.steps.marks[number]
        off = shifts[trace.rank] - earliest
        by_dim = group_by(trace.calls, lambda call: call.group.mesh_dim)
        named = {f"communication {dim}": messages_of(calls) for dim, calls in sorted(by_dim.items())} | {
            "computation": trace.compute,
            "copy": trace.copies,
            "exposed": difference(messages_of(trace.calls), trace.compute),
        }
        cuts = {name: within(of, start, end) + off for name, of in named.items()}
        lanes += [
            Lane(rank=trace.rank, name=n, intervals=tuple(_to_draw(of))) for n, of in cuts.items() if len(of)
        ]
    return number, lanes


def _to_draw(of: Intervals) -> Iterable[tuple[float, float]]:
    """Few enough: gaps too short to be seen are closed."""
    while len(of) > _MOST_DRAWN:
        gap = np.quantile(of[1:, 0] - of[:-1, 1], 0.5)
        of = union(of + np.array([0.0, gap])) - np.array([0.0, gap])
    return [(round(float(start) / 1e6, 9), round(float(end) / 1e6, 9)) for start, end in of]
