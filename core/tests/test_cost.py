"""The cost model against hand-computed values and against torch's own functions on the same meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from hypothesis import given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _collective_utils as torch_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec as TorchSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TorchMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests.priced import CHANGES, SHAPE, P, R, dp_tp, spec
from dtbench_core.cost import mesh_topology
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.mesh_topology import MeshTopoInfo
from dtbench_core.cost.redistribution import (
    ChainSearch,
    local_gib,
    one_step_redistribute_cost,
    redistribute_cost,
    spec_to_bytes,
    transition_cost,
)
from dtbench_core.cost.ring import GIB
from dtbench_core.layout.placement import Partial, Placement, Replicate, Shard
from dtbench_core.layout.spec import DTensorSpec


@pytest.fixture(autouse=True)
def fake_world() -> Iterator[None]:
    """Of 8 ranks, with the built-in constants."""

    def forget() -> None:
        MeshTopoInfo.build_from_mesh.cache_clear()
        torch_cost.MeshTopoInfo.build_from_mesh.cache_clear()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    forget()
    yield
    mesh_topology.use_topology(None)
    forget()
    dist.destroy_process_group()


def torch_spec(mesh: DeviceMesh, *placements: Placement, dtype: torch.dtype = torch.float32) -> TorchSpec:
    kinds = {Replicate: lambda p: torch_tensor.Replicate(), Shard: lambda p: torch_tensor.Shard(p.dim)}
    theirs = tuple(kinds.get(type(p), lambda p: torch_tensor.Partial(p.reduce_op))(p) for p in placements)
    return TorchSpec(mesh, theirs, TorchMeta(torch.Size(SHAPE), torch.empty(SHAPE).stride(), dtype))


# --- the built-in constants ------------------------------------------------------------------------


@pytest.mark.parametrize("per_host", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (8, 1)])
def test_builtin_constants_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], per_host: int
) -> None:
    monkeypatch.setattr(torch.cpu, "device_count", lambda: per_host)
    mesh = init_device_mesh("cpu", shape)
    ours, theirs = MeshTopoInfo.build_from_mesh(mesh), torch_cost.MeshTopoInfo.build_from_mesh(mesh)
    assert list(ours.mesh_dim_devices) == theirs.mesh_dim_devices
    assert list(ours.mesh_dim_bandwidth) == theirs.mesh_dim_bandwidth
    assert list(ours.mesh_dim_latency) == theirs.mesh_dim_latency
    assert (ours.base_latency_us, ours.source) == (6.6, "built-in")


# --- collectives -----------------------------------------------------------------------------------


# --- redistribution --------------------------------------------------------------------------------

PAIRS = list(itertools.product([R, P, Shard(0), Shard(1)], repeat=2))


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_redistribution_on_one_dim_equals_torch(src: Placement, dst: Placement, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (8,))
    ours = redistribute_cost(spec(mesh, src, dtype=dtype), spec(mesh, dst, dtype=dtype))
    theirs = torch_cost.redistribute_cost(
        torch_spec(mesh, src, dtype=dtype), torch_spec(mesh, dst, dtype=dtype)
    )
    assert ours == pytest.approx(theirs, rel=1e-12)
    local = spec_to_bytes(spec(mesh, src, dtype=dtype)) / (8 if src.is_shard() else 1) / GIB
    assert ours == transition_cost(src, dst, local, mesh_topology.topology_of(mesh), 0)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize(("changed", "other"), [(0, R), (1, R), (0, P), (1, P), (0, Shard(2)), (1, Shard(2))])
def test_redistribution_of_one_of_two_dims_equals_torch(
    src: Placement, dst: Placement, changed: int, other: Placement
) -> None:
    mesh = dp_tp()
    before, after = ([src, other], [dst, other]) if changed == 0 else ([other, src], [other, dst])
    ours = redistribute_cost(spec(mesh, *before), spec(mesh, *after))
    if src.is_shard() and dst.is_partial():
        assert ours == math.inf  # torch prices some of these as a detour through Replicate
        return
    theirs = torch_cost.redistribute_cost(torch_spec(mesh, *before), torch_spec(mesh, *after))
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_no_way_and_no_cost() -> None:
    mesh, line = dp_tp(), init_device_mesh("cpu", (8,))
    assert redistribute_cost(spec(mesh, R, Shard(0)), spec(mesh, R, P)) == math.inf
    assert redistribute_cost(spec(mesh, P, R), spec(mesh, Partial("max"), R)) == math.inf
    assert redistribute_cost(spec(line, R), spec(mesh["tp"], R)) == math.inf
    assert redistribute_cost(spec(mesh, Shard(0), P), spec(mesh, Shard(0), P)) == 0.0
    assert redistribute_cost(spec(mesh, R, R), spec(mesh, Shard(0), P)) == 0.0


def test_an_exchange_never_costs_more_than_gathering_and_cutting() -> None:
    """PyTorch's surcharge makes it so for small tensors, of which the planner then gathers everything."""
    mesh = init_device_mesh("cpu", (8,))
    small = [DTensorSpec.of(mesh, (p,), (8, 8), (8, 1), torch.float32) for p in (Shard(0), R, Shard(1))]
    there, all_of_it, back = small
    exchanged = redistribute_cost(there, back)
    assert exchanged == redistribute_cost(there, all_of_it) + redistribute_cost(all_of_it, back)
    meta = TorchMeta(torch.Size((8, 8)), (8, 1), torch.float32)
    kinds = [TorchSpec(mesh, (p,), meta) for p in (torch_tensor.Shard(0), torch_tensor.Shard(1))]
    assert exchanged < torch_cost.redistribute_cost(*kinds)


