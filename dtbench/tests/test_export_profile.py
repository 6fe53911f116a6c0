"""`dtbench export --to inductor-profile`, read by torch's own ProfileData and used by a compiled function."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtbench.cost.export import inductor_profile
from dtbench.cost.export.targets import ExportRequest, export, render
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.records.result import MeshShape
from dtbench.records.topology import CalibratedTopology, LeftOut, MeasuredCurve
from dtbench.tests.made_up_topology import SIZES, a_dim, a_topology, curve_of, ring_curve, ring_dim
from dtbench.tests.programs import LIMIT_S, environment
from dtbench.traces.job import read_job

profile_guided_estimation = pytest.importorskip(
    "torch._inductor.fx_passes.profile_guided_estimation", reason="torch 2.13 has it first"
)
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
# The bandwidth falls by three quarters from 32 MiB to 96 MiB: far from a line in log-log space.
BENT = curve_of((2**12, 2**25, 3 * 2**25, 2**30), (30.0, 100.0, 1200.0, 11000.0))
ITEMSIZE = {"Float": 4, "BFloat16": 2, "Double": 8, "Half": 2}


def two_dims(**changes: Any) -> CalibratedTopology:
    """A mesh of dp=2 and tp=4, calibrated over both and over all ranks."""
    dims = (
        ring_dim("dp", 2, 5.0, 20.0, *COLLECTIVES),
        ring_dim("tp", 4, 50.0, 2.0, *COLLECTIVES),
        a_dim("dp+tp", 8, 5.0, 20.0, collectives={"all_reduce": BENT}),
    )
    mesh = MeshShape(dim_names=("dp", "tp"), shape=(2, 4))
    return a_topology(*dims, **{"mesh": mesh, **changes})


def load(tmp_path: Path, request: ExportRequest) -> Any:
    """Returns torch's ProfileData of the exported trace."""
    export(request, "inductor-profile")
    profile = profile_guided_estimation.ProfileData()
    profile.load(str(request.path))
    return profile


def exported(topology: CalibratedTopology, tmp_path: Path, **options: Any) -> Any:
    return load(tmp_path, ExportRequest(topology, tmp_path / "profile.json", **options))


def element_bytes(collective: str, dtype: str, ranks: int) -> int:
    """Returns the curve's bytes per element of torch's output, which is a shard for a reduce-scatter."""
    return ITEMSIZE[dtype] * (ranks if collective == "reduce_scatter" else 1)


def assert_follows(
    profile: Any, curve: MeasuredCurve, collective: str, ranks: tuple[int, ...], dtype: str
) -> None:
    """Compares torch's look-up with the curve, at sizes between its rows and beyond both ends."""
    per_element = element_bytes(collective, dtype, len(ranks))
    sizes = {int(2 ** (exponent / 7)) for exponent in range(7 * 37)}
    for elements in sorted({max(1, size // per_element) for size in sizes}):
        expected_ms = curve.columns["time_us"].us(elements * per_element) / 1e3
        got_ms, source = profile.lookup_collective(collective, ranks, elements, dtype)
        tolerance = 0.05 if elements * per_element <= curve.table[-1].size_bytes else 0.1
        assert source == "profile"
        assert got_ms == pytest.approx(expected_ms, rel=tolerance), (collective, dtype, elements)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_look_ups_follow_the_curves_of_every_group(tmp_path: Path, dtype: str) -> None:
    topology = two_dims()
    profile = exported(topology, tmp_path, dtypes=(dtype,))
    name = inductor_profile.DTYPES[dtype][0]
    groups = {
        "dp": [(rank, rank + 4) for rank in range(4)],
        "tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "dp+tp": [tuple(range(8))],
    }
    expected = {
        (collective, ranks, name)
        for dim in topology.dims
        for collective, ranks in itertools.product(dim.collectives, groups[dim.name])
    }
    assert {*profile.get_collective_keys()} == expected
    for dim in topology.dims:
        for collective, curve in dim.collectives.items():
            for ranks in groups[dim.name][:2]:
                assert_follows(profile, curve, collective, ranks, name)


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(BENT, id="bend"),
        pytest.param(curve_of((2**20,), (100.0,)), id="one size"),
        pytest.param(curve_of((2**10, 2**30), (50.0, 50.0)), id="flat"),
        pytest.param(curve_of(SIZES, [5.0 * 1.01**i for i in range(len(SIZES))]), id="latency only"),
        pytest.param(curve_of((3, 5, 7, 2**30), (1.0, 200.0, 300.0, 9000.0)), id="tiny sizes"),
    ],
)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_look_ups_follow_unusual_curves(tmp_path: Path, curve: MeasuredCurve, collective: str) -> None:
    topology = a_topology(a_dim("tp", 2, 5.0, 20.0, collectives={collective: curve}))
    assert_follows(exported(topology, tmp_path), curve, collective, (0, 1), "Float")


def test_events_have_the_fields_of_a_trace(tmp_path: Path) -> None:
    request = ExportRequest(two_dims(), tmp_path / "profile.json", dtypes=("float32",))
    export(request, "inductor-profile")
    trace = json.loads(request.path.read_text())
    config = trace["distributedInfo"]["pg_config"]
    assert [(group["pg_desc"], group["ranks"]) for group in config[3:6]] == [
        ("mesh_dp", [3, 7]),
        ("mesh_tp", [0, 1, 2, 3]),
        ("mesh_tp", [4, 5, 6, 7]),
    ]
    scatter = next(
        event["args"]
        for event in trace["traceEvents"]
        if event["args"]["Collective name"] == "reduce_scatter"
    )
    assert scatter == {
        "Collective name": "reduce_scatter",
        "Process Group Name": "0",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 4]",
        "Group size": 2,
        "In msg nelems": 2,
        "Out msg nelems": 1,
        "dtype": "Float",
    }
    ends: dict[str, float] = {}
    for event in trace["traceEvents"]:
        assert event["ts"] == pytest.approx(ends.get(event["tid"], 0.0))
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_mesh_of_the_job_determines_the_groups(tmp_path: Path) -> None:
    """The job has the calibrated dims in another order, and one more of a single rank."""
    mesh = (("tp", 4), ("pp", 1), ("dp", 2))
    request = ExportRequest(two_dims(), tmp_path / "profile.json", mesh=mesh)
    profile = load(tmp_path, request)
    assert {ranks for _, ranks, _ in profile.get_collective_keys()} == {
        *((rank, rank + 1) for rank in (0, 2, 4, 6)),
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    }
    assert render(request, "inductor-profile").notes == ("not exported, since the mesh lacks it: dp+tp=8",)


