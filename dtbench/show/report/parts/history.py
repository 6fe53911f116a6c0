"""Times of earlier revisions, one kind of machine at a time: what moved most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from dtbench.show.report import tables as t
from dtbench.show.report.figures import Axis, Series, Style, line_panel, nice_step
from dtbench.show.report.section import Figure, Section
from dtbench.show.report.sources import History
from dtbench.units import format_seconds

MOST_PANELS = 6
# A revision and what was there before it: fewer tell nothing.
FEWEST = 2
LINE = Style("s0", "o")
_SHORT = 10


def history(histories: Sequence[History]) -> Section:
    section = Section("history", "History")
    if not any(one.points for one in histories):
        section.missing = "dtbench gate --base REV --head REV --history FOLDER --record"
        return section
    section.lead = (
        "Times that gates recorded for each revision, one estimate per revision; only times of one kind of machine "
        "stand in one series. The file holds no intervals, so a single step may be noise: what stays is a change."
    )
    for index, one in enumerate(one for one in histories if one.points):
        series = _series(one)
        section.figures += [f] if (f := _figure(section, index, one, series)) else []
        section.tables.append(_table(one, series))
    return section


def _series(one: History) -> dict[str, list[tuple[int, float]]]:
    """Benchmark -> (place of the revision, seconds), what moved most at the last revision first."""
    series: dict[str, list[tuple[int, float]]] = {}
    for place, point in enumerate(one.points):
        for label, time_s in point.times_s.items():
            series.setdefault(label, []).append((place, time_s))
    return dict(sorted(series.items(), key=lambda item: (-abs(_change(item[1]) or 0), item[0])))


def _change(points: Sequence[tuple[int, float]]) -> float | None:
    """The last time over the median of the earlier ones, less 1."""
    if len(points) < FEWEST:
        return None
    return points[-1][1] / median(time for _, time in points[:-1]) - 1


def _figure(
    section: Section, index: int, one: History, series: dict[str, list[tuple[int, float]]]
) -> Figure | None:
    drawn = {label: points for label, points in series.items() if len(points) >= FEWEST}
    if len(drawn) > MOST_PANELS:
        section.cuts.append(
            f"The figure shows the {MOST_PANELS} of {len(drawn)} benchmarks that moved most; the table has them all."
        )
    panels = []
    count = len(one.points)
    step = max(1, (count - 1) // 3)
    x = Axis(
        -0.3,
        count - 0.7,
        False,
        lambda v: one.points[round(v)].revision[:_SHORT],
        list(range(0, count, step)),
    )
    for place, (label, points) in enumerate(list(drawn.items())[:MOST_PANELS]):
        values = [time for _, time in points]
        before = median(values[:-1])
        y = _close_axis(values)
        change = _change(points) or 0.0
        desc = f"{len(points)} revisions; the last is {change:+.1%} against the median of those before."
        line = [Series("time", LINE, [float(k) for k, _ in points], values)]
        panels.append(
            line_panel(
                label, line, x, y, columns=2, prefix=f"history{index}p{place}", desc=desc, level=before
            )
        )
    if not panels:
        return None
    return Figure(
        f"Time per revision, oldest at the left, on {one.machine or 'a machine of unknown kind'}; the line across is "
        "the median of all but the last. Ordered by how far the last lies from it. The axes do not "
        "begin at 0.",
        (),
        panels,
        2,
    )


def _close_axis(values: Sequence[float]) -> Axis:
    """As near to the values as shows a change of a few percent; it does not begin at 0."""
    middle = median(values)
    low, high = min(*values, 0.95 * middle), max(*values, 1.05 * middle)
    room = 0.06 * (high - low)
    step = nice_step((high - low) / 4)
    ticks = [k * step for k in range(math.ceil((low - room) / step), math.floor((high + room) / step) + 1)]
    return Axis(low - room, high + room, False, lambda v: format_seconds(v), ticks)


def _table(one: History, series: dict[str, list[tuple[int, float]]]) -> t.Table:
    points = list(series.values())
    changes = [_change(of) for of in points]
    return t.Table(
        f"Every benchmark on {one.machine or 'a machine of unknown kind'}",
        [
            t.text("Benchmark", list(series)),
            t.counts("Revisions", [len(of) for of in points]),
            *t.times(
                [
                    (
                        "median before",
                        [median(v for _, v in of[:-1]) if len(of) > 1 else None for of in points],
                    ),
                    ("last", [of[-1][1] for of in points]),
                ]
            ),
            t.Column("change", [t.MISSING if c is None else f"{100 * c:+.1f}" for c in changes], True, "%"),
            t.text("Last revision", [one.points[of[-1][0]].revision for of in points]),
            t.text("Recorded", [one.points[of[-1][0]].time for of in points]),
        ],
        folded=True,
    )
