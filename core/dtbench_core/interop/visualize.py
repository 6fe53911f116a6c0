"""Pictures of how a DTensor is spread over its mesh: as text, and as SVG.

Mesh dims cut tensor dims one by one, so the shards form a grid: each tensor dim is a row of segments,
and each combination of segments is a cell that one rank, or several replicas, hold. The last two dims
are drawn as a plane; every combination of segments of the dims before them is a plane of its own.
"""

from __future__ import annotations

import html
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtbench_core.errors import ArgumentError, describe_ranks
from dtbench_core.layout.placement import held_runs, local_extents
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.tensor.dtensor import DTensor

# More segments of a dim than this are not drawn one by one: the first and the last ones tell the pattern.
MAX_SEGMENTS = 48
KEPT_FIRST, KEPT_LAST = 24, 8


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Prints which rank holds which part of `dtensor`, on the first rank of its mesh alone.

    Args:
        header: printed above.
        use_rich: accepted for compatibility; the text is plain in either case.
    """
    spec = _spec_of(dtensor)
    coordinate = spec.info.coordinate
    if coordinate is not None and not any(coordinate):
        sys.stdout.write(sharding_text(dtensor, header) + "\n")


class Segment(NamedTuple):
    """`length` elements of a tensor dim. owner: the index on each mesh dim that cuts the tensor dim, as (mesh dim,
    index); None for a stretch that is left out of the picture."""

    label: str
    length: int
    owner: tuple[tuple[int, int], ...] | None


class Plane(NamedTuple):
    """One 2-D picture: the segments of the last two dims, and the ranks that hold the cells in which they meet.

    title: where it lies in the dims before. ranks: None in cells that are left out.
    """

    title: str
    rows: list[Segment]
    columns: list[Segment]
    ranks: list[list[list[int] | None]]


def _spec_of(dtensor: DTensor) -> DTensorSpec:
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"got a {type(dtensor).__name__} to show, expected a DTensor: plain tensors lie on one rank"
        )
    return dtensor._spec


# ---- the layout (pure) ----


def _segments(spec: DTensorSpec, dim: int) -> list[Segment]:
    """The segments of tensor dim `dim` that have elements, by offset."""
    info = spec.info
    cutting = [d for d, p in enumerate(spec.placements) if p.is_shard(dim)]
    found = []
    for index in itertools.product(*(range(info.sizes[d]) for d in cutting)):
        owner = tuple(zip(cutting, index, strict=True))
        coordinate = tuple(dict(owner).get(d, 0) for d in range(info.ndim))
        for offset, length in held_runs(spec.shape[dim], dim, spec.placements, info.sizes, coordinate):
            found.append((offset, length, owner))
    row = [Segment(f"{offset}:{offset + n}", n, owner) for offset, n, owner in sorted(found) if n]
    if len(row) <= MAX_SEGMENTS:
        return row
    first, last = row[:KEPT_FIRST], row[-KEPT_LAST:]
    left_out = spec.shape[dim] - sum(segment.length for segment in first + last)
    return [*first, Segment("...", left_out, None), *last]


def planes(spec: DTensorSpec) -> Iterator[Plane]:
    """The planes of the picture; cells with elements only."""
    if 0 in spec.shape:
        return
    whole = [[Segment("", 1, ())]]  # in place of the dims that a scalar or a vector lacks
    *outer, rows, columns = whole * (2 - spec.ndim) + [_segments(spec, d) for d in range(spec.ndim)]
    for at in itertools.product(*outer):
        title = f"[{', '.join([*(segment.label for segment in at), ':', ':'])}]" if at else ""
        ranks = [[_ranks_of(spec, (*at, row, column)) for column in columns] for row in rows]
        yield Plane(title, rows, columns, ranks)


def _ranks_of(spec: DTensorSpec, cell: Sequence[Segment]) -> list[int] | None:
    """The ranks that hold the cell where these segments meet; None if left out."""
    fixed: dict[int, int] = {}
    for segment in cell:
        if segment.owner is None:
            return None
        fixed |= dict(segment.owner)
    index = tuple(fixed.get(d, slice(None)) for d in range(spec.info.ndim))
    ranks: list[int] = spec.mesh.mesh[index].flatten().tolist()
    return ranks


def name_ranks(ranks: Sequence[int] | None) -> str:
    """`rank 3`, `ranks 0-3, 8`."""
    if ranks is None:
        return "..."
    return f"rank{'s' if len(ranks) > 1 else ''} {describe_ranks(ranks).replace(',', ', ')}"


def _notes(spec: DTensorSpec) -> list[str]:
    notes = []
    if spec.has_partial():
        notes.append("Partial: each of the ranks named together holds a term, not the value")
    sizes = spec.info.sizes
    coordinates = itertools.product(*map(range, sizes))
    empty = [
        rank
        for rank, at in zip(spec.mesh.mesh.flatten().tolist(), coordinates, strict=True)
        if 0 in local_extents(spec.shape, spec.placements, sizes, at)[0]
    ]
    if empty:
        notes.append(f"empty: {name_ranks(empty)}")
    return notes


# ---- text ----


def sharding_text(dtensor: DTensor, header: str = "") -> str:
    """The picture as a table per plane: dim ranges at the edges, ranks in the cells."""
    spec = _spec_of(dtensor)
    lines = [header] if header else []
    lines.append(repr(spec))
    for plane in planes(spec):
        lines += [plane.title] if plane.title else []
        lines += _table(spec.ndim, plane)
    return "\n".join([*lines, *_notes(spec)])


def _table(ndim: int, plane: Plane) -> list[str]:
    if ndim == 0:
        return [f" {name_ranks(plane.ranks[0][0])}"]
    corner = f"dim {ndim - 2} \\ {ndim - 1}" if ndim > 1 else "dim 0"
    grid = [[corner, *(column.label for column in plane.columns)]]
    grid += [[row.label, *map(name_ranks, ranks)] for row, ranks in zip(plane.rows, plane.ranks, strict=True)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [" | ".join(map(str.ljust, line, widths)) for line in grid]
    lines = [f" {line}".rstrip() for line in lines]
    return [lines[0], "+".join("-" * (width + 2) for width in widths), *lines[1:]]


# ---- SVG ----

# Pixels. A plane is as large as its tensor's proportions say, and at least as its labels need.
PLANE = 360
FONT, LINE, MARGIN = 12, 20, 16
CHARACTER = 7.3  # of a 12 px monospace font, a little generous


def sharding_svg(dtensor: DTensor, header: str = "") -> str:
    """The picture as an SVG document: cells in proportion, one colour per first rank that holds them."""
    spec = _spec_of(dtensor)
    body: list[str] = []
    width, y = 0.0, float(MARGIN)
    for size, text in ((15, header), (FONT, repr(spec))):
        if text:
            y += LINE
            body.append(_text(MARGIN, y - 5, text, size, "bold" if size > FONT else "normal"))
            width = max(width, len(text) * CHARACTER * size / FONT)
    for plane in planes(spec):
        drawn, plane_width, y = _draw(spec, plane, y + 8)
        body += drawn
        width = max(width, plane_width)
    for note in _notes(spec):
        y += LINE
        body.append(_text(MARGIN, y - 1, note))
        width = max(width, len(note) * CHARACTER)
    total_width, total_height = round(width + 2 * MARGIN), round(y + MARGIN)
    frame = f'width="{total_width}" height="{total_height}" viewBox="0 0 {total_width} {total_height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" font-family="monospace">',
            f"<title>{html.escape(header or repr(spec))}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>",
        ]
    )


def _draw(spec: DTensorSpec, plane: Plane, y: float) -> tuple[list[str], float, float]:
    """(elements, right edge, lower edge) of one plane whose upper edge is at `y`."""
    labels = [[name_ranks(ranks) for ranks in line] for line in plane.ranks]
    needed = [
        max(map(len, (column.label, *texts))) * CHARACTER + 12
        for column, *texts in zip(plane.columns, *labels, strict=True)
    ]
    left = MARGIN + max(len(row.label) for row in plane.rows) * CHARACTER + 8
    widths = _spread(plane.columns, needed, PLANE)
    # Height over width is the tensor's, held within reason.
    aspect = min(1.0, max(0.15, spec.shape[-2] / spec.shape[-1])) if spec.ndim > 1 else 0.1
    heights = _spread(plane.rows, [LINE + 6.0] * len(plane.rows), PLANE * aspect)
    edges = list(itertools.accumulate(widths, initial=left))
    middles = [x + w / 2 for x, w in zip(edges, widths, strict=False)]
    out = []
    if plane.title:
        y += LINE
        out.append(_text(MARGIN, y - 5, plane.title))
    if spec.ndim:
        y += LINE
        for column, middle in zip(plane.columns, middles, strict=True):
            out.append(_text(middle, y - 5, column.label, anchor="middle"))
    for row, ranks_in_row, texts, h in zip(plane.rows, plane.ranks, labels, heights, strict=True):
        base = y + h / 2 + 4
        out.append(_text(left - 6, base, row.label, anchor="end"))
        for i, (ranks, text) in enumerate(zip(ranks_in_row, texts, strict=True)):
            place = f'x="{edges[i]:.1f}" y="{y:.1f}" width="{widths[i]:.1f}" height="{h:.1f}"'
            out.append(f'<rect {place} fill="{_colour(spec, ranks)}" stroke="#333333"/>')
            out.append(_text(middles[i], base, text, anchor="middle"))
        y += h
    return out, edges[-1], y


def _spread(row: Sequence[Segment], needed: Sequence[float], available: float) -> list[float]:
    """Pixels of each segment: its share of `available`, at least what it needs."""
    total = sum(segment.length for segment in row)
    return [max(need, available * s.length / total) for s, need in zip(row, needed, strict=True)]


def _colour(spec: DTensorSpec, ranks: Sequence[int] | None) -> str:
    """A light colour of the first of the ranks; neighbours on the mesh differ clearly."""
    if not ranks:
        return "#f2f2f2"
    place = spec.mesh.mesh.flatten().tolist().index(ranks[0])
    # The golden ratio spreads any number of hues; lightness 82 % keeps black text readable.
    return f"hsl({(place * 0.618034 + 0.55) % 1.0 * 360:.0f}, 70%, 82%)"


def _text(
    x: float, y: float, text: str, size: int = FONT, weight: str = "normal", anchor: str = "start"
) -> str:
    if not text:
        return ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="#111111">{html.escape(text)}</text>'
    )
