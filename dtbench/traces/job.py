"""Reads the traces of a job, or an earlier profile of it, and computes the figures of a `Job`."""

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
from dtbench.records.job import (
    CallKind,
    Collective,
    DimParts,
    Job,
    Lane,
    PhaseParts,
    RankJob,
    StepParts,
)
from dtbench.records.read import BadFieldError, convert, read_json
from dtbench.text.units import format_seconds, plural
from dtbench.traces.clock_alignment import AlignedJob, align_clocks
from dtbench.traces.communication import UNKNOWN, Call, ProcessGroup, bus_bandwidth, to_count
from dtbench.traces.intervals import Intervals, difference, intervals, length, shares, union, within
from dtbench.traces.kineto import printable
from dtbench.traces.phases import PHASES
from dtbench.traces.rank_trace import RankTrace, read_rank
from dtbench.traces.steps import Steps, count_outlying_first, find_complete_steps

_MAX_LANE_INTERVALS = 300  # more could not be told apart on a page, which is limited to 2 MB
_MAX_CALLERS = 3
_MAX_LISTED_RANKS = 8
_MAX_JOB_BYTES = 256 * 2**20
_NOT_TRACES = (JOB_FILE, "table.json")  # other JSON files in a profile's folder
_TRACES = re.compile(r"\.json(\.gz)?$|\.trace(\.gz)?$")


