"""Calibration: constants, warnings, the entry of each mesh dim, and the coverage of 90 % intervals."""

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.cost.calibration import calibrate, intervals, times
from dtbench.cost.calibration.times import QUANTILE, points_of
from dtbench.cost.show import print_topology
from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.records.result import Result, Run
from dtbench.records.topology import CalibratedTopology, Dim, HostLayout, read_topology, write_topology
from dtbench.stats import interval, summarize
from dtbench.tests import made_up
from dtbench.tests.made_up import KIB, MIB, slowed
from dtbench_core.cost.ring import RING_COLLECTIVES as RING

RESULTS = Path(__file__).parents[2] / "results"


def run_of(results: Iterable[Result], **changes: Any) -> Run:
    return made_up.run(list(results), **changes)


def dims_of(*runs: Run) -> dict[str, Dim]:
    return {dim.name: dim for dim in calibrate(runs).dims}


def calibrated_dims(results: Iterable[Result], **changes: Any) -> dict[str, Dim]:
    return dims_of(run_of(results, **changes))


def exact(**changes: Any) -> list[Result]:
    return list(
        made_up.collectives(**{"names": RING, "noise": 0.0, "samples": 8, "modes": ["together"]} | changes)
    )


@pytest.fixture(scope="module")
def topology() -> CalibratedTopology:
    return calibrate([run_of(made_up.collectives())])


@pytest.fixture
def tp(topology: CalibratedTopology) -> Dim:
    return topology.dims[1]


# ---------------------------------------------------------------------------- finding what is there


def test_calibrate_recovers_constants_from_noisy_times(topology: CalibratedTopology) -> None:
    for dim, truth in zip(topology.dims, made_up.TRUTH.values(), strict=True):
        # The lower quartile of 5 % noise lies 3.4 % below the median.
        assert (dim.bandwidth_GiBps * 0.966, dim.latency_us_per_hop / 0.966) == pytest.approx(truth, rel=0.03)
        assert dim.bandwidth_interval[0] < dim.bandwidth_GiBps < dim.bandwidth_interval[1]
        assert dim.latency_interval[0] < dim.latency_us_per_hop < dim.latency_interval[1]


def test_fit_ignores_a_single_burst() -> None:
    size = made_up.SIZES[-1]
    results = slowed(exact(), lambda r, _: 10.0 if (r.name, r.size_bytes) == ("all_reduce", size) else 1.0)
    dim = calibrated_dims(results)["tp"]
    assert (dim.bandwidth_GiBps, dim.residuals.worst_ratio) == pytest.approx((1.6, 1), rel=1e-3)
    assert [drop.first_bytes for drop in dim.drops] == [size]


# ---------------------------------------------------------------------------- which samples count


def test_times_exclude_waiting_for_late_ranks(tp: Dim) -> None:
    with_waiting = calibrated_dims(
        [msgspec.structs.replace(r, rank_samples_s={}) for r in made_up.collectives()]
    )["tp"]
    assert with_waiting.bandwidth_GiBps < 0.9 * tp.bandwidth_GiBps
    assert ["waiting for the last rank" in str(dim.warnings) for dim in (with_waiting, tp)] == [True, False]


def test_results_of_all_groups_together_are_preferred(tp: Dim) -> None:
    alone = calibrated_dims(made_up.collectives(modes=["alone"]))["tp"]
    assert (tp.groups_sharing, alone.groups_sharing) == ("together", "alone")
    assert alone.bandwidth_GiBps > 1.8 * tp.bandwidth_GiBps
    assert "only one group at work" in str(alone.warnings)


def test_results_that_are_not_ok_are_ignored(topology: CalibratedTopology) -> None:
    spoiled = [msgspec.structs.replace(r, status="wrong", launch=1) for r in slowed(made_up.collectives(), 9)]
    assert calibrate([run_of([*made_up.collectives(), *spoiled])]).dims == topology.dims


# ---------------------------------------------------------------------------- what the data do not hold


