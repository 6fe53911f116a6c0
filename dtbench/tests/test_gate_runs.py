"""Whole gates through the command line, on arms whose launches take milliseconds, and some real launches."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtbench.gate import gate as gates
from dtbench.gate import launcher
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import Benchmark, SuiteSelection
from dtbench.gate.sampler import FEW_BENCHMARKS, SAMPLES
from dtbench.tests.gate_selftest import plan_on
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_arm import made_up_arm
from dtbench.tests.test_gate_arms import git

Gate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gate(dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """`dtbench gate` with made-up arms: base and head are dicts of their variables."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(base: dict[str, str], head: dict[str, str], *options: str) -> tuple[int, str, str]:
        @contextlib.contextmanager
        def made_up(*_: Any) -> Iterator[tuple[Arm, Arm]]:
            yield made_up_arm(tmp_path / "base-arm", **base), made_up_arm(tmp_path / "head-arm", **head)

        monkeypatch.setattr(gates, "open_arms", made_up)
        where = () if "-o" in options else ("-o", "g")
        return dtbench("gate", "--base", "env:", "--head", "env:", "dispatch", *where, *options)

    return run


def verdicts(folder: str = "g") -> dict[str, str]:
    benchmarks = json.loads(Path(folder, "gate.json").read_text())["benchmarks"]
    return {b["name"]: b["verdict"] for b in benchmarks}


