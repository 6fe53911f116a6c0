"""What the figures are drawn of: axes with margins in pixels, words beside them, the places of marks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from dtbench.model.errors import plain
from dtbench.show.report.axes import Axis
from dtbench.show.report.svg import FONT_PX, STAND_IN

# Of a mark: where it is, in pixels from the left and the top, and what it says.
Point = tuple[int, int, str]


def axes_in(canvas: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with margins in pixels."""
    width, height = 72 * canvas.get_size_inches()
    axes = canvas.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    axes.tick_params(length=3, pad=4)
    return axes


def note(axes: Axes, text: str, place: int, colour: str = "muted") -> None:
    """At the right of a row."""
    beside(axes, text, (1, place), (7, 0), ("axes fraction", "data"), colour)


def beside(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    coords: str | tuple[str, str],
    colour: str,
    gid: str | None = None,
    fontsize: float = FONT_PX,
) -> None:
    """Text outside of the axes. offset: pixels."""
    axes.annotate(
        plain(text),
        at,
        offset,
        xycoords=coords,
        textcoords="offset points",
        va="center",
        color=STAND_IN[colour],
        annotation_clip=False,
        gid=gid,
        fontsize=fontsize,
    )


def label_rows(axes: Axes, labels: Sequence[str], most: int) -> None:
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), [plain(cut(label, most)) for label in labels])
    axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=FONT_PX)


def precisely(axis: Axis, value: float) -> str:
    """A value with the digits that an axis spares."""
    return axis.format(float(f"{value:.3g}"))


def points(axes: Axes, marks: Sequence[tuple[float, float, str]]) -> list[Point]:
    """Of marks in the axes' values, and what each says, their places in pixels."""
    canvas = axes.get_figure(root=True)
    assert canvas is not None
    scale, height = 72 / canvas.dpi, 72 * canvas.get_size_inches()[1]
    places = axes.transData.transform([mark[:2] for mark in marks] or np.empty((0, 2))) * scale
    return [
        (round(x), round(height - y), said)
        for (x, y), (*_, said) in zip(places, marks, strict=True)
        if math.isfinite(x + y)
    ]


def name_ends(axes: Axes, ends: Sequence[tuple[str, str, float, str]]) -> None:
    """Beside the last value of each series its name, none on top of another. ends: (id, name, last value, colour)."""
    spacing = FONT_PX + 1
    height = 72 * axes.get_window_extent().height / axes.get_figure().dpi  # type: ignore[union-attr]
    left = axes.get_xlim()[0]
    low, high = (axes.transData.transform((left, y))[1] for y in axes.get_ylim())
    at = [
        height * float((axes.transData.transform((left, y))[1] - low) / (high - low)) for _, _, y, _ in ends
    ]
    upwards = sorted(range(len(ends)), key=lambda place: at[place])
    floor, ceiling = -math.inf, height
    for place in upwards:
        at[place] = floor = max(at[place], floor + spacing)
    for place in reversed(upwards):  # what was pushed over the top comes down again
        at[place] = min(at[place], ceiling)
        ceiling = at[place] - spacing
    for (id_, name, _, colour), y in zip(ends, at, strict=True):
        beside(axes, name, (1, 0), (5, y), "axes fraction", colour, gid=id_, fontsize=FONT_PX - 1)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
