"""DTensors copied, pickled, saved and loaded, alone and in modules; checkpoints that reshard."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from core.tests.local_world import ThreadWorlds
from core.tests.placing import sharded
from dtbench_core import (
    CoreError,
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Layout = tuple[tuple[int, ...], list[Placement]]
LAYOUTS: list[Layout] = [
    ((4,), [S0]),
    ((4,), [S1]),
    ((4,), [R]),
    ((2, 2), [S0, S1]),
    ((2, 2), [S1, R]),
    ((2, 2), [S0, S0]),
]


def _tensor(layout: Layout, shape: tuple[int, ...] = (5, 3)) -> DTensor:
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return distribute_tensor(full, mesh_of(layout[0]), layout[1])


def _same(a: DTensor, b: DTensor) -> bool:
    """Equal, and neither shares memory with the other."""
    one, other = a.to_local(), b.to_local()
    apart = one.numel() == 0 or one.data_ptr() != other.data_ptr()
    return a._spec is b._spec and type(a) is type(b) and bool((one == other).all()) and apart


# ---- copies ----


@on_ranks
def test_copies_are_equal_and_apart() -> None:
    for layout in LAYOUTS:
        tensor = _tensor(layout)
        saved = io.BytesIO()
        torch.save({"x": [tensor]}, saved)
        saved.seek(0)
        assert _same(copy.deepcopy(tensor), tensor)
        assert _same(pickle.loads(pickle.dumps(tensor)), tensor)
        assert _same(torch.load(saved, weights_only=True)["x"][0], tensor)
        saved.seek(0)
        assert _same(torch.load(saved, weights_only=False)["x"][0], tensor)


@on_ranks
def test_a_mesh_is_found_again_beside_an_equal_one_of_other_groups() -> None:
    """Each has its own process groups: what is loaded lies on those that it was saved on."""
    first, second = (init_device_mesh("cpu", (2, 2)) for _ in range(2))
    one, other = (
        distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [S0, S1]) for mesh in (first, second)
    )
    assert _same(pickle.loads(pickle.dumps(one)), one) and _same(pickle.loads(pickle.dumps(other)), other)
    assert one._spec is not other._spec


@on_ranks
def test_parameters_stay_parameters() -> None:
    parameter = nn.Parameter(_tensor(LAYOUTS[0]))
    (parameter * 2).redistribute(placements=[R]).sum().backward()
    twice = copy.deepcopy([parameter, parameter])
    loaded = pickle.loads(pickle.dumps(parameter))
    frozen = copy.deepcopy(nn.Parameter(_tensor(LAYOUTS[0]), requires_grad=False))
    assert parameter.grad is not None and twice[0].grad is None, "as the copy of a plain parameter"
    assert all(isinstance(t, nn.Parameter) and isinstance(t, DTensor) for t in (*twice, loaded, frozen))
    assert all(t.is_leaf and t.requires_grad for t in (*twice, loaded)) and not frozen.requires_grad, "leaf"
    assert twice[0] is twice[1], "one"
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(parameter * 2)
    assert _same(loaded, parameter) and _same(twice[0], parameter), "equal"


@on_ranks
@pytest.mark.parametrize("leaf", [True, False])
def test_data_of_what_from_local_made_counts_its_writes_apart(leaf: bool) -> None:
    """They count for the plain tensor, too, but by no other way."""
    source = _tensor(LAYOUTS[0], (4, 2)).double()
    plain = source.to_local().clone().requires_grad_()
    x = DTensor.from_local(plain if leaf else plain * 1, source.device_mesh, source.placements)
    y, of_view = x**2, x[:, :1] ** 3
    x.data.mul_(2)
    x[:, :1].data.add_(1)
    (y.sum() + of_view.sum()).backward()
    with torch.no_grad():  # both saved what x holds since
        wanted = 2 * x
        wanted[:, :1].add_(3 * x[:, :1] ** 2)
    assert plain.grad is not None and torch.equal(plain.grad, wanted.to_local())
    z = x * x
    with torch.no_grad():
        x.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        z.sum().backward()


@on_ranks
def test_data_may_be_read_and_assigned() -> None:
    tensor, other = _tensor(LAYOUTS[0]), _tensor(LAYOUTS[3], (4, 2)).double()
    leaf = tensor.requires_grad_()
    shared = leaf.data
    shared.add_(1)
    leaf.data = other
    assert not shared.requires_grad and float(shared.sum().full_tensor()) == sum(range(15)) + 15
    assert leaf._spec is other._spec and leaf.dtype == torch.float64 and tuple(leaf.size()) == (4, 2)
    assert float((leaf * 1).detach().sum().full_tensor()) == sum(range(8)) and leaf.requires_grad
    with pytest.raises(CoreError, match="expected a DTensor"):
        leaf.data = torch.ones(4, 2)


@on_ranks
def test_a_copy_of_a_window_may_be_written() -> None:
    window = _tensor(LAYOUTS[0])[:1]  # gathered before it was cut: not to be written to
    assert copy.deepcopy(window).fill_(1).full_tensor().flatten().tolist() == [1.0] * 3


def _save(path: str) -> None:
    torch.save(_tensor(LAYOUTS[0]), f"{path}/{dist.get_rank()}.pt")


def _load_the_neighbours(path: str) -> None:
    torch.load(f"{path}/{3 - dist.get_rank()}.pt")


def test_a_part_is_loaded_by_its_rank_alone(ranks: ThreadWorlds, tmp_path: Path) -> None:
    ranks(_save, str(tmp_path))
    # Rows 2, 2, 1, 0 over the ranks: no rank's mirror image holds as many.
    message = "every rank loads the part that it saved itself"
    ranks.refuse(_load_the_neighbours, str(tmp_path), message=message, error=LayoutError)
    with pytest.raises(MeshError, match="no process group, expected the world that saved it"):
        torch.load(tmp_path / "0.pt")


# ---- modules ----


def _sharded_module() -> nn.Module:
    torch.manual_seed(3)
    return sharded(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)))


@on_ranks
def test_modules_load_states_in_place_and_by_assignment() -> None:
    module, twin = _sharded_module(), _sharded_module()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    state = copy.deepcopy(module.state_dict())
    before = dict(twin.named_parameters())
    twin.load_state_dict(state)
    assert all(before[name] is parameter for name, parameter in twin.named_parameters())
    assert all(_same(a, b) for a, b in zip(twin.parameters(), module.parameters(), strict=True))  # type: ignore[arg-type]
    twin.load_state_dict(state, assign=True)
    assert all(
        p.to_local().data_ptr() == state[name].to_local().data_ptr() and p.requires_grad  # type: ignore[operator]
        for name, p in twin.named_parameters()
    )


# ---- torch.distributed.checkpoint ----


@pytest.mark.parametrize("shape", [(5, 3), (8, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
@on_ranks
def test_checkpoints_reshard(tmp_path: Path, saved: Layout, shape: tuple[int, ...]) -> None:
    """Saves one layout and loads it into every other."""
    dcp.save({"x": _tensor(saved, shape), "step": 7}, checkpoint_id=tmp_path)
    for layout in LAYOUTS:
        target = _tensor(layout, shape)
        with torch.no_grad():
            target.fill_(-1)
        state: dict[str, Any] = {"x": target, "step": 0}
        dcp.load(state, checkpoint_id=tmp_path)
        assert state["step"] == 7 and _same(state["x"], _tensor(layout, shape)), layout


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
@on_gloo_ranks
def test_asynchronous_checkpoints(tmp_path: Path, layout: Layout) -> None:
    """What was saved is what the tensor held then, though it is changed before the file is written; a plain tensor
    loads it."""
    tensor = _tensor(layout)
    saving = dcp.async_save({"x": tensor}, checkpoint_id=tmp_path)
    with torch.no_grad():
        tensor.fill_(-1)
    saving.result()
    state = {"x": torch.zeros(5, 3)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["x"].flatten().tolist() == [float(i) for i in range(15)]


def _checkpoint_of_terms(path: str) -> None:
    dcp.save({"x": DTensor.from_local(torch.ones(3), mesh_of((4,)), [Partial()])}, checkpoint_id=path)


def test_a_partial_cannot_be_saved(ranks: ThreadWorlds, tmp_path: Path) -> None:
    message = "expected Shard or Replicate: redistribute it first"
    ranks.refuse(_checkpoint_of_terms, str(tmp_path), message=message)
