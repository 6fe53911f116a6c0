"""The cost model: against computed values, against torch on the same meshes, and with measured topologies."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
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

from dtbench_core.cost import mesh_topology
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.mesh_topology import MeshTopoInfo
from dtbench_core.cost.redistribution import (
    ChainSearch,
    allreduce_cost,
    local_gib,
    one_step_redistribute_cost,
    redistribute_cost,
    spec_to_bytes,
    transition_cost,
)
from dtbench_core.cost.ring import GIB
from dtbench_core.cost.topology import SENDING, TopologyError, read_curve
from dtbench_core.layout.placement import Partial, Placement, Replicate, Shard
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.redistribute import routes
from dtbench_core.runtime import clear_caches

# 512 KiB: large enough that an exchange beats gathering everything, too small for a detour to pay.
SHAPE = (128, 64, 16)
R, P = Replicate(), Partial()
CHANGES = [*SENDING, "R->S(0)", "R->S(1)"]


def dp_tp() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def spec(mesh: DeviceMesh, *placements: Placement, dtype: torch.dtype = torch.float32) -> DTensorSpec:
    return DTensorSpec.of(mesh, placements, SHAPE, torch.empty(SHAPE).stride(), dtype)


def topology(**changes: Any) -> dict[str, Any]:
    """Returns a topology of dp=2, tp=4. `dp__ranks=3` changes a field of a mesh dim, `schema=1` one of the file."""
    dims = {
        "dp": {"name": "dp", "ranks": 2, "bandwidth_GiBps": 0.5, "latency_us_per_hop": 40},
        "tp": {"name": "tp", "ranks": 4, "bandwidth_GiBps": 2.0, "latency_us_per_hop": 10.0},
    }
    fields: dict[str, Any] = {
        "kind": "topology",
        "schema": 1,
        "device_type": "cpu",
        "base_latency_us": 6.6,
        "dims": list(dims.values()),
    }
    for key, value in changes.items():
        dim, _, field = key.partition("__")
        if field:
            dims[dim][field] = value
        else:
            fields[key] = value
    return fields


def table(*rows: tuple[int, float]) -> dict[str, Any]:
    """Returns a curve in the form of a topology file."""
    return {"table": [{"size_bytes": size, "time_us": us} for size, us in rows]}


def measured(**changed: Any) -> dict[str, Any]:
    """Returns a topology whose transitions all take 100 us, except those in `changed`, e.g. tp_SR=table(...)."""
    priced = topology()
    short = {name.replace("(", "").replace(")", "").replace("->", ""): name for name in CHANGES}
    flat = table((1024, 100.0), (2**30, 100.0))
    for dim in priced["dims"]:
        own = {name: changed.get(f"{dim['name']}_{key}", flat) for key, name in short.items()}
        dim["transitions"] = {"core": own, "torch": {}}
    return priced


@pytest.fixture(autouse=True)
def builtin_constants(group: dist.ProcessGroup) -> Iterator[None]:
    """A fake group of 8 ranks with the built-in constants."""

    def forget() -> None:
        MeshTopoInfo.build_from_mesh.cache_clear()
        torch_cost.MeshTopoInfo.build_from_mesh.cache_clear()

    forget()
    yield
    mesh_topology.use_topology(None)
    forget()


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
    theirs = torch_cost.MeshTopoInfo.build_from_mesh(mesh)
    expected = MeshTopoInfo(
        mesh,
        tuple(theirs.mesh_dim_devices),
        tuple(theirs.mesh_dim_bandwidth),
        tuple(theirs.mesh_dim_latency),
        6.6,
        "built-in",
    )
    assert MeshTopoInfo.build_from_mesh(mesh) == expected


# --- redistribution --------------------------------------------------------------------------------

PAIRS = list(itertools.product([R, P, Shard(0), Shard(1)], repeat=2))


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


def test_impossible_and_free_redistributions() -> None:
    mesh, line = dp_tp(), init_device_mesh("cpu", (8,))
    pairs = [
        (spec(mesh, R, Shard(0)), spec(mesh, R, P)),
        (spec(mesh, P, R), spec(mesh, Partial("max"), R)),
        (spec(line, R), spec(mesh["tp"], R)),
        (spec(mesh, Shard(0), P), spec(mesh, Shard(0), P)),
        (spec(mesh, R, R), spec(mesh, Shard(0), P)),
    ]
    assert [redistribute_cost(*pair) for pair in pairs] == [math.inf, math.inf, math.inf, 0.0, 0.0]


def test_all_to_all_never_costs_more_than_gathering_and_slicing() -> None:
    """PyTorch's surcharge makes it more expensive for small tensors, so that its planner gathers everything."""
    mesh = init_device_mesh("cpu", (8,))
    rows, full, columns = (
        DTensorSpec.of(mesh, (p,), (8, 8), (8, 1), torch.float32) for p in (Shard(0), R, Shard(1))
    )
    exchanged = redistribute_cost(rows, columns)
    assert exchanged == redistribute_cost(rows, full) + redistribute_cost(full, columns)
    meta = TorchMeta(torch.Size((8, 8)), (8, 1), torch.float32)
    kinds = [TorchSpec(mesh, (p,), meta) for p in (torch_tensor.Shard(0), torch_tensor.Shard(1))]
    assert exchanged < torch_cost.redistribute_cost(*kinds)


