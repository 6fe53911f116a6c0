"""A flame graph as one SVG file that needs nothing else: no script, no font, no other file. Pure.

The root is on top; a frame's width is its time with all it called, its tooltip has the figures. Graphs of
one case share their scale, so that their lengths compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from dtbench.units import format_seconds

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


@dataclass
class _Frame:
    ns: float = 0.0
    children: dict[str, _Frame] = field(default_factory=dict)


def draw(graphs: Sequence[Graph], title: str) -> str:
    """The SVG text of the graphs, one below the other."""
    longest: dict[str, float] = {}
    trees = [(graph, _tree(graph.folded)) for graph in graphs]
    for graph, tree in trees:
        longest[graph.case] = max(longest.get(graph.case, 0.0), tree.ns)
    y, shown = float(_TOP_PX), []
    left_out = 0
    boxes_left = MOST_BOXES
    for graph, tree in trees:
        boxes, skipped = _boxes(tree, y + 8, longest[graph.case], boxes_left)
        boxes_left -= len(boxes)
        left_out += skipped
        text = f"{graph.label}: {format_seconds(tree.ns * 1e-9)} per call"
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


def _tree(folded: Mapping[tuple[str, ...], float]) -> _Frame:
    """Frames with their times, own and below; the outermost are the children of the one given."""
    root = _Frame()
    for stack, ns in folded.items():
        frame = root
        frame.ns += ns
        for name in stack:
            frame = frame.children.setdefault(name, _Frame())
            frame.ns += ns
    return root


def _boxes(root: _Frame, top: float, scale_ns: float, most: int) -> tuple[list[dict[str, Any]], int]:
    """(what is drawn, how many frames are not)."""
    boxes: list[dict[str, Any]] = []
    skipped = 0
    px = (WIDTH_PX - 2 * MARGIN_PX) / scale_ns if scale_ns > 0 else 0.0
    level = [(root, float(MARGIN_PX))]
    depth = 0
    while level:
        below = []
        for parent, left in level:
            for name, frame in parent.children.items():
                width = frame.ns * px
                if width < _LEAST_PX or len(boxes) >= most:
                    skipped += 1
                else:
                    figures = f"{format_seconds(frame.ns * 1e-9)} per call, {frame.ns / root.ns:.1%}"
                    boxes.append(
                        {
                            "kind": _kind_of(name),
                            "tip": f"{_visible(name)}\n{figures}",
                            "text": _fitting(_visible(name), width),
                            "x": round(left, 2),
                            "y": top + depth * ROW_PX,
                            "width": round(width, 2),
                        }
                    )
                    below.append((frame, left))
                left += width
        level, depth = below, depth + 1
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
