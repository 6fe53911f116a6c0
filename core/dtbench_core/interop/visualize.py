"""Pictures of how a DTensor is spread over its mesh: as text, and as SVG.

Mesh dims cut tensor dims one by one, so the shards form a grid: each tensor dim is a row of segments,
and each combination of segments is a cell that one rank, or several replicas, hold. The last two dims
are drawn as a plane; every combination of segments of the dims before them is a plane of its own.
"""

from __future__ import annotations

import colorsys
import html
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import Shard
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
    """`length` elements of a tensor dim from `offset` on. owner: the index on each mesh dim that cuts the
    tensor dim, as (mesh dim, index); None for a stretch that is left out of the picture."""

    offset: int
    length: int
    owner: tuple[tuple[int, int], ...] | None

    def __str__(self) -> str:
        return "..." if self.owner is None else f"{self.offset}:{self.offset + self.length}"


class Plane(NamedTuple):
    """One 2-D picture: the index ranges of the dims before the last two, and the segments of those two."""

    title: str
    outer: tuple[Segment, ...]
    rows: list[Segment]
    columns: list[Segment]


def _spec_of(dtensor: DTensor) -> DTensorSpec:
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"got a {type(dtensor).__name__} to show, expected a DTensor: plain tensors lie on one rank"
        )
    return dtensor._spec


# ---- the layout (pure) ----


def segments(spec: DTensorSpec, dim: int) -> list[Segment]:
    """The segments of tensor dim `dim`, by offset; empty ones come after the ones with elements."""
    runs = [Segment(0, spec.shape[dim], ())]
    held = [(spec.shape[dim], runs)]  # per owner so far: how much it holds, and in which runs
    for mesh_dim, (placement, parts) in enumerate(zip(spec.placements, spec.info.sizes, strict=True)):
        if isinstance(placement, Shard) and placement.dim == dim:
            held = [
                (
                    sum(length for _, length in pieces),
                    [
                        Segment(run.offset, run.length, ((run.owner or ()) + ((mesh_dim, index),)))
                        for run in _within(mine, pieces)
                    ],
                )
                for size, mine in held
                for index in range(parts)
                for pieces in [placement.runs(size, parts, index)]
            ]
    every = [run for _, mine in held for run in mine]
    return sorted(every, key=lambda run: (run.length == 0, run.offset))


def _within(mine: Sequence[Segment], pieces: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """What the (offset, length) `pieces` of the joined runs `mine` are in the global tensor."""
    for offset, length in pieces:
        if length == 0:
            start = mine[0] if mine else Segment(0, 0, ())
            yield Segment(start.offset + min(offset, start.length), 0, start.owner)
            continue
        before = 0
        for run in mine:
            low, high = max(offset, before), min(offset + length, before + run.length)
            if low < high:
                yield Segment(run.offset + low - before, high - low, run.owner)
            before += run.length


def planes(spec: DTensorSpec) -> list[Plane]:
    """The planes of the picture; cells with elements only."""
    per_dim = [_elided([s for s in segments(spec, d) if s.length]) for d in range(spec.ndim)]
    if 0 in spec.shape:
        return []
    whole = [Segment(0, 1, ())]
    rows = per_dim[-2] if spec.ndim > 1 else whole
    columns = per_dim[-1] if spec.ndim else whole
    made = []
    for outer in itertools.product(*per_dim[:-2]):
        title = f"[{', '.join([*map(str, outer), ':', ':'])}]" if outer else ""
        made.append(Plane(title, outer, rows, columns))
    return made


def _elided(row: list[Segment]) -> list[Segment]:
    if len(row) <= MAX_SEGMENTS:
        return row
    first, last = row[:KEPT_FIRST], row[-KEPT_LAST:]
    start = first[-1].offset + first[-1].length
    return [*first, Segment(start, last[0].offset - start, None), *last]


def ranks_of(spec: DTensorSpec, cell: Sequence[Segment]) -> list[int] | None:
    """The ranks that hold the cell where these segments, one per tensor dim, meet; None if left out."""
    fixed: dict[int, int] = {}
    for segment in cell:
        if segment.owner is None:
            return None
        fixed |= dict(segment.owner)
    ranks = spec.mesh.mesh
    index = tuple(fixed.get(d, slice(None)) for d in range(spec.info.ndim))
    return [int(r) for r in ranks[index].flatten().tolist()]


def empty_ranks(spec: DTensorSpec) -> list[int]:
    """The ranks that hold no element."""
    held: set[int] = set()
    if 0 not in spec.shape:
        for cell in itertools.product(
            *([s for s in segments(spec, d) if s.length] for d in range(spec.ndim))
        ):
            held |= set(ranks_of(spec, cell) or ())
    return [r for r in sorted(map(int, spec.mesh.mesh.flatten().tolist())) if r not in held]


def name_ranks(ranks: Sequence[int] | None) -> str:
    """`rank 3`, `ranks 0-3, 8`."""
    if ranks is None:
        return "..."
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _notes(spec: DTensorSpec) -> list[str]:
    notes = []
    if spec.has_partial():
        notes.append("Partial: each of the ranks named together holds a term, not the value")
    if empty := empty_ranks(spec):
        notes.append(f"empty: {name_ranks(empty)}")
    return notes


# ---- text ----


def sharding_text(dtensor: DTensor, header: str = "") -> str:
    """The picture as a table per plane: dim ranges at the edges, ranks in the cells."""
    spec = _spec_of(dtensor)
    parts = [header] if header else []
    parts.append(repr(spec))
    for plane in planes(spec):
        if plane.title:
            parts.append(plane.title)
        parts += _table(spec, plane)
    return "\n".join([*parts, *_notes(spec)])


def _table(spec: DTensorSpec, plane: Plane) -> list[str]:
    if spec.ndim == 0:
        return [f" {name_ranks(ranks_of(spec, ()))}"]
    last = spec.ndim - 1
    top = [f"dim {last - 1} \\ {last}" if last else "dim 0", *map(str, plane.columns)]
    grid = [top]
    for row in plane.rows:
        label = str(row) if spec.ndim > 1 else ""
        grid.append([label, *(name_ranks(ranks_of(spec, _cell(spec, plane, row, c))) for c in plane.columns)])
    widths = [max(len(line[i]) for line in grid) for i in range(len(top))]
    rule = "+".join("-" * (w + 2) for w in widths)
    lines = [" | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) for line in grid]
    return [f" {lines[0]}".rstrip(), rule, *(f" {line}".rstrip() for line in lines[1:])]


def _cell(spec: DTensorSpec, plane: Plane, row: Segment, column: Segment) -> tuple[Segment, ...]:
    return (*plane.outer, row, column)[-spec.ndim :] if spec.ndim else ()


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
        drawn, plane_width, plane_height = _draw(spec, plane, y + 8)
        body += drawn
        width, y = max(width, plane_width), y + 8 + plane_height
    for note in _notes(spec):
        y += LINE
        body.append(_text(MARGIN, y - 1, note, FONT))
        width = max(width, len(note) * CHARACTER)
    total_width, total_height = round(width + 2 * MARGIN), round(y + MARGIN)
    label = html.escape(header or repr(spec))
    frame = f'width="{total_width}" height="{total_height}" viewBox="0 0 {total_width} {total_height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" font-family="monospace">',
            f"<title>{label}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>",
        ]
    )


