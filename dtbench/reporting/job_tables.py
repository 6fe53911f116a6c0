"""A job in words and tables, which the terminal and the page share. Figures are per step of a rank, or of the whole
trace where no steps are marked; over steps and ranks times are medians, calls and bytes means."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from dtbench.records.job import Job, RankJob, StepParts
from dtbench.records.judged_job import CallKind, Judgement
from dtbench.suite.grouping import group_by
from dtbench.text import terminal as to
from dtbench.text.table import MISSING, Table, TableColumn
from dtbench.text.units import format_bandwidth, format_bytes, format_seconds, plural

MOST_RANKS, MOST_COLLECTIVES = 16, 12  # of a screenful
_PARTS = ("step", "computation", "communication", "exposed", "idle", "host_bound")
_WORTH = {
    "hidden": "if {}'s communication were hidden",
    "links": "if {}'s links ran as without the job",
    "on time": "if the last rank came on time over {}",
}


def parts_of(rank: RankJob) -> StepParts:
    """Its median step; without steps its whole trace."""
    names = StepParts.__struct_fields__
    whole = StepParts(step_s=rank.span_s, **{name: getattr(rank, name) for name in names[1:]})
    middle = {name: _median(getattr(one, name) for one in rank.each_step or [whole]) for name in names}
    return StepParts(**{name: value for name, value in middle.items() if value is not None})


def extremes(job: Job) -> list[RankJob]:
    """As many ranks as are shown: half that came last most often or have the longest steps, half of the contrary."""
    last = sum((Counter(waits.last) for waits in job.waits), Counter[str]())
    ranks = sorted(job.ranks, key=lambda rank: (last[str(rank.rank)], parts_of(rank).step_s))
    half = MOST_RANKS // 2
    return sorted(ranks[:half] + ranks[half:][-half:], key=lambda rank: rank.rank)


def headline(job: Job) -> tuple[str, str]:
    """The share of exposed communication, the median over ranks; and a sentence on it, the steps and the ranks."""
    parts = [parts_of(rank) for rank in job.ranks]
    step_s, longest_s = (of(one.step_s for one in parts) for of in (median, max))
    exposed = f"{median(one.exposed_s / (one.step_s or 1) for one in parts):.0%}"
    missing = f" of {job.world_size}" if job.world_size > len(parts) else ""
    on = ", ".join(filter(None, (job.backend, job.torch and f"torch {job.torch}", job.ranks[0].device)))
    steps = {f"{plural(rank.steps, 'step')} by {rank.steps_by}" for rank in job.ranks if rank.steps}
    told = ", ".join(sorted(steps)) or "of the whole trace"
    span = f"{'A step takes' if steps else 'No steps are marked; the traces span'} {format_seconds(step_s)}"
    return exposed, (
        f"{job.label or 'job'}: {plural(len(parts), 'rank')}{missing}{on and f' ({on})'}. {span}, the longest "
        f"{format_seconds(longest_s)}; {exposed} of it is exposed communication ({told})."
    )


def tables(job: Job, judgement: Judgement, *, screen: bool = False) -> list[Table]:
    """By mesh dim, by collective and by rank. screen: the costliest collectives and the extreme ranks alone."""
    shares = {row.kind: row.share for row in judgement.links}
    steps = defaultdict(lambda: 1, {rank.rank: rank.steps for rank in job.ranks if rank.steps})
    made = _dims(job, steps, shares), _collectives(job, steps, shares, screen), _ranks(job, screen)
    return [table for table in made if table.total_rows]


def _table(what: str, job: Job, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """heads: those of figures begin with >; columns without a value are left out."""
    cells = [[MISSING if row[i] in ("", "-") else row[i] for row in rows] for i in range(len(heads))]
    there = [(head, of) for head, of in zip(heads, cells, strict=True) if {*of} != {MISSING}]
    per = "per step" if all(rank.steps for rank in job.ranks) else "whole trace"
    return Table(f"{what}, {per}", [TableColumn(head.lstrip(">"), of, head[0] == ">") for head, of in there])


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(sorted({"?" if value is None else str(value) for value in values}))


def _dims(job: Job, steps: Mapping[int, int], shares: Mapping[CallKind, float | None]) -> Table:
    calls = group_by(job.collectives, lambda c: c.mesh_dim)
    parts = group_by(((rank, d) for rank in job.ranks for d in rank.dims), lambda of: of[1].mesh_dim)
    rows = []
    for dim in sorted({**calls, **parts}, key=lambda dim: -sum(d.exposed_s for _, d in parts.get(dim, ()))):
        of, timed = calls.get(dim, []), parts.get(dim, [])
        ranks = len({c.rank for c in of}) or 1
        row = [dim, _distinct(c.group_size for c in of)]
        row.append(f"{sum(c.stepped / steps[c.rank] for c in of) / ranks:.4g}")
        row.append(format_bytes(sum(c.stepped / steps[c.rank] * (c.bytes or 0) for c in of) / ranks or None))
        row.append(_distinct(c.dtype for c in of))
        row.append(format_seconds(_median(d.communication_s / steps[rank.rank] for rank, d in timed)))
        row.append(format_seconds(_median(d.exposed_s / steps[rank.rank] for rank, d in timed)))
        row.append(_percent(_median(d.exposed_s / (_whole_s(rank) or 1) for rank, d in timed)))
        largest = max((c for c in of if c.busbw), key=lambda c: c.bytes or 0, default=None)
        same = [c for c in of if largest and CallKind.of(c) == CallKind.of(largest)]
        row.append(f"{largest.collective} {format_bytes(largest.bytes)}" if largest else "")
        row.append(format_bandwidth(_median(c.busbw for c in same)))
        rows.append(
            [*row, _percent(shares.get(CallKind.of(largest)) if largest else None), _last(job, dim=dim)]
        )
    heads = "Mesh dim,Ranks,>calls,>bytes,Dtypes,>time,>exposed,>of all,Largest,>its busbw,>of calibrated,Last mostly"
    return _table("Communication by mesh dim", job, heads.split(","), rows)


def _whole_s(rank: RankJob) -> float:
    return sum(step.step_s for step in rank.each_step) or rank.span_s


def _last(job: Job, rank: str = "", dim: str = "") -> str:
    """Who came last over the dim most often, or over which dims the rank did; how often and by how much."""
    said = []
    for of in job.waits:
        one = rank or max(of.last, key=of.last.__getitem__, default="")
        if one in of.last and dim in ("", of.mesh_dim):
            who = of.mesh_dim if rank else f"rank {one}"
            said.append(f"{who}: {of.last[one] / (of.calls or 1):.0%}, {format_seconds(of.late_s.get(one))}")
    return "; ".join(said)


def _collectives(
    job: Job, steps: Mapping[int, int], shares: Mapping[CallKind, float | None], screen: bool
) -> Table:
    rows = []
    for kind, of in group_by(job.collectives, CallKind.of).items():
        each_s = median(c.time_s / c.count * c.stepped / steps[c.rank] for c in of)
        row = [kind.mesh_dim, kind.collective, kind.dtype or "", format_bytes(kind.bytes)]
        row += [f"{median(c.stepped / steps[c.rank] for c in of):.4g}", format_seconds(each_s)]
        row += [format_seconds(_median(getattr(c, name) for c in of)) for name in ("median_s", "moving_s")]
        row += [format_bandwidth(_median(c.busbw for c in of)), _percent(shares.get(kind))]
        rows.append((each_s, [*row, "" if screen else ", ".join(of[0].asked_by[:2])]))
    shown = [row for _, row in sorted(rows, key=lambda of: -of[0])][: MOST_COLLECTIVES if screen else None]
    heads = "Mesh dim,Collective,Dtype,>Size,>calls,>time,>one call,>without waiting,>busbw,>of calibrated,Asked by"
    return _table(f"Collectives, {len(shown)} of {len(rows)} by time", job, heads.split(","), shown)


def _ranks(job: Job, screen: bool) -> Table:
    rows = []
    for rank in extremes(job) if screen else job.ranks:
        parts = parts_of(rank)
        row = [str(rank.rank), *(format_seconds(getattr(parts, f"{name}_s")) for name in _PARTS)]
        row += [_percent(parts.exposed_s / (parts.step_s or 1)), _last(job, rank=str(rank.rank))]
        rows.append([*row, "" if screen else rank.source])
    heads = [">Rank", *(f">{name.replace('_', '-')}" for name in _PARTS), ">of step", "Last", "Trace"]
    return _table(f"Ranks, {len(rows)} of {len(job.ranks)}", job, heads, rows)


def sentences(judgement: Judgement) -> dict[str, list[str]]:
    """Title -> what at most it would be worth, what changed from a base, what figures of links are not measured."""
    worth = [
        f"{format_seconds(one.saved_s)} ({one.share:.0%} of the step of rank {one.rank}) "
        + _WORTH[one.what].format(one.mesh_dim)
        for one in judgement.worth
    ]
    times = [
        f"{one.part}: {format_seconds(one.base_s)} → {format_seconds(one.head_s)}, {one.why or one.verdict.meaning}"
        for one in judgement.times
    ]
    changed = [*map(str, judgement.calls), *times]
    needed = [str(one) for one in judgement.needed]
    doubted = group_by((row for row in judgement.links if row.doubts), lambda row: row.doubts)
    doubts = [
        f"{why}: {of[0].kind}" + f" and {len(of) - 1} more" * (len(of) > 1) for why, of in doubted.items()
    ]
    return {
        "At most it would save": worth,
        "What the layout needs": needed,
        "Base → new": changed,
        "How the links' figures were come by": doubts,
    }


def print_job(job: Job, judgement: Judgement) -> None:
    """A screenful; what is cut is said. Too wide a table is broken into several, of which each names its rows."""
    console = to.new_console()
    width = to.readable_width(console)
    to.print_prose(console, headline(job)[1], width=width)
    for table in tables(job, judgement, screen=True):
        to.print_prose(console, "")
        to.print_line(console, table.caption, "bold")
        names = table.columns[: 4 if table.columns[1].header == "Collective" else 1]
        block, rest = [*names], [*table.columns[len(names) :]]
        while rest:
            block.append(rest.pop(0))
            if not rest or to.width_of(console, [*block, rest[0]]) > width:
                to.print_table(console, block)
                block = [*names]
    for title, lines in {**sentences(judgement), "Notes": job.notes}.items():
        for line in ["", title, *(f"- {line}" for line in lines[: to.MAX_ROWS])] if lines else ():
            to.print_prose(console, line, "bold" * (line == title), width)
