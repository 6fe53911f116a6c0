"""`dtbench profile` through its real entry point: simulated ranks, two gloo ranks, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtbench.records.profile import LANES
from dtbench.tests.made_up import Cli
from dtbench.tests.programs import start

ONE_CASE = ("dispatch/add", "--filter", "S(0),S(0) mesh=8 pass=forward call=cached")


def read_trace(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    for event in events:
        assert event["ph"] == "M" or (event["ts"] >= 0 and event["dur"] >= 0 and event["name"])
    return events


def test_a_dispatch_by_stage_for_core_and_torch(tmp_path: Path) -> None:
    done = start("profile", *ONE_CASE, "--quick", "-o", "p", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "p"
    core, other = json.loads((folder / "table.json").read_text())["cases"]
    assert (core["impl"], core["source"]) == ("core", "the core's counters")
    assert (other["impl"], other["source"]) == ("torch", "Python and C++ frames")
    for backend in (core, other):
        total = sum(row["ns"] for row in backend["rows"]) + backend["unattributed_ns"]
        assert total == pytest.approx(backend["whole_ns"])
        stages = {row["stage"] for row in backend["rows"]}
        assert {"entry", "key", "cache", "local op", "wrap"} <= stages and "redistribute" not in stages
        assert backend["floor_ns"] > 0 and backend["recorded_ns"] > 0
    for line in (folder / "table.txt").read_text().splitlines():
        assert line in done.stdout
    assert not (folder / "trace.json.gz").exists()
    shown = json.loads((folder / "speedscope.json").read_text())
    frames = [frame["name"] for frame in shown["shared"]["frames"]]
    for profile, table in zip(shown["profiles"], (core, other), strict=True):
        stacks = [[frames[number] for number in stack] for stack in profile["samples"]]
        assert all(stack[0] == "one call" for stack in stacks)
        assert any("aten::add" in stack for stack in stacks)
        assert sum(profile["weights"]) == pytest.approx(profile["endValue"])
        assert table["impl"] in profile["name"]
    assert any("wrapper.py: wrap" in name for name in frames)


def test_two_ranks_in_one_trace(tmp_path: Path) -> None:
    args = ("--filter", "pass=forward ", "--impl", "core", "--nproc", "2", "--quick", "-o", "p")
    done = start("profile", "tensor_parallel/mlp", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    table = json.loads((tmp_path / "p" / "table.json").read_text())
    core, whole = table["sections"]
    assert core["label"].endswith("(core)") and whole["label"].endswith("(whole)")
    for section in (core, whole):
        assert section["iterations"] == 3 and section["plain_us"] > 0 and section["unmatched"] == 0
        for parts in section["parts_us"].values():
            assert parts["whole"] > 0 and parts["compute"] > 0
            assert parts["exposed"] == pytest.approx(parts["communication"] - parts["overlap"])
            busy = parts["compute"] + parts["exposed"]
            assert parts["host"] == pytest.approx(parts["whole"] - busy, abs=0.01)
    assert core["parts_us"].keys() == {"0", "1"}
    (skew,) = core["skews"]
    assert (skew["kind"], skew["count"]) == ("allreduce", 3)
    assert sum(skew["late"].values()) + skew["unclear"] == 3
    assert whole["skews"] == [] and whole["parts_us"]["0"]["communication"] == 0
    assert "without the profiler" in done.stdout and "clocks:" in done.stdout

    events = read_trace(tmp_path / "p")
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [e for e in events if e["ph"] == "X"]
    for rank in (0, 1):
        of_lane = {tid: [e for e in drawn if (e["pid"], e["tid"]) == (rank, tid)] for tid in LANES}
        assert {lanes[rank, tid] for tid in LANES} == set(LANES.values())
        assert [e["name"] for e in of_lane[1]] == ["allreduce"] * 3
        assert of_lane[2] and of_lane[3]
        assert "aten::addmm" in {e["name"] for e in drawn if e["pid"] == rank}
    # On one clock: the all-reduce of a rank cannot end before the other one has come.
    for mine, theirs in zip(
        *([e for e in drawn if (e["pid"], e["tid"]) == (r, 1)] for r in (0, 1)), strict=True
    ):
        late_us = sum(table["clock_us"].values())
        assert mine["ts"] + mine["dur"] >= theirs["ts"] - late_us
        assert theirs["ts"] + theirs["dur"] >= mine["ts"] - late_us


def test_what_cannot_be_profiled_is_refused_in_one_line(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "taken").mkdir()
    for args, says in (
        (("dispatch/ad",), "dispatch has no case 'ad': the nearest are add"),
        (("dispatch",), "cases match, a profile shows at most 24: name one"),
        (("dispatch/add", "--filter", "mesh=9"), "matches none of the"),
        (("dispatch/",), "is not SUITE or SUITE/CASE"),
        ((*ONE_CASE, "-o", "taken"), "taken exists already: give another -o"),
        ((*ONE_CASE, "--device", "cuda"), "torch finds no CUDA device"),
    ):
        code, out, err = dtbench("profile", *args)
        assert (code, out, err.count("\n")) == (2, "", 1), (args, out, err)
        assert says in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


BROKEN = """
from dtbench.suite import Case, Skip, Workload
from dtbench.suite import suite

def build(world, how):
    if how == "skips":
        raise Skip("not here")
    if how == "raises":
        raise RuntimeError("no such shape")
    return Workload(run=lambda: None, check=lambda: "got 3, expected 4")

@suite("broken", world="simulated", help="all that can go wrong")
def broken(plan):
    for how in ("skips", "raises", "wrong"):
        yield Case(how, {}, {"core": lambda world, how=how: build(world, how)}, clock="host")
"""


def test_cases_that_fail_leave_no_folder(dtbench: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    code, out, err = dtbench("profile", "mine.py", "-o", "p")
    assert code == 5
    assert "broken skips (core): skipped, not here" in out
    assert "broken raises (core): failed, RuntimeError: no such shape" in err
    assert "got 3, expected 4" in err and "no profile was written" in err
    assert not (tmp_path / "p").exists()