def test_cost_of_one_step() -> None:
    mesh = dp_tp()
    for src, dst in PAIRS:
        pair = spec(mesh, Shard(2), src), spec(mesh, Shard(2), dst)
        if src.is_shard() or not dst.is_partial():
            assert one_step_redistribute_cost(*pair) == redistribute_cost(*pair)
    impossible = [
        (spec(mesh, Shard(0), Shard(0)), spec(mesh, R, Shard(0))),
        (spec(mesh, R, Shard(0)), spec(mesh, Shard(0), Shard(0))),
        (spec(mesh, R, R), spec(mesh["tp"], R)),
    ]
    assert [one_step_redistribute_cost(*pair) for pair in impossible] == [math.inf] * 3
    with pytest.raises(ValueError, match=r"differ on the mesh dims \[0, 1\], expected one"):
        one_step_redistribute_cost(spec(mesh, R, R), spec(mesh, Shard(0), Shard(1)))


# --- prices are distances --------------------------------------------------------------------------

TABLES = st.tuples(*[st.floats(0.1, 500.0)] * 3).map(sorted)
CURVES = st.fixed_dictionaries(
    {name: TABLES.map(lambda us: Curve((256, 2**14, 2**20), tuple(us))) for name in CHANGES}
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MeshTopoInfo, tuple[int, ...], list[tuple[Placement, ...]]]:
    """Draws the constants of a mesh, the shape of a tensor, and two placements; the first may be Partial."""
    sizes = draw(st.sampled_from([(2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (1, 4), (2, 2, 2), (2, 3, 2)]))
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
    return MeshTopoInfo(None, sizes, bandwidth, latency, base, "test", curves), tuple(shape), [first, second]


def price(topo: MeshTopoInfo, shape: Any, src: Any, dst: Any, **how: Any) -> float:
    return sum(step.us for step in ChainSearch(shape, 4, src, dst, topo, **how).cheapest())


def brute_force(topo: MeshTopoInfo, shape: Any, src: Any, dst: Any, copy_us: float) -> float:
    """Returns the least cost of all chains of one-dim transitions, by relaxation until nothing improves."""
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
def test_chain_search_finds_the_cheapest_chain(world: Any, copy_us: float) -> None:
    topo, shape, (src, dst) = world
    least = price(topo, shape, src, dst, copy_us=copy_us)
    assert least == pytest.approx(brute_force(topo, shape, src, dst, copy_us))
    assert price(topo, shape, src, src, copy_us=copy_us) == 0.0
    assert price(topo, shape, src, dst, copy_us=copy_us, joint=True) <= least + 1e-9


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.bool))
def test_bytes_of_a_spec(dtype: Any) -> None:
    assert spec_to_bytes(spec(dp_tp(), Shard(0), P, dtype=dtype)) == torch.empty(SHAPE, dtype=dtype).nbytes


