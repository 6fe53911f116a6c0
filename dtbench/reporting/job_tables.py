"""Sentences and tables about a profiled job, for the terminal and the page.

Figures are means over steps and ranks, so that parts add up. If no steps are marked, they refer to the whole trace, or
to all calls in the logs of a job.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from statistics import fmean

from dtbench.grouping import group_by
from dtbench.records.comparison import Verdict
from dtbench.records.job import CallKind, Collective, Job, JobAnalysis, RankJob, TimeChange
from dtbench.text import terminal
from dtbench.text.table import Table, TableColumn
from dtbench.text.units import (
    MISSING,
    format_bandwidth,
    format_bytes,
    format_change,
    format_ratio,
    format_seconds,
    plural,
)

# Largest numbers of rows and sentences on a terminal.
MOST_RANKS, MOST_COLLECTIVES, MOST_CALLS = 16, 12, 2
_ASSUMPTIONS = {
    "hidden": "if computation covered all communication over {}",
    "calibrated": "if calls over {} ran at the calibrated bandwidth",
    "no_late_rank": "if no rank arrived late at calls over {}",
}


def extremes(job: Job) -> list[RankJob]:
    """Returns the ranks to show: those that arrived last most often and least often.

    Ranks that arrived last equally often are ordered by the length of their step.
    """
    last_counts = sum((Counter(waits.last_counts) for waits in job.waits), Counter[str]())
    ranks = sorted(
        job.ranks,
        key=lambda rank: (last_counts[str(rank.rank)], 0.0 if job.lacks_times else rank.mean_step.step_s),
    )
    half = MOST_RANKS // 2
    return sorted(ranks[:half] + ranks[half:][-half:], key=lambda rank: rank.rank)


def headline(job: Job) -> tuple[str, str]:
    """Returns the share of exposed communication, and a sentence about it, the steps and the ranks."""
    missing = f" of {job.world_size}" if job.world_size > len(job.ranks) else ""
    if job.lacks_times:
        return "?", (
            f"{job.label or 'job'}: {plural(len(job.ranks), 'rank')}{missing} ({job.backend}), "
            f"{plural(sum(call.count for call in job.collectives), 'call')} in the logs. Dtypes, steps, computation "
            f"and exposed communication are unknown (?){_waiting_in_calls(job)}."
        )
    parts = [rank.mean_step for rank in job.ranks]
    step_s, exposed_s = fmean(part.step_s for part in parts), fmean(part.exposed_s for part in parts)
    exposed, longest = f"{exposed_s / (step_s or 1):.0%}", format_seconds(max(part.step_s for part in parts))
    setup = ", ".join(filter(None, (job.backend, job.torch and f"torch {job.torch}", job.ranks[0].device)))
    steps = sorted({(rank.steps, rank.excluded_steps, rank.steps_source) for rank in job.ranks if rank.steps})
    step_counts = ", ".join(
        f"{count}{f' of {count + excluded}' * bool(excluded)} steps by {marked_by}"
        for count, excluded, marked_by in steps
    )
    span = f"{'A step takes' if steps else 'No steps are marked; the traces span'} {format_seconds(step_s)}"
    waited_s = [dim.waiting_s / (rank.steps or 1) for rank in job.ranks for dim in rank.dims if dim.waiting_s]
    waited = f", {sum(waited_s) / len(parts) / (step_s or 1):.0%} waiting for the last rank" * bool(waited_s)
    return exposed, (
        f"{job.label or 'job'}: {plural(len(parts), 'rank')}{missing}{setup and f' ({setup})'}. {span} on average, "
        f"{longest} on the slowest rank; {exposed} of it is exposed communication{waited} (means over "
        f"{step_counts or 'the whole trace'} and all ranks)."
    )


def _waiting_in_calls(job: Job) -> str:
    """Describes the share of time in calls that is spent waiting; "" if no call shows it."""
    calls = [call for call in job.collectives if call.transfer_s is not None]
    share = 1 - sum((call.transfer_s or 0.0) * call.count for call in calls) / (
        sum(call.mean_s * call.count for call in calls) or 1
    )
    return f"; {max(share, 0.0):.0%} of the time in collectives is waiting for the last rank" * bool(calls)


def findings(job: Job, analysis: JobAnalysis) -> list[str]:
    """Returns the most important sentences.

    These are slower or faster parts, changed calls, what bounds the collective with the most time if waiting is known,
    late ranks, and the headline.
    """
    sentences = [
        *(_change(r) for r in analysis.time_changes if r.verdict in (Verdict.SLOWER, Verdict.FASTER)),
        *map(str, analysis.call_changes[:MOST_CALLS]),
        *(str(verdict) for verdict in analysis.bounds[:1] if verdict.calls),
        *map(str, analysis.late_ranks),
    ]
    return [*(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences), headline(job)[1]]


def _change(row: TimeChange) -> str:
    ratio = f", {format_change(row.head_s / row.base_s)} than the base" if row.base_s and row.head_s else ""
    why = f" ({row.why})" if row.why else ""
    return f"{row.part.removesuffix('_s')}: {format_seconds(row.base_s)} → {format_seconds(row.head_s)}{ratio}{why}"


def tables(job: Job, analysis: JobAnalysis, *, screen: bool = False) -> list[Table]:
    """Returns the tables of verdicts, by mesh dim, by phase, by collective and by rank.

    Args:
        screen: show only the most expensive collectives and the `extremes` of the ranks.
    """
    steps = defaultdict(lambda: 1, {rank.rank: rank.steps for rank in job.ranks if rank.steps})
    return [
        table
        for table in (
            _bounds(job, analysis, screen),
            _dims(job, steps, {str(late.rank) for late in analysis.late_ranks}),
            _phases(job, steps),
            _collectives(job, steps, {row.kind: row.share for row in analysis.links}, screen),
            _ranks(job, screen),
        )
        if table.total_rows
    ]


def _table(title: str, job: Job, heads: str, rows: Sequence[Sequence[str]]) -> Table:
    """Builds a table without empty columns. Commas separate the headers; those of numbers begin with ">"."""
    columns = {
        head: [MISSING if row[i] in ("", "-") else row[i] for row in rows]
        for i, head in enumerate(heads.split(","))
    }
    filled = [(head, column) for head, column in columns.items() if {*column} != {MISSING}]
    all_calls = "all calls in the logs" if job.lacks_times else "whole trace"
    per = "per step" if all(rank.steps for rank in job.ranks) else all_calls
    return Table(
        f"{title}, {per}", [TableColumn(head.lstrip(">"), column, head[0] == ">") for head, column in filled]
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(sorted({"?" if value is None else str(value) for value in values}))


def _bounds(job: Job, analysis: JobAnalysis, screen: bool) -> Table:
    shown = analysis.bounds[: MOST_COLLECTIVES if screen else None]
    total_s = sum(row.time_s for row in analysis.bounds) or 1
    rows = [
        [
            row.mesh_dim,
            row.collective,
            row.bound,
            _percent(row.time_s / total_s),
            _percent(row.waiting_share),
            "" if row.late_rank is None else str(row.late_rank),
            format_seconds(row.late_s),
            format_ratio(row.slowdown),
            str(row.calls or ""),
            row.why,
        ]
        for row in shown
    ]
    return _table(
        f"What bounds each collective, {len(shown)} of {len(analysis.bounds)} by time",
        job,
        "Mesh dim,Collective,Bound by,>of communication,>waiting,>Late rank,>late by,>slowdown,>judged calls,Why",
        rows,
    )


def _dims(job: Job, steps: Mapping[int, int], late: Set[str]) -> Table:
    calls, ranks = group_by(job.collectives, lambda c: c.mesh_dim), len(job.ranks)
    parts = group_by(((rank, d) for rank in job.ranks for d in rank.dims), lambda pair: pair[1].mesh_dim)
    step_s = 1.0 if job.lacks_times else sum(rank.mean_step.step_s for rank in job.ranks) or 1
    rows = []
    for dim in sorted({**calls, **parts}, key=lambda dim: -sum(d.exposed_s for _, d in parts.get(dim, ()))):
        dim_calls, timed = calls.get(dim, []), parts.get(dim, [])
        ranks_with_calls = len({c.rank for c in dim_calls})
        exposed_s = sum(d.exposed_s / steps[rank.rank] for rank, d in timed)
        largest = max((c for c in dim_calls if c.busbw), key=lambda c: c.bytes or 0, default=None)
        rows.append(
            [
                dim,
                _last_arrivals(job, dim=dim, late=late),
                _distinct(c.group_size for c in dim_calls),
                f"{ranks_with_calls} of {ranks}" if ranks_with_calls < ranks else "",
                f"{sum(c.calls_in_steps / steps[c.rank] for c in dim_calls) / ranks:.4g}",
                format_bytes(
                    sum(c.calls_in_steps / steps[c.rank] * (c.bytes or 0) for c in dim_calls) / ranks or None
                ),
                _distinct(c.dtype for c in dim_calls),
                *(
                    ["?"] * 3
                    if job.lacks_times
                    else [
                        format_seconds(
                            sum(d.communication_s / steps[rank.rank] for rank, d in timed) / ranks
                        ),
                        format_seconds(exposed_s / ranks),
                        _percent(exposed_s / step_s),
                    ]
                ),
                f"{largest.collective} {format_bytes(largest.bytes)}" if largest else "",
                format_bandwidth(_busbw([c for c in dim_calls if largest and c.kind == largest.kind])),
            ]
        )
    return _table(
        "Communication by mesh dim",
        job,
        "Mesh dim,Last rank,Ranks,On ranks,>calls,>bytes,Dtypes,>time,>exposed,>exposed/step,Largest call,>its busbw",
        rows,
    )


def _phases(job: Job, steps: Mapping[int, int]) -> Table:
    """Returns the table by mesh dim and phase, without rows if no phase is known."""
    parts = [
        (dim.mesh_dim, part, steps[rank.rank])
        for rank in job.ranks
        for dim in rank.dims
        for part in dim.phases
    ]
    step_s = 1.0 if job.lacks_times else sum(rank.mean_step.step_s for rank in job.ranks) or 1
    rows = []
    for (dim, phase), dim_parts in group_by(parts, lambda part: (part[0], part[1].phase)).items():
        time_s, exposed_s = (
            sum(getattr(part, name) / count for _, part, count in dim_parts)
            for name in ("communication_s", "exposed_s")
        )
        if time_s:
            rows.append(
                [
                    dim,
                    phase,
                    *(format_seconds(s / len(job.ranks)) for s in (time_s, exposed_s)),
                    _percent(exposed_s / step_s),
                ]
            )
    return _table(
        "Communication by phase",
        job,
        "Mesh dim,Phase,>time,>exposed,>exposed/step",
        rows if any(row[1] != "?" for row in rows) else [],
    )


def _mean_s(calls: Sequence[Collective]) -> float:
    """Returns the mean time of a call in seconds."""
    return sum(c.mean_s * (c.timed or c.count) for c in calls) / (sum(c.timed or c.count for c in calls) or 1)


def _busbw(calls: Sequence[Collective]) -> float | None:
    """Returns the bus bandwidth of calls of one kind at their mean time."""
    mean_s = _mean_s(calls)
    return next((c.busbw * c.mean_s / mean_s for c in calls if c.busbw and mean_s), None)


def _last_arrivals(job: Job, rank: str = "", dim: str = "", late: Set[str] = frozenset()) -> str:
    """Describes how often and how late a rank arrives last, e.g. "rank 1: 80%, 2 ms".

    Args:
        rank: this rank over each mesh dim; "": the rank that arrives last most often.
        dim: only this mesh dim.
        late: ranks to prefer if several arrive last equally often.
    """
    texts = []
    for waits in job.waits:
        counts = waits.last_counts
        latest = rank or max(counts, key=lambda number: (counts[number], number in late), default="")
        if latest in counts and dim in ("", waits.mesh_dim):
            texts.append(
                f"{waits.mesh_dim if rank else f'rank {latest}'}: {counts[latest] / (waits.calls or 1):.0%}, "
                f"{format_seconds(waits.late_s.get(latest))}"
            )
    return "; ".join(texts)


def _collectives(
    job: Job, steps: Mapping[int, int], shares: Mapping[CallKind, float | None], screen: bool
) -> Table:
    rows, ranks = [], len(job.ranks)
    for kind, kind_calls in group_by(job.collectives, lambda call: call.kind).items():
        per_step_s = sum(c.mean_s * c.calls_in_steps / steps[c.rank] for c in kind_calls) / ranks
        transfers = [c.transfer_s for c in kind_calls if c.transfer_s is not None]
        row = [
            kind.mesh_dim,
            kind.collective,
            kind.dtype or "?" * job.lacks_times,
            format_bytes(kind.bytes),
            f"{sum(c.calls_in_steps / steps[c.rank] for c in kind_calls) / ranks:.4g}",
            format_seconds(per_step_s),
            format_seconds(_mean_s(kind_calls)),
            format_seconds(fmean(transfers) if transfers else None),
            format_bandwidth(_busbw(kind_calls)),
            _of_calibrated(shares.get(kind)),
            "" if screen else ", ".join(kind_calls[0].callers[:2]),
        ]
        rows.append((per_step_s, row))
    shown = [row for _, row in sorted(rows, key=lambda pair: -pair[0])][
        : MOST_COLLECTIVES if screen else None
    ]
    return _table(
        f"Collectives, {len(shown)} of {len(rows)} by time",
        job,
        "Mesh dim,Collective,Dtype,>Size,>calls,>time,>per call,>without waiting,>busbw,>of calibrated,Called from",
        shown,
    )


def _of_calibrated(share: float | None) -> str:
    return f"{share:.0%}: not comparable" if share and share > 1 else _percent(share)


def _ranks(job: Job, screen: bool) -> Table:
    rows, shown = [], extremes(job) if screen else job.ranks
    title = f"Ranks, {len(shown)} of {len(job.ranks)}"
    if job.lacks_times:
        unknown = [[str(rank.rank), "?", "?", "?", rank.host, rank.source] for rank in shown]
        return _table(title, job, ">Rank,>step,>computation,>exposed,Host,Log", unknown)
    for rank in shown:
        step = rank.mean_step
        copies_only_s = step.step_s - step.computation_s - step.exposed_s - step.idle_s
        rows.append(
            [
                str(rank.rank),
                _last_arrivals(job, rank=str(rank.rank)),
                format_seconds(step.step_s),
                format_seconds(step.computation_s),
                format_seconds(step.exposed_s),
                format_seconds(step.idle_s),
                format_seconds(copies_only_s if step.copy_s else None),
                _percent(step.exposed_s / (step.step_s or 1)),
                format_seconds(step.communication_s),
                format_seconds(step.host_bound_s),
                "" if screen else rank.source,
            ]
        )
    return _table(
        title,
        job,
        ">Rank,Last,>step,>computation,>exposed,>idle,>copies only,>exposed/step,>communication,>host-bound,Trace",
        rows,
    )


def sentences(analysis: JobAnalysis) -> dict[str, list[str]]:
    """Returns title -> sentences: possible savings, bytes that the layout needs, changes, caveats of bandwidths."""
    return {
        "At most, this much time per step could be saved": [
            f"{format_seconds(saving.saved_s)} ({saving.share:.0%} of the step of rank {saving.rank}) "
            + _ASSUMPTIONS[saving.assumption].format(saving.mesh_dim)
            for saving in analysis.savings
        ],
        "Bytes that the layout needs": [*map(str, analysis.volumes)],
        "Base → head": [*map(str, analysis.call_changes), *map(_change, analysis.time_changes)],
        "Caveats of the calibrated bandwidths": [
            f"{why}: {rows[0].kind}" + f" and {len(rows) - 1} more" * (len(rows) > 1)
            for why, rows in group_by(analysis.links, lambda row: row.caveat).items()
            if why
        ],
    }


def print_job(job: Job, analysis: JobAnalysis) -> None:
    """Prints a job on one screen. A table that is too wide is split into several that repeat the first columns."""
    console = terminal.new_console()
    width = terminal.readable_width(console)
    for sentence in findings(job, analysis):
        terminal.print_prose(console, sentence, width=width)
    for table in tables(job, analysis, screen=True):
        terminal.print_prose(console, "")
        terminal.print_line(console, table.caption, "bold")
        names = table.columns[: 4 if table.columns[1].header == "Collective" else 1]
        block, remaining = [*names], [*table.columns[len(names) :]]
        while remaining:
            block.append(remaining.pop(0))
            if not remaining or terminal.width_of(console, [*block, remaining[0]]) > width:
                terminal.print_table(console, block)
                block = [*names]
    for title, lines in {**sentences(analysis), "Notes": job.notes}.items():
        for line in ["", title, *(f"- {line}" for line in lines[: terminal.MAX_ROWS])] if lines else ():
            terminal.print_prose(console, line, "bold" * (line == title), width)
