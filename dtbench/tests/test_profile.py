"""`dtbench profile` through its real entry point: simulated ranks, two gloo ranks, and what it refuses."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dtbench.engine import clock_offsets
from dtbench.engine.rank_votes import StoreRanks
from dtbench.engine.tasks import Task
from dtbench.errors import OutputError
from dtbench.profile import output, stages
from dtbench.profile.request import choose
from dtbench.profile.stages import Overhead, Span
from dtbench.records.atomic import check_output_path, write_folder
from dtbench.records.profile import CallsProfile, CallStages, RanksProfile
from dtbench.records.read import convert, decode
from dtbench.reporting.html.parts import dispatch
from dtbench.suite import STAGES, Case
from dtbench.suite.registry import Suite
from dtbench.tests.made_up import Cli
from dtbench.tests.programs import start
from dtbench.traces.job import read_job

ONE_CASE = ("dispatch/add", "--filter", "S(0),S(0) mesh=8 pass=forward call=cached")


def test_profile_splits_a_dispatch_into_stages_for_core_and_torch(tmp_path: Path) -> None:
    done = start("profile", *ONE_CASE, "--quick", "-o", "p", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "p"
    cases = json.loads((folder / "table.json").read_text())["cases"]
    assert [(case["impl"], case["source"]) for case in cases] == [
        ("core", "the core's counters"),
        ("torch", "Python and C++ frames"),
    ]
    for backend in cases:
        times_ns = [*(row["ns"] for row in backend["rows"]), backend["unattributed_ns"]]
        assert sum(times_ns) == pytest.approx(backend["whole_ns"])
        stages = {row["stage"] for row in backend["rows"]}
        assert {"entry", "key", "cache", "local op", "wrap"} <= stages and "redistribute" not in stages
        assert backend["floor_ns"] > 0 and backend["recorded_ns"] > 0
    assert set((folder / "table.txt").read_text().splitlines()) <= set(done.stdout.splitlines())
    assert not list(folder.glob("*.gz"))
    shown = json.loads((folder / "speedscope.json").read_text())
    frames = [frame["name"] for frame in shown["shared"]["frames"]]
    for profile, case in zip(shown["profiles"], cases, strict=True):
        stacks = [[frames[number] for number in stack] for stack in profile["samples"]]
        assert {stack[0] for stack in stacks} == {"one call"} and any(
            "aten::add" in stack for stack in stacks
        )
        assert sum(profile["weights"]) == pytest.approx(profile["endValue"])
        assert case["impl"] in profile["name"]
    assert any("wrapper.py: wrap" in name for name in frames)


def test_profile_of_two_ranks_reports_them_as_a_job(tmp_path: Path, dtbench: Cli) -> None:
    done = start(
        "profile",
        "tensor_parallel/mlp",
        *("--filter", "pass=forward ", "--impl", "core", "--nproc", "2", "--quick", "-o", "p"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    folder = tmp_path / "p"
    core, whole = msgspec.json.decode((folder / "table.json").read_bytes(), type=RanksProfile).sections
    assert core.job.label.endswith("(core)") and whole.job.label.endswith("(whole)")
    for section in (core, whole):
        assert section.plain_us > 0 and section.profiled_us > 0
        assert [(rank.rank, rank.steps, rank.steps_source) for rank in section.job.ranks] == [
            (0, 3, "ProfilerStep#"),
            (1, 3, "ProfilerStep#"),
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("dispatch/ad",), "dispatch has no case 'ad': the nearest are add"),
        (("dispatch",), "cases match, a profile shows at most 24: name one"),
        (("dispatch/add", "--filter", "mesh=9"), "matches none of the"),
        (("dispatch/",), "no suite is called 'dispatch/'"),
        ((*ONE_CASE, "-o", "taken"), "taken exists already: give another -o"),
        ((*ONE_CASE, "--device", "cuda"), "torch finds no CUDA device"),
    ],
)
def test_profile_refuses_unknown_cases_and_taken_folders(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "taken").mkdir()
    code, out, err = dtbench("profile", *args)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
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
    assert code == 5 and not (tmp_path / "p").exists()
    assert "broken skips (core): skipped, not here" in out
    messages = (
        "raises (core): failed, RuntimeError: no such shape",
        "got 3, expected 4",
        "no profile was written",
    )
    assert [message for message in messages if message not in err] == []


# ------------------------------------------------------------------------------- spans and stages

COST = {"counter": Overhead(90.0, 300.0)}


def recorded(name: str, own_ns: float, *children: Any, cost: Overhead = COST["counter"]) -> Any:
    """A call as a recorder that costs `cost` shows it: (name, own time, children) -> builder of spans."""

    def build(at: float) -> Span:
        span = Span(name, "counter", at, at)
        at += cost.inside_ns + own_ns
        for child in children:
            inner = child(at + cost.outside_ns / 2)
            at = inner.end_ns + cost.outside_ns / 2
            span.children.append(inner)
        span.end_ns = at
        return span

    return build


def made_up_call(cost: Overhead = COST["counter"], slow: float = 1.0) -> Span:
    def node(name: str, ns: float, *children: Any) -> Any:
        return recorded(name, ns * slow, *children, cost=cost)

    inner = node("glue", 250, node("stopwatch", 60), node("local op", 1100), node("wrap", 900))
    outer = node("glue", 250, node("checks", 500), node("key", 700), node("cache", 100), inner)
    call: Span = node("entry", 1500, outer)(0.0)
    return call


TRUE_NS = {"entry": 1500, "checks": 500, "key": 700, "cache": 100, "local op": 1100, "wrap": 900, "glue": 500}


def broken_down(calls: list[Span], whole_ns: float) -> CallStages:
    return stages.break_down(calls, whole_ns, COST, stages.named_pieces, ignored="stopwatch")[0]


@pytest.mark.parametrize(
    ("cost", "scale", "off_ns"), [(COST["counter"], 1.0, 1e-6), (Overhead(135.0, 450.0), 1.5, 40)]
)
def test_stages_are_found_below_what_recording_adds(cost: Overhead, scale: float, off_ns: float) -> None:
    """Also where recording costs 1.5 times what its calibration says: then the rows tell their doubt."""
    broken = broken_down([made_up_call(cost) for _ in range(3)], 5300.0)
    times_ns = {row.stage: row.ns for row in broken.rows}
    assert times_ns == pytest.approx(TRUE_NS, abs=off_ns)
    assert list(times_ns) == [stage for stage in STAGES if stage in TRUE_NS]
    assert broken.fitted_to_calibrated == pytest.approx(scale, rel=0.02)
    assert (sum(times_ns.values()), broken.unattributed_ns) == pytest.approx((5300, 0), abs=1e-6)
    doubts = {row.stage: row.plus_minus_ns for row in broken.rows}
    assert doubts["key"] == pytest.approx(90 * (scale - 1), abs=3)
    assert doubts["glue"] >= 5 * doubts["key"] - 1e-6


def test_break_down_leaves_unexplained_time_unattributed() -> None:
    breakdown = broken_down([made_up_call()], 20_000.0)  # a call alone took longer than a recorded one
    assert breakdown.fitted_to_calibrated == 0 and breakdown.unattributed_ns > 5000
    assert all(row.plus_minus_ns > 0 for row in breakdown.rows)
    assert broken_down([made_up_call(slow=9)], 10.0).fitted_to_calibrated == stages.MAX_FIT


def times_of(**changes: Any) -> CallStages:
    """A table that adds up, but for the changes."""
    consistent = CallStages(
        whole_ns=5300.0,
        recorded_ns=9000.0,
        unattributed_ns=0.0,
        rows=tuple(row for stage, ns in TRUE_NS.items() for row in row_of(stage, ns)),
        label="add",
        impl="core",
        source="counters",
        calls=9,
        spans_per_call=8.0,
        fitted_to_calibrated=1.0,
        floor_ns=1200.0,
    )
    return msgspec.structs.replace(consistent, **changes)


def row_of(stage: str, ns: float, doubt_ns: float = 50.0) -> Any:
    return (stages.Stage(stage=stage, ns=ns, plus_minus_ns=doubt_ns),)


@pytest.mark.parametrize(
    ("changes", "caveat"),
    [
        ({}, ""),
        ({"unattributed_ns": -400.0}, ""),  # within the errors of all rows
        ({"unattributed_ns": -2000.0}, "do not add up"),
        ({"unattributed_ns": 2000.0}, "do not add up"),
        ({"rows": row_of("local op", 8000.0)}, "do not add up"),
        ({"rows": row_of("local op", -800.0)}, "do not add up"),
        ({"rows": row_of("local op", 8000.0, 4000.0)}, ""),
        ({"floor_ns": 6000.0}, "the plain op alone took longer than the whole call"),
        ({"floor_ns": None}, ""),
        ({"on_cpu": 0.6}, "other programs had the CPU for 40% of the time"),
    ],
)
def test_stages_that_contradict_each_other_are_called_unreliable_on_terminal_json_and_page(
    changes: dict[str, Any], caveat: str
) -> None:
    table = times_of(**changes)
    assert table.caveat.startswith("unreliable: ") == bool(caveat) and caveat in table.caveat
    assert convert(decode(msgspec.json.encode(CallsProfile(cases=(table,)))), CallsProfile).cases == (table,)
    lines = "\n".join(output.stage_tables([table]))
    assert table.caveat in lines and ("unreliable" in lines) == bool(caveat)
    page = dispatch._stage_table([table])
    assert table.caveat in page.note and bool(page.note) == bool(caveat)
    shown = [int(share) for share in re.findall(r"(-?\d+)%(?:\s|$)", lines.partition("core: from")[0])]
    assert all(0 <= share <= 100 for share in shown)
    assert bool(shown) == table.adds_up and "-0.00" not in lines


COUNTING_THREADS = """
import torch
from dtbench.suite import Case, Workload, suite