# ---- topology files ----


def test_topology_is_matched_by_mesh_dim(tmp_path: Path) -> None:
    mesh, path = dp_tp(), tmp_path / "topology.json"
    path.write_text(json.dumps(topology()))
    assert MeshTopoInfo.from_topology(path, mesh) == MeshTopoInfo(
        mesh, (2, 4), (0.5, 2.0), (40.0, 10.0), 6.6, str(path)
    )
    swapped = init_device_mesh("cpu", (4, 2), mesh_dim_names=("tp", "dp"))
    assert MeshTopoInfo.from_topology(topology(), swapped).mesh_dim_bandwidth == (2.0, 0.5)
    assert MeshTopoInfo.from_topology(topology(), mesh["tp"]).mesh_dim_devices == (4,)
    # Dims of one rank need no measurement.
    info = MeshTopoInfo.from_topology(
        topology(), init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "tp"))
    )
    assert (info.mesh_dim_devices, info.mesh_dim_bandwidth[1]) == ((1, 4), 2.0)
    assert allreduce_cost(1.0, info, 0) == 6.6


def test_topology_prices_redistributions_until_undone() -> None:
    mesh = dp_tp()
    pair = spec(mesh, R, Shard(0)), spec(mesh, R, R)
    builtin = redistribute_cost(*pair)
    gib = math.prod(SHAPE) * 4 / GIB
    with mesh_topology.use_topology(topology()):
        assert mesh_topology._topology is not None
        assert redistribute_cost(*pair) == pytest.approx(6.6 + 30 + gib * 0.75 / 2.0 * 1e6)
        inner = mesh_topology.use_topology(topology(tp__latency_us_per_hop=100.0, base_latency_us=0))
        assert redistribute_cost(*pair) == pytest.approx(300 + gib * 0.75 / 2.0 * 1e6)
        inner.restore()
        inner.restore()
        assert mesh_topology.topology_of(mesh).mesh_dim_latency == (40.0, 10.0)
    assert mesh_topology._topology is None
    assert redistribute_cost(*pair) == builtin


