"""Calibration finds constants that are known, and says where the data do not hold them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.cost import calibration
from dtbench.cost.calibration import fit
from dtbench.cost.show import print_topology
from dtbench.records.run import RunWriter, read_run
from dtbench.records.topology import Dim, HostLayout, Topology, read_topology, write_topology
from dtbench.suite import Result, Run
from dtbench.suite.errors import OutputError, UnreadableRunError, UsageError
from dtbench.tests import made_up
from dtbench.tests.made_up import slowed
from dtbench_core.cost.ring import RING_COLLECTIVES, Ring

RING = RING_COLLECTIVES
RESULTS = Path(__file__).parents[2] / "results"


def dims_of(topology: Topology) -> dict[str, Dim]:
    return {dim.name: dim for dim in topology.dims}


def run_of(results: Any, **changes: Any) -> Run:
    return made_up.run(list(results), **changes)


@pytest.fixture(scope="module")
def topology() -> Topology:
    return calibration.calibrate([run_of(made_up.collectives())])


# ---------------------------------------------------------------------------- finding what is there


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_exact_times_give_back_their_constants(ranks: int) -> None:
    truth = {"tp": (3.0, 12.0)}
    results = made_up.collectives(mesh={"tp": ranks}, truth=truth, noise=0.0, names=RING, samples=8)
    topology = calibration.calibrate([run_of(results, mesh={"tp": ranks}, hosts=["a"] * ranks)])
    dim = topology.dims[0]
    assert dim.bandwidth_GiBps == pytest.approx(3.0, rel=1e-3)
    assert dim.latency_us_per_hop == pytest.approx(12.0, rel=1e-3)
    assert dim.residuals.worst_ratio == pytest.approx(1.0, abs=1e-3)
    assert dim.fitted_on.size_bytes == (made_up.SIZES[0], made_up.SIZES[-1])


def test_noisy_times_give_back_their_constants(topology: Topology) -> None:
    for name, (bandwidth, latency) in made_up.TRUTH.items():
        dim = dims_of(topology)[name]
        # The lower quartile of 5 % noise lies 3.4 % below the median.
        assert dim.bandwidth_GiBps == pytest.approx(bandwidth / 0.966, rel=0.03)
        assert dim.latency_us_per_hop == pytest.approx(latency * 0.966, rel=0.03)
        low, high = dim.bandwidth_interval
        assert low < dim.bandwidth_GiBps < high
        low, high = dim.latency_interval
        assert low < dim.latency_us_per_hop < high


def test_the_formulas_are_those_of_torch() -> None:
    from torch.distributed.tensor import _collective_utils as theirs

    costs = {
        "all_gather": theirs.allgather_cost,
        "all_reduce": theirs.allreduce_cost,
        "reduce_scatter": theirs.reduce_scatter_cost,
    }
    for ranks in (2, 4, 8):
        info = theirs.MeshTopoInfo(None, [ranks], [19.3], [2.7])  # type: ignore[arg-type]
        for name, cost in costs.items():
            for size in made_up.SIZES:
                ours = Ring(ranks, 19.3, 2.7).collective_us(name, size)
                assert ours == pytest.approx(cost(size / 1024**3, info, 0), rel=1e-12)


def test_lines_per_collective_find_a_slow_reduce_scatter() -> None:
    exact = made_up.collectives(noise=0.0, samples=8)
    results = slowed(exact, lambda r, rank: 2.0 if r.name == "reduce_scatter" else 1.0)
    dim = dims_of(calibration.calibrate([run_of(results)]))["tp"]
    lines = dim.collectives
    assert lines["reduce_scatter"].beta_GiBps == pytest.approx(lines["all_gather"].beta_GiBps / 2, rel=0.01)
    assert lines["reduce_scatter"].alpha_us == pytest.approx(2 * lines["all_gather"].alpha_us, rel=0.01)
    # A line through exact points of one collective is exact; the one bandwidth of the dim cannot be.
    assert lines["reduce_scatter"].geometric_mean_ratio == pytest.approx(1, abs=0.01)
    assert dim.residuals.geometric_mean_ratio > 1.1


def test_one_burst_does_not_move_the_fit() -> None:
    def burst(result: Result, rank: int) -> float:
        return 10.0 if (result.name, result.size_bytes) == ("all_reduce", made_up.SIZES[-1]) else 1.0

    exact = made_up.collectives(noise=0.0, names=RING, samples=8)
    dim = dims_of(calibration.calibrate([run_of(slowed(exact, burst))]))["tp"]
    assert dim.bandwidth_GiBps == pytest.approx(1.6, rel=0.1)
    assert dim.residuals.worst_ratio > 8


def test_octaves_count_the_same_however_dense_the_sweep() -> None:
    sizes = np.array([1024.0, 1030.0, 1040.0, 4096.0])
    weights = fit.octave_weights(sizes)
    assert weights[:3].sum() == pytest.approx(weights[3])
    assert weights.mean() == pytest.approx(1)


# ---------------------------------------------------------------------------- which samples count


def test_waiting_for_late_ranks_is_no_transfer_time(topology: Topology) -> None:
    results = [msgspec.structs.replace(r, rank_samples_s={}) for r in made_up.collectives()]
    without = calibration.calibrate([run_of(results)])
    assert dims_of(without)["tp"].bandwidth_GiBps < 0.9 * dims_of(topology)["tp"].bandwidth_GiBps
    assert any("wait for the last rank" in w for w in dims_of(without)["tp"].warnings)
    assert not any("wait for the last rank" in w for w in dims_of(topology)["tp"].warnings)


def test_a_dim_is_as_slow_as_its_slowest_group() -> None:
    def second_group(result: Result, rank: int) -> float:
        return 3.0 if result.params["mesh_dim"] == "tp" and rank >= 2 else 1.0

    exact = made_up.collectives(noise=0.0, names=RING, samples=8)
    dim = dims_of(calibration.calibrate([run_of(slowed(exact, second_group))]))["tp"]
    assert dim.bandwidth_GiBps == pytest.approx(1.6 / 3, rel=0.02)


def test_groups_together_are_preferred(topology: Topology) -> None:
    assert dims_of(topology)["tp"].groups_sharing == "together"
    alone = dims_of(calibration.calibrate([run_of(made_up.collectives(modes=["alone"]))]))["tp"]
    assert alone.groups_sharing == "alone"
    assert alone.bandwidth_GiBps > 1.8 * dims_of(topology)["tp"].bandwidth_GiBps
    assert any("one group alone" in w for w in alone.warnings)


def test_results_that_are_not_ok_do_not_count(topology: Topology) -> None:
    slow = slowed(made_up.collectives(), 9)
    spoiled = [msgspec.structs.replace(r, status="wrong", launch=1) for r in slow]
    again = calibration.calibrate([run_of([*made_up.collectives(), *spoiled])])
    assert again.dims == topology.dims


def test_another_dtype_is_taken_only_where_it_must_and_said() -> None:
    half = [
        msgspec.structs.replace(r, params={**r.params, "dtype": "bfloat16"})
        for r in made_up.collectives(names=RING)
    ]
    both = calibration.calibrate([run_of([*made_up.collectives(names=RING), *half])])
    assert both.warnings == ()
    assert both.dims == calibration.calibrate([run_of(made_up.collectives(names=RING))]).dims
    assert calibration.calibrate([run_of(half)]).warnings == (
        "no results with dtype float32: bfloat16 was taken",
    )


# ---------------------------------------------------------------------------- what the data do not hold


def test_one_launch_says_that_its_intervals_are_too_narrow(topology: Topology) -> None:
    assert {dim.intervals for dim in topology.dims} == {"within one launch only: too narrow"}


def test_launches_that_differ_widen_the_interval(topology: Topology) -> None:
    factors = (0.8, 0.9, 1.0, 1.1, 1.25)
    runs = [
        run_of(made_up.collectives(seed, launch_factor=factor), run_id=f"r{seed}")
        for seed, factor in enumerate(factors)
    ]
    merged = dims_of(calibration.calibrate(runs))["tp"]
    assert merged.intervals == "over 5 launches"
    assert merged.fitted_on.launches == 5
    low, high = merged.bandwidth_interval
    narrow = dims_of(topology)["tp"].bandwidth_interval
    assert high - low > 3 * (narrow[1] - narrow[0])
    assert low < 1.6 / 0.966 < high
    # Launches inside one file are launches too.
    one_file = [r for i, f in enumerate(factors) for r in made_up.collectives(i, launch_factor=f, launch=i)]
    assert dims_of(calibration.calibrate([run_of(one_file)]))["tp"].fitted_on == merged.fitted_on


def test_times_that_do_not_grow_give_a_lower_bound() -> None:
    flat = {"dp": (1e6, 250.0), "tp": (1e6, 90.0)}
    topology = calibration.calibrate(
        [run_of(made_up.collectives(truth=flat, sizes=made_up.SIZES[:4], names=RING))]
    )
    for dim in topology.dims:
        assert dim.bandwidth_is_lower_bound
        assert any("lower bound" in w for w in dim.warnings)


def test_no_latency_beyond_the_base_is_said() -> None:
    fast = {"dp": (10.0, 0.0), "tp": (20.0, 0.0)}
    results = made_up.collectives(truth=fast, noise=0.0, names=RING, samples=8)
    for dim in calibration.calibrate([run_of(results)]).dims:
        assert dim.latency_us_per_hop == pytest.approx(0, abs=0.01)
        assert any("latency" in w for w in dim.warnings)


def test_a_short_range_of_sizes_is_said() -> None:
    topology = calibration.calibrate([run_of(made_up.collectives(sizes=made_up.SIZES[3:5], names=RING))])
    assert all(any("factor of 4 only" in w for w in dim.warnings) for dim in topology.dims)


def test_dims_that_cannot_be_calibrated_are_left_out_with_their_reason() -> None:
    shape = {"pp": 1, "dp": 2, "tp": 2}
    results = [
        *made_up.collectives(mesh=shape, truth={"pp": (1, 1), **made_up.TRUTH}, names=RING),
    ]
    results = [r for r in results if r.params["mesh_dim"] != "dp" or r.size_bytes == made_up.SIZES[0]]
    topology = calibration.calibrate([run_of(results, mesh=shape)])
    assert [dim.name for dim in topology.dims] == ["tp"]
    reasons = {dim.name: dim.reason for dim in topology.left_out}
    assert reasons["pp"].startswith("one rank")
    assert reasons["dp"].startswith("one size only")


# ---------------------------------------------------------------------------- built-in constants


@pytest.mark.parametrize(
    ("hosts", "layouts"),
    [
        (("a", "a", "b", "b"), {"dp": "inter-host", "tp": "intra-host"}),
        (("a", "b", "a", "b"), {"dp": "intra-host", "tp": "inter-host"}),
        (("a", "a", "a", "a"), {"dp": "intra-host", "tp": "intra-host"}),
        (("a", "b", "c", "d"), {"dp": "inter-host", "tp": "inter-host"}),
    ],
)
def test_the_layout_comes_from_the_hosts(hosts: tuple[str, ...], layouts: dict[str, str]) -> None:
    dims = dims_of(calibration.calibrate([run_of(made_up.collectives(names=RING), hosts=hosts)]))
    for name, layout in layouts.items():
        builtin = dims[name].builtin
        expected = (87.7, 0.6) if layout == "intra-host" else (pytest.approx(19.294), 2.7)
        assert (builtin.bandwidth_GiBps, builtin.latency_us_per_hop) == expected
        assert builtin.layout == layout
        assert dims[name].layout.kind == layout
        assert dims[name].layout.hosts_per_group == ((1, 1) if layout == "intra-host" else (2, 2))


def test_how_far_off_the_builtin_constants_are() -> None:
    # Made to take four times what torch predicts.
    builtin = {"dp": (87.7 * 0.22, 2.7), "tp": (87.7, 0.6)}
    results = slowed(made_up.collectives(truth=builtin, noise=0.0, names=RING, samples=8), 4)
    for dim in calibration.calibrate([run_of(results)]).dims:
        assert dim.builtin.predicted_over_measured == pytest.approx(0.25, rel=1e-6)
        assert dim.builtin.geometric_mean_ratio == pytest.approx(4, rel=1e-6)


def test_hosts_that_are_not_recorded_are_not_guessed() -> None:
    topology = calibration.calibrate([run_of(made_up.collectives(names=RING), ranks=[])])
    for dim in topology.dims:
        assert dim.builtin is None
        assert dim.layout == HostLayout()
        assert any("on which host" in w for w in dim.warnings)


# ---------------------------------------------------------------------------- runs that do not fit


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mesh": {"dp": 4, "tp": 1}}, "mesh"),
        ({"versions": {"backend": "nccl"}}, "backend"),
        ({"machine": {"cpu": {"model": "another"}, "gpus": []}}, "CPU"),
        ({"machine": {"cpu": {"model": "Made-up CPU @ 2.00GHz"}, "gpus": [{"name": "H100"}]}}, "GPUs"),
        ({"hosts": ("a", "a", "a", "a")}, "hosts of the ranks"),
    ],
)
def test_runs_of_different_setups_are_refused(changes: dict[str, Any], what: str) -> None:
    first = run_of(made_up.collectives(names=RING))
    other = run_of(made_up.collectives(names=RING), path="other.jsonl", run_id="other", **changes)
    with pytest.raises(UsageError, match=f"differ in {what}"):
        calibration.calibrate([first, other])


def test_the_same_run_twice_is_refused() -> None:
    one = run_of(made_up.collectives(names=RING))
    with pytest.raises(UsageError, match="the same run"):
        calibration.calibrate([one, one])


def test_no_runs_and_no_collectives_are_refused() -> None:
    with pytest.raises(UsageError, match="no run given"):
        calibration.calibrate([])
    with pytest.raises(UsageError, match="dtbench run collectives"):
        calibration.calibrate([run_of(made_up.dispatch())])
    with pytest.raises(UsageError, match="no mesh dim"):
        calibration.calibrate([run_of(made_up.collectives(sizes=made_up.SIZES[:1]))])


def test_differing_versions_and_a_cut_run_are_said() -> None:
    first = run_of(made_up.collectives(names=RING), complete=False)
    versions = {**made_up.header()["versions"], "torch": "2.11.0"}
    other = run_of(made_up.collectives(1, names=RING), run_id="other", versions=versions)
    warnings = calibration.calibrate([first, other]).warnings
    assert any("versions of torch: 2.11.0, 2.13.0+cpu" in w for w in warnings)
    assert any("incomplete run" in w for w in warnings)


def test_a_run_read_from_its_file_calibrates_the_same(tmp_path: Path, topology: Topology) -> None:
    path = tmp_path / "made-up.jsonl"
    with RunWriter.create(path, made_up.header()) as writer:
        for result in made_up.collectives():
            writer.append(result)
        writer.end()
    assert calibration.calibrate([read_run(path)]).dims == topology.dims


def test_the_table_has_per_dim_latency_bandwidth_and_how_far_pytorch_is_off(
    topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    print_topology(topology)
    out = capsys.readouterr().out
    head, *rows = out.splitlines()
    titles = ("mesh dim", "ranks", "latency [us/hop]", "bandwidth [GiB/s]", "PyTorch's constants")
    assert all(title in head for title in titles) and head.count("off by") == 2 and "90% intervals" in out
    for dim, row in zip(topology.dims, rows, strict=False):
        cells = re.split(r"  +", row.strip())
        latency, bandwidth = (list(map(float, re.findall(r"[\d.]*\d", cell))) for cell in cells[2:4])
        assert cells[0] == dim.name and bandwidth[1] <= bandwidth[0] <= bandwidth[2]
        assert latency == pytest.approx([dim.latency_us_per_hop, *dim.latency_interval], rel=0.01)
        assert dim.builtin is not None
        built_in = f"{dim.builtin.latency_us_per_hop:g} us, {dim.builtin.bandwidth_GiBps:g} GiB/s"
        assert cells[5] == built_in
        off = [float(cells[i].rstrip("x")) for i in (4, 6)]
        assert off == pytest.approx(
            [dim.residuals.geometric_mean_ratio, dim.builtin.geometric_mean_ratio], rel=0.01
        )
    assert all(f"warning: {warning}" in out for warning in topology.all_warnings())


# ---------------------------------------------------------------------------- the file


def test_what_is_written_is_read_again(tmp_path: Path, topology: Topology) -> None:
    path = tmp_path / "topology.json"
    write_topology(topology, path)
    assert read_topology(path) == topology
    write_topology(topology, path)  # our own kind may be replaced
    assert [p.name for p in tmp_path.iterdir()] == ["topology.json"]


def test_another_file_is_not_overwritten(tmp_path: Path, topology: Topology) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run","schema":1}\n')
    with pytest.raises(OutputError, match="is not a topology"):
        write_topology(topology, path)
    assert path.read_text() == '{"kind":"run","schema":1}\n'
    with pytest.raises(OutputError, match="not a regular file"):
        write_topology(topology, tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        write_topology(topology, tmp_path / "missing" / "topology.json")
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_link_is_kept_and_its_file_replaced(tmp_path: Path, topology: Topology) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    write_topology(topology, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_topology(tmp_path / "real.json") == topology


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.topology.json")), ids=lambda path: path.name)
def test_committed_topologies_are_read_with_every_figure(path: Path) -> None:
    assert json.loads(msgspec.json.encode(read_topology(path))) == json.loads(path.read_bytes())


def _damage(topology: Topology, path: str, value: Any) -> str:
    copy = json.loads(msgspec.json.encode(topology))
    *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    at: Any = copy
    for step in way:
        at = at[step]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("kind", "run", "is not a topology"),
        ("schema", 3, "newer dtbench"),
        ("schema", 1, "older dtbench .* calibrate again from the run file"),
        ("schema", True, "schema is True"),
        ("dims", {}, "dims is {}"),
        ("dims.0.name", 3, r"dims\[0\].name is 3"),
        ("dims.0.ranks", 1, "at least 2"),
        ("dims.0.bandwidth_GiBps", 0, "of at least 1e-30"),
        ("dims.0.bandwidth_GiBps", float("inf"), "not JSON"),
        ("dims.1.latency_us_per_hop", -1, "at least 0"),
        ("dims.1.latency_us_per_hop", True, "expected a number"),
        ("dims.0.residuals", KeyError, r"dims\[0\].residuals is missing"),
        ("dims.0.residuals.points.0.measured_s", "1", "expected a number"),
        ("dims.0.builtin.bandwidth_GiBps", None, "expected a number"),
        ("dims.0.collectives", [], "expected an object"),
        ("dims.0.collectives.all_gather.table", [], r"all_gather.table is empty"),
        ("dims.0.collectives.all_gather.table.1.size_bytes", 1, r"table\[1\].size_bytes is not above"),
        ("dims.0.collectives.all_gather.table.3.time_us", 1e-3, r"table\[3\].time_us is below"),
        ("dims.0.collectives.all_gather.table.2.low_us", 1e9, r"table\[2\].time_us is not between"),
        ("dims.0.collectives.all_gather.table.2.size_bytes", 10**30, "integer 10* is out of range"),
        ("dims.0.collectives.all_gather.table.2.size_bytes", 1.5, "expected an integer"),
        ("dims.0.collectives.all_gather.table.2.time_us", float("nan"), "not JSON"),
        ("dims.0.collectives.all_gather.table.0.measured_us", KeyError, "measured_us is missing"),
        ("dims.0.collectives.all_gather.alpha_us", None, "one of alpha_us and beta_GiBps"),
        ("dims.0.collectives.all_gather.beta_interval", [0, 1], "of at least 1e-30"),
        ("dims.0.transitions", KeyError, "transitions is missing"),
        ("dims.0.transitions", {"core": {"S(0)->R": {}}}, r"transitions.core.S\(0\)->R.alpha_us is missing"),
        ("dims.0.layout.kind", "inside", "expected one of intra-host, inter-host, mixed"),
        ("dims.0.layout.hosts_per_group", 2, "a list of 2"),
        ("dims.0.contention", {"all_gather": {"size_bytes": 1}}, "together_over_alone is missing"),
        ("dims.1.name", "dp", "expected each name once"),
        ("dims.0.bandwidth_interval", [1], "a list of 2"),
        ("dims.0.name", "\ud800", "not a topology"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, topology: Topology, where: str, value: Any, complaint: str
) -> None:
    path = tmp_path / "topology.json"
    path.write_text(_damage(topology, where, value))
    with pytest.raises(UnreadableRunError, match=complaint) as caught:
        read_topology(path)
    assert "\n" not in str(caught.value)
    assert "topology.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_topology_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableRunError, match="not a topology"):
        read_topology(path)
    with pytest.raises(UnreadableRunError, match="cannot read"):
        read_topology(tmp_path / "missing.json")
    with pytest.raises(UnreadableRunError, match="not a regular file"):
        read_topology(tmp_path)


def test_no_torch_is_loaded() -> None:
    rooms = "dtbench.cost.calibration, dtbench.reporting.html"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
