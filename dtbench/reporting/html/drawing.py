"""What the figures are drawn of: axes with margins in pixels, words beside them, the places of marks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from dtbench.reporting.html.svg import FONT_PX, STAND_IN
from dtbench.suite.errors import plain

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
    axes.annotate(
        plain(text),
        (1, place),
        (7, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        color=STAND_IN[colour],
        annotation_clip=False,
    )


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), list(map(plain, labels)))
    axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=FONT_PX)


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


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
