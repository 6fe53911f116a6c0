"""Comparison of two made-up topologies whose difference is known, and of committed ones with themselves."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from dtbench.comparison.topology_comparison import TopologyComparison, compare_intervals, compare_topologies
from dtbench.records.comparison import Verdict
from dtbench.records.topology import (
    CalibratedTopology,
    Dim,
    FromRun,
    HostLayout,
    LeftOut,
    MeasuredCurve,
    write_topology,
)
from dtbench.tests import made_up
from dtbench.tests.made_up_topology import a_topology, curve_of, ring_dim

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
RESULTS = Path(__file__).parents[2] / "results"


def measured(
    topology: CalibratedTopology, seed: int, launches: int = 5, noise: float = 0.02
) -> CalibratedTopology:
    """The topology as calibrated from launches that differ by `noise`, half of it shared by all sizes of a launch."""
    rng = np.random.default_rng(seed)

    def measure(curve: MeasuredCurve) -> MeasuredCurve:
        times = np.array([row.time_us for row in curve.table])
        factors = rng.normal(0, noise, (launches, 1)) + rng.normal(0, noise, (launches, len(times)))
        by_launch = times * np.exp(factors / np.sqrt(2))
        typical = np.median(by_launch, axis=0)
        table = tuple(
            replace(row, measured_us=float(us), time_us=float(rising), launch_us=tuple(samples.tolist()),
                    low_us=float(min(us / 1.1, rising)), high_us=float(max(us * 1.1, rising)))
            for row, us, rising, samples in zip(
                curve.table, typical, np.maximum.accumulate(typical), by_launch.T, strict=True
            )
        )  # fmt: skip
        return replace(curve, launches=launches, table=table)

    def measure_dim(dim: Dim) -> Dim:
        collectives = {name: measure(curve) for name, curve in dim.collectives.items()}
        fitted_on = replace(dim.fitted_on, launches=launches)
        return replace(dim, collectives=collectives, fitted_on=fitted_on)

    runs = tuple(replace(run, run_id=f"run {seed}") for run in topology.runs)
    return replace(topology, dims=tuple(map(measure_dim, topology.dims)), runs=runs)


def without_launches(topology: CalibratedTopology) -> CalibratedTopology:
    """The topology as a version of dtbench wrote it that did not record the times of each launch."""
    text = json.loads(msgspec.json.encode(topology))
    for dim in text["dims"]:
        for curve in dim["collectives"].values():
            for row in curve["table"]:
                del row["launch_us"]
    return msgspec.convert(text, CalibratedTopology)


def two_dims(tp_bandwidth: float = 40.0, tp_latency: float = 4.0, **changes: Any) -> CalibratedTopology:
    return a_topology(
        ring_dim("dp", 2, 10.0, 20.0, *COLLECTIVES),
        ring_dim("tp", 4, tp_bandwidth, tp_latency, *COLLECTIVES),
        **changes,
    )


def verdicts(comparison: TopologyComparison) -> dict[str, set[str]]:
    """Returns mesh dim -> verdicts of its calls."""
    dims = dict.fromkeys(row.suite for row in comparison.rows)
    return {dim: {str(row.verdict) for row in comparison.rows if row.suite == dim} for dim in dims}


def constants(comparison: TopologyComparison) -> dict[tuple[str, str], str]:
    return {(c.mesh_dim, c.name.split()[0]): str(c.verdict) for c in comparison.constants}


BASE, SLOWER_TP = two_dims(), two_dims(tp_bandwidth=40 / 1.2)


def test_slower_link_is_found_on_its_dim_alone():
    comparison = compare_topologies(measured(BASE, 1), measured(SLOWER_TP, 2))
    found = verdicts(comparison)
    assert found["tp"] == {"slower"} and not found["dp"] & {"slower", "faster"}
    assert comparison.exit_code == 1
    for row in comparison.rows:
        if row.suite == "tp":
            assert row.ratio == pytest.approx(1.2, rel=0.05) and row.low and row.low > 1.1
            assert row.params["sizes"].endswith("to 1 GiB") and row.base_launches == row.head_launches == 5
            # Latency decides the time of small sizes, which is the same.
            assert not any(
                size.case.verdict is Verdict.SLOWER for size in comparison.sizes
                if size.case.key[:3] == row.key[:3] and size.base.size_bytes <= 16 * 1024
            )  # fmt: skip
    backwards = compare_topologies(measured(SLOWER_TP, 2), measured(BASE, 1))
    assert verdicts(backwards)["tp"] == {"faster"} and backwards.exit_code == 3


def test_constants_are_compared_by_their_intervals():
    comparison = compare_topologies(measured(BASE, 1), measured(two_dims(tp_bandwidth=20, tp_latency=2), 2))
    assert constants(comparison) == {
        ("dp", "latency"): "same",
        ("dp", "bandwidth"): "same",
        ("tp", "latency"): "faster",
        ("tp", "bandwidth"): "slower",
    }
    bound = measured(two_dims(tp_bandwidth=20), 2)
    bound = replace(bound, dims=tuple(replace(dim, bandwidth_is_lower_bound=True) for dim in bound.dims))
    assert constants(compare_topologies(measured(BASE, 1), bound))["tp", "bandwidth"] == "inconclusive"


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.2])
def test_same_links_are_not_flagged(noise: float):
    found = [
        compare_topologies(measured(BASE, 2 * i, noise=noise), measured(BASE, 2 * i + 1, noise=noise))
        for i in range(20)
    ]
    flagged = sum(any(row.verdict in (Verdict.SLOWER, Verdict.FASTER) for row in c.rows) for c in found)
    # At most 5% in each direction. Without the correction for many sizes, more than a third would be.
    assert flagged <= 2
    assert flagged or {c.exit_code for c in found} <= {0, 3}
    if noise == 0.002:
        assert {verdict for c in found for verdict in verdicts(c)["tp"]} == {"same"}


def test_change_of_a_single_call_needs_more_launches():
    """One slower size of many may be chance after five launches, and is significant after ten."""

    def slow_call(topology: CalibratedTopology) -> CalibratedTopology:
        dp, tp = topology.dims
        rows = tp.collectives["all_gather"].table
        last = replace(rows[-1], time_us=rows[-1].time_us * 1.3, low_us=None, high_us=None)
        curve = replace(tp.collectives["all_gather"], table=(*rows[:-1], last))
        return replace(topology, dims=(dp, replace(tp, collectives=tp.collectives | {"all_gather": curve})))

    for launches, expected in ((5, "inconclusive"), (10, "slower")):
        comparison = compare_topologies(measured(BASE, 1, launches), measured(slow_call(BASE), 2, launches))
        (row,) = (row for row in comparison.rows if row.key[:2] == ("tp", "all_gather"))
        (size,) = (
            s.case for s in comparison.sizes if s.case.key[:2] == row.key[:2] and s.base.size_bytes == 2**30
        )
        assert size.verdict == row.verdict == expected
        assert ("may be chance" in size.reason) == (launches == 5)


def test_single_launch_cannot_tell():
    for remove in (lambda topology: topology, without_launches):
        base, head = (
            remove(measured(topology, i, launches=1)) for i, topology in enumerate((BASE, SLOWER_TP))
        )
        comparison = compare_topologies(base, head)
        assert {verdict for found in verdicts(comparison).values() for verdict in found} == {"inconclusive"}
        assert constants(comparison)["tp", "bandwidth"] == "inconclusive" and comparison.exit_code == 3
        assert all("one launch on each side" in row.reason for row in comparison.rows)


def test_older_files_are_decided_by_intervals():
    base = without_launches(measured(BASE, 1))
    far = without_launches(measured(two_dims(tp_bandwidth=20), 2))
    near = without_launches(measured(two_dims(tp_bandwidth=40 / 1.1), 2))  # intervals of 10% overlap
    for head, expected in ((far, "slower"), (near, "inconclusive")):
        comparison = compare_topologies(base, head)
        assert verdicts(comparison) == {"dp": {"inconclusive"}, "tp": {expected}}
        assert any("90% intervals decide" in note for note in comparison.notes)
    assert verdicts(compare_topologies(measured(BASE, 1), far))["tp"] == {"slower"}


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ((100, (95, 105)), (130, (125, 135)), "slower"),
        ((130, (125, 135)), (100, (95, 105)), "faster"),
        ((100, (95, 105)), (108, (104, 112)), "inconclusive"),
        ((100, (99, 101)), (102, (101, 103)), "same"),
        ((100, (90, 110)), (100.1, (90, 110)), "inconclusive"),  # sameness has to be shown
        ((100, None), (200, (190, 210)), "inconclusive"),
        ((0, (0, 1)), (5, (4, 6)), "inconclusive"),
        ((5, (0, 0)), (5, (4, 6)), "inconclusive"),
    ],
)
def test_disjoint_intervals_differ(base: Any, head: Any, expected: str):
    assert compare_intervals(base, head, 5)[0] == expected
    assert compare_intervals(base, head, 1)[0] == "inconclusive"


def test_setup_lists_what_changed():
    run = FromRun(run_id="a", versions={"torch": "2.13.0", "nccl": "2.28"}, gpu="H100", driver="570.1")
    other = replace(run, run_id="b", versions={"torch": "2.13.0", "nccl": "2.29"}, driver="580.2")
    base, head = (
        measured(two_dims(created=f"2026-0{month}-01", device_type="cuda", backend="nccl", runs=(r,)), 1)
        for month, r in ((5, run), (6, other))
    )
    comparison = compare_topologies(base, head)
    assert comparison.setup == {
        "calibrated": ("2026-05-01", "2026-06-01"),
        "driver": ("570.1", "580.2"),
        "nccl": ("2.28", "2.29"),
    }
    assert "driver: 570.1 in base, 580.2 in head" in comparison.notes and not comparison.machines_differ
    unknown = compare_topologies(replace(base, runs=(FromRun(run_id="a"),)), head)
    assert unknown.setup["GPU"] == ("", "H100") and not unknown.machines_differ


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cuda"}, "the machines differ: device type cpu in base, cuda in head"),
        ({"runs": (FromRun(run_id="b", gpu="H200"),)}, "the machines differ: GPU H100 in base, H200 in head"),
    ],
)
def test_other_hardware_has_no_verdict(changes: dict[str, Any], reason: str):
    base = measured(two_dims(runs=(FromRun(run_id="a", gpu="H100"),)), 1)
    comparison = compare_topologies(base, replace(measured(SLOWER_TP, 2), **{"runs": base.runs} | changes))
    assert {row.verdict for row in comparison.rows} == {Verdict.INCONCLUSIVE} and comparison.exit_code == 3
    assert comparison.summary.startswith(f"cannot tell: {reason}")
    assert {*constants(comparison).values()} == {"inconclusive"}


def test_dims_and_calls_of_one_side_are_listed():
    base = measured(BASE, 1)
    pp = ring_dim("pp", 2, 5.0, 9.0, "all_reduce")
    dp = measured(SLOWER_TP, 2).dims[0]
    fewer = replace(dp, collectives={name: dp.collectives[name] for name in COLLECTIVES[:2]})
    head = a_topology(fewer, pp, left_out=(LeftOut(name="tp", ranks=1, reason="it has a single rank"),))
    rows = {
        (row.suite, row.name): (str(row.verdict), row.reason) for row in compare_topologies(base, head).rows
    }
    assert rows["dp", "reduce_scatter"] == ("missing", "")
    assert rows["tp", "all calls"] == ("missing", "it has a single rank")
    assert rows["pp", "all calls"] == ("new", "") and len(rows) == 5
    assert rows["dp", "all_reduce"][0] in ("inconclusive", "same")
    nothing = compare_topologies(a_topology(dp), a_topology(pp))
    assert nothing.exit_code == 4 and nothing.summary.endswith("mesh dims are dp in base, pp in head")


def test_dims_of_other_groups_are_not_compared():
    base, (_, tp) = measured(BASE, 1), measured(SLOWER_TP, 2).dims
    sharing: Any = "alone"
    for changed, reason in (
        (replace(tp, ranks=8), "ranks 4 in base, 8 in head"),
        (replace(tp, groups_sharing=sharing), "groups at work together in base, alone in head"),
        (
            replace(tp, collectives={n: replace(c, dtype="bfloat16") for n, c in tp.collectives.items()}),
            "dtype ",
        ),
        (replace(tp, collectives={n: curve_of([3], [5.0]) for n in tp.collectives}), "no size in common"),
    ):
        comparison = compare_topologies(base, replace(base, dims=(base.dims[0], changed)))
        assert verdicts(comparison) == {"dp": {"same"}, "tp": {"inconclusive"}} and comparison.exit_code == 3
        assert all(reason in row.reason for row in comparison.rows if row.suite == "tp")
    moved = replace(tp, layout=HostLayout(hosts_per_group=(2, 2)))
    assert not compare_topologies(base, replace(base, dims=(moved,))).machines_differ  # base lacks its hosts


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*topology*.json")), ids=lambda path: path.name)
def test_committed_topology_is_the_same_as_itself(path: Path, dtbench: made_up.Cli):
    code, out, _ = dtbench("compare", str(path), str(path))
    assert code == 0 and out.rstrip().endswith(" same") and "the same run is on both sides" in out


def test_command_compares_topologies(tmp_path: Path, dtbench: made_up.Cli):
    base, head, run = tmp_path / "base.json", tmp_path / "head.json", tmp_path / "run.jsonl"
    write_topology(measured(BASE, 1), base)
    write_topology(measured(SLOWER_TP, 2), head)
    made_up.write(run, made_up.run(list(made_up.dispatch())))
    code, out, _ = dtbench("compare", str(base), str(head))
    assert code == 1 and "bandwidth [GiB/s]" in out and "3 slower" in out
    code, out, _ = dtbench("compare", str(base), str(head), "--json")
    found = json.loads(out)
    assert code == 1 and found["kind"] == "topology comparison" and found["counts"]["slower"] == 3
    assert {"size_bytes", "measured_us", "low_us", "high_us", "launch_us"} <= found["sizes"][0]["base"].keys()
    for files, words, message in (
        ((base, run), (), "is a run of dtbench, expected a topology"),
        ((run, base), (), "is a topology, expected a dtbench run"),
        ((base, tmp_path / "none"), (), "cannot read"),
        ((base, head), ("--export", f"bmf:{tmp_path / 'x'}"), "--export writes times of runs"),
    ):
        code, out, err = dtbench("compare", *map(str, files), *words)
        assert code == 2 and not out and message in err and len(err.splitlines()) == 1
    for damage in (b"}", b'"latency_us_per_hop":-1,', b"\xff"):
        text = base.read_bytes()
        (tmp_path / "damaged.json").write_bytes(text[:2000] + damage + text[2000:])
        code, _, err = dtbench("compare", str(tmp_path / "damaged.json"), str(head))
        assert code == 2 and len(err.splitlines()) == 1