def test_mesh_outside_the_topology_falls_back_with_one_warning() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    mesh_topology.use_topology(topology())
    with pytest.warns(UserWarning, match="holds dp=2, tp=4, not the mesh dim world=8.*built-in constants"):
        assert mesh_topology.topology_of(mesh) is MeshTopoInfo.build_from_mesh(mesh)
    mesh_topology.topology_of(mesh)  # warnings are errors here: a second one would raise


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (topology(kind="run"), "got kind 'run', expected 'topology'"),
        (topology(schema=2), "got schema 2, expected 1.*calibrate again"),
        (topology(dims=[]), r"got dims \[\], expected a list of mesh dims"),
        (topology(base_latency_us=-1), "base_latency_us: got -1, expected a finite number at least 0"),
        (topology(dp__name="tp"), "expected each name once"),
        (topology(tp__ranks=0), r"dims\[1\]\.ranks: got 0, expected a count of at least 1"),
        (topology(tp__bandwidth_GiBps=0), "bandwidth_GiBps: got 0, expected a finite number above 0"),
        (topology(dp__latency_us_per_hop="3"), r"dims\[0\]\.latency_us_per_hop: got '3'"),
        (topology(device_type="cuda"), "measured on 'cuda', but the mesh is on 'cpu'"),
        (topology(tp__ranks=8), "holds dp=2, tp=8, not the mesh dim tp=4"),
        (measured(tp_PR={"table": []}), "got no table of sizes"),
        (measured(tp_PR=table((1024, 3.0), (2048, 2.0))), "out of order"),
        (
            measured(tp_PR=table((1024, -3.0))),
            r"table\[0\]\.time_us: got -3.0, expected a finite number above 0",
        ),
        (measured(tp_PR={"table": [7]}), r"table\[0\]\.size_bytes: got None"),
    ],
)
def test_bad_topology_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        MeshTopoInfo.from_topology(content, dp_tp())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "got kind 'list'"),
        ("", "cannot read the topology .*No such file"),
    ],
)
def test_unreadable_file_changes_nothing(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topology.json"
    if text:
        path.write_text(text)
    before = mesh_topology.use_topology(topology())
    with pytest.raises(TopologyError, match=message):
        mesh_topology.use_topology(path)
    assert mesh_topology._topology is not None
    before.restore()


# --- measured curves -------------------------------------------------------------------------------


def test_curve_interpolates_and_extrapolates() -> None:
    curve = read_curve(table((1000, 10.0), (4000, 40.0), (5000, 45.0), (17000, 57.0)), "here")
    assert [curve.us(size) for size in (1000, 4000, 5000, 17000)] == [10.0, 40.0, 45.0, 57.0]
    assert (curve.us(2500), curve.us(4800), curve.us(11000)) == pytest.approx((25.0, 44.0, 51.0))
    # On with what a factor of four before the end needed per byte: 17 us for 13000 bytes.
    assert curve.us(17000 + 13000) == pytest.approx(57 + 17)
    assert (curve.us(500), curve.us(0)) == pytest.approx((5.0, 0.0)), "10 us per 1000 bytes at the start"
    flat = read_curve(table((1000, 10.0), (4000, 11.5), (8000, 11.5)), "here")
    assert flat.us(0) == pytest.approx(9.5)
    assert flat.us(16000) == pytest.approx(11.5 + 8000 * 1.5 / 7000), "over what was slower than before"
    steep = read_curve(table((1000, 1.0), (4000, 400.0)), "here")
    assert steep.us(8000) == pytest.approx(800.0), "never more than its share of the largest"
    assert steep.us(500) == pytest.approx(0.5), "and never less than its share of the smallest"
    alone = read_curve(table((1024, 10.0)), "here")
    assert (alone.us(512), alone.us(1024), alone.us(3072)) == (10.0, 10.0, 30.0)


def test_measured_changes_price_a_redistribution() -> None:
    mesh = dp_tp()
    whole = math.prod(SHAPE) * 4
    gather = table((1024, 5.0), (whole, 70.0), (2**30, 900.0))
    half = 5 + (70 - 5) * (whole / 2 - 1024) / (whole - 1024)
    priced: list[tuple[list[Placement], list[Placement], float]] = [
        ([R, Shard(0)], [R, R], 70.0),  # of the whole tensor
        ([Shard(1), Shard(0)], [Shard(1), R], half),
        ([R, P], [R, Shard(2)], 100.0),
        ([R, Shard(1)], [R, R], 170.0),  # 300 in one step, 100 + 70 by way of S(0)
    ]
    with mesh_topology.use_topology(measured(tp_S0R=gather, tp_S1R=table((1024, 300.0), (2**30, 300.0)))):
        for src, dst, cost in priced:
            assert redistribute_cost(spec(mesh, *src), spec(mesh, *dst)) == pytest.approx(cost)
        assert one_step_redistribute_cost(spec(mesh, R, Shard(1)), spec(mesh, R, R)) == pytest.approx(300.0)


def test_planner_chooses_the_measured_cheapest_route() -> None:
    """The reduce-scatter of gloo takes as long as its all-reduce; a measured one may take even longer."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    src, dst = spec(mesh, R, P), (R, Shard(0))
    clear_caches()
    assert [step.collective for step in routes.cheapest_route(src, dst)] == ["reduce_scatter"]
    slow, cheap = table((1024, 900.0), (2**30, 900.0)), table((1024, 1.0), (2**30, 1.0))
    with mesh_topology.use_topology(measured(tp_PS0=slow, tp_PS1=slow, tp_RS0=cheap)):
        assert [step.collective for step in routes.cheapest_route(src, dst)] == ["all_reduce", ""]
    assert [step.collective for step in routes.cheapest_route(src, dst)] == ["reduce_scatter"]


def test_joint_redistribution_uses_jointly_measured_times() -> None:
    content = measured()

    def steps() -> list[tuple[tuple[int, ...], float]]:
        topo = MeshTopoInfo.from_topology(content, dp_tp())
        chain = ChainSearch((64, 64), 4, (Shard(0), Shard(0)), (R, R), topo, joint=True).cheapest()
        return [(step.mesh_dims, step.us) for step in chain]

    assert steps() == [((1,), 100.0), ((0,), 100.0)], "together they were not measured"
    both = {"name": "tp+dp", "ranks": 8, "bandwidth_GiBps": 1.0, "latency_us_per_hop": 1.0}
    curves = dict.fromkeys(CHANGES, table((1024, 30.0), (2**30, 30.0)))
    content["dims"].append({**both, "transitions": {"core": curves}})
    assert steps() == [((0, 1), 30.0)]


MEASURED = {
    # The time of a message is its latency and a slope of its own, so that no other size has this price.
    "all_gather": table((2**10, 300.0), (2**30, 90_000.0)),
    "all_reduce": table((2**10, 50.0), (2**30, 160_000.0)),
    "reduce_scatter": table((2**10, 20.0), (2**30, 70_000.0)),
    "all_to_all": table((2**10, 11.0), (2**30, 40_000.0)),
}


@pytest.mark.parametrize("dims", [("dp",), ("tp",), ("tp+dp",)])
@pytest.mark.parametrize(
    ("src", "dst", "collective"),
    [
        (Shard(0), R, "all_gather"),
        (Shard(1), R, "all_gather"),
        (P, R, "all_reduce"),
        (P, Shard(0), "reduce_scatter"),
        (P, Shard(1), "reduce_scatter"),
        (Shard(0), Shard(1), "all_to_all"),
        (Shard(1), Shard(0), "all_to_all"),
    ],
)
def test_step_costs_the_measured_time_of_its_collective(
    dims: tuple[str], src: Any, dst: Any, collective: str
) -> None:
    """nccl-tests and comm.py define the bytes of a collective in the same way."""
    content = topology()
    content["dims"].append({"name": "tp+dp", "ranks": 8, "bandwidth_GiBps": 1, "latency_us_per_hop": 1})
    for dim in content["dims"]:
        dim["collectives"] = MEASURED if dim["name"] in dims else dict.fromkeys(MEASURED, table((1024, 1e9)))
    ends = [
        tuple(kind if len(dims[0]) > 2 or name in dims else R for name in ("dp", "tp")) for kind in (src, dst)
    ]
    (step,) = ChainSearch(
        (1024, 512), 4, *ends, MeshTopoInfo.from_topology(content, dp_tp()), joint=True
    ).cheapest()
    assert (step.collective, step.nbytes > 0) == (collective, True)
    assert step.us == pytest.approx(read_curve(MEASURED[collective], collective).us(step.nbytes))


def test_measured_collectives_price_unmeasured_transitions() -> None:
    mesh = dp_tp()
    content = topology()
    content["dims"][1]["collectives"] = MEASURED
    curves = MeshTopoInfo.from_topology(content, mesh).mesh_dim_curves
    assert curves[0] == {}, "dp is priced by its constants"
    content["dims"][1]["collectives"] = MEASURED | {"all_to_all": table((2**10, 9e6), (2**30, 9e6))}
    info = MeshTopoInfo.from_topology(content, mesh)
    gathered = transition_cost(Shard(0), R, 1e-3, info, 1)
    assert transition_cost(Shard(0), Shard(1), 1e-3, info, 1) == gathered, "cheaper, and the cut is free"
    del content["dims"][1]["collectives"]["all_to_all"]
    assert not MeshTopoInfo.from_topology(content, mesh).mesh_dim_curves, "some of each would not compare"