def test_a_slower_head_is_a_regression_in_every_output(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, _, err = gate({}, {"SLOW": "1.10"}, "--export", "bmf:times.json", "--history", "kept")
    assert code == 1, err
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
    latency = json.loads(Path("times.json").read_text())["fake add [core]"]["latency"]
    assert latency["lower_value"] <= latency["value"] <= latency["upper_value"]
    assert (tmp_path / "summary.md").read_text().count("| slower |") == 3
    (kept,) = Path("kept").glob("*.jsonl")
    assert json.loads(kept.read_text())["times_s"].keys() == {
        f"fake {n} [core]" for n in ("add", "mul", "view")
    }


@pytest.mark.parametrize(
    ("options", "end"),
    [((), "there is no --budget"), (("--budget", "10m"), "--budget ends it after about 10 min in all")],
)
def test_gate_announces_how_long_it_takes_before_it_times(
    gate: Gate, options: tuple[str, ...], end: str
) -> None:
    code, _, err = gate({}, {}, *options)
    before, _, timing = err.partition("timing 3 benchmarks: 15 launches, about ")
    assert code == 0 and "screen" not in before and "screen 1 of 5: 3 benchmarks" in timing
    assert re.search(rf"undecided benchmarks up to 59, about \d+ (s|min); {end}\n", timing)
    assert "\r" not in err and all(line.startswith("gate: ") for line in err.splitlines())


def test_json_is_the_file_in_the_folder_which_is_not_replaced(gate: Gate) -> None:
    code, out, _ = gate({}, {"CALLS": "43"}, "--json")
    assert code == json.loads(out)["exit_code"] == 1
    assert out == Path("g/gate.json").read_text()
    assert json.loads(out)["launches"] == 0, "what is counted needs no timed launch"
    code, _, err = gate({}, {})
    assert code == 2 and "g holds a gate already" in err


@pytest.mark.parametrize(
    ("base", "head", "options", "code", "add", "words"),
    [
        ({}, {}, (), 0, "same", "no regression (3 same); exit code 0"),
        ({}, {"CALLS": "43", "SLOW": "0.5"}, (), 1, "slower", "python_calls 41 -> 43"),
        ({}, {"CALLS": "43"}, ("--counters", "report"), 0, "same", "python_calls 41 -> 43"),
        ({}, {"CALLS": "43", "FLAKY": "1"}, (), 0, "same", "differ between launches"),
        ({}, {"LACKS": "add"}, (), 4, "missing", "head has no benchmark of this name"),
        ({"LACKS": "add"}, {}, (), 4, "new", "base has no benchmark"),
        ({"LACKS": "add"}, {}, ("--allow-new",), 0, "new", "base has no benchmark"),
        ({}, {"RAISES": "add"}, (), 5, "failed", "in head: failed: ValueError"),
        ({"RAISES": "add"}, {}, (), 5, "failed", "in base: failed: ValueError"),
        ({}, {"CRASHES": "add"}, (), 5, "failed", "in head: the launch died of SIGKILL"),
        ({}, {"HANGS": "add"}, ("--launch-timeout", "2"), 5, "failed", "not finished after 2 s"),
        ({}, {"SKIPS": "add"}, (), 4, "missing", "skipped in head: not here"),
        ({"SKIPS": "add"}, {"SKIPS": "add"}, (), 0, None, "left out"),
        ({}, {"CONTROL": "1.05"}, (), 3, "same", "UNTRUSTED: the control"),
    ],
)
def test_verdicts_and_exit_codes(
    gate: Gate,
    base: dict[str, str],
    head: dict[str, str],
    options: tuple[str, ...],
    code: int,
    add: str | None,
    words: str,
) -> None:
    ended, out, err = gate(base, head, *options)
    assert (ended, verdicts().get("add")) == (code, add), out + err
    assert words in out
    if add == "failed":
        assert verdicts() == {"add": "failed", "mul": "same", "view": "same"}


@pytest.mark.parametrize(
    ("base", "head", "options", "code", "words"),
    [
        (
            {},
            {"MUTE": "1"},
            (),
            5,
            "cannot list its benchmarks: the launch ended with exit code 1: no such luck",
        ),
        ({"LACKS": "add,mul,view"}, {"LACKS": "add,mul,view"}, (), 2, "no suite is called"),
        ({}, {}, ("--impl", "torch,local"), 2, "no benchmark of --impl torch,local: it has core"),
        (
            {},
            {"HANGS": "add"},
            ("--budget", "1s"),
            2,
            r"the budget of 1 s is too short for another launch, and counting .* .*: give --budget \d+s or more",
        ),
    ],
)
def test_arms_that_cannot_be_judged_at_all(
    gate: Gate, base: dict[str, str], head: dict[str, str], options: tuple[str, ...], code: int, words: str
) -> None:
    ended, out, err = gate(base, head, *options)
    assert ended == code, out + err
    assert re.search(words, out + err) and "Traceback" not in err


def test_a_budget_holds(gate: Gate) -> None:
    code, out, err = gate({"SLEEPS": "1"}, {"SLEEPS": "1"}, "--budget", "4s")
    assert code == 3, out + err
    assert "the budget of 4 s is too short for another launch: " in out
    assert "give --budget" in out and "name fewer benchmarks, such as dispatch/relu" in out


ENVS = ("--base", "env:", "--head", "env:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*ENVS, "dispatch/torchrun"), "without torchrun"),
        (ENVS, "nothing is selected"),
        (("--base", "main", "--head", "env:", "dispatch"), "'main' is not an arm"),
        (("--base", "env:RANK=1", "--head", "env:", "dispatch"), "is set by every launch"),
        (("--base", "rev:no-such-revision", "--head", "env:", "dispatch"), "git does not know this commit"),
        (("--base", "python:/no/such", "--head", "env:", "dispatch"), "not a program"),
        ((*ENVS, "dispatch", "--budget", "soon"), "is not a duration"),
    ],
)
def test_options_that_cannot_be_followed(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    if "dispatch/torchrun" in words:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
    code, _, err = dtbench("gate", *words)
    assert (code, message in err) == (2, True), err
    assert err.rstrip().count("\n") == 0


def test_an_interpreter_that_cannot_run_the_harness_is_named(dtbench: Cli, tmp_path: Path) -> None:
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


def test_real_launches_count_what_a_call_does(dtbench: Cli, tmp_path: Path) -> None:
    """Two launches of each arm: the extra call is counted, twice the same, and nothing needs to be timed."""
    (tmp_path / "tiny.py").write_text(SUITE)
    head = "env:TINY_MORE=1,NCCL_X=--password hunter2"
    code, out, err = dtbench("gate", "--base", "env:", "--head", head, "tiny.py", "-o", "g")
    assert code == 1, out + err
    files = [path for path in Path("g").rglob("*") if path.is_file()]
    assert "hunter2" not in out + err and not any(b"hunter2" in path.read_bytes() for path in files)
    for b in json.loads(Path("g/gate.json").read_text())["benchmarks"]:
        rise = b["counters"]
        assert list(rise) == ["python_calls"]
        assert rise["python_calls"]["head"] == rise["python_calls"]["base"] + 1
        assert (b["tolerance"], b["floor_s"]) == (0.2, 1e-6)


NEIGHBOUR = "from dtbench.suite import suite\nimport helper_beside\n" + SUITE.replace(
    "100, 200", "helper_beside.N,"
)


def test_real_arms_say_before_a_launch_that_a_selection_has_no_benchmark(
    dtbench: Cli, tmp_path: Path
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "tiny.py").write_text(NEIGHBOUR)
    code, _, err = dtbench("gate", *ENVS, "bench/tiny.py", "-o", "g")
    assert code == 2 and "ModuleNotFoundError: No module named 'helper_beside' (tiny.py:2)" in err, err
    (tmp_path / "bench" / "helper_beside.py").write_text("N = 50\n")
    code, _, err = dtbench("gate", *ENVS, "bench/tiny.py/nothing", "bench/tiny.py/sum", "-o", "g")
    assert code == 2 and "'nothing' matches none of their 1 cases; expected such as n=50" in err, err
    code, _, err = dtbench("gate", *ENVS, "bench/tiny.py", "--impl", "core", "-o", "g")
    assert code == 2 and "no benchmark of --impl core: it has python" in err, err
    assert "counting" not in err and not Path("g").exists()


def test_real_revisions_import_their_own_neighbours(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "tiny.py").write_text(NEIGHBOUR)
    git("init", "-q")
    for n in (10, 20):
        (bench / "helper_beside.py").write_text(f"N = {n}\n")
        git("add", "-A")
        git("commit", "-qm", f"{n}")
    (bench / "helper_beside.py").write_text("N = 30\n")  # of the working tree: neither arm's
    monkeypatch.setenv("PYTHONPATH", str(bench))
    code, out, err = dtbench("gate", "--base", "rev:HEAD~1", "--head", "rev:HEAD", "bench/tiny.py", "-o", "g")
    assert code == 4, out + err
    benchmarks = json.loads(Path("g/gate.json").read_text())["benchmarks"]
    assert {(b["params"]["n"], b["verdict"]) for b in benchmarks} == {(10, "missing"), (20, "new")}


def test_problem_of_both_arms_ends_the_gate_before_it_makes_a_folder(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made_up_arm

    def made_up(folder: Path, **variables: str) -> Arm:
        return replace(whole(folder, **variables), problems=("", variables.get("PROBLEM", "")))

    monkeypatch.setattr("dtbench.tests.test_gate_runs.made_up_arm", made_up)
    code, _, err = gate({"PROBLEM": "no such case"}, {"PROBLEM": "no such case"})
    assert (code, err) == (2, "dtbench: no such case\n") and not Path("g").exists()
    code, _, err = gate({"PROBLEM": "no such case"}, {"PROBLEM": "no such file"})
    assert code == 2 and "in base: no such case; in head: no such file" in err
    assert gate({"PROBLEM": "no such case"}, {})[0] == 0


# ------------------------------------------------------------------------------- launches


OWN = tuple(str(Path(__file__).parents[2] / name) for name in ("", "core", "suites"))
SUM = Benchmark(("timed", "sum", "python", ()), "timed sum [python]", "simulated", "min")
DIES = replace(SUM, key=("timed", "dies", "python", ()), label="timed dies [python]")
TIMED = """
import os
from dtbench.suite import Case, Workload
from dtbench.suite import suite

def see(what):
    with open(os.environ.get("DTBENCH_SEEN") or os.environ.get("SEEN", os.devnull), "a") as file:
        file.write(f"{what} {os.getpid()} {os.getppid()}\\n")

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


def real_arm(path: Sequence[str] = (), alone: bool = False, **variables: str) -> Arm:
    return Arm("env:", "", sys.executable, (*OWN, *path), variables, Path(OWN[0]), loads_own_modules=alone)


@contextlib.contextmanager
def launcher_of(folder: Path, suite: str = TIMED, **arms: Arm) -> Iterator[launcher.Launcher]:
    (folder / "launches").mkdir(parents=True)
    (folder / "timed.py").write_text(suite)
    selections = {name: [SuiteSelection(str(folder / "timed.py"))] for name in arms}
    gate_launcher = launcher.Launcher(
        arms, selections, plan_on("cpu"), folder / "launches", launcher.Limits(60)
    )
    with contextlib.closing(gate_launcher):
        yield gate_launcher


def test_compared_launches_are_set_up_together_and_measure_by_turns(tmp_path: Path) -> None:
    """Both are warm before either measures, and then each sample of one follows one of the other."""
    seen = tmp_path / "seen"
    arm = real_arm(SEEN=str(seen))
    with launcher_of(tmp_path / "gate", base=arm, head=arm) as gate_launcher:
        one, other = gate_launcher.launch(["head", "base"], [SUM])
        assert one.times_s[SUM.key] > 0 and other.times_s[SUM.key] > 0
        rows = map(str.split, seen.read_text().splitlines())
        calls = [pid for what, pid, *_ in rows if what == "call"]
        pids = set(calls)
        warm_up = [i for pid in pids for i in [i for i, p in enumerate(calls) if p == pid][:4]]
        assert len(pids) == 2 and sorted(warm_up) == list(range(8))
        turns = [pid for pid, _ in itertools.groupby(calls[8:])]
        samples = len(one.samples_s[SUM.key])
        assert samples == len(other.samples_s[SUM.key]) == SAMPLES * FEW_BENCHMARKS
        # a b, b a, b a, a b, and so on: of four samples each is the first of two, and two pairs of turns follow on.
        assert turns == turns[:2] * (3 * samples // 4)


def test_what_brings_a_launch_down_fails_and_the_rest_is_launched_again_in_turn(tmp_path: Path) -> None:
    with launcher_of(tmp_path, base=real_arm(), head=real_arm(DTBENCH_DIES="1")) as gate_launcher:
        sound, broken = gate_launcher.launch(["base", "head"], [SUM, DIES])
    assert "exit code 7" in broken.bad[DIES.key] and not sound.bad
    assert broken.times_s[SUM.key] > 0 and DIES.key not in sound.times_s
    assert len(sound.samples_s[SUM.key]) == len(broken.samples_s[SUM.key]) > 0


@pytest.mark.parametrize(
    ("alone", "variable", "loaders"),
    [(False, "DTBENCH_SEEN", 1), (True, "DTBENCH_SEEN", 2)],
)
def test_arms_that_load_alike_share_a_process(
    tmp_path: Path, alone: bool, variable: str, loaders: int
) -> None:
    """Not those with variables that a library may read, or with a module that launches load before they are forked."""
    arms = {}
    for name in ("base", "head"):
        (tmp_path / name).mkdir()
        if alone:
            (tmp_path / name / "click.py").write_text("")
        arms[name] = real_arm([str(tmp_path / name)], alone, **{variable: str(tmp_path / f"{name}.seen")})
    suite = f"{TIMED}\nimport click\nsee(click.__file__)\n"
    with launcher_of(tmp_path / "gate", suite, **arms) as gate_launcher:
        for launch in gate_launcher.launch(["head", "base"], [SUM]):
            assert launch.times_s[SUM.key] > 0
    assert len({real_arm(SEEN=value).loader_key for value in "ab"}) == 2
    texts = {name: (tmp_path / f"{name}.seen").read_text() for name in arms}
    assert len({text.split()[2] for text in texts.values()}) == loaders
    assert all((str(tmp_path / name / "click.py") in text) == alone for name, text in texts.items())
