"""A flame graph as one SVG file that needs nothing else: no script, no font, no other file. Pure.

The root is on top; a frame's width is its time with all it called, its tooltip has the figures. Graphs of
one case share their scale, so that their lengths compare.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import jinja2

from dtbench.text.units import format_seconds

WIDTH_PX = 1200
MARGIN_PX = 12
ROW_PX = 18
_TOP_PX = 84  # of the first graph's title
_CHAR_PX = 6.7  # of 11 px monospace, a little more than browsers take
_LEAST_PX = 0.5  # narrower frames are not drawn
MOST_BOXES = 20_000  # a file of some 5 MB
# XML 1.0 forbids these even when escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_MOST_NAME = 300  # characters of one name


@dataclass(frozen=True)
class Graph:
    """One flame graph. case: graphs of the same case share a scale. folded: stack -> ns per call."""

    case: str
    label: str
    folded: Mapping[tuple[str, ...], float]

    @property
    def ns(self) -> float:
        return sum(self.folded.values())


class _Box(TypedDict):
    """A drawn frame, px; see flame.svg.j2."""

    kind: str
    tip: str
    text: str
    x: float
    y: float
    width: float


def draw(graphs: Sequence[Graph], title: str) -> str:
    """The SVG text of the graphs, one below the other."""
    longest: dict[str, float] = {}
    for graph in graphs:
        longest[graph.case] = max(longest.get(graph.case, 0.0), graph.ns)
    y, shown = float(_TOP_PX), []
    left_out = 0
    boxes_left = MOST_BOXES
    for graph in graphs:
        boxes, skipped = _boxes(graph, y + 8, longest[graph.case], boxes_left)
        boxes_left -= len(boxes)
        left_out += skipped
        text = f"{graph.label}: {format_seconds(graph.ns * 1e-9)} per call"
        shown.append({"label": _visible(text), "y": y, "boxes": boxes})
        y = max((box["y"] for box in boxes), default=y) + ROW_PX + 30
    note = "Width is time per call, a frame's own and what it called; the cost of recording is taken off."
    if left_out:
        note += f" {left_out} frames too narrow to see are left out."
    keys = [("python", "Python"), ("c", "C function"), ("op", "op of torch's dispatcher")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("flame.svg.j2").render(
        title=_visible(title),
        note=note,
        width=WIDTH_PX,
        height=round(y),
        margin=MARGIN_PX,
        row=ROW_PX,
        keys=[{"kind": kind, "text": text, "x": MARGIN_PX + 110 * i} for i, (kind, text) in enumerate(keys)],
        graphs=shown,
    )


def _visible(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)[:_MOST_NAME]


def _boxes(graph: Graph, top: float, scale_ns: float, most: int) -> tuple[list[_Box], int]:
    """(what is drawn, how many frames are not)."""
    times: defaultdict[tuple[str, ...], float] = defaultdict(float)  # with all that a frame called
    for stack, ns in graph.folded.items():
        for depth in range(1, len(stack) + 1):
            times[stack[:depth]] += ns
    px = (WIDTH_PX - 2 * MARGIN_PX) / scale_ns if scale_ns > 0 else 0.0
    boxes: list[_Box] = []
    skipped = 0
    free: dict[tuple[str, ...], float] = {(): MARGIN_PX}  # where a drawn frame's next child begins, px
    for stack in sorted(times, key=len):
        if stack[:-1] not in free:
            continue  # its caller is too narrow
        name, width, left = stack[-1], times[stack] * px, free[stack[:-1]]
        free[stack[:-1]] += width
        if width < _LEAST_PX or len(boxes) >= most:
            skipped += 1
            continue
        free[stack] = left
        figures = f"{format_seconds(times[stack] * 1e-9)} per call, {times[stack] / graph.ns:.1%}"
        boxes.append(
            {
                "kind": _kind_of(name),
                "tip": f"{_visible(name)}\n{figures}",
                "text": _fitting(_visible(name), width),
                "x": round(left, 2),
                "y": top + (len(stack) - 1) * ROW_PX,
                "width": round(width, 2),
            }
        )
    return boxes, skipped


def _fitting(name: str, width: float) -> str:
    """What of the name fits into a box."""
    room = int((width - 6) / _CHAR_PX)
    if room < 3:
        return ""
    return name if len(name) <= room else name[: room - 1] + "…"


def _kind_of(name: str) -> str:
    if name.endswith(" (C)"):
        return "c"
    return "op" if "::" in name or name == "PythonSubclass" else "python"
