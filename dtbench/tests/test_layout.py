"""Where the groups of a mesh lie, and the time from the last arrival: against figures counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtbench.engine.clock_offsets import SAME_CLOCK, Offset, lateness_s
from dtbench.records.result import Header, Result
from dtbench.reporting.run_tables import print_runs
from dtbench.stats import summarize
from dtbench.stats.frame import cases_frame, cells, results_frame
from dtbench.stats.layout import from_last_arrival_s, layout_of, mesh_groups
from dtbench.suite.mesh import groups_of
from dtbench.tests import made_up
from dtbench.tests.test_tables import table_of


def header(mesh: dict[str, int], hosts: list[str], **facts: list[Any]) -> dict[str, Any]:
    changed = made_up.header(mesh, hosts)
    for rank in changed["ranks"]:
        rank |= {name: values[rank["rank"]] for name, values in facts.items()}
    return changed


def read_by(*args: Any, **facts: list[Any]) -> Header:
    return made_up.read(header(*args, **facts))


def test_a_file_that_lists_other_ranks_than_its_mesh_has_no_layout() -> None:
    described = header({"dp": 2, "tp": 2}, ["a"] * 4)
    assert set(mesh_groups(made_up.read(described))) == {"dp", "tp", "dp+tp"}
    described["mesh"]["shape"] = [2**10, 2**10]
    assert layout_of(made_up.read(described)) == [] and mesh_groups(made_up.read(described)) == {}


def test_hosts_are_counted_per_group_and_per_pair() -> None:
    dp, tp, both = layout_of(read_by({"dp": 2, "tp": 4}, ["a"] * 4 + ["b"] * 4))
    assert (both.name, both.ranks, both.groups) == ("dp+tp", 8, 1)
    assert (both.hosts_per_group, both.ranks_per_host, both.groups_per_host_pair) == ((2, 2), (4, 4), 1)
    assert (dp.hosts_per_group, dp.ranks_per_host, dp.groups_per_host_pair) == ((2, 2), (1, 1), 4)
    assert (tp.hosts_per_group, tp.ranks_per_host, tp.groups_per_host_pair) == ((1, 1), (4, 4), 0)
    (tp,) = layout_of(read_by({"tp": 6}, ["a", "a", "a", "b", "b", "c"]))
    assert (tp.hosts_per_group, tp.ranks_per_host, tp.groups_per_host_pair) == ((3, 3), (1, 3), 1)
    mixed, *_ = layout_of(read_by({"dp": 2, "tp": 2}, ["a", "a", "a", "b"]))  # groups 0,2 and 1,3
    assert (mixed.hosts_per_group, mixed.groups_per_host_pair) == ((1, 2), 1)
    unknown = header({"tp": 2}, ["a", "b"])
    del unknown["ranks"][1]["host"]
    assert layout_of(made_up.read(unknown))[0].hosts_per_group is None


@pytest.mark.parametrize(
    ("hosts", "boots", "count"),
    [
        (["a", "b"], ["k", "k"], 2),  # namespaces of one machine, each with a name of its own
        (["localhost", "localhost"], ["k", "m"], 2),  # nodes of one name
        (["a", "a"], ["k", "k"], 1),
        (["a", "a"], [None, None], 1),
    ],
)
def test_a_host_is_a_name_and_a_kernel(
    hosts: list[str], boots: list[str | None], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    described = header({"tp": 2}, hosts, boot_id=boots)
    assert layout_of(made_up.read(described))[0].hosts_per_group == (count, count)
    run = made_up.run([], mesh={"tp": 2}, ranks=described["ranks"])
    print_runs([run])
    out = capsys.readouterr().out
    assert f"2 on {', '.join(hosts[:count])}\n" in out
    (row,) = table_of(out, "layout")
    assert row["hosts per group"] == str(count)
    assert row["groups per host pair" if count == 2 else "ranks per host"] == ("1" if count == 2 else "2")


def test_numa_nodes_and_nvlink_neighbours() -> None:
    peers = [{"neighbours": {bus: 4}, "switch_links": 0} for bus in ("1", "0", "3", "2")]
    described = header(
        {"dp": 2, "tp": 2},
        ["a"] * 4,
        pci_bus_id=list("0123"),
        nvlink=peers,
        device_numa_node=[0, 0, 1, None],
        numa_nodes=[[0, 1]] * 4,
    )
    dp, tp, _ = layout_of(made_up.read(described))
    assert (dp.nvlink, tp.nvlink) == ((0, 2), (2, 2))
    assert (dp.numa_nodes_per_group, tp.numa_nodes_per_group) == ((2, 2), (1, 2))
    switched = header({"tp": 2}, ["a"] * 2, nvlink=[{"neighbours": {}, "switch_links": 18}] * 2)
    assert layout_of(made_up.read(switched))[0].nvlink == (1, 1)
    assert layout_of(read_by({"tp": 2}, ["a", "b"], nvlink=peers[:2]))[0].nvlink is None


# ------------------------------------------------------------------------------------- times

# Two samples of four ranks. Groups of dp: 0,2 and 1,3; of tp: 0,1 and 2,3.
READINGS = {"0": (5.0, 9.0), "1": (4.0, 2.0), "2": (3.0, 8.0), "3": (7.0, 6.0)}


def timed(dim: str, **changes: Any) -> Result:
    longest = [7.0, 9.0]
    fields: dict[str, Any] = {"time_s": summarize(longest), "samples_s": tuple(longest)}
    fields["rank_samples_s"] = READINGS
    return Result("collectives", "all_reduce", "c10d", {"mesh_dim": dim}, "ok", **fields | changes)


def test_the_last_arrival_is_the_shortest_reading_of_a_group_and_the_slowest_group_counts() -> None:
    assert from_last_arrival_s(timed("dp"), groups_of((2, 2), 0)) == (4.0, 8.0)  # max(3, 4), max(8, 2)
    assert from_last_arrival_s(timed("tp"), groups_of((2, 2), 1)) == (4.0, 6.0)  # max(4, 3), max(2, 6)
    alone = {rank: READINGS[rank] for rank in ("0", "1")}
    assert from_last_arrival_s(timed("tp", rank_samples_s=alone), groups_of((2, 2), 1)) == (4.0, 2.0)
    for lacking in ({}, {"0": (1.0,), "1": (1.0, 2.0)}, {"9": (1.0,)}):
        assert from_last_arrival_s(timed("tp", rank_samples_s=lacking), groups_of((2, 2), 1)) == ()


def test_where_a_clock_tells_a_sample_lasts_until_the_last_rank_of_a_group_is_done() -> None:
    # Rank 2 came first and waited; rank 0 came 2 s later and ended at 7 s, the last.
    late = {"0": (2.0, 0.0), "1": (1.0, 0.0), "2": (0.0, 1.0), "3": (0.0, 0.0)}
    result = timed("dp", rank_arrivals_s=late)
    assert from_last_arrival_s(result, groups_of((2, 2), 0)) == (6.0, 8.0)  # max(7 - 2, 7 - 1), max(9 - 1, 6)
    assert from_last_arrival_s(result, [[0, 2]]) == (5.0, 8.0)
    # What cannot be, as no rank's reading is so short or so long, is brought back to what can.
    impossible = timed("dp", rank_arrivals_s={"0": (0.0, 0.0), "2": (9.0, 0.0)})
    assert from_last_arrival_s(impossible, [[0, 2]]) == (3.0, 9.0)
    lacking = timed("dp", rank_arrivals_s={"0": (2.0,)})
    assert from_last_arrival_s(lacking, [[0, 2]]) == ()


@pytest.mark.parametrize("error_ns", [1, 100, 10**9])
def test_measured_offsets_correct_what_barriers_suggest(error_ns: float) -> None:
    """Rank 1, on another host whose clock is 5 s ahead, leaves every barrier 10 us after rank 0."""
    started = {0: [100, 200_100, 400_100], 1: [5 * 10**9 + t + 10_000 for t in (100, 200_100, 400_100)]}
    offsets = {0: SAME_CLOCK, 1: Offset(-5e9 + 40, error_ns)}
    late_s = lateness_s(started, {0: "a", 1: "b"}, offsets)
    # Where the ping bounds it loosely, the barriers are believed; else as far as the ping allows.
    late_ns = 0 if error_ns > 10_000 else 10_000 + 40 - error_ns
    assert late_s[1] * 1e9 == pytest.approx([late_ns] * 3, abs=1e-3)


@given(st.data())
def test_arrivals_are_found_whatever_the_clocks_of_the_hosts_show(data: st.DataObject) -> None:
    samples = 9
    times = st.lists(st.integers(0, 10**9), min_size=samples, max_size=samples)
    barrier = data.draw(times)
    behind = {rank: data.draw(times) for rank in range(4)}
    clock = {0: 0, 1: 0, 2: data.draw(st.integers(-(10**17), 10**17)), 3: data.draw(st.integers(0, 10**17))}
    started = {r: [b + d + clock[r] for b, d in zip(barrier, behind[r], strict=True)] for r in range(4)}
    late_s = lateness_s(started, {0: "a", 1: "a", 2: "b", 3: None})
    # On one kernel exactly; between kernels but for a shift, which leaves both together in the median.
    assert late_s[1] - late_s[0] == pytest.approx((np.array(behind[1]) - behind[0]) * 1e-9, abs=1e-7)
    for rank in (2, 3):
        ours = (late_s[rank] - (late_s[0] + late_s[1]) / 2) * 1e9
        assert np.median(ours) == pytest.approx(0.0, abs=100.0)
        true = np.array(behind[rank]) - (np.array(behind[0]) + behind[1]) / 2
        assert ours - true == pytest.approx(np.full(samples, ours[0] - true[0]), abs=100.0)
    assert np.min(list(late_s.values()), axis=0) == pytest.approx(np.zeros(samples))


def test_it_stands_in_the_frame_and_beside_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up.run([timed("dp"), timed("tp"), timed("tp", launch=1, rank_samples_s={}), timed("none")])
    frame = results_frame([run])
    assert cells(frame["from_last_s"]) == [5.0, 4.5, None, None]  # lower quartiles of the samples
    assert cells(cases_frame(frame)["from_last_s", "c10d"]) == [5.0, 4.5, None]
    print_runs([run])
    rows = table_of(capsys.readouterr().out, "collectives")
    assert [row["since last arrival [s]"] for row in rows] == ["5.000", "4.500", "-"]
    assert [row["c10d [s]"] for row in rows] == ["7.500"] * 3
