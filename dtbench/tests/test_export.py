"""Exported modules in the installed torch, on a fake process group of 16 ranks.

Expected costs are written out from the constants, not taken from dtbench's own formulas.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _collective_utils, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench.cost.estimate import estimate_call
from dtbench.cost.export.module import export, literal, render
from dtbench.errors import OutputError, UsageError
from dtbench.records.topology import CalibratedTopology, FromRun, HostLayout, write_topology
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_topology import a_curve, a_dim, a_topology, curve_of, ring_curve, ring_dim

GIB, MIB = 1024**3, 1024**2
# 64 MiB as float32; a gather of it, and of the eighth that one rank of tp holds.
SHAPE, SIZE = (4096, 4096), 64 * MIB
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
# Between 32 MiB at 100 us and 96 MiB at 900 us: 64 MiB is halfway.
BENT = curve_of((32 * MIB, 96 * MIB), (100.0, 900.0))
HALFWAY_US = 500.0
COST = "_compute_placement_transition_cost"


@pytest.fixture(autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "tp"))


def module_of(topology: CalibratedTopology, target: Any = "torch", name: str = "exported") -> ModuleType:
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = compile(render(topology, target, name), f"{name}.py", "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def two_dims(device_type: str = "cpu", **tp: Any) -> CalibratedTopology:
    """dp is slow (5 GiB/s, 20 us a hop), tp is fast (50 GiB/s, 2 us a hop)."""
    return a_topology(a_dim("dp", 2, 5.0, 20.0), a_dim("tp", 8, 50.0, 2.0, **tp), device_type=device_type)


def spec(mesh: DeviceMesh, *placements: Any, shape: tuple[int, int] = SHAPE) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def cost(mesh: DeviceMesh, src: tuple[Any, ...], dst: tuple[Any, ...]) -> float:
    return _collective_utils.redistribute_cost(spec(mesh, *src), spec(mesh, *dst))


# ------------------------------------------------------------------- torch: constants per mesh dim


def test_exported_constants_determine_torchs_costs(mesh: DeviceMesh) -> None:
    with module_of(two_dims()).apply():
        topo = _collective_utils.MeshTopoInfo.build_from_mesh(mesh)
        gathered = _collective_utils.allgather_cost(SIZE / GIB, topo, 0)
        reduced = _collective_utils.allreduce_cost(SIZE / GIB, topo, 1)
        by_redistribute = cost(mesh, (R, S0), (R, R))
    assert gathered == pytest.approx(6.6 + 20 + 0.0625 / 2 / 5 * 1e6)
    assert reduced == pytest.approx(6.6 + 14 * 2 + 0.0625 * 14 / 8 / 50 * 1e6)
    assert by_redistribute == pytest.approx(6.6 + 7 * 2 + 0.0625 * 7 / 8 / 50 * 1e6)


def test_dims_are_matched_by_name_in_other_meshes(mesh: DeviceMesh) -> None:
    transposed = DeviceMesh("cpu", torch.arange(16).view(2, 8).T.contiguous(), mesh_dim_names=("tp", "dp"))
    with_one = init_device_mesh("cpu", (1, 2, 8), mesh_dim_names=("pp", "dp", "tp"))  # pp was not measured
    with module_of(two_dims()).apply():
        over_dp, over_tp = cost(mesh, (S0, R), (R, R)), cost(mesh, (R, S0), (R, R))
        assert cost(transposed, (S0, R), (R, R)) == over_tp
        assert (cost(mesh["dp"], (S0,), (R,)), cost(mesh["tp"], (S0,), (R,))) == (over_dp, over_tp)
        assert cost(with_one, (R, S0, R), (R, R, R)) == over_dp
        topo = _collective_utils.MeshTopoInfo.build_from_mesh(transposed)
    assert (topo.mesh_dim_devices, topo.mesh_dim_bandwidth) == ([8, 2], [50.0, 5.0])
    assert topo.mesh_dim_latency == [2.0, 20.0]


@pytest.mark.parametrize(
    ("sizes", "names", "message"),
    [
        ((2, 8), ("dp", "cp"), "cp=8"),
        ((4, 4), ("dp", "tp"), "dp=4, tp=4"),
        ((16,), None, "without a name=16"),
    ],
)
def test_other_meshes_keep_torchs_constants_with_one_warning(
    sizes: tuple[int, ...], names: tuple[str, ...] | None, message: str
) -> None:
    other = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    src, dst = (S0, *[R] * (len(sizes) - 1)), (R,) * len(sizes)
    before = cost(other, src, dst)
    dims = a_dim("dp", 2, 5.0, 20.0, transitions={"S(0)->R": BENT}), a_dim("tp", 8, 50.0, 2.0)
    with module_of(a_topology(*dims)).apply():
        with pytest.warns(UserWarning, match=f"dp=2, tp=8 were measured; got .*{message}: torch's own"):
            assert cost(other, src, dst) == before
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cost(other, src, dst) == before


def test_different_device_type_raises(mesh: DeviceMesh) -> None:
    topology = two_dims("cuda")
    with module_of(topology).apply(), pytest.raises(RuntimeError, match=r"measured on 'cuda'.*on 'cpu'"):
        cost(mesh, (R, S0), (R, R))


# --------------------------------------------------------------------- torch: times per transition


def test_measured_transitions_replace_the_formulas(mesh: DeviceMesh) -> None:
    one = mesh["tp"]
    with module_of(two_dims(transitions={"S(0)->R": BENT, "R->S(0)": BENT, "S(1)->S(0)": BENT})).apply():
        assert cost(one, (S0,), (R,)) == pytest.approx(HALFWAY_US)
        assert cost(one, (S1,), (S0,)) == pytest.approx(HALFWAY_US)  # by the whole tensor, not the shard
        assert cost(one, (R,), (S0,)) == 0  # torch takes more than 0 for communication
        assert cost(one, (P,), (R,)) == pytest.approx(6.6 + 14 * 2 + 0.0625 * 14 / 8 / 50 * 1e6)
        assert cost(one, (S0,), (P,)) == math.inf
        assert cost(mesh["dp"], (S0,), (R,)) == pytest.approx(6.6 + 20 + 0.0625 / 2 / 5 * 1e6)


def test_collectives_replace_unmeasured_transitions(mesh: DeviceMesh) -> None:
    collectives = {"all_gather": a_curve(50, 2), "all_reduce": BENT, "all_to_all": a_curve(9, 1)}
    with module_of(two_dims(collectives=collectives, transitions={"P->S(0)": a_curve(7, 4)})).apply():
        one = mesh["tp"]
        assert cost(one, (P,), (R,)) == pytest.approx(HALFWAY_US)
        assert cost(one, (S1,), (R,)) == pytest.approx(50 + 0.0625 / 2 * 1e6)
        assert cost(one, (P,), (S0,)) == pytest.approx(7 + 0.0625 / 4 * 1e6)
        assert cost(one, (S0,), (S1,)) == pytest.approx(50 + 0.0625 / 2 * 1e6)  # DTensor gathers on the CPU


def test_all_to_all_size_is_that_of_a_rank(mesh: DeviceMesh) -> None:
    topology = two_dims("cuda", collectives={"all_to_all": a_curve(9, 1)})
    exported = module_of(topology)
    exported.DEVICE_TYPE = "cpu"  # no mesh on cuda here
    with exported.apply():
        assert cost(mesh["tp"], (S0,), (S1,)) == pytest.approx(9 + 0.0625 / 8 * 1e6)
        topo = _collective_utils.MeshTopoInfo.build_from_mesh(mesh["tp"])
        assert getattr(_collective_utils, COST)(S0, S0, topo, 0, 0.0625) == (0.0, 0.0625)


# ------------------------------------------------------------------------------------- decisions


def plan(mesh: DeviceMesh, src: tuple[Any, ...], dst: tuple[Any, ...]) -> list[tuple[int, str, str]]:
    with _redistribute.use_min_cost_redistribution_plan():
        steps = _redistribute._gen_transform_infos(spec(mesh, *src), spec(mesh, *dst))
    return [(step.mesh_dim, *map(str, step.src_dst_placements)) for step in steps]


def test_export_changes_the_planned_redistribution(mesh: DeviceMesh) -> None:
    src, dst = (S0, R), (R, R)
    straight = [(0, "S(0)", "R")]
    assert plan(mesh, src, dst) == straight
    # Straight: 6.6 + 20 + 6250. An eighth over dp, the whole over tp: 26.6 + 781 + 20.6 + 1094.
    applied = module_of(two_dims()).apply()
    assert [step[0] for step in plan(mesh, src, dst)] == [1, 0, 1]
    applied.undo()
    assert plan(mesh, src, dst) == straight


def test_export_changes_the_sharding_strategy(mesh: DeviceMesh) -> None:
    one, slow, fast = mesh["tp"], a_curve(1000, 1), a_curve(1, 1000)
    others = dict.fromkeys(("S(1)->R", "S(1)->S(0)", "P->R", "P->S(0)", "P->S(1)"), slow)

    def product(**prices: Any) -> str:
        topology = two_dims(transitions=others | {name: prices[key] for key, name in CHANGES.items()})
        a, b = (DTensor.from_local(torch.ones(8, 64), one, [S0], run_check=False) for _ in range(2))
        with module_of(topology).apply():
            return str((a @ b).placements[0])

    # Both factors have their rows sharded: gather the second, or move the first's shards to its columns.
    assert product(gather=fast, move=slow) == "S(0)"
    assert product(gather=slow, move=fast).startswith("P")
    assert product(gather=fast, move=slow) == "S(0)"  # nothing is left of the decision before


CHANGES = {"gather": "S(0)->R", "move": "S(0)->S(1)"}


# ----------------------------------------------------------------------------------- apply and undo


def test_undo_restores_torchs_functions_in_reverse_order(mesh: DeviceMesh) -> None:
    def functions() -> list[object]:
        own = [vars(_collective_utils.MeshTopoInfo)["build_from_mesh"], getattr(_collective_utils, COST)]
        from torch.distributed.tensor._ops import single_dim_strategy

        return [*own, getattr(single_dim_strategy, COST, None)]

    before, cost_before = functions(), cost(mesh, (S0, R), (R, R))
    first = module_of(two_dims()).apply()
    changed = [now is not then for now, then in zip(functions(), before, strict=True)]
    assert changed == [then is not None for then in before]
    second = module_of(a_topology(a_dim("dp", 2, 1.0, 0.0), a_dim("tp", 8, 1.0, 0.0))).apply()
    assert cost(mesh, (S0, R), (R, R)) == pytest.approx(6.6 + 0.0625 / 2 * 1e6)
    with pytest.raises(RuntimeError, match="undo those first"):
        first.undo()
    second.undo()
    assert cost(mesh, (S0, R), (R, R)) == pytest.approx(6.6 + 20 + 0.0625 / 2 / 5 * 1e6)
    first.undo()
    first.undo()
    assert all(now is then for now, then in zip(functions(), before, strict=True))
    assert cost(mesh, (S0, R), (R, R)) == cost_before


def other_cost(current: Any, target: Any, mesh_topo: Any, mesh_dim: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (COST, other_cost, r"current_placement.*got \(current, target"),
        (COST, None, "got none"),
        ("allreduce_cost", lambda bytes_gb, mesh_topo, mesh_dim: 1.0, "allreduce_cost of 1 GiB.*got 1.0 us"),
    ],
)
def test_unsupported_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    exported = module_of(two_dims())
    monkeypatch.setattr(_collective_utils, name, value)
    with pytest.raises(
        RuntimeError, match=rf"(?s)another cost model.*{message}.*supported are torch 2.11 and 2.13"
    ):
        exported.apply()
    assert getattr(_collective_utils, name) is value


# ---------------------------------------------------------------------------------------- inductor


def graph_of(mesh: DeviceMesh) -> torch.fx.Graph:
    """One collective of each kind over tp, with the shapes that a trace would note."""
    ops, group = torch.ops._c10d_functional, mesh.get_group("tp").group_name
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(MIB, device="meta")
    calls = {
        "gather": (ops.all_gather_into_tensor.default, (x, 8, group), 8 * MIB),
        "reduce": (ops.all_reduce.default, (x, "sum", group), MIB),
        "scatter": (ops.reduce_scatter_tensor.default, (x, "sum", 8, group), MIB // 8),
        "world": (ops.all_reduce.default, (x, "sum", _get_default_group().group_name), MIB),
        "exchange": (ops.all_to_all_single.default, (x, [MIB // 8] * 8, [MIB // 8] * 8, group), MIB),
    }
    for name, (op, args, elements) in calls.items():
        node = graph.create_node("call_function", op, args, name=name)
        node.meta["val"] = torch.empty(elements, device="meta")
    return graph


def with_collectives(device_type: str = "cpu") -> CalibratedTopology:
    curves = {"all_gather": a_curve(10, 4), "all_reduce": a_curve(20, 2), "reduce_scatter": BENT}
    return two_dims(device_type, collectives=curves)


def test_inductor_estimate_is_in_milliseconds(mesh: DeviceMesh) -> None:
    from torch._inductor import config
    from torch._inductor.fx_passes.overlap_scheduling import estimate_collective_time

    options = config.aten_distributed_optimizations
    nodes = {node.name: node for node in graph_of(mesh).nodes}
    with module_of(with_collectives(), "inductor").apply(mesh):
        hook = options.custom_runtime_estimation
        ms = {
            name: estimate_collective_time(nodes[name], custom_runtime_estimation=hook)
            for name in ("gather", "reduce")
        }
        latency_ms = estimate_collective_time(nodes["gather"], 0, custom_runtime_estimation=hook)
        assert hook(nodes["exchange"]) is None  # all_to_all was not measured
        assert hook(nodes["world"]) is None  # nor all dims as one
        assert hook(nodes["gather"], 4096) is None
        assert hook(nodes["x"]) is None
    assert ms["gather"] == pytest.approx(0.010 + 32 / 1024 / 4 * 1e3)
    assert ms["reduce"] == pytest.approx(0.020 + 4 / 1024 / 2 * 1e3)
    assert latency_ms == pytest.approx(0.010)
    assert options.custom_runtime_estimation is None
    with module_of(two_dims(collectives={"reduce_scatter": a_curve(0, 1)}), "inductor").apply(
        mesh
    ) as applied:
        assert applied.estimate(nodes["scatter"]) == pytest.approx(4 / 1024 * 1e3)  # of all that is scattered


def test_inductor_keeps_torchs_estimates_of_other_nodes(mesh: DeviceMesh) -> None:
    """torch leaves nodes out that its hook does not answer, where it would have estimated them without."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1024, 1024, device="meta")
    added = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    added.meta["val"] = product.meta["val"] = x.meta["val"]
    exported = module_of(with_collectives(), "inductor")
    exported.overlap_scheduling = stand_in = ModuleType("overlap_scheduling")
    stand_in.is_compute_node = lambda node: node is product  # type: ignore[attr-defined]
    stand_in.estimate_roofline_runtime_ms = lambda node: 0.25  # type: ignore[attr-defined]
    estimate = exported.CollectiveEstimate({})
    assert (estimate(added), estimate(product)) == (0.25, None)


