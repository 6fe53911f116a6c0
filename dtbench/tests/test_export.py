"""Exported modules in the installed torch, on a fake process group of 16 ranks.

Expected costs are computed from the constants by hand. At the end: one curve of a collective has one price in the
core's planner, in exported modules and in `dtbench plan`, whether it comes from logs of nccl-tests or from a run of
dtbench. Both count bytes as nccl-tests does.
"""

import ast
import importlib.util
import math
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _collective_utils, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import single_dim_strategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench.cost.export.module import literal
from dtbench.cost.export.targets import TARGETS, ExportRequest, export, render
from dtbench.cost.plan.machines import TopologyLinks
from dtbench.errors import EXIT_OK, OutputError, UsageError
from dtbench.records.topology import CalibratedTopology, FromRun, read_topology, write_topology
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import table
from dtbench.tests.made_up_topology import a_curve, a_dim, a_topology, curve_of
from dtbench_core.cost.redistribution import ChainSearch
from dtbench_core.cost.topology import Topology
from dtbench_core.layout import placement as core

GIB, MIB = 1024**3, 1024**2
# 64 MiB as float32; a gather of it, and of the eighth that one rank of tp holds.
SHAPE, SIZE = (4096, 4096), 64 * MIB
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
# Between 32 MiB at 100 us and 96 MiB at 900 us: 64 MiB is halfway.
BENT = curve_of((32 * MIB, 96 * MIB), (100.0, 900.0))
HALFWAY_US = 500.0
# torch's formula with the constants of `two_dims`: a gather over dp, an all-reduce over tp.
DP_GATHER_US = 6.6 + 20 + 0.0625 / 2 / 5 * 1e6
ALL_REDUCE_US = 6.6 + 14 * 2 + 0.0625 * 14 / 8 / 50 * 1e6
COST = "_compute_placement_transition_cost"


@pytest.fixture(autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "tp"))


def source_of(topology: CalibratedTopology, target: str, name: str = "exported") -> str:
    content = render(ExportRequest(topology, Path(f"{name}.py")), target).content
    assert isinstance(content, str)
    return content


def module_of(topology: CalibratedTopology, target: str = "torch", name: str = "exported") -> ModuleType:
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(source_of(topology, target, name), f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return module


def two_dims(device_type: str = "cpu", **tp: Any) -> CalibratedTopology:
    """dp is slow (5 GiB/s, 20 us a hop), tp is fast (50 GiB/s, 2 us a hop)."""
    return a_topology(a_dim("dp", 2, 5.0, 20.0), a_dim("tp", 8, 50.0, 2.0, **tp), device_type=device_type)


def spec(mesh: DeviceMesh, *placements: Any) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(SHAPE), (SHAPE[1], 1), torch.float32))


def cost(mesh: DeviceMesh, src: tuple[Any, ...], dst: tuple[Any, ...]) -> float:
    return _collective_utils.redistribute_cost(spec(mesh, *src), spec(mesh, *dst))


# ------------------------------------------------------------------- torch: constants per mesh dim


def test_exported_constants_determine_torchs_costs(mesh: DeviceMesh) -> None:
    with module_of(two_dims()).apply():
        topo = _collective_utils.MeshTopoInfo.build_from_mesh(mesh)
        costs_us = [
            _collective_utils.allgather_cost(SIZE / GIB, topo, 0),
            _collective_utils.allreduce_cost(SIZE / GIB, topo, 1),
            cost(mesh, (R, S0), (R, R)),
        ]
    assert costs_us == pytest.approx([DP_GATHER_US, ALL_REDUCE_US, 6.6 + 7 * 2 + 0.0625 * 7 / 8 / 50 * 1e6])
    with (
        module_of(two_dims("cuda")).apply(),
        pytest.raises(RuntimeError, match=r"measured on 'cuda'.*on 'cpu'"),
    ):
        cost(mesh, (R, S0), (R, R))