def test_single_measurement_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    once = calibrate([run_of(made_up.collectives(names=RING, noise=0.0, samples=1))])
    curves = [curve for dim in once.dims for curve in dim.collectives.values()]
    intervals = [(dim.bandwidth_interval, dim.latency_interval) for dim in once.dims]
    intervals += [(curve.alpha_interval, curve.beta_interval) for curve in curves]
    intervals += [(row.low_us, row.high_us) for curve in curves for row in curve.table]
    assert {*intervals} == {(None, None)} and {curve.end_interval for curve in curves} == {None}
    print_topology(once)
    out = capsys.readouterr().out
    assert out.count("(no interval)") == 2 * len(once.dims) and ".." not in out


def test_differing_launches_widen_intervals(tp: Dim) -> None:
    factors = dict(enumerate((0.8, 0.9, 1.0, 1.1, 1.25)))
    runs = (run_of(made_up.collectives(i, launch_factor=f), run_id=f"r{i}") for i, f in factors.items())
    merged = dims_of(*runs)["tp"]
    assert (tp.intervals, merged.intervals) == ("from a single launch: too narrow", "over 5 launches")
    low, high = merged.bandwidth_interval
    assert low < 1.6 / 0.966 < high and high - low > 3 * float(np.ptp(tp.bandwidth_interval))
    # Launches inside one file count, too.
    one_file = (r for i, f in factors.items() for r in made_up.collectives(i, launch_factor=f, launch=i))
    assert calibrated_dims(one_file)["tp"].fitted_on == merged.fitted_on
    assert merged.fitted_on.launches == 5


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
    for dim in calibrate([run_of(made_up.collectives(names=RING, **changes))]).dims:
        assert warning in str(dim.warnings)
        assert dim.bandwidth_is_lower_bound == (warning == "only a lower bound")
        assert warning != "latency" or dim.latency_us_per_hop == pytest.approx(0, abs=0.01)


def test_dims_without_enough_results_are_left_out_with_a_reason() -> None:
    shape = {"pp": 1, "dp": 2, "tp": 2}
    results = made_up.collectives(mesh=shape, truth={"pp": (1, 1), **made_up.TRUTH}, names=RING)
    results = [r for r in results if r.params["mesh_dim"] != "dp" or r.size_bytes == made_up.SIZES[0]]
    topology = calibrate([run_of(results, mesh=shape)])
    assert [dim.name for dim in topology.dims] == ["tp"]
    reasons = {dim.name: dim.reason for dim in topology.left_out}
    assert reasons["pp"].startswith("it has a single rank") and reasons["dp"].startswith("a single size")


# ---------------------------------------------------------------------------- built-in constants


