"""A user's own job: one step of its ranks drawn, its bandwidths beside the calibrated ones, and its tables."""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from dtbench.records.job import Job
from dtbench.records.topology import CalibratedTopology
from dtbench.reporting.html.axes import bandwidths_axis, value_axis
from dtbench.reporting.html.figures import LOOKS, CurvePanel, Figure, curves, lanes, lines
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.reporting.job_tables import extremes, headline, sentences, step_of, tables
from dtbench.suite.errors import plain
from dtbench.suite.grouping import group_by
from dtbench_core.cost.ring import busbw_factor

_LEAD = Markup(
    '{} The traces, by the names in the table of ranks, open in <a href="https://ui.perfetto.dev">Perfetto</a>.'
)


def fill(section: ReportSection, of: Material) -> None:
    job, judgement = of.sources.job, of.sources.judgement
    if job is None:
        return
    share = f"{step_of(job)[1]:.0%}"
    section.lead = _LEAD.format(plain(headline(job)))
    section.outcome = f"{share} of the job is exposed communication"
    section.headlines = [(share, "of the job is exposed communication, which no computation covers")]
    section.headlines += [
        (f"{one.share:.0%}", one.sentence) for one in (judgement.worth[:2] if judgement else ())
    ]
    said = sentences(judgement).items()
    section.cuts = [*(f"{title}: {line}" for title, of_it in said for line in of_it), *job.notes]
    section.add(_timeline(job), _bandwidths(job, of.sources.topology), *tables(job, judgement))


def _timeline(job: Job) -> Figure | None:
    by_rank = group_by(job.lanes, lambda lane: lane.rank)
    ranks = [rank.rank for rank in extremes(job) if rank.rank in by_rank]
    rows = {f"rank {rank}": {lane.name: lane.intervals for lane in by_rank[rank]} for rank in ranks}
    names = sorted({lane.name for lane in job.lanes}, key=lambda name: (name == "exposed", name))
    clock = f"clocks brought together by {job.aligned_by}" if job.aligned_by else "each rank's own clock"
    caption = f"Step {job.drawn_step} of {len(ranks)} of {len(job.ranks)} ranks, {clock}. Gaps below a thousandth are filled."
    return lanes(
        "lanes", f"Step {job.drawn_step}", rows, names, value_axis([job.drawn_s], log=False), caption
    )


def _bandwidths(job: Job, topology: CalibratedTopology | None) -> Figure | None:
    """A panel per mesh dim: the job's calls as marks, the calibrated curve of each collective as a line."""
    calls = group_by(
        (c for c in job.collectives if c.bytes and c.busbw), lambda c: (c.mesh_dim, c.collective)
    )
    names = sorted({name for _, name in calls})[: len(LOOKS)]
    looks = dict(zip(names, LOOKS, strict=False))
    styles = {name: replace(look, dash=None) for name, look in looks.items()}
    styles |= {f"{name}, calibrated": replace(look, marker="") for name, look in looks.items()}
    points = {dim: dict[str, list[tuple[float, float | None]]]() for dim, _ in calls}
    for (dim, name), of in calls.items():
        if name in looks:
            points[dim][name] = [(float(c.bytes or 0), c.busbw) for c in of]
        for one in topology.dims if topology and name in looks else ():
            if one.name == dim and (curve := one.collectives.get(name)):
                factor = 1e6 * busbw_factor(name, one.ranks)
                rows = [(float(row.size_bytes), factor * row.size_bytes / row.time_us) for row in curve.table]
                points[dim][f"{name}, calibrated"] = [*rows]
    panels = [CurvePanel(dim, lines(of)) for dim, of in points.items()]
    caption = "Bus bandwidth of the job's calls, per rank and size, waiting included. Lines: as calibrated, without the job."
    return curves("inJob", panels, styles, caption, y=bandwidths_axis, over="size of a call")


JOB = Part("job", "Job", fill)
