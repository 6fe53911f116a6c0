"""Whole gates through the command line, on arms whose launches take milliseconds, and one on real ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.gate import gate as gates
from dtbench.gate import launcher
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import Benchmark, Selection
from dtbench.gate.sampler import FEW_BENCHMARKS, SAMPLES
from dtbench.gate.schedule import OutOfTimeError
from dtbench.suite.errors import ArmError, UsageError
from dtbench.tests import gate_selftest
from dtbench.tests.gate_selftest import plan_on
from dtbench.tests.gate_selftest_suite import selftest
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_arm import made_up_arm

Gate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gate(dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """`dtbench gate` with made-up arms: base and head are dicts of their variables."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

    def run(base: dict[str, str], head: dict[str, str], *options: str) -> tuple[int, str, str]:
        @contextlib.contextmanager
        def made_up(*_: Any) -> Iterator[tuple[Arm, Arm]]:
            yield made_up_arm(tmp_path / "base-arm", **base), made_up_arm(tmp_path / "head-arm", **head)

        monkeypatch.setattr(gates, "open_arms", made_up)
        where = () if "-o" in options else ("-o", "g")
        return dtbench("gate", "--base", "env:", "--head", "env:", "fake", *where, *options)

    return run


def verdicts(folder: str = "g") -> dict[str, str]:
    benchmarks = json.loads(Path(folder, "gate.json").read_text())["benchmarks"]
    return {b["name"]: b["verdict"] for b in benchmarks}


def test_the_same_twice_passes(gate: Gate):
    code, out, _ = gate({}, {})
    assert code == 0, out
    assert verdicts() == dict.fromkeys(("add", "mul", "view"), "PASS")
    assert "no regression (3 PASS); exit code 0" in out


