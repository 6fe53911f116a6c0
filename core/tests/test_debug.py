"""Debugging aids: pictures of shardings, the stage timer of dispatch, and checks that ranks agree."""

import contextlib
import io
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtbench_core as dt
from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    ArgumentError,
    DTensor,
    Partial,
    RanksDifferError,
    Replicate,
    Shard,
    check_ranks,
    sharding_svg,
    sharding_text,
    visualize_sharding,
    zeros,
)
from dtbench_core.dispatch.op_plan import DIRECT_KINDS, Moving
from dtbench_core.interop import stopwatch

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
def test_text_of_a_sharding(name: str) -> None:
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
    root = ElementTree.fromstring(
        sharding_svg(zeros(shape, device_mesh=mesh_of(mesh), placements=placements), header)
    )
    assert header in [t.text for t in root.iter(f"{NAMESPACE}text")], "shown as it is, not as markup"
    assert not list(root.iter(f"{NAMESPACE}script"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{NAMESPACE}rect"):
        if rect.get("stroke"):
            assert 0 <= float(rect.get("x", -1)) <= width - float(rect.get("width", 0))
            assert 0 <= float(rect.get("y", -1)) <= height - float(rect.get("height", 0))


def test_only_dtensors_are_drawn() -> None:
    with pytest.raises(ArgumentError, match="got a Tensor to show, expected a DTensor"):
        sharding_text(torch.ones(2))


# ---- stage timer ----


@pytest.fixture
def mesh(fake_world: Any) -> DeviceMesh:
    fake_world(8)
    return init_device_mesh("cpu", (8,))


def opened(log: stopwatch.Log) -> list[str]:
    """Returns the names of the stages in the order of their start."""
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert len(pairs) % 2 == 0
    return [stopwatch.NAMES[first] for first, second in pairs if second != stopwatch.END]


def everything() -> dict[Any, Any]:
    """Returns all attributes of the modules and classes of the core."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "dtbench_core"]
    held = {(m.__name__, name): value for m in modules for name, value in vars(m).items()}
    for cls in (dt.DTensor, Moving, *DIRECT_KINDS):
        held |= {(cls.__name__, name): value for name, value in vars(cls).items()}
    return held


def test_stage_timer_records_each_stage_of_a_cached_call_once(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 4), mesh, [dt.Shard(0)])
    for _ in range(3):
        torch.add(x, x)
    with stopwatch.StageTimer() as log:
        result = torch.add(x, x)
    seen = [name for name in opened(log) if name != stopwatch.BOOKKEEPING]
    assert seen == ["glue", "checks", "checks", "key", "cache", "local op", "wrap"]
    assert torch.equal(result.to_local(), torch.full((2, 4), 2.0))


def test_stage_timer_records_communication_and_backward(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 24), mesh, [dt.Shard(0)])
    y = dt.DTensor.from_local(torch.ones(16, 3), mesh, [dt.Shard(1)]).requires_grad_()
    with stopwatch.StageTimer() as log:
        torch.autograd.grad(torch.mul(x, y).sum(), y)
    assert set(stopwatch.NAMES) <= {*opened(log), "entry"}


def test_stage_timer_restores_everything_after_an_error(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 4), mesh, [dt.Shard(0)])
    torch.add(x, x)
    watch, before = stopwatch.StageTimer(), everything()
    for _ in range(2):
        with pytest.raises(dt.errors.MixedTensorError), watch as log:
            torch.add(x, torch.ones(16, 4))
        assert opened(log)  # every bracket is closed
        after = everything()
        assert after.keys() == before.keys()
        assert [key for key, value in before.items() if after[key] is not value] == []


# ---- checks that ranks agree ----


CASES = ("rows", "placements", "part", "op", "redistribute", "full_tensor", "dtype")


def error_of_ranks_that_differ(how: str) -> str:
    """Runs an op on two ranks, of which rank 1 differs in one way; returns the message of the error."""
    mesh = mesh_of((2,))
    other = dist.get_rank() == 1
    dtype = torch.float64 if how == "dtype" and other else torch.float32
    part = torch.ones(2 if how in ("rows", "full_tensor") and other else 4, 8, dtype=dtype)
    x = DTensor.from_local(part, mesh, [Shard(1 if how == "placements" and other else 0)])
    if how == "part" and other:
        x._local_tensor = torch.ones(3, 8)
    with pytest.raises(RanksDifferError) as error, check_ranks():
        if how == "redistribute":
            x.redistribute(mesh, [Replicate() if other else Shard(1)])
        elif how == "full_tensor":
            x.full_tensor()
        else:
            _ = x * 2 if how == "op" and other else x + x
    return str(error.value)


@pytest.mark.parametrize("how", CASES)
def test_ranks_that_differ_raise_alike(ranks: ThreadWorlds, how: str) -> None:
    message, other = ranks(error_of_ranks_that_differ, how, world_size=2)
    op = {"redistribute": "redistribute to", "full_tensor": "full_tensor", "op": "aten.mul"}.get(
        how, "aten.add"
    )
    assert message == other and all(
        part in message for part in ("rank 0 has", "rank 1 has", "float32", op)
    ), message