torch.seen_by_the_test = []

@suite("mine", world="simulated", help="threads")
def mine(plan):
    workload = Workload(run=lambda: torch.seen_by_the_test.append(torch.get_num_threads()))
    yield Case("a", {}, {"core": lambda world: workload}, clock="host")
"""


def test_workload_is_profiled_on_one_thread_and_the_number_of_threads_restored(
    dtbench: Cli, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(COUNTING_THREADS)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert dtbench("profile", "mine.py", "--quick", "-o", "p")[0] == 0
        assert (set(torch.seen_by_the_test), torch.get_num_threads()) == ({1}, 3)  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)


def frame(name: str, start: float, end: float, *children: Span, kind: str = "PyCall") -> Span:
    return Span(name, kind, start, end, list(children))


def test_frames_of_torch_go_to_their_stages() -> None:
    where = "torch/distributed/tensor/"
    subclass = frame(
        "PythonSubclass",
        30,
        100,
        frame(f"{where}_dtensor_spec.py(446): __hash__", 35, 40),
        frame("torch/distributed/device_mesh.py(1232): get_coordinate", 50, 52),
        frame("aten::add", 60, 70),
        frame(f"{where}_dispatch.py(759): wrap", 75, 95, frame("torch/_ops.py(9): __hash__", 80, 85)),
        kind="TorchOp",
    )
    call = frame("profiled_call", 0, 110, frame("aten::add", 20, 105, subclass, kind="TorchOp"))
    times: Counter[str] = Counter()
    for stage, ns, _ in stages.frame_pieces(call, {}):
        times[stage] += ns
    # C++ between two frames counts with the one that comes next. Together they take 110 ns.
    assert times == {"entry": 20 + 5 + 10 + 5 + 5, "key": 10, "cache": 12, "local op": 18, "wrap": 25}


def test_speedscope_gets_a_weighted_stack_per_frame() -> None:
    folded: dict[str, dict[tuple[str, ...], float]] = {
        "add (core)": {("call",): 20.0, ("call", "f"): 60.25},
        "add (torch)": {("call",): 5.0},
    }
    written = json.loads(json.dumps(output.speedscope(folded, "p")))
    frames = [frame["name"] for frame in written["shared"]["frames"]]
    for profile, stacks in zip(written["profiles"], folded.values(), strict=True):
        assert (
            dict(
                zip(
                    (tuple(frames[number] for number in stack) for stack in profile["samples"]),
                    profile["weights"],
                    strict=True,
                )
            )
            == stacks
        )
        assert (profile["startValue"], profile["endValue"]) == (0, sum(stacks.values()))


# ------------------------------------------------------------------------------- groups and clocks


def test_offset_from_marks_bounds_the_clock_offset() -> None:
    # The profiler's clock is 1000 behind; marks of 2 within readings 10 apart, placed unevenly.
    offset = clock_offsets.offset_from_marks([(100.0, -899.0, -897.0, 110.0), (200.0, -793.0, -791.0, 210.0)])
    assert abs(offset.ns - 1000) <= offset.uncertainty_ns < 2
    # A drift that no offset fits: the tightest mark decides.
    drifting = clock_offsets.offset_from_marks(
        [(100.0, -900.0, -898.0, 102.5), (200.0, -700.0, -698.0, 230.0)]
    )
    assert drifting.ns == pytest.approx(1000.25)


def test_another_hosts_clock_is_found_over_the_store() -> None:
    import time

    from torch._C._distributed_c10d import HashStore

    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    # Ranks 0 and 1 share a host, 2 and 4 another one; the host of rank 3 is unknown.
    boot_ids = ["a", "a", "b", None, "b"]
    ahead = [0, 0, 5_000_000_000, -7_000_000, 5_000_000_000]

    def on(rank: int) -> list[clock_offsets.Offset]:
        ranks = StoreRanks(store, rank, len(boot_ids), lambda _reason: None)
        measured = partial(
            clock_offsets.offset_to_rank_0, ranks, store, boot_ids, lambda: time.time_ns() + ahead[rank]
        )
        return [measured(), measured()]  # the second by other keys

    with ThreadPoolExecutor(len(boot_ids)) as pool:
        offsets = list(pool.map(on, range(len(boot_ids))))
    assert offsets[0] == offsets[1] == [clock_offsets.SAME_CLOCK] * 2 and offsets[2] == offsets[4]
    for rank in (2, 3, 4):
        assert all(
            o.uncertainty_ns > 0 and abs(o.ns + ahead[rank]) <= o.uncertainty_ns for o in offsets[rank]
        )
    assert not store.check(["clock/0/2/0/ask"])  # nothing is left behind
    drifted = clock_offsets.mean_offset(clock_offsets.Offset(10.0, 2.0), clock_offsets.Offset(30.0, 1.0))
    assert drifted == clock_offsets.Offset(20.0, 12.0)


# ------------------------------------------------------------------------------- choosing


def test_a_case_is_chosen_by_its_whole_name() -> None:
    suite = Suite("dispatch", lambda plan: iter(()), "simulated", "help")
    tasks = [
        Task(suite, Case(name, {"n": n}, {"core": lambda world: world}), ("core",))
        for name in ("add", "addmm", "add_", "relu")
        for n in range(3)
    ]
    assert [task.label for task in choose(tasks, "add", "")] == [f"dispatch add n={n}" for n in range(3)]
    assert [task.label for task in choose(tasks, "add", "N=2")] == ["dispatch add n=2"]
    assert choose(tasks, "", "") == tasks


# ------------------------------------------------------------------------------- the folder


def test_write_folder_writes_all_files_or_none(here: Path) -> None:
    output.write_profile(Path("p"), ["a\ud800"], CallsProfile(cases=()), {"rank0.json.gz": b"x"}, "a trace")
    assert {path.name for path in Path("p").iterdir()} == {"rank0.json.gz", "table.json", "table.txt"}
    assert Path("p/rank0.json.gz").read_bytes() == b"x"
    for path in ("p", "no/p"):
        with pytest.raises(OutputError, match="another -o"):
            check_output_path(Path(path), "remove it")
    for path, file in (("p", "c"), ("q", "c" * 300)):
        with pytest.raises(OutputError, match=r"exists already|cannot write"):
            write_folder(Path(path), {file: b""})
    assert [path.name for path in here.iterdir()] == ["p"]


def test_write_folder_makes_sub_folders(here: Path) -> None:
    write_folder(Path("p"), {"a/b/c": b"x", "a/d": b"y"})
    files = {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert files == {"p/a/b/c": b"x", "p/a/d": b"y"}