def test_a_slower_head_is_a_regression_everywhere_it_is_told(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = gate({}, {"SLOW": "1.10"})
    assert code == 1
    assert out.count("::error title=REGRESSION fake ") == 3
    suite = ET.parse("g/junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "3", "0")
    assert all("(at least +" in (f.get("message") or "") for f in suite.iter("failure"))
    everything = json.loads(Path("g/gate.json").read_text())
    assert everything["exit_code"] == 1
    assert everything["benchmarks"][0]["effect"]["ratio"] == pytest.approx(1.10, abs=0.01)
    assert everything["benchmarks"][0]["effect"]["pairs"] == 10
    trend = json.loads(Path("g/smaller-is-better.json").read_text())
    assert [row["unit"] for row in trend] == ["us"] * 3
    assert trend[0]["value"] == pytest.approx(110, rel=0.02)
    assert (tmp_path / "summary.md").read_text().count("| REGRESSION |") == 3


def test_json_is_the_file_in_the_folder(gate: Gate):
    code, out, _ = gate({}, {"CALLS": "43"}, "--json")
    assert code == json.loads(out)["exit_code"] == 1
    assert out == Path("g/gate.json").read_text()


def test_more_calls_are_a_regression_without_a_timed_launch(gate: Gate):
    code, out, _ = gate({}, {"CALLS": "43", "SLOW": "0.5"})
    assert code == 1
    assert "python_calls 41 -> 43" in out
    assert not list(Path("g/launches").glob("*-null.jsonl"))


def test_fewer_calls_are_none_and_reported_ones_do_not_judge(gate: Gate):
    assert gate({}, {"CALLS": "40"})[0] == 0
    code, out, _ = gate({}, {"CALLS": "43"}, "--counters", "report", "-o", "g2")
    assert code == 0
    assert "python_calls 41 -> 43" in out


def test_a_count_that_differs_between_launches_is_not_judged(gate: Gate):
    code, out, _ = gate({}, {"CALLS": "43", "FLAKY": "1"})
    assert code == 0
    assert "differ between launches" in out


@pytest.mark.parametrize(
    ("base", "head", "options", "code", "add", "said"),
    [
        ({}, {"LACKS": "add"}, (), 4, "MISSING", "head has no benchmark of this name"),
        ({"LACKS": "add"}, {}, (), 4, "NEW", "base has no benchmark"),
        ({"LACKS": "add"}, {}, ("--allow-new",), 0, "NEW", "base has no benchmark"),
        ({}, {"LACKS": "add,mul,view"}, (), 4, "MISSING", "no suite is called 'fake'"),
        ({}, {"RAISES": "add"}, (), 5, "FAILED", "in head: failed: ValueError"),
        ({"RAISES": "add"}, {}, (), 5, "FAILED", "in base: failed: ValueError"),
        ({}, {"CRASHES": "add"}, (), 5, "FAILED", "died of SIGKILL"),
        ({}, {"SKIPS": "add"}, (), 4, "MISSING", "skipped in head: not here"),
        ({}, {"CONTROL": "1.05"}, (), 3, "PASS", "UNTRUSTED: the control"),
        ({"TIME": "0"}, {"TIME": "0"}, (), 3, "INCONCLUSIVE", "below what the clock resolves"),
    ],
)
def test_what_is_not_clearly_fine_never_passes(
    gate: Gate,
    base: dict[str, str],
    head: dict[str, str],
    options: tuple[str, ...],
    code: int,
    add: str,
    said: str,
):
    ended, out, err = gate(base, head, *options)
    assert (ended, verdicts()["add"]) == (code, add), out + err
    assert said in out


def test_only_the_impls_asked_for_are_judged(gate: Gate):
    assert gate({}, {}, "--impl", "core")[0] == 0
    code, _, err = gate({}, {}, "--impl", "torch,local", "-o", "g2")
    assert code == 2 and "no benchmark of --impl torch,local: it has core" in err


def test_what_both_skip_is_left_out(gate: Gate):
    code, out, _ = gate({"SKIPS": "add"}, {"SKIPS": "add"})
    assert code == 0 and "left out" in out and "add" not in verdicts()


def test_a_launch_that_hangs_fails_and_the_others_are_judged(gate: Gate):
    code, out, _ = gate({}, {"HANGS": "add"}, "--launch-timeout", "2")
    assert code == 5
    assert verdicts() == {"add": "FAILED", "mul": "PASS", "view": "PASS"}
    assert "no end after 2 s" in out


@pytest.mark.parametrize(
    ("base", "head", "code", "said"),
    [
        ({}, {"MUTE": "1"}, 5, "cannot list its benchmarks: the launch ended with exit code 1: no such luck"),
        ({"LACKS": "add,mul,view"}, {"LACKS": "add,mul,view"}, 2, "no suite is called"),
        ({}, {"SCHEMA": "99"}, 5, "FAILED"),
    ],
)
def test_arms_that_cannot_be_judged_at_all(
    gate: Gate, base: dict[str, str], head: dict[str, str], code: int, said: str
):
    ended, out, err = gate(base, head)
    assert ended == code, out + err
    assert said in out + err
    assert "Traceback" not in err


def test_a_gate_goes_on_where_it_stopped(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    real, calls = launcher.Launcher.launch, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments[0])
        if len(calls) == 3:
            real(self, arguments[0][:1], *arguments[1:])
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(launcher.Launcher, "launch", interrupted)
    code, _, err = gate({}, {"SLOW": "1.1"})
    assert code == 130 and "--resume -o g" in err
    before = {p: p.stat().st_mtime_ns for p in Path("g/launches").glob("*.jsonl")}
    monkeypatch.setattr(launcher.Launcher, "launch", real)
    code, _, err = gate({}, {"SLOW": "1.1"}, "-o", "g", "--resume")
    assert code == 1
    assert len(before) == 2 + 7
    del before[max(before)]  # the launches beside it were not made
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert json.loads(Path("g/gate.json").read_text())["reused_launches"] == 8
    code, _, err = gate({}, {"SLOW": "1.2"}, "-o", "g", "--resume")
    assert code == 2 and "its head is" in err
    assert gate({}, {})[0] == 2, "the folder is taken"


def test_a_budget_holds(gate: Gate):
    code, out, err = gate({"SLEEPS": "1"}, {"SLEEPS": "1"}, "--budget", "4s")
    assert code == 3, out + err
    assert "the budget of 4 s holds no further launch: " in out
    assert "give --budget" in out and "name fewer benchmarks, such as dispatch/relu" in out
    code, _, err = gate({}, {"HANGS": "add"}, "--budget", "1s", "-o", "g2")
    assert code == 2
    said = r"the budget of 1 s holds no further launch, and not all is counted after .*: give --budget \d+s or more"
    assert re.search(said, err)


def test_the_least_that_it_takes_is_said_before_anything_is_spent(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch
):
    assert dtbench("suite", "new", "mine.py")[0] == 0

    def refuse(*_: object, **_more: object) -> None:
        raise ArmError("a launch was made")

    monkeypatch.setattr(gates, "Launcher", refuse)
    given = ("--base", "env:", "--head", "env:", "--budget", "5s")
    for file, impl, said in (
        ("mine.py/n=256", "plain", "1 benchmark: about 4 min"),
        ("mine.py", "", "2 benchmarks"),
    ):
        code, _, err = dtbench("gate", *given, file, "--impl", impl)
        *_, first, second = err.splitlines()
        assert said in first and first.endswith("to confirm one that is; the budget is about 5 s")
        assert code != 0 and "a launch was made" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--head", "env:", "dispatch"), "Missing option '--base'"),
        (("--base", "env:", "--head", "env:"), "nothing is selected"),
        (("--base", "main", "--head", "env:", "dispatch"), "'main' is not an arm"),
        (("--base", "rev:", "--head", "env:", "dispatch"), "is not an arm"),
        (("--base", "env:A", "--head", "env:", "dispatch"), "is no variable"),
        (("--base", "env:RANK=1", "--head", "env:", "dispatch"), "which every launch sets itself"),
        (("--base", "rev:no-such-revision", "--head", "env:", "dispatch"), "git knows no such commit"),
        (("--base", "python:/no/such", "--head", "env:", "dispatch"), "no program lies there"),
        (("--base", "env:", "--head", "env:", "/add"), "is not SUITE"),
        (("--base", "env:", "--head", "env:", "dispatch", "--budget", "soon"), "is no duration"),
        (("--base", "env:", "--head", "env:", "dispatch", "--record"), "--record needs --history"),
        (("--base", "env:", "--head", "env:", "dispatch", "--resume"), "--resume needs -o"),
        (("--base", "env:", "--head", "env:", "dispatch", "--resume", "-o", "x"), "holds no gate"),
        (("--base", "env:", "--head", "env:", "dispatch", "--nonsense"), "No such option"),
    ],
)
def test_options_that_cannot_be_followed(dtbench: Cli, words: tuple[str, ...], said: str):
    code, _, err = dtbench("gate", *words)
    assert (code, said in err) == (2, True), err
    assert err.rstrip().count("\n") == 0