def test_inductor_refuses_unmeasured_dims(mesh: DeviceMesh) -> None:
    exported = module_of(with_collectives(), "inductor")
    with pytest.raises(ValueError, match="no mesh"):
        exported.apply()
    with pytest.raises(ValueError, match=r"cp=8, expected one of dp=2, tp=8"):
        exported.apply(init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "cp")))
    with pytest.raises(RuntimeError, match="measured on 'cuda'"):
        module_of(with_collectives("cuda"), "inductor").apply(mesh)
    swapped = DeviceMesh("cpu", torch.arange(16).view(8, 2), mesh_dim_names=("tp", "dp"))
    exported.apply(mesh, swapped).undo()  # other ranks, other groups


def test_inductor_cache_key_depends_on_constants(mesh: DeviceMesh, tmp_path: Path) -> None:
    """The settings are pickled into the key of compiled graphs: other curves, another key."""
    import pickle
    import sys

    saved = []
    for beta in (4, 5):
        curves = {"all_gather": a_curve(10, beta)}
        name = "exported_for_cache"
        sys.modules[name] = exported = module_of(two_dims(collectives=curves), "inductor", name)
        with exported.apply(mesh) as applied:
            saved.append(pickle.dumps(applied.estimate))
    del sys.modules[name]
    assert saved[0] != saved[1]


