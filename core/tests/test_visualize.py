"""The pictures of shardings: what they say of every layout, and that they are well formed."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import mesh_of, on_ranks
from dtbench_core import (
    ArgumentError,
    DTensor,
    Partial,
    Replicate,
    Shard,
    sharding_svg,
    sharding_text,
    visualize_sharding,
    zeros,
)

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
NAMESPACE = "{http://www.w3.org/2000/svg}"

LAYOUTS: dict[str, tuple[Any, str]] = {
    "uneven": (
        ((5, 3), (4,), [S0]),
        """\
uneven
float32[5, 3] S(0) on 4 cpu mesh
 dim 0 \\ 1 | 0:3
-----------+--------
 0:2       | rank 0
 2:4       | rank 1
 4:5       | rank 2
empty: rank 3
""",
    ),
    "nested": (
        ((7,), (2, 2), [S0, S0]),
        """\
nested
float32[7] S(0),S(0) on 2x2 cpu mesh
 dim 0 | 0:2    | 2:4    | 4:6    | 6:7
-------+--------+--------+--------+--------
       | rank 0 | rank 1 | rank 2 | rank 3
""",
    ),
    "replicas": (
        ((8, 16), (2, 2), [R, S1]),
        """\
replicas
float32[8, 16] R,S(1) on 2x2 cpu mesh
 dim 0 \\ 1 | 0:8        | 8:16
-----------+------------+------------
 0:8       | ranks 0, 2 | ranks 1, 3
""",
    ),
    "three dims": (
        ((3, 2, 4), (2, 2), [S0, S2]),
        """\
three dims
float32[3, 2, 4] S(0),S(2) on 2x2 cpu mesh
[0:2, :, :]
 dim 1 \\ 2 | 0:2    | 2:4
-----------+--------+--------
 0:2       | rank 0 | rank 1
[2:3, :, :]
 dim 1 \\ 2 | 0:2    | 2:4
-----------+--------+--------
 0:2       | rank 2 | rank 3
""",
    ),
    "scalar": (((), (4,), [R]), "scalar\nfloat32[] R on 4 cpu mesh\n ranks 0-3\n"),
    "nothing": (((0, 3), (4,), [S0]), "nothing\nfloat32[0, 3] S(0) on 4 cpu mesh\nempty: ranks 0-3\n"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks
def test_text(name: str) -> None:
    (shape, mesh, placements), text = LAYOUTS[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(zeros(shape, device_mesh=mesh_of(mesh), placements=placements), header=name)
    assert out.getvalue() == ("" if dist.get_rank() else text), "the first rank of the mesh prints"


@on_ranks
def test_svg_draws_cells_in_proportion() -> None:
    root = ElementTree.fromstring(sharding_svg(zeros((7, 4), device_mesh=mesh_of((4,)), placements=[S0])))
    cells = [r for r in root.iter(f"{NAMESPACE}rect") if r.get("stroke")]
    heights = [float(c.get("height", 0)) for c in cells]
    assert len(cells) == 4 and len({c.get("fill") for c in cells}) == 4
    assert heights[0] == heights[1] == heights[2] == pytest.approx(2 * heights[3], abs=0.2)
    texts = {t.text for t in root.iter(f"{NAMESPACE}text")}
    assert {"0:2", "2:4", "4:6", "6:7", "0:4", *(f"rank {i}" for i in range(4))} <= texts
    pending = DTensor.from_local(torch.ones(3), mesh_of((4,)), [P])
    for text in (sharding_text(pending), sharding_svg(pending)):
        assert "ranks 0-3" in text and "holds a term, not the value" in text


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks
def test_svg_is_well_formed_and_within_its_frame(name: str) -> None:
    shape, mesh, placements = LAYOUTS[name][0]
    header = "<script>alert('&\"')</script>"
    tensor = zeros(shape, device_mesh=mesh_of(mesh), placements=placements)
    root = ElementTree.fromstring(sharding_svg(tensor, header))
    texts = [t.text for t in root.iter(f"{NAMESPACE}text")]
    assert header in texts, "shown as it is, not as markup"
    assert not list(root.iter(f"{NAMESPACE}script"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{NAMESPACE}rect"):
        if rect.get("stroke"):
            assert 0 <= float(rect.get("x", -1)) <= width - float(rect.get("width", 0))
            assert 0 <= float(rect.get("y", -1)) <= height - float(rect.get("height", 0))


def test_only_dtensors_are_drawn() -> None:
    with pytest.raises(ArgumentError, match="got a Tensor to show, expected a DTensor"):
        sharding_text(torch.ones(2))
