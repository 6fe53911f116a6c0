"""`dtbench profile` through its real entry point: simulated ranks, two gloo ranks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from dtbench.records.profile import RanksProfile
from dtbench.tests.made_up import Cli
from dtbench.tests.programs import start
from dtbench.traces.job import read_job

ONE_CASE = ("dispatch/add", "--filter", "S(0),S(0) mesh=8 pass=forward call=cached")


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
    assert not list(folder.glob("*.gz"))
    shown = json.loads((folder / "speedscope.json").read_text())
    frames = [frame["name"] for frame in shown["shared"]["frames"]]
    for profile, table in zip(shown["profiles"], (core, other), strict=True):
        stacks = [[frames[number] for number in stack] for stack in profile["samples"]]
        assert all(stack[0] == "one call" for stack in stacks)
        assert any("aten::add" in stack for stack in stacks)
        assert sum(profile["weights"]) == pytest.approx(profile["endValue"])
        assert table["impl"] in profile["name"]
    assert any("wrapper.py: wrap" in name for name in frames)


def test_two_ranks_are_told_as_a_job_is(tmp_path: Path, dtbench: Cli) -> None:
    args = ("--filter", "pass=forward ", "--impl", "core", "--nproc", "2", "--quick", "-o", "p")
    done = start("profile", "tensor_parallel/mlp", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    folder = tmp_path / "p"
    core, whole = msgspec.json.decode((folder / "table.json").read_bytes(), type=RanksProfile).sections
    assert core.job.label.endswith("(core)") and whole.job.label.endswith("(whole)")
    for section in (core, whole):
        assert section.plain_us > 0 and section.profiled_us > 0
        assert [(rank.rank, rank.steps, rank.steps_source) for rank in section.job.ranks] == [
            (n, 3, "ProfilerStep#") for n in (0, 1)
        ]
        assert all(step.computation_s > 0 for rank in section.job.ranks for step in rank.each_step)
    assert [(c.rank, c.collective, c.mesh_dim, c.dtype, c.bytes, c.count) for c in core.job.collectives] == [
        (n, "all_reduce", "tp", "float32", 2 * 64 * 256 * 4, 3) for n in (0, 1)
    ]
    (waits,) = core.job.waits
    assert (waits.mesh_dim, waits.calls, sum(waits.last_counts.values()) + waits.unclear) == ("tp", 3, 3)
    assert not whole.job.collectives and not whole.job.waits and whole.job.aligned_by
    assert {lane.name for lane in core.job.lanes} >= {"communication tp", "computation", "exposed"}

    # The table is what `show` prints, and the traces are a job's.
    assert "without the profiler" in done.stdout
    assert dtbench("show", "p")[1] == (folder / "table.txt").read_text()
    traces = sorted(folder.glob("1-*core*.gz"))
    assert [rank.source for rank in core.job.ranks] == [trace.name for trace in traces]
    assert [len(rank.each_step) for rank in read_job(traces).ranks] == [3, 3]


def test_what_cannot_be_profiled_is_refused_in_one_line(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "taken").mkdir()
    for args, says in (
        (("dispatch/ad",), "dispatch has no case 'ad': the nearest are add"),
        (("dispatch",), "cases match, a profile shows at most 24: name one"),
        (("dispatch/add", "--filter", "mesh=9"), "matches none of the"),
        (("dispatch/",), "no suite is called 'dispatch/'"),
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