def test_ranks_of_another_launcher_start_no_gate(dtbench: Cli, monkeypatch: pytest.MonkeyPatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert dtbench("gate", "--base", "env:", "--head", "env:", "dispatch")[0] == 2


def test_an_interpreter_that_cannot_run_the_harness_is_named(dtbench: Cli, tmp_path: Path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    program.chmod(0o755)
    code, _, err = dtbench("gate", "--base", f"python:{program}", "--head", "env:", "dispatch")
    assert code == 5
    assert "cannot run the harness: No module named torch" in err


SUITE = """
import os
from dtbench.suite import Case, Workload
from dtbench.suite import suite

MORE = "TINY_MORE" in os.environ
if MORE:
    print("x" * 6_000_000, end="the end of it", flush=True)

@suite("tiny", world="simulated", help="two sums")
def tiny(plan):
    for n in (100, 200):
        yield Case("sum", {"n": n}, build={"python": lambda world, n=n: Workload(run=lambda: work(n))}, clock="host",
                   tolerance=0.2, floor_s=1e-6)

def work(n):
    if MORE:
        step()
    return sum(range(n))

def step():
    pass
"""


def test_real_launches_count_what_a_call_does(dtbench: Cli, tmp_path: Path):
    """Two launches of each arm: the extra call is counted, twice the same, and nothing needs to be timed. What head
    prints is cut, and what looks like a secret is nowhere."""
    (tmp_path / "tiny.py").write_text(SUITE)
    head = "env:TINY_MORE=1,NCCL_X=--password hunter2"
    code, out, err = dtbench("gate", "--base", "env:", "--head", head, "tiny.py", "-o", "g")
    assert code == 1, out + err
    files = [path for path in Path("g").rglob("*") if path.is_file()]
    assert "hunter2" not in out + err and not any(b"hunter2" in path.read_bytes() for path in files)
    logs = [path.read_text() for path in Path("g").rglob("*head*.log")]
    assert logs and all(len(text) < 2.1 * 2**20 and "the end of it" in text[-(2**20) :] for text in logs)
    assert "more than their logs keep" in Path("g/gate.json").read_text()
    benchmarks = json.loads(Path("g/gate.json").read_text())["benchmarks"]
    for b in benchmarks:
        rise = b["counters"]
        assert (
            list(rise) == ["python_calls"]
            and rise["python_calls"]["head"] == rise["python_calls"]["base"] + 1
        )
        assert (b["tolerance"], b["floor_s"]) == (0.2, 1e-6)


def launcher_of(arms: dict[str, Arm], suite: Path, folder: Path) -> launcher.Launcher:
    folder.mkdir(exist_ok=True)
    selections = {name: [Selection(str(suite))] for name in arms}
    return launcher.Launcher(arms, selections, plan_on("cpu"), folder, launcher.Limits(60))


def real_arm(text: str, path: Sequence[str], **variables: str) -> Arm:
    return Arm(text, text, "", sys.executable, (*OWN, *path), variables, Path(OWN[0]), "", "", "")


OWN = tuple(str(Path(__file__).parents[2] / name) for name in ("", "core", "suites"))
SUM = Benchmark(("timed", "sum", "python", ()), "timed sum [python]", "simulated", "min")


def test_compared_launches_are_set_up_together_and_measure_by_turns(tmp_path: Path):
    """Real ones: both are warm before either measures, and then each sample of one follows one of the other."""
    seen = tmp_path / "seen"
    (tmp_path / "timed.py").write_text(TIMED)
    arm = real_arm("env:", (), SEEN=str(seen))
    made = launcher_of({"base": arm, "head": arm}, tmp_path / "timed.py", tmp_path / "launches")
    with contextlib.closing(made):
        one, other = made.launch(["head", "base"], [SUM])
        assert one.times_s[SUM.key] > 0 and other.times_s[SUM.key] > 0
        rows = [line.split() for line in seen.read_text().splitlines()]
        calls = [pid for what, pid, *_ in rows if what == "call"]
        pids = set(calls)
        warm_up = [i for pid in pids for i in [i for i, p in enumerate(calls) if p == pid][:4]]
        assert len(pids) == 2 and sorted(warm_up) == list(range(8))
        turns = [pid for pid, _ in itertools.groupby(calls[8:])]
        samples = len(one.samples_s[SUM.key])
        assert samples == len(other.samples_s[SUM.key]) == SAMPLES * FEW_BENCHMARKS
        # a b, b a, b a, a b, and so on: of four samples each is the first of two, and two pairs of turns follow on.
        assert turns == turns[:2] * (3 * samples // 4)
        assert len({on for what, _, _, on in rows if what == "call"} - {rows[0][3]}) <= 1, (
            "one CPU for all samples"
        )

        made.prepare(2)
        for _ in range(3):
            made.launch(["base"], [SUM])
        rows = [line.split() for line in seen.read_text().splitlines()]
        parents = [parent for what, _, parent, _ in rows if what == "loaded"]
        assert len(parents) == 5 and parents[0] == parents[1]
        assert len(set(parents)) == 4, "each round loads anew, those that are prepared too"
        pids = list(dict.fromkeys(row[1] for row in rows))
        ends = [[row for row in rows if row[1] == pid][-1][3] for pid in pids]
        if hasattr(os, "sched_getaffinity"):
            cpus = itertools.islice(itertools.cycle(map(str, sorted(os.sched_getaffinity(0)))), 4)
            assert ends[1:] == list(cpus), "and each round has the next CPU"


def test_what_is_launched_again_has_nothing_that_was_sampled_in_turn(tmp_path: Path):
    """A benchmark that takes its process down leaves the others of the arm to be measured alone."""
    (tmp_path / "timed.py").write_text(TIMED)
    base, head = real_arm("env:", ()), real_arm("env:", (), DTBENCH_DIES="1")
    dies = replace(SUM, key=("timed", "dies", "python", ()), label="timed dies [python]")
    made = launcher_of({"base": base, "head": head}, tmp_path / "timed.py", tmp_path / "launches")
    with contextlib.closing(made):
        sound, broken = made.launch(["base", "head"], [SUM, dies])
    assert "exit code 7" in broken.bad[dies.key] and not sound.bad
    assert broken.times_s[SUM.key] > 0 and SUM.key not in broken.samples_s
    assert sound.samples_s[SUM.key]


def test_an_arm_that_brings_what_is_loaded_already_gets_its_own(tmp_path: Path):
    """A revision of a library that the harness loads too: its launches share nothing, and so load it."""
    (tmp_path / "timed.py").write_text(TIMED + "\nimport click\nsee(click.__file__)\n")
    arms = {}
    for name in ("base", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "click.py").write_text("")
        arms[name] = real_arm(name, [str(tmp_path / name)], DTBENCH_SEEN=str(tmp_path / f"{name}.seen"))
    with contextlib.closing(launcher_of(arms, tmp_path / "timed.py", tmp_path / "launches")) as made:
        for launch in made.launch(["head", "base"], [SUM]):
            assert launch.times_s[SUM.key] > 0
    for name in arms:
        assert str(tmp_path / name / "click.py") in (tmp_path / f"{name}.seen").read_text()


def test_arms_load_apart_where_variables_differ_that_a_library_may_read(tmp_path: Path):
    (tmp_path / "timed.py").write_text(TIMED)
    seen = {name: tmp_path / f"{name}.seen" for name in ("base", "head")}
    for variable, loaders in (("DTBENCH_SEEN", 1), ("SEEN", 2)):
        arms = {name: real_arm(name, (), **{variable: str(path)}) for name, path in seen.items()}
        with contextlib.closing(launcher_of(arms, tmp_path / "timed.py", tmp_path / variable)) as made:
            made.launch(["base", "head"], [SUM])
        parents = {path.read_text().splitlines()[0].split()[2] for path in seen.values()}
        assert len(parents) == loaders
        for path in seen.values():
            path.unlink()


def test_a_launch_that_cannot_be_started_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if began:
            raise OSError("no memory")
        began.append(real(*args, **options))
        return began[-1]

    arms = {name: made_up_arm(tmp_path / name, SLEEPS="60", NAME=name) for name in ("base", "head")}
    for number, start in enumerate(
        (lambda m: m.launch(["base", "head"], []), lambda m: m.count("base", "head"))
    ):
        monkeypatch.setattr(subprocess, "Popen", popen)
        made = launcher_of(arms, Path("fake"), tmp_path / str(number))
        with contextlib.closing(made), pytest.raises(OSError, match="no memory"):
            start(made)
        assert began.pop().returncode is not None


def test_a_loader_that_fails_is_told_as_its_launches_end(tmp_path: Path):
    arm = made_up_arm(tmp_path / "base")
    (tmp_path / "base/sources/dtbench/gate/worker.py").write_text("raise ImportError('libtorch is gone')")
    with contextlib.closing(launcher_of({"base": arm}, Path("fake"), tmp_path / "launches")) as made:
        (launch,) = made.launch(["base"], [SUM])
    assert launch.bad[SUM.key] == "the launch ended with exit code 1: ImportError: libtorch is gone"


TIMED = """
import os
from dtbench.suite import Case, Workload
from dtbench.suite import suite

def see(what):
    with open(os.environ.get("DTBENCH_SEEN") or os.environ.get("SEEN", os.devnull), "a") as file:
        on = ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else "?"
        file.write(f"{what} {os.getpid()} {os.getppid()} {on}\\n")

see("loaded")

@suite("timed", world="simulated", help="sums")
def timed(plan):
    for name in ("sum", "dies"):
        yield Case(name, {}, build={"python": lambda world, name=name: Workload(run=lambda: call(name))},
                   clock="host", samples=5, warmup_calls=4)

def call(name):
    see("call")
    if name == "dies" and os.environ.get("DTBENCH_DIES"):
        os._exit(7)
"""


def test_a_self_test_whose_budget_holds_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Launcher:
        def __init__(self, *_args: Any, **_given: Any) -> None:
            self.close = lambda: None

        def count(self, _role: str) -> Any:
            raise OutOfTimeError("the budget of 1 s holds no further launch")

    monkeypatch.setattr(gate_selftest, "Launcher", Launcher)
    arms = contextlib.nullcontext([SimpleNamespace(path=["x"]), None])
    monkeypatch.setattr(gate_selftest, "open_arms", lambda *_: arms)
    with pytest.raises(UsageError, match="the budget held 0 rounds of four launches, trials need 30"):
        gate_selftest.selftest(1.0, tmp_path / "gate", False, "cpu", lambda _text: None)


def test_a_self_test_judges_a_gpus_times_on_a_gpu():
    assert {case.clock for case in selftest.cases(plan_on("cuda"))} == {"device"}
    assert {case.clock for case in selftest.cases(plan_on("auto"))} == {"host"}