# ------------------------------------------------------------------------------------ the program


@pytest.mark.parametrize("target", ["torch", "inductor"])
def test_export_command_writes_a_module(dtbench: Cli, tmp_path: Path, target: str) -> None:
    write_topology(with_collectives(), tmp_path / "topology.json")
    code, out, err = dtbench("export", "topology.json", "--to", target, "-o", "mine.py")
    assert (code, err) == (0, "")
    assert "mine.py" in out
    text = (tmp_path / "mine.py").read_text()
    assert "import mine\n" in text
    assert "dtbench" not in {alias.name for node in ast.walk(ast.parse(text)) for alias in imported(node)}
    compile(text, "mine.py", "exec")


def test_autoparallel_formula_gives_measured_times() -> None:
    """Of four ranks on two hosts."""
    curves = {name: ring_curve(name, 4, 20.0, 5.0) for name in ("all_gather", "all_reduce")}
    place = HostLayout(hosts_per_group=(2, 2), ranks_per_host=(2, 2))
    dim = structs.replace(a_dim("dp", 4, 20.0, 5.0, collectives=curves), layout=place)
    exported: dict[str, Any] = {}
    exec(render(a_topology(dim), "autoparallel"), exported)
    assert exported["RUNTIME_TABLES"].keys() == exported["RUNTIME_RAMPS"].keys() == curves.keys()
    for name, curve in curves.items():
        (latency, bandwidth), shares = (
            exported["RUNTIME_TABLES"][name][2, 2],
            exported["RUNTIME_RAMPS"][name][2, 2],
        )
        for row in curve.table:
            size = row.size_bytes
            share = np.interp(math.log2(size / 4 / 64), range(24), shares)
            assert latency + size / (1000 * bandwidth * share) == pytest.approx(row.time_us, rel=0.02)


