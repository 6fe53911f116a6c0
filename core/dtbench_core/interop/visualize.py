"""Drawings of a DTensor's shards on its mesh, as text and as SVG.

Mesh dims shard tensor dims independently, so the shards form a grid. Each tensor dim is a row of segments, and each
combination of segments is a cell, held by one rank or by several replicas. The last two dims are drawn as a plane,
once for every combination of segments of the dims before them.
"""

from __future__ import annotations

import html
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtbench_core.errors import ArgumentError, describe_ranks
from dtbench_core.layout.placement import local_extents, runs_of_rank
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.tensor.dtensor import DTensor


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Prints which rank holds which part of `dtensor`, only on the first rank of its mesh.

    Args:
        header: a line printed first.
        use_rich: accepted for compatibility; the text is plain in either case.
    """
    coordinate = _spec_of(dtensor).info.coordinate
    if coordinate is not None and not any(coordinate):
        sys.stdout.write(sharding_text(dtensor, header) + "\n")


class Segment(NamedTuple):
    """Consecutive elements of one tensor dim.

    Attributes:
        label: the range of elements.
        length: the number of elements.
        owner: (mesh dim, index) of the segment on each mesh dim that shards the tensor dim.
    """

    label: str
    length: int
    owner: tuple[tuple[int, int], ...]


class Plane(NamedTuple):
    """A 2-D drawing of the last two dims.

    Attributes:
        title: the segments of the other dims.
        rows: the segments of the second to last dim.
        columns: the segments of the last dim.
        ranks: the ranks that hold each cell, by row and column.
    """

    title: str
    rows: list[Segment]
    columns: list[Segment]
    ranks: list[list[list[int]]]


def _spec_of(dtensor: DTensor) -> DTensorSpec:
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"got a {type(dtensor).__name__} to show, expected a DTensor: a plain tensor is on one rank only"
        )
    return dtensor._spec


def _segments(spec: DTensorSpec, dim: int) -> list[Segment]:
    """Returns the nonempty segments of tensor dim `dim`, by offset."""
    info = spec.info
    sharding_dims = [d for d, p in enumerate(spec.placements) if p.is_shard(dim)]
    runs = []
    for index in itertools.product(*(range(info.sizes[d]) for d in sharding_dims)):
        owner = tuple(zip(sharding_dims, index, strict=True))
        for offset, length in runs_of_rank(
            spec.shape[dim],
            dim,
            spec.placements,
            info.sizes,
            tuple(dict(owner).get(d, 0) for d in range(info.ndim)),
        ):
            runs.append((offset, length, owner))
    return [Segment(f"{offset}:{offset + n}", n, owner) for offset, n, owner in sorted(runs) if n]


def planes(spec: DTensorSpec) -> Iterator[Plane]:
    """Yields the planes of the drawing; none for a tensor without elements."""
    if 0 in spec.shape:
        return
    missing_dim = [[Segment("", 1, ())]]  # replaces the dims that a scalar or a vector lacks
    *outer, rows, columns = missing_dim * (2 - spec.ndim) + [_segments(spec, d) for d in range(spec.ndim)]
    for outer_cell in itertools.product(*outer):
        yield Plane(
            f"[{', '.join([*(segment.label for segment in outer_cell), ':', ':'])}]" if outer_cell else "",
            rows,
            columns,
            [[_ranks_of(spec, (*outer_cell, row, column)) for column in columns] for row in rows],
        )


def _ranks_of(spec: DTensorSpec, cell: Sequence[Segment]) -> list[int]:
    """Returns the ranks that hold the cell at the intersection of these segments."""
    index_of_dim = dict(pair for segment in cell for pair in segment.owner)
    index = tuple(index_of_dim.get(d, slice(None)) for d in range(spec.info.ndim))
    return spec.mesh.mesh[index].flatten().tolist()


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks, e.g. `rank 3` or `ranks 0-3, 8`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {describe_ranks(ranks).replace(',', ', ')}"


def _notes(spec: DTensorSpec) -> list[str]:
    notes = ["Partial: each rank of a cell holds a term, not the value"] if spec.has_partial() else []
    sizes = spec.info.sizes
    empty = [
        rank
        for rank, coordinate in zip(
            spec.mesh.mesh.flatten().tolist(), itertools.product(*map(range, sizes)), strict=True
        )
        if 0 in local_extents(spec.shape, spec.placements, sizes, coordinate)[0]
    ]
    return [*notes, f"empty: {name_ranks(empty)}"] if empty else notes


def sharding_text(dtensor: DTensor, header: str = "") -> str:
    """Returns the drawing as a table per plane, with dim ranges at the edges and ranks in the cells."""
    spec = _spec_of(dtensor)
    lines = [line for line in (header, repr(spec)) if line]
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
    lines = [f" {' | '.join(map(str.ljust, line, widths))}".rstrip() for line in grid]
    return [lines[0], "+".join("-" * (width + 2) for width in widths), *lines[1:]]


# Pixels of the SVG. A plane has the proportions of its tensor, and is at least as large as its labels.
PLANE = 360
FONT, LINE, MARGIN = 12, 20, 16
CHARACTER = 7.3  # width in a 12 px monospace font, rounded up


class _Drawing:
    """Text lines and planes, one below the other.

    Attributes:
        width: the width used so far, pixels.
        y: the height used so far, pixels.
    """

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec, self.body = spec, list[str]()
        self.width, self.y = 0.0, float(MARGIN)

    def line(self, text: str, size: int = FONT) -> None:
        if text:
            self.y += LINE
            self.text(MARGIN, self.y - 5, text, size)
            self.width = max(self.width, len(text) * CHARACTER * size / FONT)

    def text(self, x: float, y: float, text: str, size: int = FONT, anchor: str = "start") -> None:
        weight = "bold" if size > FONT else "normal"
        self.body.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
            f'fill="#111111">{html.escape(text)}</text>'
        )

    def plane(self, plane: Plane) -> None:
        labels = [[name_ranks(ranks) for ranks in line] for line in plane.ranks]
        minimum_sizes = [
            max(map(len, (column.label, *texts))) * CHARACTER + 12
            for column, *texts in zip(plane.columns, *labels, strict=True)
        ]
        shape = self.spec.shape
        # The aspect ratio is that of the tensor, within limits.
        aspect = min(1.0, max(0.15, shape[-2] / shape[-1])) if len(shape) > 1 else 0.1
        widths = _segment_sizes(plane.columns, minimum_sizes, PLANE)
        heights = _segment_sizes(plane.rows, [LINE + 6.0] * len(plane.rows), PLANE * aspect)
        x_start = MARGIN + max(len(row.label) for row in plane.rows) * CHARACTER + 8
        edges = list(itertools.accumulate(widths, initial=x_start))
        self.y += 8
        self.line(plane.title)
        if shape:
            self.y += LINE
            for column, edge, width in zip(plane.columns, edges, widths, strict=False):
                self.text(edge + width / 2, self.y - 5, column.label, anchor="middle")
        for row, ranks_in_row, texts, height in zip(plane.rows, plane.ranks, labels, heights, strict=True):
            base = self.y + height / 2 + 4
            if row.label:
                self.text(x_start - 6, base, row.label, anchor="end")
            for edge, width, ranks, text in zip(edges, widths, ranks_in_row, texts, strict=False):
                box = f'x="{edge:.1f}" y="{self.y:.1f}" width="{width:.1f}" height="{height:.1f}"'
                self.body.append(f'<rect {box} fill="{self._colour(ranks)}" stroke="#333333"/>')
                self.text(edge + width / 2, base, text, anchor="middle")
            self.y += height
        self.width = max(self.width, edges[-1])

    def _colour(self, ranks: Sequence[int]) -> str:
        """Returns a light colour for the first of the ranks; ranks that are neighbours on the mesh differ clearly."""
        position = self.spec.mesh.mesh.flatten().tolist().index(ranks[0])
        # Steps of the golden ratio distribute any number of hues evenly; black text is readable at lightness 82 %.
        return f"hsl({(position * 0.618034 + 0.55) % 1.0 * 360:.0f}, 70%, 82%)"


def sharding_svg(dtensor: DTensor, header: str = "") -> str:
    """Returns the drawing as an SVG document; cells are in proportion to their sizes.

    The colour of a cell is that of the first rank that holds it.
    """
    spec = _spec_of(dtensor)
    drawing = _Drawing(spec)
    drawing.line(header, 15)
    drawing.line(repr(spec))
    for plane in planes(spec):
        drawing.plane(plane)
    for note in _notes(spec):
        drawing.line(note)
    width, height = round(drawing.width + 2 * MARGIN), round(drawing.y + MARGIN)
    frame = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" font-family="monospace">',
            f"<title>{html.escape(header or repr(spec))}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *drawing.body,
            "</svg>",
        ]
    )


def _segment_sizes(row: Sequence[Segment], minimum_sizes: Sequence[float], available: float) -> list[float]:
    """Returns the pixels of each segment: its share of `available`, but not less than its minimum."""
    total = sum(segment.length for segment in row)
    return [max(size, available * s.length / total) for s, size in zip(row, minimum_sizes, strict=True)]