def _draw(spec: DTensorSpec, plane: Plane, top: float) -> tuple[list[str], float, float]:
    """(elements, width, height) of one plane whose upper edge is at `top`."""
    cells = [
        [ranks_of(spec, _cell(spec, plane, row, column)) for column in plane.columns] for row in plane.rows
    ]
    labels = [[name_ranks(ranks) for ranks in line] for line in cells]
    needed = [
        max(len(text) for text in (*(line[i] for line in labels), str(column))) * CHARACTER + 12
        for i, column in enumerate(plane.columns)
    ]
    row_names = [str(row) if spec.ndim > 1 else "" for row in plane.rows]
    left = MARGIN + max(len(name) for name in row_names) * CHARACTER + 8
    widths = _spread(plane.columns, needed, PLANE)
    heights = _spread(plane.rows, [LINE + 6.0] * len(plane.rows), PLANE * _aspect(spec))
    out, y = [], top
    if plane.title:
        y += LINE
        out.append(_text(MARGIN, y - 5, plane.title, FONT))
    if spec.ndim:
        y += LINE
        x = left
        for column, w in zip(plane.columns, widths, strict=True):
            out.append(_text(x + w / 2, y - 5, str(column), FONT, anchor="middle"))
            x += w
    for name, ranks_in_row, texts, h in zip(row_names, cells, labels, heights, strict=True):
        out.append(_text(left - 6, y + h / 2 + 4, name, FONT, anchor="end"))
        x = left
        for ranks, text, w in zip(ranks_in_row, texts, widths, strict=True):
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{_colour(spec, ranks)}" '
                'stroke="#333333"/>'
            )
            out.append(_text(x + w / 2, y + h / 2 + 4, text, FONT, anchor="middle"))
            x += w
        y += h
    return out, left + sum(widths), y - top


def _spread(row: Sequence[Segment], needed: Sequence[float], available: float) -> list[float]:
    """Pixels of each segment: its share of `available`, at least what it needs."""
    total = sum(segment.length for segment in row)
    return [max(need, available * s.length / total) for s, need in zip(row, needed, strict=True)]


def _aspect(spec: DTensorSpec) -> float:
    """Height over width of a plane, held within reason."""
    if spec.ndim < 2:
        return 0.1
    return min(1.0, max(0.15, spec.shape[-2] / spec.shape[-1]))


def _colour(spec: DTensorSpec, ranks: Sequence[int] | None) -> str:
    """A light colour of the first of the ranks; neighbours on the mesh differ clearly."""
    if not ranks:
        return "#f2f2f2"
    place = spec.mesh.mesh.flatten().tolist().index(ranks[0])
    # The golden ratio spreads any number of hues; lightness 0.82 keeps black text readable.
    red, green, blue = colorsys.hls_to_rgb((place * 0.618034 + 0.55) % 1.0, 0.82, 0.7)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", anchor: str = "start") -> str:
    if not text:
        return ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="#111111">{html.escape(text)}</text>'
    )
