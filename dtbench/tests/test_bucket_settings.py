"""The choice of a bucket: the smallest within 5% of the best, its interval, its loss on other launches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtbench.cost.settings.buckets import Sweep, choose, held_out_loss, sweeps_of
from dtbench.suite.errors import UsageError
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli

RUN = str(Path(__file__).parents[2] / "results" / "settings" / "buckets-cpu-2ranks.jsonl")
MIB = 2**20
GROUP = ("dp", 2, "float32", 4096, 64 * MIB)


def sweep(*launches: Sequence[float]) -> Sweep:
    sizes = tuple(MIB * 4**k for k in range(len(launches[0])))
    return Sweep(GROUP, sizes, np.asarray(launches, dtype=np.float64))


def test_the_smallest_within_5_percent_of_the_best_rate_is_chosen() -> None:
    found = choose(sweep([2.0, 1.06, 1.04, 1.0, 1.3]))
    assert (found.bucket, found.fastest, found.cap_mb) == (16 * MIB, 64 * MIB, 16.0)
    assert found.loss == pytest.approx(0.04) and (found.low, found.high) == (None, None)


def test_the_edge_of_a_sweep_is_no_recommendation() -> None:
    largest, smallest = choose(sweep([3.0, 2.0, 1.0])), choose(sweep([1.0, 2.0, 3.0]))
    assert (largest.bucket, largest.cap_mb, smallest.bucket, smallest.cap_mb) == (16 * MIB, None, MIB, None)
    assert "larger may be faster" in largest.edge and "smaller may do" in smallest.edge
    # A curve that is flat up to the edge is known to have nothing beyond what it loses.
    assert choose(sweep([3.0, 1.02, 1.0])).cap_mb == 4.0


@pytest.mark.parametrize(("time_s", "bucket"), [(1 / 0.951, 1), (1 / 0.949, 4)])
def test_the_rate_decides_not_the_time(time_s: float, bucket: int) -> None:
    assert choose(sweep([time_s, 1.0])).bucket == bucket * MIB


def test_launches_that_agree_have_a_narrow_interval_and_others_a_wide_one() -> None:
    sure = choose(sweep(*[[2.0, 1.0, 1.0]] * 6))
    assert (sure.low, sure.bucket, sure.high) == (4 * MIB, 4 * MIB, 4 * MIB)
    torn = choose(sweep(*([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]] * 3)))
    assert (torn.low, torn.high) == (MIB, 16 * MIB)


def test_sizes_are_compared_within_a_launch() -> None:
    """Launches of 1, 3 and 9 s; the larger bucket is 20 % faster in two of them, and has the larger median time."""
    found = choose(sweep([1.0, 0.8], [3.0, 3.6], [9.0, 7.2]))
    assert (found.bucket, found.fastest) == (4 * MIB, 4 * MIB)


def test_a_choice_is_checked_on_the_launches_that_it_did_not_see() -> None:
    assert held_out_loss(sweep(*[[1.0, 2.0]] * 4)) == 0
    # Two launches of a kind each: halves of one kind choose what is twice as slow in the other.
    found = held_out_loss(sweep([1.0, 2.0], [2.0, 1.0]))
    assert found == pytest.approx(1.0)
    with pytest.raises(UsageError, match="--launches"):
        held_out_loss(sweep([1.0, 2.0]))


def test_sweeps_are_those_of_launches_with_every_size() -> None:
    cases = list(made_up.bucketer())
    found = sweeps_of([made_up.run(cases)])
    assert [(s.group[3], s.buckets, s.times_s.shape) for s in found] == [
        (2**14, (MIB, 4 * MIB, 16 * MIB, 64 * MIB), (1, 4)),
        (2**18, (MIB, 4 * MIB, 16 * MIB, 64 * MIB), (1, 4)),
    ]
    one = [r for r in cases if r.params["bucket_bytes"] == MIB]
    with pytest.raises(UsageError, match="two or more bucket sizes"):
        sweeps_of([made_up.run(one)])
    half = [msgspec.structs.replace(r, launch=1) for r in one]
    assert [len(s.times_s) for s in sweeps_of([made_up.run([*cases, *half])])] == [1, 1]


def test_the_command_prints_the_settings_and_their_loss_on_other_launches(dtbench: Cli) -> None:
    code, out, error = dtbench("settings", RUN)
    assert (code, error) == (0, "") and "bucket_cap_mb" in out and "pre_bucketing_fsdp_collectives" in out
    code, out, _ = dtbench("settings", RUN, "--split", "--json")
    rows = json.loads(out)["buckets"]
    assert code == 0 and [row["group"][2] for row in rows] == ["float32", "bfloat16"]
    assert all(row["edge"] or row["bucket_cap_mb"] == row["bucket"] / MIB for row in rows)
    assert all(row["bucket_cap_mb"] is None or not row["edge"] for row in rows)
    assert all(row["held_out_loss"] >= 0 for row in rows)


def test_a_run_without_a_sweep_is_refused_in_a_line(dtbench: Cli) -> None:
    code, out, error = dtbench("settings", str(Path(RUN).parents[1] / "dispatch-cpu-2cores.jsonl"))
    assert (code, out) == (2, "") and error.count("\n") == 1 and "dtbench run bucketer --size" in error