def test_dims_are_matched_by_name_in_other_meshes(mesh: DeviceMesh) -> None:
    transposed = DeviceMesh("cpu", torch.arange(16).view(2, 8).T.contiguous(), mesh_dim_names=("tp", "dp"))
    with_one = init_device_mesh("cpu", (1, 2, 8), mesh_dim_names=("pp", "dp", "tp"))  # pp was not measured
    with module_of(two_dims()).apply():
        over_dp = [
            cost(mesh, (S0, R), (R, R)),
            cost(mesh["dp"], (S0,), (R,)),
            cost(with_one, (R, S0, R), (R, R, R)),
        ]
        over_tp = [
            cost(mesh, (R, S0), (R, R)),
            cost(mesh["tp"], (S0,), (R,)),
            cost(transposed, (S0, R), (R, R)),
        ]
    assert (over_dp, over_tp) == (over_dp[:1] * 3, over_tp[:1] * 3) and over_dp[0] != over_tp[0]


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
    dp = a_dim("dp", 2, 5.0, 20.0, transitions={"S(0)->R": BENT})
    with module_of(a_topology(dp, a_dim("tp", 8, 50.0, 2.0))).apply():
        with pytest.warns(UserWarning, match=f"dp=2, tp=8 were measured; got .*{message}: torch's own"):
            assert cost(other, src, dst) == before
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cost(other, src, dst) == before


# --------------------------------------------------------------------- torch: times per transition


GATHER_US = 50 + 0.0625 / 2 * 1e6
TRANSITIONS = {"transitions": {"S(0)->R": BENT, "R->S(0)": BENT, "S(1)->S(0)": BENT}}
COLLECTIVES = {
    "collectives": {"all_gather": a_curve(50, 2), "all_reduce": BENT, "all_to_all": a_curve(9, 1)},
    "transitions": {"P->S(0)": a_curve(7, 4)},
}


@pytest.mark.parametrize(
    ("measured", "src", "dst", "us"),
    [
        (TRANSITIONS, S0, R, HALFWAY_US),
        (TRANSITIONS, S1, S0, HALFWAY_US),  # by the size of the whole tensor, not of the shard
        (TRANSITIONS, R, S0, 0),  # torch considers costs above 0 as communication
        (TRANSITIONS, P, R, ALL_REDUCE_US),  # not measured: by the formula
        (TRANSITIONS, S0, P, math.inf),
        (COLLECTIVES, P, R, HALFWAY_US),
        (COLLECTIVES, S1, R, GATHER_US),
        (COLLECTIVES, P, S0, 7 + 0.0625 / 4 * 1e6),
        (COLLECTIVES, S0, S1, GATHER_US),  # DTensor gathers on the CPU
    ],
)
def test_measured_transitions_and_collectives_replace_the_formulas(
    mesh: DeviceMesh, measured: dict[str, Any], src: Any, dst: Any, us: float
) -> None:
    with module_of(two_dims(**measured)).apply():
        assert cost(mesh["tp"], (src,), (dst,)) == pytest.approx(us)
        assert cost(mesh["dp"], (S0,), (R,)) == pytest.approx(DP_GATHER_US)


# ------------------------------------------------------------------------------------- decisions


def test_export_changes_the_planned_redistribution(mesh: DeviceMesh) -> None:
    def planned_dims() -> list[int]:
        with _redistribute.use_min_cost_redistribution_plan():
            steps = _redistribute._gen_transform_infos(spec(mesh, S0, R), spec(mesh, R, R))
        return [step.mesh_dim for step in steps]

    assert planned_dims() == [0]
    # Straight: 6.6 + 20 + 6250. An eighth over dp, the whole over tp: 26.6 + 781 + 20.6 + 1094.
    with module_of(two_dims()).apply():
        assert planned_dims() == [1, 0, 1]
    assert planned_dims() == [0]


@pytest.mark.parametrize(
    ("gather", "move", "placement"),
    [
        pytest.param(a_curve(1, 1000), a_curve(1000, 1), "S(0)", id="gather the second factor"),
        pytest.param(a_curve(1000, 1), a_curve(1, 1000), "P(sum)", id="move the first factor's shards"),
    ],
)
def test_export_changes_the_sharding_strategy(
    mesh: DeviceMesh, gather: Any, move: Any, placement: str
) -> None:
    """The rows of both factors are sharded."""
    names = ("S(1)->R", "S(1)->S(0)", "P->R", "P->S(0)", "P->S(1)")
    transitions = dict.fromkeys(names, a_curve(1000, 1)) | {"S(0)->R": gather, "S(0)->S(1)": move}
    a, b = (DTensor.from_local(torch.ones(8, 64), mesh["tp"], [S0], run_check=False) for _ in range(2))
    with module_of(two_dims(transitions=transitions)).apply():
        assert str((a @ b).placements[0]) == placement


