"""Calibration recovers known constants, and warns about constants that the data do not determine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.cost import calibration
from dtbench.cost.calibration import times
from dtbench.cost.show import print_topology
from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.records.result import Result, Run
from dtbench.records.topology import CalibratedTopology, Dim, read_topology, write_topology
from dtbench.tests import made_up
from dtbench.tests.made_up import slowed
from dtbench_core.cost.ring import RING_COLLECTIVES

RING = RING_COLLECTIVES
RESULTS = Path(__file__).parents[2] / "results"


def dims_of(topology: CalibratedTopology) -> dict[str, Dim]:
    return {dim.name: dim for dim in topology.dims}


def run_of(results: Any, **changes: Any) -> Run:
    return made_up.run(list(results), **changes)


@pytest.fixture(scope="module")
def topology() -> CalibratedTopology:
    return calibration.calibrate([run_of(made_up.collectives())])


# ---------------------------------------------------------------------------- finding what is there


def test_calibrate_recovers_constants_from_noisy_times(topology: CalibratedTopology) -> None:
    for name, (bandwidth, latency) in made_up.TRUTH.items():
        dim = dims_of(topology)[name]
        # The lower quartile of 5 % noise lies 3.4 % below the median.
        assert dim.bandwidth_GiBps == pytest.approx(bandwidth / 0.966, rel=0.03)
        assert dim.latency_us_per_hop == pytest.approx(latency * 0.966, rel=0.03)
        low, high = dim.bandwidth_interval
        assert low < dim.bandwidth_GiBps < high
        low, high = dim.latency_interval
        assert low < dim.latency_us_per_hop < high


def test_fit_ignores_a_single_burst() -> None:
    def burst(result: Result, rank: int) -> float:
        return 10.0 if (result.name, result.size_bytes) == ("all_reduce", made_up.SIZES[-1]) else 1.0

    exact = made_up.collectives(noise=0.0, names=RING, samples=8)
    dim = dims_of(calibration.calibrate([run_of(slowed(exact, burst))]))["tp"]
    assert dim.bandwidth_GiBps == pytest.approx(1.6, rel=1e-3)
    assert dim.residuals.worst_ratio == pytest.approx(1, abs=1e-3)
    assert [drop.first_bytes for drop in dim.drops] == [made_up.SIZES[-1]]


# ---------------------------------------------------------------------------- which samples count


def test_times_exclude_waiting_for_late_ranks(topology: CalibratedTopology) -> None:
    results = [msgspec.structs.replace(r, rank_samples_s={}) for r in made_up.collectives()]
    without = calibration.calibrate([run_of(results)])
    assert dims_of(without)["tp"].bandwidth_GiBps < 0.9 * dims_of(topology)["tp"].bandwidth_GiBps
    assert any("waiting for the last rank" in w for w in dims_of(without)["tp"].warnings)
    assert not any("waiting for the last rank" in w for w in dims_of(topology)["tp"].warnings)


def test_results_of_all_groups_together_are_preferred(topology: CalibratedTopology) -> None:
    assert dims_of(topology)["tp"].groups_sharing == "together"
    alone = dims_of(calibration.calibrate([run_of(made_up.collectives(modes=["alone"]))]))["tp"]
    assert alone.groups_sharing == "alone"
    assert alone.bandwidth_GiBps > 1.8 * dims_of(topology)["tp"].bandwidth_GiBps
    assert any("only one group at work" in w for w in alone.warnings)


def test_results_that_are_not_ok_are_ignored(topology: CalibratedTopology) -> None:
    slow = slowed(made_up.collectives(), 9)
    spoiled = [msgspec.structs.replace(r, status="wrong", launch=1) for r in slow]
    again = calibration.calibrate([run_of([*made_up.collectives(), *spoiled])])
    assert again.dims == topology.dims


# ---------------------------------------------------------------------------- what the data do not hold


def test_single_measurement_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    once = calibration.calibrate([run_of(made_up.collectives(names=RING, noise=0.0, samples=1))])
    for dim in once.dims:
        assert dim.bandwidth_interval is dim.latency_interval is None
        for curve in dim.collectives.values():
            assert curve.alpha_interval is curve.beta_interval is curve.end_interval is None
            assert {(row.low_us, row.high_us) for row in curve.table} == {(None, None)}
    print_topology(once)
    out = capsys.readouterr().out
    assert out.count("(no interval)") == 2 * len(once.dims) and ".." not in out


def test_differing_launches_widen_intervals(topology: CalibratedTopology) -> None:
    assert {dim.intervals for dim in topology.dims} == {"from a single launch: too narrow"}
    factors = (0.8, 0.9, 1.0, 1.1, 1.25)
    runs = [
        run_of(made_up.collectives(seed, launch_factor=factor), run_id=f"r{seed}")
        for seed, factor in enumerate(factors)
    ]
    merged = dims_of(calibration.calibrate(runs))["tp"]
    assert (merged.intervals, merged.fitted_on.launches) == ("over 5 launches", 5)
    low, high = merged.bandwidth_interval
    narrow = dims_of(topology)["tp"].bandwidth_interval
    assert high - low > 3 * (narrow[1] - narrow[0])
    assert low < 1.6 / 0.966 < high
    # Launches inside one file are launches too.
    one_file = [r for i, f in enumerate(factors) for r in made_up.collectives(i, launch_factor=f, launch=i)]
    assert dims_of(calibration.calibrate([run_of(one_file)]))["tp"].fitted_on == merged.fitted_on


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            {"truth": {"dp": (1e6, 250.0), "tp": (1e6, 90.0)}, "sizes": made_up.SIZES[:4]},
            "only a lower bound",
        ),
        ({"truth": {"dp": (10.0, 0.0), "tp": (20.0, 0.0)}, "noise": 0.0, "samples": 8}, "latency"),
        ({"sizes": made_up.SIZES[3:5]}, "only a factor of 4"),
    ],
)
def test_poorly_determined_constants_are_warned_about(changes: dict[str, Any], warning: str) -> None:
    dims = calibration.calibrate([run_of(made_up.collectives(names=RING, **changes))]).dims
    assert len(dims) == 2
    for dim in dims:
        assert any(warning in w for w in dim.warnings)
        assert dim.bandwidth_is_lower_bound == (warning == "only a lower bound")
        assert warning != "latency" or dim.latency_us_per_hop == pytest.approx(0, abs=0.01)


def test_dims_without_enough_results_are_left_out_with_a_reason() -> None:
    shape = {"pp": 1, "dp": 2, "tp": 2}
    results = made_up.collectives(mesh=shape, truth={"pp": (1, 1), **made_up.TRUTH}, names=RING)
    results = [r for r in results if r.params["mesh_dim"] != "dp" or r.size_bytes == made_up.SIZES[0]]
    topology = calibration.calibrate([run_of(results, mesh=shape)])
    assert [dim.name for dim in topology.dims] == ["tp"]
    reasons = {dim.name: dim.reason for dim in topology.left_out}
    assert reasons["pp"].startswith("it has a single rank")
    assert reasons["dp"].startswith("a single size")


# ---------------------------------------------------------------------------- built-in constants


def test_errors_of_builtin_constants_are_reported() -> None:
    # Made to take four times what torch predicts.
    builtin = {"dp": (87.7 * 0.22, 2.7), "tp": (87.7, 0.6)}
    results = slowed(made_up.collectives(truth=builtin, noise=0.0, names=RING, samples=8), 4)
    for dim in calibration.calibrate([run_of(results)]).dims:
        assert dim.builtin.predicted_over_measured == pytest.approx(0.25, rel=1e-6)
        assert dim.builtin.geometric_mean_ratio == pytest.approx(4, rel=1e-6)


# ---------------------------------------------------------------------------- runs that do not fit


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": {"dp": 4, "tp": 1}}, "differ in mesh"),
        ({"versions": {"backend": "nccl"}}, "differ in backend"),
        ({"machine": {"cpu": {"model": "another"}, "gpus": []}}, "differ in CPU"),
        (
            {"machine": {"cpu": {"model": "Made-up CPU @ 2.00GHz"}, "gpus": [{"name": "H100"}]}},
            "differ in GPUs",
        ),
        ({"hosts": ("a", "a", "a", "a")}, "differ in hosts of the ranks"),
        ({"run_id": "first"}, "the same run"),
    ],
)
def test_runs_of_different_setups_are_refused(changes: dict[str, Any], says: str) -> None:
    first = run_of(made_up.collectives(names=RING), run_id="first")
    other = run_of(made_up.collectives(names=RING), **{"path": "other.jsonl", "run_id": "other", **changes})
    with pytest.raises(UsageError, match=says) as refusal:
        calibration.calibrate([first, other])
    if says.startswith("differ"):
        for run in (first, other):
            command = f"`dtbench calibrate {run.path} -o {run.path.stem}.topology.json`"
            assert command in str(refusal.value)


@pytest.mark.parametrize(
    ("results", "says"),
    [
        (None, "no run given"),
        (made_up.dispatch(), "dtbench run collectives"),
        (made_up.collectives(sizes=made_up.SIZES[:1]), "no mesh dim"),
    ],
)
def test_runs_without_a_range_of_sizes_are_refused(results: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        calibration.calibrate([] if results is None else [run_of(results)])


def test_differing_versions_and_incomplete_runs_are_warned_about() -> None:
    first = run_of(made_up.collectives(names=RING), complete=False)
    versions = {**made_up.header()["versions"], "torch": "2.11.0"}
    other = run_of(made_up.collectives(1, names=RING), run_id="other", versions=versions)
    warnings = calibration.calibrate([first, other]).warnings
    assert any("versions of torch: 2.11.0, 2.13.0+cpu" in w for w in warnings)
    assert any("incomplete run" in w for w in warnings)


def test_print_topology_shows_constants_and_errors_per_dim(
    topology: CalibratedTopology, capsys: pytest.CaptureFixture[str]
) -> None:
    print_topology(topology)
    out = capsys.readouterr().out
    _head, *rows = out.splitlines()
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


def test_topology_round_trips_and_other_files_are_not_overwritten(
    tmp_path: Path, topology: CalibratedTopology
) -> None:
    path, link, other = tmp_path / "topology.json", tmp_path / "link.json", tmp_path / "run.jsonl"
    link.symlink_to(path)
    for place in (path, path, link):  # our own kind may be replaced
        write_topology(topology, place)
        assert read_topology(path) == topology and link.is_symlink()
    other.write_text('{"kind":"run","schema":1}\n')
    for place, says in (
        (other, "is not a topology"),
        (tmp_path, "not a regular file"),
        (tmp_path / "missing" / "t.json", "cannot write"),
    ):
        with pytest.raises(OutputError, match=says):
            write_topology(topology, place)
    assert other.read_text() == '{"kind":"run","schema":1}\n'
    assert {p.name for p in tmp_path.iterdir()} == {path.name, link.name, other.name}


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.topology.json")), ids=lambda path: path.name)
def test_committed_topologies_round_trip(path: Path) -> None:
    assert json.loads(msgspec.json.encode(read_topology(path))) == json.loads(path.read_bytes())


def _damage(topology: CalibratedTopology, path: str, value: Any) -> str:
    copy = json.loads(msgspec.json.encode(topology))
    *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    at: Any = copy
    for step in way:
        at = at[step]
    at[last] = value
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("kind", "run", "is a run of dtbench, expected a topology"),
        ("schema", 2, "newer dtbench .* upgrade dtbench"),
        ("dims", {}, "dims: expected array"),
        ("dims.0.ranks", 1, "expected int >= 2"),
        ("dims.0.bandwidth_GiBps", 0, "expected float >= 1e-30"),
        ("dims.0.bandwidth_GiBps", float("inf"), "not JSON"),
        ("dims.0.collectives.all_gather.table", [], "table is empty"),
        ("dims.0.collectives.all_gather.table.1.size_bytes", 1, r"table\[1\].size_bytes is not above"),
        ("dims.0.collectives.all_gather.table.3.time_us", 1e-3, r"table\[3\].time_us is below"),
        ("dims.0.collectives.all_gather.table.2.low_us", 1e9, r"table\[2\].time_us is not between"),
        ("dims.0.collectives.all_gather.alpha_us", None, "one of alpha_us and beta_GiBps"),
        ("dims.1.name", "dp", "expected each name once"),
    ],
)
def test_damaged_topology_is_refused_in_one_line(
    tmp_path: Path, topology: CalibratedTopology, where: str, value: Any, complaint: str
) -> None:
    path = tmp_path / "topology.json"
    path.write_text(_damage(topology, where, value))
    with pytest.raises(UnreadableRunError, match=complaint) as caught:
        read_topology(path)
    assert "\n" not in str(caught.value)
    assert "topology.json" in str(caught.value)


def test_lines_are_fitted_to_a_subset_of_a_long_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has all of them, and the constants are those of all."""
    sizes = tuple(1024 * k for k in range(1, 3000))
    run = run_of(
        made_up.collectives(mesh={"dp": 2}, truth={"dp": (40, 2)}, names=RING[:1], sizes=sizes, samples=1)
    )
    dim = dims_of(calibration.calibrate([run]))["dp"]
    (curve,) = dim.collectives.values()
    assert len(curve.table) == len(sizes)
    assert dim.fitted_on.points == times.MAX_FITTED_SIZES
    assert dim.fitted_on.size_bytes == (sizes[0], sizes[-1])
    monkeypatch.setattr(times, "MAX_FITTED_SIZES", len(sizes))
    fitted_to_all = dims_of(calibration.calibrate([run]))["dp"]
    assert fitted_to_all.fitted_on.points > times.MAX_FITTED_SIZES * 0.9
    assert dim.bandwidth_GiBps == pytest.approx(fitted_to_all.bandwidth_GiBps, rel=0.05)