def test_missing_dims_and_collectives_are_noted(tmp_path: Path) -> None:
    topology = a_topology(
        ring_dim("tp", 4, 50.0, 2.0, "all_reduce", "all_gather", "reduce_scatter"),
        mesh=MeshShape(dim_names=("pp", "tp"), shape=(2, 4)),
        left_out=(LeftOut(name="pp", ranks=2, reason="few sizes"),),
    )
    assert render(ExportRequest(topology, tmp_path / "p.json"), "inductor-profile").notes == (
        "not exported, since it was not calibrated: pp=2",
        "not exported, since it was not measured over tp: all_to_all",
    )


def test_profile_does_not_pass_for_a_recorded_trace(tmp_path: Path) -> None:
    request = ExportRequest(two_dims(), tmp_path / "profile.json")
    export(request, "inductor-profile")
    with pytest.raises(UnreadableRunError, match="`dtbench export` wrote it"):
        read_job([request.path])


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ((("dp", 4), ("tp", 4)), r"--mesh has dp=4, but the topology was calibrated on dp=2,tp=4"),
        ((("cp", 2),), "--mesh has cp=2"),
        ((("pp", 1),), "got the mesh pp=1, expected one with dp=2,tp=4"),
    ],
)
def test_meshes_without_measured_dims_are_refused(tmp_path: Path, mesh: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        render(ExportRequest(two_dims(), tmp_path / "p.json", mesh=mesh), "inductor-profile")


def test_profile_of_too_many_groups_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_profile, "MAX_EVENTS", 100)
    with pytest.raises(UsageError, match=r"7 process groups would have \d+ events, expected at most 100"):
        render(ExportRequest(two_dims(), tmp_path / "p.json"), "inductor-profile")


def test_compiled_function_uses_the_profile_of_its_group(tmp_path: Path) -> None:
    """Runs torch's overlap scheduler on two gloo ranks, and reads what it logs of its estimates."""
    curves = {name: ring_curve(name, 2, 5.0, 20.0) for name in COLLECTIVES}
    topology = a_topology(a_dim("tp", 2, 5.0, 20.0, collectives=curves))
    export(ExportRequest(topology, tmp_path / "profile.json"), "inductor-profile")
    program = Path(__file__).with_name("profiled_compile.py")
    ranks = subprocess.run(
        [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", program, "profile.json"],
        cwd=tmp_path,
        env=environment() | {"TORCH_TRACE": "logs", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ranks.returncode == 0, ranks.stderr
    look_ups = [json.loads(line) for line in ranks.stdout.splitlines() if line.startswith("[")]
    assert {(name, *rest) for name, *rest in ((q[0], tuple(q[1]), q[2], q[3], q[5]) for q in look_ups)} == {
        ("all_gather_into_tensor", (0, 1), 2 * 64 * 64, "Float", "profile"),
        ("all_reduce", (0, 1), 64 * 64, "Float", "profile"),
        ("reduce_scatter_tensor", (0, 1), 32 * 64, "Float", "profile"),
    }
    (log,) = [
        line
        for file in (tmp_path / "logs").iterdir()
        for line in file.read_text().splitlines()
        if "rank_0" in file.name and '"pge_ms"' in line
    ]
    sizes = {"all_gather_into_tensor": 2**15, "all_reduce": 2**14, "reduce_scatter_tensor": 2**14}
    expected_ms = {
        name: curves[name.removesuffix("_into_tensor").removesuffix("_tensor")].columns["time_us"].us(size)
        / 1e3
        for name, size in sizes.items()
    }
    got_ms = {entry["node"]: entry["pge_ms"] for entry in json.loads(log)["diagnostics"]}
    assert got_ms == pytest.approx(expected_ms, rel=0.02)