def test_errors_of_builtin_constants_are_reported() -> None:
    """The times are four times those that torch predicts."""
    results = slowed(exact(truth={"dp": (87.7 * 0.22, 2.7), "tp": (87.7, 0.6)}), 4)
    for builtin in (dim.builtin for dim in calibrated_dims(results).values()):
        assert (builtin.predicted_over_measured, builtin.geometric_mean_ratio) == pytest.approx((0.25, 4))


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
        calibrate([first, other])
    for name in ("made-up", "other") if says.startswith("differ") else ():
        assert f"`dtbench calibrate {name}.jsonl -o {name}.topology.json`" in str(refusal.value)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no run given"),
        ([run_of(made_up.dispatch())], "dtbench run collectives"),
        ([run_of(made_up.collectives(sizes=made_up.SIZES[:1]))], "no mesh dim"),
    ],
)
def test_runs_without_a_range_of_sizes_are_refused(runs: list[Run], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate(runs)


def test_differing_versions_and_incomplete_runs_are_warned_about() -> None:
    first = run_of(exact(), complete=False)
    other = run_of(exact(), run_id="other", versions={**made_up.header()["versions"], "torch": "2.11.0"})
    warnings = str(calibrate([first, other]).warnings)
    assert "versions of torch: 2.11.0, 2.13.0+cpu" in warnings and "incomplete run" in warnings


def test_topology_records_gpus_driver_and_hosts_of_its_runs() -> None:
    gpus = [{"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}, {"name": "NVIDIA A100"}, {"name": None}]
    measured = run_of(made_up.collectives(), machine={"gpus": gpus, "driver": "570.1"})
    (source,) = calibrate([measured]).runs
    assert (source.gpu, source.driver, source.hosts) == ("NVIDIA H100, NVIDIA A100", "570.1", 2)


def test_print_topology_shows_constants_and_errors_per_dim(
    topology: CalibratedTopology, capsys: pytest.CaptureFixture[str]
) -> None:
    print_topology(topology)
    out = capsys.readouterr().out
    for dim, row in zip(topology.dims, out.splitlines()[1:], strict=False):
        cells = re.split(r"  +", row.strip())
        latency, bandwidth, error, builtin_error = (
            [float(number) for number in re.findall(r"[\d.]*\d", cells[column])] for column in (2, 3, 4, 6)
        )
        hosts = {"dp": "2 hosts x 1 rank", "tp": "1 host x 2 ranks"}
        assert cells[:2] == [dim.name, hosts[dim.name]] and dim.builtin is not None
        assert bandwidth == pytest.approx([dim.bandwidth_GiBps, *dim.bandwidth_interval], rel=0.01)
        assert latency == pytest.approx([dim.latency_us_per_hop, *dim.latency_interval], rel=0.01)
        assert cells[5] == f"{dim.builtin.latency_us_per_hop:g} us, {dim.builtin.bandwidth_GiBps:g} GiB/s"
        assert error == pytest.approx([dim.residuals.geometric_mean_ratio], rel=0.01)
        assert builtin_error == pytest.approx([dim.builtin.geometric_mean_ratio], rel=0.01)
    assert all(f"warning: {warning}" in out for warning in topology.all_warnings())


# ---------------------------------------------------------------------------- the file


def test_topology_round_trips_and_may_be_replaced(tmp_path: Path, topology: CalibratedTopology) -> None:
    path, link = tmp_path / "topology.json", tmp_path / "link.json"
    link.symlink_to(path)
    for place in (path, path, link):  # a topology may be replaced
        write_topology(topology, place)
        assert read_topology(path) == topology and link.is_symlink()


@pytest.mark.parametrize(
    ("place", "message"),
    [("run.jsonl", "is not a topology"), (".", "not a regular file"), ("missing/t.json", "cannot write")],
)
def test_topology_does_not_replace_other_files(
    tmp_path: Path, topology: CalibratedTopology, place: str, message: str
) -> None:
    (tmp_path / "run.jsonl").write_text('{"kind":"run","schema":1}\n')
    with pytest.raises(OutputError, match=message):
        write_topology(topology, tmp_path / place)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"run.jsonl": '{"kind":"run","schema":1}\n'}


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.topology.json")), ids=lambda path: path.name)
def test_committed_topologies_round_trip(path: Path) -> None:
    assert json.loads(msgspec.json.encode(read_topology(path))) == json.loads(path.read_bytes())


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
        ("dims.1.name", "dp", "expected distinct names"),
    ],
)
def test_damaged_topology_is_refused_in_one_line(
    tmp_path: Path, topology: CalibratedTopology, where: str, value: Any, complaint: str
) -> None:
    content = json.loads(msgspec.json.encode(topology))
    *keys, last = [int(key) if key.isdigit() else key for key in where.split(".")]
    functools.reduce(operator.getitem, keys, content)[last] = value
    (tmp_path / "topology.json").write_text(json.dumps(content))
    with pytest.raises(UnreadableRunError, match=rf"^.*topology.json.*{complaint}[^\n]*\Z"):
        read_topology(tmp_path / "topology.json")