@pytest.mark.parametrize(
    ("topology", "target", "says"),
    [
        (a_topology(a_dim("tp", 8, 1.0, 1.0), base_latency_us=3.0), "torch", "base latency of 3 us"),
        (a_topology(), "torch", "no mesh dim"),
        (
            a_topology(
                structs.replace(
                    ring_dim("dp", 4, 20.0, 5.0, "all_reduce"),
                    layout=HostLayout(hosts_per_group=(1, 2), ranks_per_host=(2, 4)),
                )
            ),
            "autoparallel",
            "the same number of hosts and of ranks per host",
        ),
    ],
)
def test_unsupported_topologies_are_refused(topology: CalibratedTopology, target: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        render(topology, target)


def imported(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("none.json --to torch -o mine.py", "cannot read"),
        ("t.json --to jax -o mine.py", "--to"),
        ("t.json --to torch -o none/mine.py", "cannot write none"),
    ],
)
def test_export_errors_have_one_line(dtbench: Cli, tmp_path: Path, words: str, says: str) -> None:
    write_topology(two_dims(), tmp_path / "t.json")
    code, out, err = dtbench("export", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err
    assert not (tmp_path / "mine.py").exists()


# ----------------------------------------------------------------------------- untrusted topologies

NASTY = 'tp"""\n\'); import os; os.abort()  # {{ 7 * 7 }} \\ \u202e\x1b[2J'


@pytest.mark.parametrize("target", ["torch", "inductor"])
def test_names_are_escaped_as_literals(target: Any) -> None:
    def names_in(text: str) -> set[str]:
        return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}

    curves = {"all_reduce": a_curve(1, 1)}
    topology = a_topology(
        a_dim(NASTY, 8, 50.0, 2.0, collectives=curves, warnings=(NASTY,)),
        runs=(FromRun(run_id=NASTY, versions={NASTY: NASTY}),),
        created=NASTY,
        warnings=(NASTY,),
    )
    plain = a_topology(a_dim("tp", 8, 1.0, 2.0, collectives=curves))
    text = render(topology, target, NASTY)
    assert text.isascii() and names_in(text) == names_in(render(plain, target))
    exported = module_of(topology, target)
    assert (*exported.DIMS,) == (NASTY,)
    assert exported.SOURCE["runs"] == (NASTY,)
    assert literal({"a": (1, [2.5, None], True)}) == "{'a': (1, (2.5, None), True)}"
    for value in (math.nan, math.inf, object(), b"x"):
        with pytest.raises(TypeError, match="expected a string"):
            literal(value)


def test_export_does_not_overwrite_other_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    export(two_dims(), "torch", path)
    export(two_dims(), "inductor", path)  # its own may be
    assert path.read_text().startswith('"""Measured times')
    path.write_text("print('mine')\n")
    with pytest.raises(OutputError, match="left as it was"):
        export(two_dims(), "torch", path)


def test_exported_curves_interpolate_like_dtbench() -> None:
    for seed in range(20):
        numbers = random.Random(seed)
        sizes = sorted(numbers.sample(range(1, 10**6), numbers.randint(1, 9)))
        times = sorted(numbers.choice((numbers.uniform(1, 100), 50.0)) for _ in sizes)
        curve = curve_of(sizes, times)
        exported = module_of(two_dims(collectives={"all_reduce": curve}), "inductor")
        for size in (1, 2, 5000, 77_777, sizes[0], sizes[-1], 10**6, 10**9):
            got = exported.CURVES["tp", "all_reduce"].us(size)
            assert got == pytest.approx(estimate_call(curve, size).time_us, abs=1e-9), (seed, size)