# ----------------------------------------------------------------------------------- apply and undo


def test_undo_restores_torchs_functions_in_reverse_order(mesh: DeviceMesh) -> None:
    def functions() -> list[object]:
        build = vars(_collective_utils.MeshTopoInfo)["build_from_mesh"]
        return [build, getattr(_collective_utils, COST), getattr(single_dim_strategy, COST, None)]

    def over_dp() -> float:
        return cost(mesh, (S0, R), (R, R))

    before, cost_before = functions(), over_dp()
    first = module_of(two_dims()).apply()
    assert all(now is not then for now, then in zip(functions(), before, strict=True) if then is not None)
    second = module_of(a_topology(a_dim("dp", 2, 1.0, 0.0), a_dim("tp", 8, 1.0, 0.0))).apply()
    assert over_dp() == pytest.approx(6.6 + 0.0625 / 2 * 1e6)
    with pytest.raises(RuntimeError, match="undo those first"):
        first.undo()
    second.undo()
    assert over_dp() == pytest.approx(DP_GATHER_US)
    for _ in range(2):  # a second undo changes nothing
        first.undo()
    assert (functions(), over_dp()) == (before, cost_before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (COST, lambda current, target, mesh_topo, mesh_dim: 0.0, r"current_placement.*got \(current, target"),
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
    ops, group, world = torch.ops._c10d_functional, mesh.get_group("tp").group_name, dist.group.WORLD
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(MIB, device="meta")
    calls = {
        "gather": (ops.all_gather_into_tensor.default, (x, 8, group), 8 * MIB),
        "reduce": (ops.all_reduce.default, (x, "sum", group), MIB),
        "scatter": (ops.reduce_scatter_tensor.default, (x, "sum", 8, group), MIB // 8),
        "world": (ops.all_reduce.default, (x, "sum", world.group_name), MIB),
        "exchange": (ops.all_to_all_single.default, (x, [MIB // 8] * 8, [MIB // 8] * 8, group), MIB),
    }
    for name, (op, args, elements) in calls.items():
        graph.create_node("call_function", op, args, name=name).meta["val"] = torch.empty(
            elements, device="meta"
        )
    return graph


def with_collectives(device_type: str = "cpu") -> CalibratedTopology:
    curves = {"all_gather": a_curve(10, 4), "all_reduce": a_curve(20, 2), "reduce_scatter": a_curve(0, 1)}
    return two_dims(device_type, collectives=curves)


def test_inductor_estimate_is_in_milliseconds(mesh: DeviceMesh) -> None:
    from torch._inductor import config
    from torch._inductor.fx_passes.overlap_scheduling import estimate_collective_time

    options = config.aten_distributed_optimizations
    nodes = {node.name: node for node in graph_of(mesh).nodes}
    with module_of(with_collectives(), "inductor").apply(mesh):
        hook = options.custom_runtime_estimation
        calls = ((nodes["gather"],), (nodes["reduce"],), (nodes["scatter"],), (nodes["gather"], 0))
        ms = [estimate_collective_time(*call, custom_runtime_estimation=hook) for call in calls]
        # all_to_all was not measured, nor all dims as one.
        assert [hook(nodes[name]) for name in ("exchange", "world", "x")] == [None] * 3
        assert hook(nodes["gather"], 4096) is None
    gather_ms, reduce_ms = 0.010 + 32 / 1024 / 4 * 1e3, 0.020 + 4 / 1024 / 2 * 1e3
    assert ms == pytest.approx([gather_ms, reduce_ms, 4 / 1024 * 1e3, 0.010])
    assert options.custom_runtime_estimation is None


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


def test_inductor_cache_key_depends_on_constants(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor pickles its settings into the key of compiled graphs."""
    keys = set()
    for curve in (a_curve(10, 4), a_curve(10, 5)):
        exported = module_of(two_dims(collectives={"all_gather": curve}), "inductor", "exported_for_cache")
        monkeypatch.setitem(sys.modules, "exported_for_cache", exported)
        with exported.apply(mesh) as applied:
            keys.add(pickle.dumps(applied.estimate))
    assert len(keys) == 2


# ------------------------------------------------------------------------------------ the program


@pytest.mark.parametrize("target", ["torch", "inductor"])
def test_export_command_writes_a_module(dtbench: Cli, tmp_path: Path, target: str) -> None:
    write_topology(with_collectives(), tmp_path / "topology.json")
    code, out, err = dtbench("export", "topology.json", "--to", target, "-o", "mine.py")
    assert (code, err) == (0, "") and "mine.py" in out
    text = (tmp_path / "mine.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "import mine\n" in text and imports
    assert not [node for node in imports if "dtbench" in ast.unparse(node)]


@pytest.mark.parametrize(
    ("topology", "target", "says"),
    [
        (a_topology(a_dim("tp", 8, 1.0, 1.0), base_latency_us=3.0), "torch", "base latency of 3 us"),
        *((a_topology(), target, "no mesh dim") for target in TARGETS),
    ],
)
def test_unsupported_topologies_are_refused(topology: CalibratedTopology, target: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        source_of(topology, target)


def test_help_names_every_target(dtbench: Cli) -> None:
    _, out, _ = dtbench("export", "--help")
    assert re.findall(r"^ +--to ([a-z]\S*)", out, re.MULTILINE) == [*TARGETS]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("none.json --to torch -o mine.py", "cannot read"),
        ("t.json --to jax -o mine.py", "--to"),
        ("t.json --to torch -o none/mine.py", "cannot write none"),
        ("t.json --to torch --mesh dp=2,tp=8 -o mine.py", "--mesh is for inductor-profile"),
        ("t.json --to torch --dtype float16 -o mine.py", "--dtype is for inductor-profile"),
    ],
)
def test_export_errors_have_one_line(dtbench: Cli, tmp_path: Path, words: str, says: str) -> None:
    write_topology(two_dims(), tmp_path / "t.json")
    code, out, err = dtbench("export", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err
    assert not (tmp_path / "mine.py").exists()


# ----------------------------------------------------------------------------- untrusted topologies

NASTY = 'tp"""\n\'); import os; os.abort()  # {{ 7 * 7 }} \\ \u202e\x1b[2J'


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("target", ["torch", "inductor"])
def test_names_are_escaped_as_literals(target: str) -> None:
    curves = {"all_reduce": a_curve(1, 1)}
    topology = a_topology(
        a_dim(NASTY, 8, 50.0, 2.0, collectives=curves, warnings=(NASTY,)),
        runs=(FromRun(run_id=NASTY, versions={NASTY: NASTY}),),
        created=NASTY,
        warnings=(NASTY,),
    )
    plain = a_topology(a_dim("tp", 8, 1.0, 2.0, collectives=curves))
    text, exported = source_of(topology, target, "x/" + NASTY.replace("/", "")), module_of(topology, target)
    assert text.isascii() and names_in(text) == names_in(source_of(plain, target))
    assert ((*exported.DIMS,), exported.SOURCE["runs"]) == ((NASTY,), (NASTY,))


@pytest.mark.parametrize("value", [math.nan, math.inf, pytest.param(object(), id="object"), b"x"], ids=repr)
def test_only_plain_values_become_literals(value: Any) -> None:
    assert literal({"a": (1, [2.5, None], True)}) == "{'a': (1, (2.5, None), True)}"
    with pytest.raises(TypeError, match="expected a string"):
        literal(value)


def test_export_does_not_overwrite_other_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for target in ("torch", "inductor"):  # an exported module may be replaced
        export(ExportRequest(two_dims(), path), target)
    path.write_text("print('mine')\n")
    with pytest.raises(OutputError, match="not overwritten"):
        export(ExportRequest(two_dims(), path), "torch")
    assert path.read_text() == "print('mine')\n"


RANKS = 8
# Microseconds and GB/s of each collective, so unlike that no other bytes have the same price.
TIMES = {
    "all_gather": (40.0, 200.0),
    "all_reduce": (55.0, 150.0),
    "reduce_scatter": (30.0, 230.0),
    "all_to_all": (12.0, 300.0),
}
# Size of the message that moves the tensor: for an all-to-all, the buffer of a rank.
MESSAGE_BYTES = {collective: SIZE // RANKS if collective == "all_to_all" else SIZE for collective in TIMES}
CHANGES = [
    (S0, R, "all_gather"),
    (S1, R, "all_gather"),
    (P, R, "all_reduce"),
    (P, S0, "reduce_scatter"),
    (P, S1, "reduce_scatter"),
    (S0, S1, "all_to_all"),
    (S1, S0, "all_to_all"),
]
CORE: dict[Any, Any] = {S0: core.Shard(0), S1: core.Shard(1), R: core.Replicate(), P: core.Partial()}


def time_us(collective: str, size: int) -> float:
    latency_us, rate = TIMES[collective]
    return latency_us + size / rate / 1e3


def from_logs(dtbench: Cli) -> None:
    tables = [
        table(name, RANKS, time=lambda size, _in_place, name=name: time_us(name, size))  # type: ignore[misc]
        for name in TIMES
    ]
    Path("nccl.log").write_text("\n".join(tables))
    assert dtbench("import", "nccl.log", "-o", "run.jsonl", "--mesh", f"tp={RANKS}")[0] == EXIT_OK


def from_own_run(_dtbench: Cli) -> None:
    results = [
        made_up.result(
            "collectives",
            name,
            "c10d",
            {
                "mesh_dim": "tp",
                "ranks": RANKS,
                "groups": "together",
                "mode": "isolated",
                "dtype": "float32",
                "size": size,
            },
            [1e-6 * time_us(name, size)] * 5,
            size_bytes=size,
        )
        for name in TIMES
        for size in (2**12 * 4**k for k in range(8))
    ]
    made_up.write(Path("run.jsonl"), made_up.run(results, mesh={"tp": RANKS}, hosts=["node-a"] * RANKS))


@pytest.fixture(params=[from_logs, from_own_run])
def topology(request: pytest.FixtureRequest, dtbench: Cli) -> CalibratedTopology:
    request.param(dtbench)
    code, _, err = dtbench("calibrate", "run.jsonl", "-o", "topology.json")
    assert code == EXIT_OK, err
    return read_topology(Path("topology.json"))


def message_us(topology: CalibratedTopology, collective: str) -> float:
    """Returns the curve's time of the message that moves the tensor."""
    size = MESSAGE_BYTES[collective]
    us = topology.dims[0].collectives[collective].columns["time_us"].us(size)
    assert us == pytest.approx(time_us(collective, size), rel=0.01)
    return us


def test_core_prices_a_step_as_its_collective(topology: CalibratedTopology) -> None:
    constants = Topology.load("topology.json").constants([("tp", RANKS)])
    for src, dst, collective in CHANGES:
        (step,) = ChainSearch(SHAPE, 4, [CORE[src]], [CORE[dst]], constants).cheapest() or ()
        assert (step.collective, step.us) == (collective, pytest.approx(message_us(topology, collective)))


def test_export_to_torch_prices_a_step_as_its_collective(
    topology: CalibratedTopology, mesh: DeviceMesh
) -> None:
    exported = module_of(structs.replace(topology, device_type="cuda"), "torch")
    exported.DEVICE_TYPE = "cpu"  # no mesh on cuda here
    with exported.apply():
        for src, dst, collective in CHANGES:
            assert cost(mesh["tp"], (src,), (dst,)) == pytest.approx(message_us(topology, collective))


def test_export_to_inductor_and_plan_price_a_message_as_its_collective(topology: CalibratedTopology) -> None:
    curves, links = module_of(topology, "inductor").CURVES, TopologyLinks(topology, RANKS)
    for collective in TIMES:
        size = MESSAGE_BYTES[collective]
        us = [curves["tp", collective].us(size), 1e6 * links.collective(collective, size, RANKS, 1)]
        assert us == pytest.approx([message_us(topology, collective)] * 2)