def read_job(paths: Sequence[Path], label: str = "", command: Sequence[str] = ()) -> Job:
    """Reads the traces of a job.

    Args:
        paths: trace files, or folders of them.
        label: the job's name; by default that of the first trace's folder.
        command: the command that was recorded.

    Raises:
        UsageError: there are no traces, or several of one rank.
        UnreadableRunError: a file is not a trace.
    """
    files = [
        file
        for path in paths
        for file in (sorted(filter(is_trace, path.iterdir())) if path.is_dir() else [path])
    ]
    if not files:
        raise UsageError(
            f"no traces in {', '.join(map(str, paths))}: expected *.json or *.json.gz of torch.profiler, "
            "or logs of NCCL's inspector"
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
    _drop_partly_known_groups(traces.values())
    by_rank = [traces[rank] for rank in sorted(traces)]
    by_rank[0].notes[:0] = _exclude_steps(by_rank)
    return build_job(by_rank, label or files[0].parent.name, command)


def load_job(path: Path) -> Job:
    """Reads the `job.json` of a profile, given that file or its folder.

    Raises:
        UnreadableRunError: the file is missing, damaged or something else.
    """
    file = path / JOB_FILE if path.is_dir() else path
    try:
        return convert(read_json(file, "a job of `dtbench profile`", _MAX_JOB_BYTES), Job)
    except BadFieldError as error:
        raise UnreadableRunError(f"{file} is not a job written by `dtbench profile`: {error}") from error


def is_trace(file: Path) -> bool:
    return _TRACES.search(file.name) is not None and file.name not in _NOT_TRACES


def build_job(traces: Sequence[RankTrace], label: str = "", command: Sequence[str] = ()) -> Job:
    """Computes the figures of a job from the traces of its ranks, in the order of ranks."""
    aligned = align_clocks(traces)
    drawn_step, lanes = _draw_step(traces, aligned)
    world_size = max(max(trace.world_size, trace.rank + 1) for trace in traces)
    # Only the trace of the delayed rank has delays.
    delay = max(filter(None, (trace.delay for trace in traces)), key=lambda delay: delay.count, default=None)
    notes = [*map(str, filter(None, [delay])), *(note for trace in traces for note in trace.notes)]
    if len(traces) < world_size:
        notes.insert(
            0,
            f"have traces of {len(traces)} of {world_size} ranks: "
            "waiting times need the traces of all ranks of a group",
        )
    elif aligned.unaligned:
        notes.append(
            f"could not align the clocks of ranks {_list_ranks(sorted(aligned.unaligned))}: "
            f"they share no collective with rank {traces[0].rank}"
        )
    return Job(
        label=label,
        command=tuple(command),
        world_size=world_size,
        backend=traces[0].backend,
        torch=traces[0].torch,
        ranks=tuple(_rank_figures(trace, aligned, traces[0]) for trace in traces),
        collectives=tuple(
            row
            for trace in traces
            for row in sorted(_collectives(trace, aligned), key=lambda row: -row.time_s)
        ),
        waits=tuple(aligned.waits),
        bounds=tuple(aligned.bounds),
        aligned_by=aligned.method,
        drawn_step=drawn_step,
        drawn_s=max([0.0, *(end for lane in lanes for _, end in lane.intervals)]),
        lanes=tuple(lanes),
        delay=delay,
        notes=tuple(_merge_notes(notes)),
    )


def _list_ranks(ranks: Sequence[object]) -> str:
    return ", ".join(map(str, ranks[:_MAX_LISTED_RANKS])) + ", ..." * (len(ranks) > _MAX_LISTED_RANKS)


def _merge_notes(notes: Sequence[str]) -> Iterable[str]:
    """Merges notes that are the same on several ranks."""
    for text, repeated in group_by(notes, lambda note: re.sub(r"^rank \d+: ", "", note)).items():
        ranks = [
            note.partition(":")[0].removeprefix("rank ") for note in repeated if note.startswith("rank ")
        ]
        yield f"ranks {_list_ranks(ranks)}: {text}" if len(ranks) > 1 else repeated[0]


def _drop_partly_known_groups(traces: Iterable[RankTrace]) -> None:
    """Forgets gloo's process groups on all ranks if one rank's trace lacks them.

    Otherwise, which calls have a group would differ between two recordings of one job.
    """
    gloo = [trace for trace in traces if trace.backend == "gloo" or not trace.on_gpu]
    if any(
        not call.group.key and call.collective not in ("send", "recv")
        for trace in gloo
        for call in trace.calls
    ):
        for trace in gloo:
            trace.calls = [call._replace(group=ProcessGroup("")) for call in trace.calls]
            trace.notes.append(
                f"rank {trace.rank}: the trace does not show the process groups of gloo's calls; "
                "`dtbench profile -- COMMAND` records them"
            )


def _exclude_steps(traces: Sequence[RankTrace]) -> Iterable[str]:
    """Excludes partial steps and slow first steps from the traces, and yields a note about each exclusion.

    If one rank has no steps, all figures cover whole traces.
    """
    if not all(trace.steps.spans for trace in traces):
        for trace in traces:
            trace.steps = Steps()
        return
    yield from (f"rank {trace.rank}: {note}" for trace in traces for note in _exclude_partial_steps(trace))
    slowest_s = [
        max(end - start for start, end in rank_spans) / 1e6
        for rank_spans in zip(*(trace.steps.spans for trace in traces), strict=False)
    ]
    skipped = 0 if traces[0].window.get("warm") else count_outlying_first(slowest_s)
    for trace in traces:
        trace.steps = trace.steps.select(skipped, len(trace.steps.spans))
    if skipped:
        longest, usual = map(format_seconds, (max(slowest_s[:skipped]), median(slowest_s[skipped:])))
        yield (
            f"excluded from all figures: the first {plural(skipped, 'step')} "
            f"(up to {longest}, later steps {usual}: warm-up or compilation)"
        )


def _exclude_partial_steps(trace: RankTrace) -> list[str]:
    """Excludes partial steps, as the recorder counted them, else by the work in each step. Returns notes."""
    steps, count = trace.steps, len(trace.steps.spans)
    requested, recorded = (to_count(trace.window.get(key)) or 0 for key in ("asked", "whole"))
    # Unknown calls may have been launched before the trace began.
    calls = Counter(
        steps.indices_at([call.issued for call in trace.calls if call.collective != UNKNOWN]).tolist()
    )
    work = [calls[index] + bool(len(within(trace.compute, *span))) for index, span in enumerate(steps.spans)]
    begin, end = (0, min(max(recorded, 1), count)) if requested else find_complete_steps(work)
    trace.steps = steps.select(begin, end)
    notes = {
        f"{recorded} of the {requested} requested steps were recorded: {printable(trace.window.get('why'))}": (
            recorded < requested
        ),
        "the start of the first step is unknown; it is excluded from all figures": steps.excluded > 0,
        f"the {'first' if begin else 'last'} step is partial and excluded from all figures": (
            end - begin < count
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _in_progress(calls: Iterable[Call]) -> Intervals:
    """Returns when at least one of the calls was in progress."""
    return union(intervals((call.start, call.end) for call in calls))


def _rank_figures(trace: RankTrace, aligned: AlignedJob, first: RankTrace) -> RankJob:
    messages = _in_progress(trace.calls)
    whole_trace = asdict(_step_parts(trace, messages, *trace.span))
    offset_us, error_us = (
        None if trace.rank in aligned.unaligned else by_rank.get(trace.rank)
        for by_rank in (aligned.offset_us, aligned.error_us)
    )
    each_step = tuple(_step_parts(trace, messages, *span) for span in trace.steps.spans)
    return RankJob(
        rank=trace.rank,
        source=trace.source,
        host=trace.host,
        device=trace.device,
        steps=len(each_step),
        excluded_steps=trace.steps.excluded,
        steps_source=trace.steps.source,
        step_s=fmean(step.step_s for step in each_step) if each_step else None,
        span_s=whole_trace.pop("step_s"),
        **whole_trace,
        each_step=each_step,
        dims=_dims(trace, aligned),
        clock_offset_s=0.0 if offset_us is None else (offset_us + first.zero_us - trace.zero_us) / 1e6,
        clock_error_s=None if error_us in (None, float("inf")) else error_us / 1e6,
    )


def _dims(trace: RankTrace, aligned: AlignedJob) -> tuple[DimParts, ...]:
    """Returns the rank's communication by mesh dim and phase.

    Exposed time is split into waiting and transfer. Where several of them overlap, each gets an equal share of the
    overlap.
    """
    by_dim = group_by(enumerate(trace.calls), lambda indexed_call: indexed_call[1].group.mesh_dim)
    steps = union(intervals(trace.steps.spans or (trace.span,)))
    # Mesh dim and phase -> time in progress; the same and whether it is waiting -> when it is exposed.
    communication_s, exposed = dict[tuple[str, str], float](), dict[tuple[str, str, bool], Intervals]()
    shows_waiting = set[str]()
    for dim, calls in sorted(by_dim.items()):
        transfers = [(call, aligned.transfer_us.get((trace.rank, index))) for index, call in calls]
        waiting = union(intervals((call.start, call.end - us) for call, us in transfers if us is not None))
        shows_waiting |= {dim for _, us in transfers if us is not None}
        by_phase, earlier = group_by((call for _, call in calls), lambda call: call.phase), intervals(())
        for phase in sorted(by_phase, key=PHASES.index):
            messages = difference(_in_progress(by_phase[phase]), earlier)
            earlier = union(np.concatenate([earlier, messages]))
            messages = difference(messages, difference(messages, steps))
            uncovered = difference(messages, trace.compute)
            exposed[dim, phase, False] = difference(uncovered, waiting)
            exposed[dim, phase, True] = difference(uncovered, exposed[dim, phase, False])
            communication_s[dim, phase] = length(messages) / 1e6
    exposed_s = dict(zip(exposed, (us / 1e6 for us in shares([*exposed.values()])), strict=True))
    return tuple(
        DimParts(
            mesh_dim=dim,
            communication_s=sum(communication_s[key] for key in keys),
            exposed_s=sum(exposed_s[*key, is_waiting] for key in keys for is_waiting in (True, False)),
            waiting_s=sum(exposed_s[*key, True] for key in keys) if dim in shows_waiting else None,
            phases=tuple(
                PhaseParts(
                    phase=key[1],
                    communication_s=communication_s[key],
                    exposed_s=exposed_s[*key, True] + exposed_s[*key, False],
                )
                for key in keys
            ),
        )
        for dim, keys in group_by(communication_s, lambda key: key[0]).items()
    )


def _step_parts(trace: RankTrace, messages: Intervals, start: float, end: float) -> StepParts:
    """Returns the time of each activity from `start` to `end`, microseconds of the trace."""
    compute, copies = within(trace.compute, start, end), within(trace.copies, start, end)
    communication = within(messages, start, end)
    idle = difference(intervals([(start, end)]), union(np.concatenate([compute, copies, communication])))
    return StepParts(
        step_s=(end - start) / 1e6,
        computation_s=length(compute) / 1e6,
        communication_s=length(communication) / 1e6,
        exposed_s=length(difference(communication, compute)) / 1e6,
        copy_s=length(copies) / 1e6,
        idle_s=length(idle) / 1e6,
        host_bound_s=_host_bound_us(trace, idle) / 1e6 if len(trace.launched) else None,
    )


def _host_bound_us(trace: RankTrace, idle: Intervals) -> float:
    """Returns the idle time before the host launched the kernel that ends each idle interval."""
    next_kernel = np.searchsorted(trace.launched[:, 0], idle[:, 1] - 1e-3)
    next_kernel = next_kernel[next_kernel < len(trace.launched)]
    starts, ends = idle[: len(next_kernel)].T
    return float(np.clip(np.minimum(trace.launched[next_kernel, 1], ends) - starts, 0, None).sum())


def _collectives(trace: RankTrace, aligned: AlignedJob) -> Iterable[Collective]:
    """Yields the rank's calls by kind."""
    # Both steps and calls are located on the host, since the GPU runs behind.
    in_steps = trace.steps.indices_at([call.issued for call in trace.calls]) >= 0
    kinds = [
        CallKind(call.group.mesh_dim, call.collective, call.group.size, call.dtype, call.bytes)
        for call in trace.calls
    ]
    for kind, indices in group_by(range(len(kinds)), kinds.__getitem__).items():
        indices_in_steps = [index for index in indices if in_steps[index]]
        timed = indices_in_steps or indices
        calls = [trace.calls[index] for index in timed]
        seconds = [(call.end - call.start) / 1e6 for call in calls]
        transfers_us = [
            us for index in timed if (us := aligned.transfer_us.get((trace.rank, index))) is not None
        ]
        yield Collective(
            rank=trace.rank,
            **asdict(kind),
            count=len(indices),
            in_steps=len(indices_in_steps) if trace.steps.host_spans else None,
            timed=len(timed),
            time_s=sum(seconds),
            median_s=median(seconds),
            best_s=min(seconds),
            transfer_s=fmean(transfers_us) / 1e6 if len(transfers_us) == len(calls) else None,
            busbw=bus_bandwidth(kind.collective, kind.group_size, kind.bytes, sum(seconds) / len(seconds)),
            callers=tuple(
                caller for caller, _ in Counter(call.caller for call in calls).most_common() if caller
            )[:_MAX_CALLERS],
        )


def _draw_step(traces: Sequence[RankTrace], aligned: AlignedJob) -> tuple[int | None, list[Lane]]:
    """Returns the index and the lanes of the middle step."""
    steps = min(len(trace.steps.spans) for trace in traces)
    if not steps:
        return None, []
    index, lanes = steps // 2, []
    starts = {trace.rank: trace.steps.spans[index][0] for trace in traces}
    # Ranks with unaligned clocks are drawn as if their step began together with the first rank's.
    offsets = aligned.offset_us | {rank: starts[traces[0].rank] - starts[rank] for rank in aligned.unaligned}
    earliest = min(start + offsets[rank] for rank, start in starts.items())
    for trace in traces:
        offset = offsets[trace.rank] - earliest
        by_dim = group_by(trace.calls, lambda call: call.group.mesh_dim)
        activities = {
            **{f"communication {dim}": _in_progress(calls) for dim, calls in sorted(by_dim.items())},
            "computation": trace.compute,
            "copy": trace.copies,
            "exposed": difference(_in_progress(trace.calls), trace.compute),
        }
        for name, spans in activities.items():
            if len(drawn := within(spans, *trace.steps.spans[index]) + offset):
                lanes.append(Lane(rank=trace.rank, name=name, intervals=tuple(_to_seconds(drawn))))
    return index, lanes


def _to_seconds(spans: Intervals) -> Iterable[tuple[float, float]]:
    """Converts intervals to seconds, and merges the closest ones if there are too many to draw."""
    while len(spans) > _MAX_LANE_INTERVALS:
        gap = np.quantile(spans[1:, 0] - spans[:-1, 1], 0.5)
        spans = union(spans + np.array([0.0, gap])) - np.array([0.0, gap])
    return [(round(float(start) / 1e6, 9), round(float(end) / 1e6, 9)) for start, end in spans]