def test_the_price_of_one_step() -> None:
    mesh = dp_tp()
    one = one_step_redistribute_cost
    for src, dst in PAIRS:
        pair = spec(mesh, Shard(2), src), spec(mesh, Shard(2), dst)
        if src.is_shard() or not dst.is_partial():
            assert one(*pair) == redistribute_cost(*pair)
    assert one(spec(mesh, Shard(0), Shard(0)), spec(mesh, R, Shard(0))) == math.inf
    assert one(spec(mesh, R, Shard(0)), spec(mesh, Shard(0), Shard(0))) == math.inf
    assert one(spec(mesh, R, R), spec(mesh["tp"], R)) == math.inf
    with pytest.raises(ValueError, match=r"differ on the mesh dims \[0, 1\], expected one"):
        one(spec(mesh, R, R), spec(mesh, Shard(0), Shard(1)))


# --- prices are distances --------------------------------------------------------------------------

TABLES = st.tuples(*[st.floats(0.1, 500.0)] * 3).map(sorted)
CURVES = st.fixed_dictionaries(
    {name: TABLES.map(lambda us: Curve((256, 2**14, 2**20), tuple(us))) for name in CHANGES}
)
SIZES = st.sampled_from([(2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (1, 4), (2, 2, 2), (2, 3, 2)])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MeshTopoInfo, tuple[int, ...], list[tuple[Placement, ...]]]:
    """Constants of a mesh, a tensor's shape, and two ways of placing it; the first may be pending."""
    sizes = draw(SIZES)
    n = len(sizes)
    bandwidth = draw(st.tuples(*[st.sampled_from([0.5, 20.0, 87.7])] * n))
    latency = draw(st.tuples(*[st.sampled_from([0.0, 0.6, 40.0])] * n))
    shape = draw(st.lists(st.sampled_from([1, 3, 8, 24, 4096]), min_size=1, max_size=3))
    plain = [R, *(Shard(d) for d in range(len(shape)))]
    pending = draw(st.sampled_from([P, Partial("avg"), Partial("max")]))
    first = draw(st.tuples(*[st.sampled_from([*plain, pending])] * n))
    second = draw(st.tuples(*[st.sampled_from(plain)] * n))
    base = draw(st.sampled_from([0.0, 6.6, 300.0]))
    curves = tuple(draw(CURVES) for _ in sizes) if draw(st.booleans()) else ()
    topo = MeshTopoInfo(None, sizes, bandwidth, latency, base, "test", curves)
    return topo, tuple(shape), [first, second]


def price(topo: MeshTopoInfo, shape: Any, src: Any, dst: Any, **how: Any) -> float:
    chain = ChainSearch(shape, 4, src, dst, topo, **how).cheapest()
    return sum(step.us for step in chain)


def brute_force(topo: MeshTopoInfo, shape: Any, src: Any, dst: Any, copy_us: float) -> float:
    """The least sum over all chains of one-dim transitions: relaxed until nothing improves."""
    sizes = topo.mesh_dim_devices
    kinds = [R, *(Shard(d) for d in range(len(shape))), *(p for p in src if p.is_partial())]
    states = list(itertools.product(dict.fromkeys(kinds), repeat=len(sizes)))
    edges = []
    for state in states:
        held = local_gib(shape, 4, state, sizes)
        for dim, kind in itertools.product(range(len(sizes)), dict.fromkeys(kinds)):
            inner = [p.dim for p in state[dim + 1 :] if isinstance(p, Shard)]
            nested = any(isinstance(p, Shard) and p.dim in inner for p in (state[dim], kind))
            extremum = state[dim].is_partial("max") and kind.is_shard()
            if kind == state[dim] or kind.is_partial() or nested or extremum:
                continue
            us = copy_us
            if state[dim].is_replicate():
                if topo.mesh_dim_curves:
                    us = topo.mesh_dim_curves[dim][f"R->S({min(kind.dim, 1)})"].us(held * GIB)
            else:
                us = transition_cost(state[dim], kind, held, topo, dim)
            edges.append((state, (*state[:dim], kind, *state[dim + 1 :]), us))
    best = dict.fromkeys(states, math.inf)
    best[src] = 0.0
    improved = True
    while improved:
        improved = False
        for before, after, us in edges:
            if best[before] + us < best[after] - 1e-12:
                best[after], improved = best[before] + us, True
    return best[dst]


@settings(max_examples=150, deadline=None)
@given(worlds(), st.sampled_from([0.0, 1.0]))
def test_no_chain_at_all_is_cheaper(world: Any, copy_us: float) -> None:
    topo, shape, (src, dst) = world
    least = price(topo, shape, src, dst, copy_us=copy_us)
    assert least == pytest.approx(brute_force(topo, shape, src, dst, copy_us))
    assert price(topo, shape, src, src, copy_us=copy_us) == 0.0
    assert price(topo, shape, src, dst, copy_us=copy_us, joint=True) <= least + 1e-9


def test_bytes_of_a_spec() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.bool):
        expected = torch.empty(SHAPE, dtype=dtype).untyped_storage().nbytes()
        assert spec_to_bytes(spec(dp_tp(), Shard(0), P, dtype=dtype)) == expected
