"""A job in words and tables, which the terminal and the page share. Figures are per step of a rank, or of the whole
trace where no steps are marked; over steps and ranks they are means, so that parts add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from statistics import fmean

from dtbench.grouping import group_by
from dtbench.records.comparison import Verdict
from dtbench.records.job import CallKind, Collective, Job, JobAnalysis, RankJob, TimeChange
from dtbench.text import terminal
from dtbench.text.table import Table, TableColumn
from dtbench.text.units import MISSING, format_bandwidth, format_bytes, format_change, format_seconds, plural

MOST_RANKS, MOST_COLLECTIVES, MOST_CALLS = 16, 12, 2  # of a screenful
_WORTH = {
    "hidden": "if {}'s communication were hidden",
    "calibrated": "if {}'s links ran as without the job",
    "no_late_rank": "if no rank waited for the last one over {}",
}


def extremes(job: Job) -> list[RankJob]:
    """As many ranks as are shown: half that came last most often or have the longest steps, half of the contrary."""
    last = sum((Counter(waits.last_counts) for waits in job.waits), Counter[str]())
    ranks = sorted(job.ranks, key=lambda rank: (last[str(rank.rank)], rank.mean_step.step_s))
    half = MOST_RANKS // 2
    return sorted(ranks[:half] + ranks[half:][-half:], key=lambda rank: rank.rank)


def headline(job: Job) -> tuple[str, str]:
    """The share of exposed communication, and a sentence on it, the steps and the ranks."""
    parts = [rank.mean_step for rank in job.ranks]
    step_s, exposed_s = fmean(part.step_s for part in parts), fmean(part.exposed_s for part in parts)
    exposed, longest = f"{exposed_s / (step_s or 1):.0%}", format_seconds(max(part.step_s for part in parts))
    missing = f" of {job.world_size}" if job.world_size > len(parts) else ""
    on = ", ".join(filter(None, (job.backend, job.torch and f"torch {job.torch}", job.ranks[0].device)))
    steps = sorted({(rank.steps, rank.excluded_steps, rank.steps_source) for rank in job.ranks if rank.steps})
    told = ", ".join(
        f"{count}{f' of {count + excluded}' * bool(excluded)} steps by {by}" for count, excluded, by in steps
    )
    span = f"{'A step takes' if steps else 'No steps are marked; the traces span'} {format_seconds(step_s)}"
    waited_s = [dim.waiting_s / (rank.steps or 1) for rank in job.ranks for dim in rank.dims if dim.waiting_s]
    waited = f", {sum(waited_s) / len(parts) / (step_s or 1):.0%} waiting for the last rank" * bool(waited_s)
    return exposed, (
        f"{job.label or 'job'}: {plural(len(parts), 'rank')}{missing}{on and f' ({on})'}. {span}, the longest rank's "
        f"{longest}; {exposed} of it is exposed communication{waited} (means over "
        f"{told or 'the whole trace'} and all ranks)."
    )


def findings(job: Job, analysis: JobAnalysis) -> list[str]:
    """What to know first, the most telling first: what became slower, who is late, and the job in a sentence."""
    changed = [row for row in analysis.time_changes if row.verdict in (Verdict.SLOWER, Verdict.FASTER)]
    said = [*map(_change, changed), *map(str, (*analysis.call_changes[:MOST_CALLS], *analysis.late_ranks))]
    return [*(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said), headline(job)[1]]


def _change(row: TimeChange) -> str:
    ratio = f", {format_change(row.head_s / row.base_s)} than the base" if row.base_s and row.head_s else ""
    why = f" ({row.why})" if row.why else ""
    return f"{row.part.removesuffix('_s')}: {format_seconds(row.base_s)} → {format_seconds(row.head_s)}{ratio}{why}"


def tables(job: Job, analysis: JobAnalysis, *, screen: bool = False) -> list[Table]:
    """By mesh dim, by collective and by rank. screen: the costliest collectives and the extreme ranks alone."""
    steps = defaultdict(lambda: 1, {rank.rank: rank.steps for rank in job.ranks if rank.steps})
    made = (
        _dims(job, steps, {str(late.rank) for late in analysis.late_ranks}),
        _collectives(job, steps, {row.kind: row.share for row in analysis.links}, screen),
        _ranks(job, screen),
    )
    return [table for table in made if table.total_rows]


def _table(what: str, job: Job, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """heads: those of figures begin with >; columns without a value are left out."""
    cells = [[MISSING if row[i] in ("", "-") else row[i] for row in rows] for i in range(len(heads))]
    there = [(head, of) for head, of in zip(heads, cells, strict=True) if {*of} != {MISSING}]
    per = "per step" if all(rank.steps for rank in job.ranks) else "whole trace"
    return Table(f"{what}, {per}", [TableColumn(head.lstrip(">"), of, head[0] == ">") for head, of in there])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(sorted({"?" if value is None else str(value) for value in values}))


def _dims(job: Job, steps: Mapping[int, int], late: Set[str]) -> Table:
    calls, ranks = group_by(job.collectives, lambda c: c.mesh_dim), len(job.ranks)
    parts = group_by(((rank, d) for rank in job.ranks for d in rank.dims), lambda of: of[1].mesh_dim)
    step_s = sum(rank.mean_step.step_s for rank in job.ranks) or 1
    rows = []
    for dim in sorted({**calls, **parts}, key=lambda dim: -sum(d.exposed_s for _, d in parts.get(dim, ()))):
        of, timed = calls.get(dim, []), parts.get(dim, [])
        on, exposed_s = len({c.rank for c in of}), sum(d.exposed_s / steps[rank.rank] for rank, d in timed)
        largest = max((c for c in of if c.busbw), key=lambda c: c.bytes or 0, default=None)
        same = [c for c in of if largest and c.kind == largest.kind]
        rows.append(
            [
                dim,
                _last(job, dim=dim, late=late),
                _distinct(c.group_size for c in of),
                f"{on} of {ranks}" if on < ranks else "",
                f"{sum(c.calls_in_steps / steps[c.rank] for c in of) / ranks:.4g}",
                format_bytes(
                    sum(c.calls_in_steps / steps[c.rank] * (c.bytes or 0) for c in of) / ranks or None
                ),
                _distinct(c.dtype for c in of),
                format_seconds(sum(d.communication_s / steps[rank.rank] for rank, d in timed) / ranks),
                format_seconds(exposed_s / ranks),
                _percent(exposed_s / step_s),
                f"{largest.collective} {format_bytes(largest.bytes)}" if largest else "",
                format_bandwidth(_busbw(same)),
            ]
        )
    heads = (
        "Mesh dim,Last mostly,Ranks,On ranks,>calls,>bytes,Dtypes,>time,>exposed,>of all,Largest,>its busbw"
    )
    return _table("Communication by mesh dim", job, heads.split(","), rows)


def _mean_s(calls: Sequence[Collective]) -> float:
    """Mean seconds of a call."""
    return sum(c.mean_s * (c.timed or c.count) for c in calls) / (sum(c.timed or c.count for c in calls) or 1)


def _busbw(calls: Sequence[Collective]) -> float | None:
    """The bus bandwidth of calls of one kind, by their mean time."""
    mean_s = _mean_s(calls)
    return next((c.busbw * c.mean_s / mean_s for c in calls if c.busbw and mean_s), None)


def _last(job: Job, rank: str = "", dim: str = "", late: Set[str] = frozenset()) -> str:
    """Who came last over the dim most often, of equals who is late, or over which dims the rank did; how often and by
    how much."""
    said = []
    for of in job.waits:
        one = rank or max(
            of.last_counts, key=lambda number: (of.last_counts[number], number in late), default=""
        )
        if one in of.last_counts and dim in ("", of.mesh_dim):
            said.append(
                f"{of.mesh_dim if rank else f'rank {one}'}: {of.last_counts[one] / (of.calls or 1):.0%}, "
                f"{format_seconds(of.late_s.get(one))}"
            )
    return "; ".join(said)


def _collectives(
    job: Job, steps: Mapping[int, int], shares: Mapping[CallKind, float | None], screen: bool
) -> Table:
    rows, ranks = [], len(job.ranks)
    for kind, of in group_by(job.collectives, lambda call: call.kind).items():
        per_step_s = sum(c.mean_s * c.calls_in_steps / steps[c.rank] for c in of) / ranks
        moving = [c.transfer_s for c in of if c.transfer_s is not None]
        row = [
            kind.mesh_dim,
            kind.collective,
            kind.dtype or "",
            format_bytes(kind.bytes),
            f"{sum(c.calls_in_steps / steps[c.rank] for c in of) / ranks:.4g}",
            format_seconds(per_step_s),
            format_seconds(_mean_s(of)),
            format_seconds(fmean(moving) if moving else None),
            format_bandwidth(_busbw(of)),
            _of_calibrated(shares.get(kind)),
            "" if screen else ", ".join(of[0].callers[:2]),
        ]
        rows.append((per_step_s, row))
    shown = [row for _, row in sorted(rows, key=lambda of: -of[0])][: MOST_COLLECTIVES if screen else None]
    heads = "Mesh dim,Collective,Dtype,>Size,>calls,>time,>one call,>without waiting,>busbw,>of calibrated,Asked by"
    return _table(f"Collectives, {len(shown)} of {len(rows)} by time", job, heads.split(","), shown)


def _of_calibrated(share: float | None) -> str:
    return f"{share:.0%}: not comparable" if share and share > 1 else _percent(share)


def _ranks(job: Job, screen: bool) -> Table:
    rows = []
    for rank in extremes(job) if screen else job.ranks:
        step = rank.mean_step
        alone_s = step.step_s - step.computation_s - step.exposed_s - step.idle_s
        rows.append(
            [
                str(rank.rank),
                _last(job, rank=str(rank.rank)),
                format_seconds(step.step_s),
                format_seconds(step.computation_s),
                format_seconds(step.exposed_s),
                format_seconds(step.idle_s),
                format_seconds(alone_s if step.copy_s else None),
                _percent(step.exposed_s / (step.step_s or 1)),
                format_seconds(step.communication_s),
                format_seconds(step.host_bound_s),
                "" if screen else rank.source,
            ]
        )
    heads = (
        ">Rank,Last,>step,>computation,>exposed,>idle,>copies alone,>of step,>communication,>host-bound,Trace"
    )
    return _table(f"Ranks, {len(rows)} of {len(job.ranks)}", job, heads.split(","), rows)


def sentences(analysis: JobAnalysis) -> dict[str, list[str]]:
    """Title -> what at most it would be worth, what changed from a base, what figures of links are not measured."""
    doubted = group_by((row for row in analysis.links if row.caveat), lambda row: row.caveat)
    return {
        "At most it would save": [
            f"{format_seconds(one.saved_s)} ({one.share:.0%} of the step of rank {one.rank}) "
            + _WORTH[one.assumption].format(one.mesh_dim)
            for one in analysis.savings
        ],
        "What the layout needs": [*map(str, analysis.volumes)],
        "Base → new": [*map(str, analysis.call_changes), *map(_change, analysis.time_changes)],
        "How the links' figures were come by": [
            f"{why}: {of[0].kind}" + f" and {len(of) - 1} more" * (len(of) > 1) for why, of in doubted.items()
        ],
    }


def print_job(job: Job, analysis: JobAnalysis) -> None:
    """A screenful; what is cut is said. Too wide a table is broken into several, of which each names its rows."""
    console = terminal.new_console()
    width = terminal.readable_width(console)
    for sentence in findings(job, analysis):
        terminal.print_prose(console, sentence, width=width)
    for table in tables(job, analysis, screen=True):
        terminal.print_prose(console, "")
        terminal.print_line(console, table.caption, "bold")
        names = table.columns[: 4 if table.columns[1].header == "Collective" else 1]
        block, rest = [*names], [*table.columns[len(names) :]]
        while rest:
            block.append(rest.pop(0))
            if not rest or terminal.width_of(console, [*block, rest[0]]) > width:
                terminal.print_table(console, block)
                block = [*names]
    for title, lines in {**sentences(analysis), "Notes": job.notes}.items():
        for line in ["", title, *(f"- {line}" for line in lines[: terminal.MAX_ROWS])] if lines else ():
            terminal.print_prose(console, line, "bold" * (line == title), width)