def test_lines_are_fitted_to_a_subset_of_a_long_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has all sizes, and the bandwidth is that of a fit to all."""
    sizes, limit = tuple(1024 * k for k in range(1, 3000)), times.MAX_FITTED_SIZES
    run = run_of(
        made_up.collectives(mesh={"dp": 2}, truth={"dp": (40, 2)}, names=RING[:1], sizes=sizes, samples=1)
    )
    dim = dims_of(run)["dp"]
    monkeypatch.setattr(times, "MAX_FITTED_SIZES", len(sizes))
    fitted_to_all = dims_of(run)["dp"]
    assert [len(c.table) for c in dim.collectives.values()] == [len(sizes)]
    assert (dim.fitted_on.points, dim.fitted_on.size_bytes) == (limit, (sizes[0], sizes[-1]))
    assert fitted_to_all.fitted_on.points > len(sizes) * 0.9
    assert dim.bandwidth_GiBps == pytest.approx(fitted_to_all.bandwidth_GiBps, rel=0.05)


# ------------------------------------------------------------------------------ meshes of other shapes


@pytest.mark.parametrize(
    ("mesh", "hosts", "layouts"),
    [
        # 3 hosts of 2: hops of groups of 3 and of 2, beside one base latency.
        (
            {"dp": 3, "tp": 2},
            ("a", "a", "b", "b", "c", "c"),
            {"dp": ("inter-host", (3, 3), (1, 1), 2), "tp": ("intra-host", (1, 1), (2, 2), 0)},
        ),
        (
            {"dp": 2, "tp": 4},
            ("a", "a", "a", "a", "b", "b", "b", "b"),
            {"dp": ("inter-host", (2, 2), (1, 1), 4), "tp": ("intra-host", (1, 1), (4, 4), 0)},
        ),
        # The same mesh on hosts of two: the rows now cross hosts, two ranks of a row on each.
        (
            {"dp": 2, "tp": 4},
            ("a", "a", "b", "b", "c", "c", "d", "d"),
            {"dp": ("inter-host", (2, 2), (1, 1), 2), "tp": ("inter-host", (2, 2), (2, 2), 1)},
        ),
        # And with the hosts dealt out in turn: what the shape calls the inner dim crosses, the outer not.
        (
            {"dp": 2, "tp": 4},
            ("a", "b", "c", "d", "a", "b", "c", "d"),
            {"dp": ("intra-host", (1, 1), (2, 2), 0), "tp": ("inter-host", (4, 4), (1, 1), 2)},
        ),
    ],
)
def test_dims_on_different_links_get_their_own_constants_and_layout(
    mesh: dict[str, int], hosts: tuple[str, ...], layouts: dict[str, tuple[Any, ...]]
) -> None:
    truth = {"dp": (0.5, 200.0), "tp": (4.0, 30.0)}
    dims = calibrated_dims(exact(mesh=mesh, truth=truth), mesh=mesh, hosts=hosts)
    assert {name: msgspec.structs.astuple(dim.layout) for name, dim in dims.items()} == layouts
    for name, dim in dims.items():
        assert (dim.bandwidth_GiBps, dim.latency_us_per_hop) == pytest.approx(truth[name], rel=1e-3)
        builtin = (2.7, 19.294) if dim.layout.kind == "inter-host" else (0.6, 87.7)
        assert (dim.builtin.latency_us_per_hop, dim.builtin.bandwidth_GiBps) == pytest.approx(builtin)
        assert "mixed" not in str(dim.warnings)


def test_missing_layout_is_not_guessed() -> None:
    for dim in calibrated_dims(exact(), ranks=[]).values():
        assert (dim.builtin, dim.layout) == (None, HostLayout())
        assert "lacks the hosts" in str(dim.warnings)


# ------------------------------------------------------------------------------------- mixed dims


def test_flattened_mesh_has_an_entry_if_it_was_measured() -> None:
    dims = calibrated_dims([*exact(), *exact(mesh={"dp+tp": 4}, truth={"dp+tp": (0.3, 120.0)})])
    assert (list(calibrated_dims(exact())), list(dims)) == (["dp", "tp"], ["dp", "tp", "dp+tp"])
    flat = dims["dp+tp"]
    assert (flat.ranks, flat.groups, flat.layout.kind) == (4, 1, "inter-host")
    assert (flat.bandwidth_GiBps, flat.latency_us_per_hop) == pytest.approx((0.3, 120.0), rel=1e-3)


def test_groups_over_different_numbers_of_hosts_make_a_mixed_dim() -> None:
    dp, tp = calibrated_dims(exact(), hosts=("a", "a", "a", "b")).values()
    assert (tp.layout.kind, dp.layout.kind, tp.layout.hosts_per_group) == ("mixed", "mixed", (1, 2))
    # Priced like its slowest group, and compared with torch's constants between hosts.
    assert "its groups span 1 to 2 hosts" in str(tp.warnings) and tp.builtin.layout == "inter-host"


def test_consistently_slower_group_makes_a_mixed_dim() -> None:
    results = slowed(exact(), lambda r, rank: 1.6 if r.params["mesh_dim"] == "tp" and rank >= 2 else 1.0)
    dp, tp = calibrated_dims(results, hosts=("a",) * 4).values()
    assert (tp.layout.kind, dp.layout.kind) == ("mixed", "intra-host")
    assert "its slowest group takes 1.60x" in str(tp.warnings)
    # The price is that of the slow group.
    largest = tp.collectives["all_gather"].table[-1]
    true_us = made_up.ring_us("all_gather", largest.size_bytes, 2, *made_up.TRUTH["tp"])
    assert largest.time_us == pytest.approx(1.6 * true_us)


@pytest.mark.parametrize("sizes", [made_up.SIZES, made_up.SIZES[:3]], ids=["one or the other", "latency"])
def test_differences_of_groups_do_not_make_a_mixed_dim(sizes: tuple[int, ...]) -> None:
    """Each size has a slow group, now one and now the other; or below 64 KiB always the second, by its latency."""
    rng = np.random.default_rng(1)

    @functools.cache
    def slow_group(*_curve_and_size: Any) -> int:
        return 1 if len(sizes) == 3 else int(rng.integers(2))

    def slowdown(result: Result, rank: int) -> float:
        return (
            2.0 if slow_group(result.name, result.size_bytes, result.params["mesh_dim"]) == rank // 2 else 1.0
        )

    dims = calibrated_dims(slowed(exact(sizes=sizes), slowdown), hosts=("a",) * 4)
    assert dims["tp"].layout.kind == "intra-host"


# ------------------------------------------------------------------------------------- contention


def test_contention_is_measured_at_the_largest_common_size() -> None:
    results = exact(modes=["alone", "together"], names=("all_gather", "all_reduce"))
    lacking = ("all_gather", "alone", made_up.SIZES[-1])
    results = [r for r in results if (r.name, r.params["groups"], r.size_bytes) != lacking]
    contention = calibrated_dims(results)["dp"].contention
    assert contention["all_gather"].size_bytes == made_up.SIZES[-2]
    bandwidth, latency = made_up.TRUTH["dp"]
    for name, size in (("all_gather", made_up.SIZES[-2]), ("all_reduce", made_up.SIZES[-1])):
        slow, fast = (made_up.ring_us(name, size, 2, b, latency) for b in (bandwidth, 2 * bandwidth))
        assert contention[name].together_over_alone == pytest.approx(slow / fast)
    assert calibrated_dims(exact(modes=["alone"]))["dp"].contention == {}


# ----------------------------------------------------------------------------------------- dtypes


def as_dtype(results: list[Result], dtype: str, factor: float = 1.0) -> list[Result]:
    return slowed((msgspec.structs.replace(r, params={**r.params, "dtype": dtype}) for r in results), factor)


def test_curve_uses_a_single_dtype_and_prefers_float32() -> None:
    results = exact()
    dim = calibrated_dims([*as_dtype(results, "bfloat16", 1.5), *results])["tp"]
    assert dim.collectives == calibrated_dims(results)["tp"].collectives
    about_dtype = [w for w in dim.warnings if "bfloat16" in w]
    assert len(about_dtype) == 3 and "all_reduce of bfloat16 takes 1.50x as long as float32" in about_dtype[1]
    assert "bfloat16" not in str(calibrated_dims([*results, *as_dtype(results, "bfloat16")])["tp"].warnings)
    # Without float32 the dtype with the most sizes is used.
    few = as_dtype(exact(sizes=made_up.SIZES[:2]), "bfloat16")
    curve = calibrated_dims([*few, *as_dtype(exact(), "float16", 2.0)])["tp"].collectives["all_gather"]
    assert (curve.dtype, curve.points) == ("float16", len(made_up.SIZES))


# ------------------------------------------------------------------------------- redistributions


def transitions(scale: float = 1.0, **params: Any) -> list[Result]:
    return [
        made_up.result(
            "redistribute",
            name,
            impl,
            {"mesh_dim": "tp", "ranks": 2, "dtype": "float32", "size": size, **params},
            [scale * host * (50e-6 + size / 1e9)] * 6,
            size_bytes=size,
        )
        for name in ("S(0)->R", "P->S(1)")
        for impl, host in (("core", 1.0), ("torch", 1.4))
        for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB)
    ]


@pytest.mark.parametrize(("impl", "factor"), [("core", 1.0), ("torch", 1.4)])
def test_redistributions_have_a_curve_per_impl(impl: str, factor: float) -> None:
    dims = calibrated_dims([*exact(), *transitions()])
    assert dims["dp"].transitions == {} and set(dims["tp"].transitions) == {"core", "torch"}
    curve = dims["tp"].transitions[impl]["P->S(1)"]
    assert (curve.alpha_us, curve.beta_GiBps) == pytest.approx((50 * factor, 1e9 / 2**30 / factor), rel=1e-3)
    times_us = {row.size_bytes: row.time_us for row in curve.table}
    assert times_us == pytest.approx({size: factor * (50 + size / 1e3) for size in times_us})


def test_redistributions_of_other_modes_and_bad_results_are_ignored() -> None:
    ignored = [
        *transitions(9.0, mode="back_to_back", groups="together"),
        *transitions(0.5, groups="alone"),
        *(msgspec.structs.replace(r, status="wrong", launch=1) for r in transitions(9.0)),
        *(msgspec.structs.replace(r, impl="local") for r in transitions(0.1)),
    ]
    dim = calibrated_dims([*exact(), *ignored, *transitions(mode="isolated", groups="together")])["tp"]
    assert dim.transitions == calibrated_dims([*exact(), *transitions()])["tp"].transitions
    alone = calibrated_dims([*exact(), *transitions(groups="alone")])["tp"]
    assert "redistributions were measured with only one group at work" in str(alone.warnings)


# ------------------------------------------------------------------------------ tables, few sizes


def test_table_times_never_fall_and_keep_measured_times() -> None:
    """Pool adjacent violators, by hand: 400 and 100 us become their geometric mean."""
    measured_us = (50, 400, 100, 500)
    results = [
        msgspec.structs.replace(result, time_s=summarize([us * 1e-6]), samples_s=())
        for result, us in zip(transitions(), measured_us, strict=False)
    ]
    table = calibrated_dims([*exact(), *results])["tp"].transitions["core"]["S(0)->R"].table
    assert [row.time_us for row in table] == pytest.approx([50, 200, 200, 500])
    assert [row.measured_us for row in table] == pytest.approx(measured_us)
    assert all((row.low_us or row.time_us) <= row.time_us <= (row.high_us or row.time_us) for row in table)


def test_invalid_times_are_left_out_of_tables() -> None:
    invalid = {made_up.SIZES[2]: math.nan, made_up.SIZES[4]: 0.0}
    results = slowed(exact(), lambda r, rank: invalid.get(r.size_bytes or 0, 1.0))
    table = calibrated_dims(results)["tp"].collectives["all_gather"].table
    assert [row.size_bytes for row in table] == [size for size in made_up.SIZES if size not in invalid]


def test_end_bandwidth_is_that_of_large_messages() -> None:
    # Messages below 4 MiB take half the time, as a traffic shaper lets bursts pass: that bends the line, not the end.
    bursts = slowed(exact(), lambda r, rank: 0.5 if (r.size_bytes or 0) < 4 * MIB else 1.0)
    single_size = [r for r in exact() if r.name != "all_reduce" or r.size_bytes == MIB]
    straight, bent, single = (
        calibrated_dims(results)["tp"].collectives["all_reduce"] for results in (exact(), bursts, single_size)
    )
    # Two ranks: the algorithm's bandwidth is the ring's. Times without noise have no interval.
    assert (straight.end_GiBps, bent.end_GiBps) == pytest.approx((1.6, 1.6), rel=1e-3)
    assert bent.beta_GiBps != pytest.approx(1.6, rel=0.05)
    assert (straight.end_interval, single.end_GiBps) == (None, None)


@pytest.mark.parametrize(
    ("count", "warning"), [(1, "measured at a single size"), (2, "measured at only two sizes")]
)
def test_few_sizes_are_warned_about(count: int, warning: str) -> None:
    dim = calibrated_dims([*exact(), *transitions()[0:4:3][:count]])["tp"]
    curve = dim.transitions["core"]["S(0)->R"]
    assert {value is None for value in (curve.alpha_us, curve.beta_GiBps)} == {count == 1}
    assert curve.points == count and f"core S(0)->R {warning}" in str(dim.warnings)


def test_redistributions_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="no ok results of the collectives suite"):
        calibrated_dims(transitions())


# Values of standard deviation 1: normal, or Student's t of 3 degrees of freedom.
DRAWS: dict[str, Callable[[np.random.Generator, int | tuple[()]], np.ndarray]] = {
    "normal": lambda rng, size: np.asarray(rng.normal(size=size)),
    "heavy": lambda rng, size: np.asarray(rng.standard_t(3, size) / np.sqrt(3)),
}


def coverage(
    launches: int, common: float, own: float, tails: str = "normal", machines: int = 60
) -> tuple[float, float]:
    """Returns the share of new launches inside the intervals, and the mean half width of their logarithms.

    Args:
        launches: launches that an interval is computed from.
        common: sd of a launch's factor for all sizes.
        own: sd of a launch's factor for each size.
        tails: key of DRAWS.
        machines: repetitions.
    """
    rng, draw, sizes = np.random.default_rng(7), DRAWS[tails], made_up.SIZES

    def launch() -> np.ndarray:  # (sizes, repetitions) us
        centre = np.log(100 + np.array(sizes) * 1e-4) + common * draw(rng, ()) + own * draw(rng, len(sizes))
        return np.exp(centre[:, None] + rng.normal(0, 0.05, (len(sizes), 20)))

    inside, widths = [], []
    for _ in range(machines):
        measured = [launch() for _ in range(launches)]
        times = {size: {("r", k): m[i] for k, m in enumerate(measured)} for i, size in enumerate(sizes)}
        low, high = interval(intervals.new_launch(points_of(times), 200), intervals.INTERVAL)
        widths.append(np.log(high / low) / 2)
        new = np.quantile([launch() for _ in range(5)], QUANTILE, axis=2)
        inside.append((low <= new) & (new <= high))
    return float(np.mean(inside)), float(np.mean(widths))


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize(("common", "own"), [(0.1, 0.02), (0.1, 0.1), (0.0, 0.1)])
def test_intervals_hold_nine_of_ten_new_launches(common: float, own: float, tails: str) -> None:
    share, width = coverage(5, common, own, tails)
    # Student's t of 4 degrees of freedom is 1.42 times as wide as a normal's 1.645 sd.
    assert 0.85 <= share <= 0.97 and width < 1.6 * 1.645 * float(np.hypot(common, own)) + 0.05


def test_intervals_of_few_launches_are_wide_enough_unless_there_is_one() -> None:
    shares, widths = zip(*(coverage(launches, 0.1, 0.05) for launches in (2, 3, 8)), strict=True)
    assert min(shares) >= 0.85 and widths[0] > 1.5 * widths[1] > 1.5 * widths[2]
    assert coverage(1, 0.1, 0.02)[0] < 0.5  # as the topology file warns
