"""Times of earlier revisions, one kind of machine at a time: what moved most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from dtbench.reporting.html.axes import Axis, round_ticks
from dtbench.reporting.html.figures import CurvePanel, DrawnCurve, Figure, Style, curves
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.reporting.html.sources import History
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_seconds

MOST_PANELS = 6
# A revision and what was there before it: fewer tell nothing.
FEWEST = 2
STYLES = {"time": Style("s0", "o", words="a revision, or a run")}
_HASH, _SHORT = 8, 11  # characters of a commit and of another revision's name beside a tick

# Benchmark -> (place of the revision, seconds).
Times = dict[str, list[tuple[int, float]]]


def fill(section: ReportSection, of: Material) -> None:
    section.lead = (
        "Times that gates recorded for each revision, or of each run of a folder, one estimate each; only times of one "
        "kind of machine stand in one series. There are no intervals: a single step may be noise, a "
        "lasting one is a change."
    )
    for index, one in enumerate(one for one in of.sources.histories if one.points):
        times = _times(one)
        section.add(_figure(section, index, one, times), _table(one, times))


def _times(one: History) -> Times:
    """What moved most at the last revision first."""
    times: Times = {}
    for place, point in enumerate(one.points):
        for label, time_s in point.times_s.items():
            times.setdefault(label, []).append((place, time_s))
    return dict(sorted(times.items(), key=lambda item: (-abs(_change(item[1]) or 0), item[0])))


def _before(points: list[tuple[int, float]]) -> float | None:
    """The median of all times but the last."""
    return median(time for _, time in points[:-1]) if len(points) >= FEWEST else None


def _change(points: list[tuple[int, float]]) -> float | None:
    before = _before(points)
    return None if before is None else points[-1][1] / before - 1


def _figure(section: ReportSection, index: int, one: History, times: Times) -> Figure | None:
    drawn = {label: points for label, points in times.items() if len(points) >= FEWEST}
    panels, names = [], _short(list(times))
    for label, points in section.capped(list(drawn.items()), "benchmarks by change", MOST_PANELS):
        values = [time for _, time in points]
        line = [DrawnCurve("time", [float(place) for place, _ in points], values)]
        panels.append(CurvePanel(names[label], line, level=_before(points), y=close_axis(values)))
    count = len(one.points)
    places = [range(0, count, max(1, count // parts)) for parts in (4, 3, 2)]
    return curves(
        f"history{index}p",
        panels,
        STYLES,
        f"Time per revision, oldest at the left, on {one.machine or 'a machine of unknown kind'}; the line across is "
        "the median of all but the last. Ordered by how far the last lies from it. The axes do not begin at 0.",
        x=Axis(-0.3, count - 0.7, False, lambda place: _tick(one.points[round(place)].revision), places),
        y=close_axis,
    )


def _tick(revision: str) -> str:
    return revision[: _HASH if re.fullmatch("[0-9a-f]{40,}", revision) else _SHORT]


def close_axis(values: Sequence[float]) -> Axis:
    """As near to the values as shows a change of a few percent; it does not begin at 0."""
    low, high = min(*values, 0.95 * median(values)), max(*values, 1.05 * median(values))
    low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    return Axis(low, high, False, format_seconds, round_ticks(low, high), "time")


def _short(labels: list[str]) -> dict[str, str]:
    """Without the suite and the params that all of them share, label by label."""
    words = {label: label.split() for label in labels}
    shared = set.intersection(*map(set, words.values())) if len(labels) > 1 else set[str]()
    return {
        label: " ".join(w for i, w in enumerate(of) if w not in shared or ("=" not in w and i > 0)) or label
        for label, of in words.items()
    }


def _table(one: History, times: Times) -> Table:
    series = list(times.values())
    before, last = [_before(of) for of in series], [of[-1][1] for of in series]
    return Table(
        f"Every benchmark on {one.machine or 'a machine of unknown kind'}",
        [
            columns.text("Benchmark", list(times)),
            columns.counts("Revisions", [len(of) for of in series]),
            *columns.times([("median before", before), ("last", last)]),
            columns.numbers("change", map(_change, series), lambda change: f"{100 * change:+.1f}", "%"),
            columns.text("Last revision", [one.points[of[-1][0]].revision for of in series]),
            columns.text("Recorded", [one.points[of[-1][0]].time for of in series]),
        ],
        folded=True,
    )


HISTORY = Part("history", "History", fill, (), "dtbench gate --base REV --head REV --history FOLDER --record")
