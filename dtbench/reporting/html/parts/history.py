"""Times of earlier revisions per kind of machine, those with the largest changes first."""

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
# Smallest number of revisions of a series.
FEWEST = 2
STYLES = {"time": Style("s0", "o", words="a revision, or a run")}
_HASH, _SHORT = 8, 11  # characters at a tick: of a commit, and of another revision's name

# Benchmark -> (index of the revision, seconds).
Times = dict[str, list[tuple[int, float]]]


def fill(section: ReportSection, material: Material) -> None:
    section.lead = (
        "Times that `dtbench gate --history` recorded per revision, or of each run of a folder, one estimate each. A "
        "series has times of one kind of machine. There are no intervals: a single step may be noise, a "
        "lasting one is a change."
    )
    for index, history in enumerate(history for history in material.sources.histories if history.points):
        times = _times(history)
        section.add(_figure(section, index, history, times), _table(history, times))


def _times(history: History) -> Times:
    """Returns the times of each benchmark, those with the largest change at the last revision first."""
    times: Times = {}
    for index, point in enumerate(history.points):
        for label, time_s in point.times_s.items():
            times.setdefault(label, []).append((index, time_s))
    return dict(sorted(times.items(), key=lambda item: (-abs(_change(item[1]) or 0), item[0])))


def _baseline(points: list[tuple[int, float]]) -> float | None:
    """Returns the median of all times but the last."""
    return median(time for _, time in points[:-1]) if len(points) >= FEWEST else None


def _change(points: list[tuple[int, float]]) -> float | None:
    baseline = _baseline(points)
    return None if baseline is None else points[-1][1] / baseline - 1


def _figure(section: ReportSection, index: int, history: History, times: Times) -> Figure | None:
    drawn = [(label, points) for label, points in times.items() if len(points) >= FEWEST]
    panels, names = [], _short(list(times))
    for label, points in section.capped(drawn, "benchmarks by change", MOST_PANELS):
        values = [time for _, time in points]
        panels.append(
            CurvePanel(
                names[label],
                [DrawnCurve("time", [float(index) for index, _ in points], values)],
                level=_baseline(points),
                y=close_axis(values),
            )
        )
    count = len(history.points)
    tick_sets = [range(0, count, max(1, count // parts)) for parts in (4, 3, 2)]
    return curves(
        f"history{index}p",
        panels,
        STYLES,
        f"Time per revision, oldest at the left, on {history.machine or 'a machine of unknown kind'}. The horizontal "
        "line is the median of all but the last. Benchmarks are ordered by the change at the last revision. The axes "
        "do not begin at 0.",
        x=Axis(
            -0.3, count - 0.7, False, lambda index: _tick(history.points[round(index)].revision), tick_sets
        ),
        y=close_axis,
    )


def _tick(revision: str) -> str:
    return revision[: _HASH if re.fullmatch("[0-9a-f]{40,}", revision) else _SHORT]


def close_axis(values: Sequence[float]) -> Axis:
    """Returns an axis that does not begin at 0, so that changes of a few percent are visible."""
    low, high = min(*values, 0.95 * median(values)), max(*values, 1.05 * median(values))
    low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    return Axis(low, high, False, format_seconds, round_ticks(low, high), "time")


def _short(labels: list[str]) -> dict[str, str]:
    """Returns label -> label without the suite and the params that all labels share."""
    words = {label: label.split() for label in labels}
    shared = set.intersection(*map(set, words.values())) if len(labels) > 1 else set[str]()
    return {
        label: " ".join(w for i, w in enumerate(label_words) if w not in shared or ("=" not in w and i > 0))
        or label
        for label, label_words in words.items()
    }


def _table(history: History, times: Times) -> Table:
    series = list(times.values())
    baselines, last = [_baseline(points) for points in series], [points[-1][1] for points in series]
    return Table(
        f"Every benchmark on {history.machine or 'a machine of unknown kind'}",
        [
            columns.text("Benchmark", list(times)),
            columns.counts("Revisions", [len(points) for points in series]),
            *columns.times([("median of earlier", baselines), ("last", last)]),
            columns.numbers("change", map(_change, series), lambda change: f"{100 * change:+.1f}", "%"),
            columns.text("Last revision", [history.points[points[-1][0]].revision for points in series]),
            columns.text("Recorded", [history.points[points[-1][0]].time for points in series]),
        ],
        folded=True,
    )


HISTORY = Part(
    "history", "History", fill, (), "dtbench gate --base rev:REV --head rev:REV SUITE --history FOLDER"
)
