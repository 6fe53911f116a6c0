"""A profiled job, and profiles of a suite's cases: timeline of one step, bandwidths, tables."""

import math
import re
from dataclasses import replace

from markupsafe import Markup

from dtbench.errors import plain
from dtbench.grouping import group_by
from dtbench.records.job import Job, JobAnalysis
from dtbench.records.topology import CalibratedTopology
from dtbench.reporting.html.axes import Axis, bandwidths_axis, value_axis
from dtbench.reporting.html.figures import LOOKS, CurvePanel, DrawnCurve, Figure, curves, lines
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.reporting.job_tables import extremes, findings, headline, sentences, tables
from dtbench.text.units import format_seconds
from dtbench_core.cost.ring import busbw_factor

LANE_PX, MAX_SECTIONS = 7.0, 3
_LEAD = Markup(
    '{} The traces that the table of ranks names open in <a href="https://ui.perfetto.dev">Perfetto</a>.'
)


def fill(section: ReportSection, material: Material) -> None:
    if (job := material.sources.job) is None:
        return
    (share, _), analysis = headline(job), material.sources.analysis or JobAnalysis(0)
    *first, sentence = findings(job, analysis)
    section.lead = (Markup("{}") if job.lacks_times else _LEAD).format(plain(" ".join([*first, sentence])))
    section.outcome = (
        re.split(r"(?: \([^()]*\))?(?:\. |\.$)", first[0])[0]
        if first
        else "exposed communication is unknown"
        if job.lacks_times
        else f"{share} of the step is exposed communication"
    )
    savings, needed, changes, caveats = sentences(analysis).values()
    section.headlines = [(format_seconds(late.late_s), str(late)) for late in analysis.late_ranks[:1]]
    section.headlines.append((share, "of the step is exposed communication, which no computation covers"))
    section.headlines += [
        (f"{saving.share:.0%}", f"of the step could be saved at most: {line}")
        for saving, line in zip(analysis.savings[:2], savings, strict=False)
    ]
    section.notes = [*changes, *needed, *savings[2:], *caveats, *job.notes]
    section.add(_timeline(job), _bandwidths(job, material.sources.topology), *tables(job, analysis))


def _timeline(job: Job, id_: str = "lanes") -> Figure | None:
    """Draws one step: the ranks below each other, with a line with gaps per lane."""
    drawn = {lane.rank for lane in job.lanes}
    ranks = [rank.rank for rank in extremes(job) if rank.rank in drawn]
    names = sorted({lane.name for lane in job.lanes}, key=lambda name: (name == "exposed", name))
    looks = zip(names, LOOKS * len(names), strict=False)
    styles = {name: replace(look, marker="", dash=(), px=LANE_PX - 1) for name, look in looks}
    height = len(names) + 1
    series = []
    for lane in job.lanes:
        if lane.rank in ranks and lane.intervals:
            x = [v for start, end in lane.intervals for v in (start, end, math.nan)]
            y = -ranks.index(lane.rank) - (names.index(lane.name) + 1) / height
            series.append(DrawnCurve(lane.name, x, [y] * len(x)))
    clock = f"clocks aligned by {job.aligned_by}" if job.aligned_by else "clocks as recorded"
    caption = f"{len(ranks)} of {len(job.ranks)} ranks, {clock}; gaps too short to see are not drawn."
    middles = [n + 0.5 - len(ranks) for n in range(len(ranks))]
    y_axis = Axis(-len(ranks), 0, False, lambda y: f"rank {ranks[int(-y)]}", [middles])
    panel, x_axis = CurvePanel(f"Step {job.drawn_step}", series), value_axis([job.drawn_s], log=False)
    return curves(
        id_, [panel], styles, caption, y=lambda _: y_axis, x=x_axis, max_px=LANE_PX * height * len(ranks) + 70
    )


def _bandwidths(job: Job, topology: CalibratedTopology | None) -> Figure | None:
    """Draws a panel per mesh dim: the job's calls as marks, the calibrated curve of each collective as a line."""
    calls = group_by(
        (c for c in job.collectives if c.bytes and c.busbw), lambda c: (c.mesh_dim, c.collective)
    )
    looks = dict(zip(sorted({name for _, name in calls}), LOOKS, strict=False))
    styles = {name: replace(look, dash=None) for name, look in looks.items()}
    styles |= {f"{name}, calibrated": replace(look, marker="") for name, look in looks.items()}
    points = {dim: dict[str, list[tuple[float, float | None]]]() for dim, _ in calls}
    for (dim, name), dim_calls in calls.items():
        if name in looks:
            points[dim][name] = [(float(call.bytes or 0), call.busbw) for call in dim_calls]
        for topology_dim in topology.dims if topology and name in looks else ():
            if topology_dim.name == dim and (curve := topology_dim.collectives.get(name)):
                rate = 1e6 * busbw_factor(name, topology_dim.ranks)
                points[dim][f"{name}, calibrated"] = [
                    (float(row.size_bytes), rate * row.size_bytes / row.time_us) for row in curve.table
                ]
    return curves(
        "inJob",
        [CurvePanel(dim, lines(dim_points)) for dim, dim_points in points.items()],
        styles,
        "Bus bandwidth of the job's calls by rank and size, including waiting. Lines: calibrated without the job.",
        y=bandwidths_axis,
        x_title="size of a call",
    )


def fill_sections(section: ReportSection, material: Material) -> None:
    """Adds profiles of cases, those with communication first."""
    profiles = sorted(material.sources.ranks, key=lambda profile: not profile.job.collectives)
    if len(profiles) > MAX_SECTIONS:
        section.notes = [
            f"{MAX_SECTIONS} of {len(profiles)} are drawn; the profile's table.txt has them all."
        ]
    short = {profile.job.label: re.sub(r" \w+=.*(?= \()", "", profile.job.label) for profile in profiles}
    distinct = len({*short.values()}) == len(short)
    for number, profile in enumerate(profiles[:MAX_SECTIONS]):
        label = short[profile.job.label] if distinct else profile.job.label
        if timeline := _timeline(profile.job, f"lanes{number}"):
            section.add(
                replace(
                    timeline,
                    caption=f"{headline(profile.job)[1]} {profile.overhead_text} {timeline.caption}",
                    folded=label if material.sources.runs else "",
                )
            )
        for table in tables(profile.job, JobAnalysis(0)):
            section.add(replace(table, caption=f"{label}: {table.caption}", folded=True))


JOB = Part("job", "Job", fill)
RANKS = Part("ranks", "Profile of ranks", fill_sections)
