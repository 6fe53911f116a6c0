"""The check that no text of a drawing lies on another: it finds what does, and the fixture runs it on all drawings."""

from __future__ import annotations

import pytest
from dtbench.reporting.html.drawing import axes_in
from matplotlib.figure import Figure

from dtbench.reporting.html import figures
from dtbench.reporting.html.axes import Axis
from dtbench.reporting.html.svg import settings
from dtbench.tests.overlaps import overlapping_texts


def ticks(canvas: Figure, low: float, high: float, values: list[float]) -> None:
    axes = axes_in(canvas, left=120, right=20, top=20, bottom=40)
    for which in "xy":
        Axis(low, high, False, lambda v: f"{v:,.0f} bytes", values).apply(axes, which)


def test_labels_on_each_other_and_cut_off_are_found() -> None:
    with settings():
        canvas = Figure(figsize=(300 / 72, 100 / 72))
        axes = axes_in(canvas, left=20, right=20, top=20, bottom=40)
        axes.set_xlim(0, 100)
        axes.set_xticks([40, 50], ["forty bytes", "fifty bytes"])
        axes.set_yticks([0.5], ["a row with a long name"])
        found = overlapping_texts(canvas)
    assert ("forty bytes", "fifty bytes") in found and ("a row with a long name", "") in found


@pytest.mark.parametrize("count", [2, 5, 11, 41, 201])
def test_an_axis_leaves_out_the_ticks_that_have_no_room(count: int) -> None:
    values = [1e6 * k / (count - 1) for k in range(count)]
    with settings():
        canvas = Figure(figsize=(340 / 72, 100 / 72))
        ticks(canvas, -2e5, 1.2e6, values)
        assert overlapping_texts(canvas) == []
        axes = canvas.axes[0]
        assert all(
            any(text.get_text() for text in labels)
            for labels in (axes.get_xticklabels(), axes.get_yticklabels())
        )


def test_every_drawing_of_the_tests_is_looked_at() -> None:
    def paint(canvas: Figure) -> None:
        canvas.add_axes((0, 0, 1, 1)).set_axis_off()
        for _ in range(2):
            canvas.axes[0].text(0.5, 0.5, "the same place")

    with settings(), pytest.raises(AssertionError, match="the same place"):
        figures.draw(200, 100, paint, prefix="p", title="t")
