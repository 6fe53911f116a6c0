"""Arms of a gate, and whole gates through the command line: on arms whose launches take milliseconds, and really."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtbench.errors import UsageError
from dtbench.gate import arms, launcher, worker
from dtbench.gate import gate as gates
from dtbench.gate.arms import Arm, open_arms, parse_variables
from dtbench.gate.benchmark import Benchmark, SuiteSelection
from dtbench.gate.process import environment_of
from dtbench.gate.sampler import FEW_BENCHMARKS, SAMPLES
from dtbench.machine import provenance
from dtbench.tests.gate_selftest import plan_on
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_arm import made_up_arm

Gate = Callable[..., tuple[int, str, str]]
ENVS = ("--base", "env:", "--head", "env:")


@pytest.fixture
def gate(dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """`dtbench gate` with made-up arms: base and head are dicts of their variables."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(base: dict[str, str], head: dict[str, str], *options: str) -> tuple[int, str, str]:
        @contextlib.contextmanager
        def made_up(*_: Any) -> Iterator[tuple[Arm, Arm]]:
            yield made_up_arm(tmp_path / "base-arm", **base), made_up_arm(tmp_path / "head-arm", **head)

        monkeypatch.setattr(gates, "open_arms", made_up)
        return dtbench("gate", *ENVS, "dispatch", "-o", "g", *options)

    return run


def benchmarks_of_report() -> list[dict[str, Any]]:
    benchmarks: list[dict[str, Any]] = json.loads(Path("g/gate.json").read_text())["benchmarks"]
    return benchmarks


def test_a_slower_head_is_a_regression_in_every_output(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, _, err = gate({}, {"SLOW": "1.10"}, "--export", "bmf:times.json", "--history", "kept")
    (kept,) = Path("kept").glob("*.jsonl")
    files = ("g/gate.json", "g/smaller-is-better.json", "times.json", kept)
    report, trend, times, history = (json.loads(Path(file).read_text()) for file in files)
    assert code == report["exit_code"] == 1, err
    suite = ET.parse("g/junit.xml").getroot()[0]
    failures = ["(at least +" in (failure.get("message") or "") for failure in suite.iter("failure")]
    assert (suite.get("tests"), suite.get("errors"), failures) == ("3", "0", [True] * 3)
    effect, latency = report["benchmarks"][0]["effect"], times["fake add [core]"]["latency"]
    assert (effect["ratio"], effect["pairs"]) == (pytest.approx(1.10, abs=0.01), 10)
    assert [row["unit"] for row in trend] == ["us"] * 3 and trend[0]["value"] == pytest.approx(110, rel=0.02)
    assert latency["lower_value"] <= latency["value"] <= latency["upper_value"]
    assert (tmp_path / "summary.md").read_text().count("| slower |") == 3
    assert history["times_s"].keys() == {f"fake {n} [core]" for n in ("add", "mul", "view")}


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


def test_announced_and_missing_times_follow_from_the_time_spent() -> None:
    """Counting took 4 s. A screening and 22 pairs that follow it took 8 and 45 s."""
    ranks = replace(SUM, world="ranks")
    announced = [gates._announcement([benchmark], 4.0, None) for benchmark in (SUM, ranks)]
    assert [re.findall(r"about (\d+) (s|min)", text) for text in announced] == [
        [("10", "s"), ("54", "s")],
        [("30", "s"), ("2", "min")],
    ]
    assert gates._remedy(15, 12.0).startswith(": about 44 s more are needed")


def test_json_is_the_file_in_the_folder_which_is_not_replaced(gate: Gate) -> None:
    code, out, _ = gate({}, {"CALLS": "43"}, "--json")
    report = json.loads(out)
    assert out == Path("g/gate.json").read_text()
    assert (code, report["exit_code"], report["launches"]) == (1, 1, 0)  # counters need no timed launches
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
    exit_code, out, err = gate(base, head, *options)
    verdicts = {benchmark["name"]: benchmark["verdict"] for benchmark in benchmarks_of_report()}
    assert (exit_code, verdicts.get("add")) == (code, add), out + err
    assert words in out
    assert add != "failed" or verdicts == {"add": "failed", "mul": "same", "view": "same"}


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
            {"SLEEPS": "1"},
            {"SLEEPS": "1"},
            ("--budget", "4s"),
            3,
            "(?s)the budget of 4 s is too short for .*give --budget.*name fewer benchmarks, such as dispatch/relu",
        ),
        (
            {},
            {"HANGS": "add"},
            ("--budget", "1s"),
            2,
            r"the budget of 1 s is too short for another launch, and counting .* .*: give --budget \d+s or more",
        ),
    ],
)
def test_arms_that_cannot_be_compared_are_reported(
    gate: Gate, base: dict[str, str], head: dict[str, str], options: tuple[str, ...], code: int, words: str
) -> None:
    exit_code, out, err = gate(base, head, *options)
    assert exit_code == code, out + err
    assert re.search(words, out + err) and "Traceback" not in err


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
def test_options_that_cannot_be_followed_are_refused(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name in torchrun if "dispatch/torchrun" in words else ():
        monkeypatch.setenv(name, torchrun[name])
    code, _, err = dtbench("gate", *words)
    assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_an_interpreter_that_cannot_run_the_harness_is_named(dtbench: Cli, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    program.chmod(0o755)
    code, _, err = dtbench("gate", "--base", f"python:{program}", "--head", "env:", "dispatch")
    assert code == 5 and "cannot run the harness: No module named torch" in err


def test_interpreter_that_hangs_ends_with_the_budget(dtbench: Cli, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    arm = f"python:{program}"
    code, _, err = dtbench("gate", "--base", arm, "--head", arm, "dispatch", "--budget", "0.5s")
    assert code == 5 and "no answer after 0.5 s; torch or a suite hangs on import, or --budget is" in err


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
    files = [path.read_bytes() for path in Path("g").rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in [*files, (out + err).encode()])
    for benchmark in benchmarks_of_report():
        ((counter, counts),) = benchmark["counters"].items()
        assert (counter, counts["head"]) == ("python_calls", counts["base"] + 1)
        assert (benchmark["tolerance"], benchmark["floor_s"]) == (0.2, 1e-6)


NEIGHBOUR = "from dtbench.suite import suite\nimport helper_beside\n" + SUITE.replace(
    "100, 200", "helper_beside.N,"
)


def test_real_arms_report_a_selection_without_benchmarks_before_a_launch(
    dtbench: Cli, tmp_path: Path
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "tiny.py").write_text(NEIGHBOUR)
    for words, message in (
        ("bench/tiny.py", "ModuleNotFoundError: No module named 'helper_beside' (tiny.py:2)"),
        (
            "bench/tiny.py/nothing bench/tiny.py/sum",
            "'nothing' matches none of their 1 cases; the nearest are n=50",
        ),
        ("bench/tiny.py --impl core", "no benchmark of --impl core: it has python"),
    ):
        code, _, err = dtbench("gate", *ENVS, *words.split(), "-o", "g")
        assert code == 2 and message in err and "counting" not in err, err
        (tmp_path / "bench" / "helper_beside.py").write_text("N = 50\n")
    missing = ("--base", "env:", "--head", "backend:missing", "bench/tiny.py", "-o", "g")
    code, _, err = dtbench("gate", *missing)
    assert code == 2 and "dtbench: backend:missing: --backend missing: torch " in err, err
    assert not Path("g").exists()


def test_real_revisions_import_their_own_neighbours(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "tiny.py").write_text(NEIGHBOUR)
    git("init", "-q")
    for n in (10, 20):
        (bench / "helper_beside.py").write_text(f"N = {n}\n")
        commit(f"{n}")
    (bench / "helper_beside.py").write_text("N = 30\n")  # not committed
    monkeypatch.setenv("PYTHONPATH", str(bench))
    words = ("--base", "rev:HEAD~1", "--head", "rev:HEAD", "bench/tiny.py", "-o", "g")
    code, out, err = dtbench("gate", *words)
    assert code == 4, out + err
    verdicts = {benchmark["params"]["n"]: benchmark["verdict"] for benchmark in benchmarks_of_report()}
    assert verdicts == {10: "missing", 20: "new"}


def test_real_revisions_are_refused_if_they_import_the_working_tree(dtbench: Cli, tmp_path: Path) -> None:
    """The suite finds a module of the repository by its absolute path, as some editable installations do."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_beside.py").write_text("N = 10\n")
    (tmp_path / "tiny.py").write_text(f"import sys\nsys.path.append({str(tmp_path / 'lib')!r})\n{NEIGHBOUR}")
    git("init", "-q")
    commit("a module in lib")
    code, _, err = dtbench("gate", "--base", "rev:HEAD", "--head", "rev:HEAD", "tiny.py", "-o", "g")
    assert code == 2 and f"rev:HEAD imported {tmp_path}/lib/helper_beside.py of the working tree" in err, err
    assert "timing" not in err


def test_modules_of_the_working_tree_are_those_that_the_checkout_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, checkout = tmp_path / "top", tmp_path / "checkout"
    files = [top / "lib" / f"{name}.py" for name in ("committed", "untracked")]
    (tmp_path / "link").symlink_to(top)
    for file in (*files, checkout / "lib" / "committed.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name, file in (
        ("committed_file", tmp_path / "link" / "lib" / "committed.py"),
        ("untracked_file", files[1]),
        ("file_of_checkout", checkout / "lib" / "committed.py"),
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[name], "__file__", str(file), raising=False)
    monkeypatch.chdir(checkout)
    assert (worker.imported_from(str(top)), worker.imported_from("")) == ((str(files[0]),), ())


@pytest.mark.parametrize(
    ("head", "code", "message"),
    [
        ("no such case", 2, "dtbench: no such case\n"),
        ("no such file", 2, "in base: no such case; in head: no such file"),
        ("", 0, ""),
    ],
)
def test_problem_of_both_arms_ends_the_gate_before_it_makes_a_folder(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, head: str, code: int, message: str
) -> None:
    def arm(folder: Path, problem: str, make_arm: Callable[..., Arm] = made_up_arm) -> Arm:
        return replace(make_arm(folder), problems=("", problem))

    monkeypatch.setattr("dtbench.tests.test_gate_runs.made_up_arm", arm)
    exit_code, _, err = gate({"problem": "no such case"}, {"problem": head})
    assert (exit_code, message in err, Path("g").exists()) == (code, True, code == 0)


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
    """Both warm up before either measures. Then each sample of one follows a sample of the other."""
    arm = real_arm(SEEN=str(tmp_path / "seen"))
    with launcher_of(tmp_path / "gate", base=arm, head=arm) as gate_launcher:
        launches = gate_launcher.launch(["head", "base"], [SUM])
    calls = re.findall(r"^call (\d+)", (tmp_path / "seen").read_text(), re.MULTILINE)
    assert sorted(Counter(calls[:8]).values()) == [4, 4]
    turns = [pid for pid, _ in itertools.groupby(calls[8:])]
    samples = SAMPLES * FEW_BENCHMARKS
    assert [len(launch.samples_s[SUM.key]) for launch in launches] == [samples] * 2
    assert min(launch.times_s[SUM.key] for launch in launches) > 0
    # a b, b a, b a, a b, and so on: in four samples each arm is twice the first, and two pairs of turns are adjacent.
    assert turns == turns[:2] * (3 * samples // 4)


def test_launch_on_real_ranks_uses_the_backend_of_its_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run_ranks(_arm: Arm, words: Sequence[str], *_rest: Any) -> str:
        commands.append([*words])
        return "nothing ran"

    monkeypatch.setattr(launcher, "run_ranks", run_ranks)
    arms_by_name = {"base": real_arm(), "head": replace(real_arm(), backend="gloo:tcp")}
    on_ranks = replace(SUM, world="ranks")
    with launcher_of(tmp_path, **arms_by_name) as gate_launcher:
        launches = gate_launcher.launch(["head", "base"], [on_ranks])
    assert [words[words.index("--backend") + 1] for words in commands] == ["gloo:tcp", "auto"]
    assert [launch.bad for launch in launches] == [{on_ranks.key: "nothing ran"}] * 2


def test_benchmark_that_kills_a_launch_fails_and_the_others_are_measured(tmp_path: Path) -> None:
    with launcher_of(tmp_path, base=real_arm(), head=real_arm(DTBENCH_DIES="1")) as gate_launcher:
        sound, broken = gate_launcher.launch(["base", "head"], [SUM, DIES])
    assert "exit code 7" in broken.bad[DIES.key] and not sound.bad
    assert broken.times_s[SUM.key] > 0 and DIES.key not in sound.times_s
    assert len(sound.samples_s[SUM.key]) == len(broken.samples_s[SUM.key]) > 0


@pytest.mark.parametrize("alone", [False, True])
def test_arms_load_apart_only_with_modules_of_their_own(tmp_path: Path, alone: bool) -> None:
    """A variable of DTBENCH_* does not need a process of its own; a module that launches load before a fork does."""
    arms = {}
    for name in ("base", "head"):
        (tmp_path / name).mkdir()
        if alone:
            (tmp_path / name / "click.py").write_text("")
        arms[name] = real_arm([str(tmp_path / name)], alone, DTBENCH_SEEN=str(tmp_path / f"{name}.seen"))
    suite = f"{TIMED}\nimport click\nsee(click.__file__)\n"
    with launcher_of(tmp_path / "gate", suite, **arms) as gate_launcher:
        assert all(launch.times_s[SUM.key] > 0 for launch in gate_launcher.launch(["head", "base"], [SUM]))
    texts = {name: (tmp_path / f"{name}.seen").read_text() for name in arms}
    assert len({text.split()[2] for text in texts.values()}) == 1 + alone
    assert all((str(tmp_path / name / "click.py") in text) == alone for name, text in texts.items())


def test_arms_with_other_library_variables_load_apart() -> None:
    assert len({real_arm(SEEN=value).loader_key for value in "ab"}) == 2


def git(*words: str) -> str:
    author = [
        "-c",
        "user.name=somebody",
        "-c",
        "user.email=somebody@example.org",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    return subprocess.run(["git", *author, *words], capture_output=True, text=True, check=True).stdout.strip()


def commit(message: str) -> None:
    git("add", "-A")
    git("commit", "-qm", message)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits of other suites and cores. Interpreters are not started."""
    folder = tmp_path / "repository"
    (folder / "core" / "dtbench_core").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(arms, "_probed", lambda arm, *_: arm)
    git("init", "-q")
    for number in (1, 2):
        for file in ("core/dtbench_core/__init__.py", "my_suite.py"):
            (folder / file).write_text(f"NUMBER = {number}\n")
        commit(f"number {number}")
    return folder


def test_a_revision_has_its_own_core_and_the_harness_of_the_gate(repository: Path) -> None:
    with open_arms("rev:HEAD~1", "rev:HEAD") as (base, head):
        for arm, number in ((base, 1), (head, 2)):
            sources = Path(arm.path[0])
            assert (sources / "dtbench_core" / "__init__.py").read_text() == f"NUMBER = {number}\n"
            assert (sources / "dtbench" / "gate" / "worker.py").is_file()
            assert (sources / "dtbench_suites" / "dispatch.py").is_file()
            assert not (sources / "dtbench" / "tests").exists() and arm.python == sys.executable
            own, builtin = arm.selections([SuiteSelection("my_suite.py"), SuiteSelection("dispatch", "add")])
            assert Path(own.suite).read_text() == f"NUMBER = {number}\n"
            assert builtin == SuiteSelection("dispatch", "add")
        roots = [Path(arm.root) for arm in (base, head)]
        assert base.revision == git("rev-parse", "HEAD~1") and all(root.is_dir() for root in roots)
        # Even a gate that is killed now leaves the repository as it was.
        assert git("status", "--porcelain") == "" and not Path(".git/worktrees").exists()
        tree_format = "--format=%(objectmode) %(objectname) 0%x09%(path)"
        assert git("ls-files", "--stage") == git("ls-tree", "-r", tree_format, "HEAD")
    assert not any(root.exists() for root in roots)


def test_other_arms_take_the_sources_of_the_gate_as_they_were(repository: Path) -> None:
    with open_arms("env:", "env:A=1") as (base, head):
        for arm in (base, head):
            assert Path(arm.path[0], "dtbench_core", "comm.py").is_file()
            assert not Path(arm.path[0]).is_relative_to(repository)
        assert environment_of({}, head.env, head.path)["A"] == "1" and "A" not in base.env


def test_hooks_filters_and_diff_commands_of_a_repository_do_not_run(repository: Path, tmp_path: Path) -> None:
    """Each would touch a file. Sources are as committed."""
    mark, hooks = tmp_path / "mark", repository / ".git" / "hooks"
    command = f"sh -c 'touch {mark}; cat'"
    for name in ("post-index-change", "post-checkout", "fsmonitor-watchman", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
    (repository / ".gitattributes").write_text("*.py filter=a.b=c diff=d\nmy_suite.py filter=lfs\n")
    commit("attributes")
    filters = [
        f"filter.{name}.{kind}" for name in ("a.b=c", "lfs") for kind in ("clean", "smudge", "process")
    ]
    commands = (*filters, "diff.external", "diff.d.command", "diff.d.textconv")
    settings = dict.fromkeys(commands, command) | {
        "filter.a.b=c.required": "true",
        "filter.lfs.required": "true",
        "core.fsmonitor": str(hooks / "fsmonitor-watchman"),
    }
    for key, value in settings.items():
        git("config", key, value)
    mark.unlink(missing_ok=True)
    with open_arms("env:", "rev:HEAD") as (_, head):
        assert (head.root / "my_suite.py").read_text() == "NUMBER = 2\n"
    for number in (2, 3):
        (repository / "my_suite.py").write_text(f"NUMBER = {number}\n")
        assert provenance._checkout(repository).dirty is (number == 3)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["rev:https://x:hunter2@h", "python:/opt/token=hunter2/python", "env:A --api-key hunter2"]
)
def test_errors_echo_no_secret(repository: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"^(?!.*hunter2)"), open_arms("env:", text):
        pass


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("A=x,y,B=,C=1=2", {"A": "x,y", "B": "", "C": "1=2"}),
        *((text, None) for text in ("A", "=1", "1A=2", "PYTHONPATH=x", "A=\0", "DTBENCH_GATE_CONTROL=x")),
    ],
)
def test_variables_are_parsed_or_refused(text: str, variables: dict[str, str] | None) -> None:
    with pytest.raises(UsageError) if variables is None else nullcontext():
        assert parse_variables(text) == variables


def test_launch_environment_lacks_the_variables_of_an_outer_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST", "DTBENCH_LAUNCH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("KEPT", "1")
    arm = made_up_arm(tmp_path, SLOW="2")
    env = environment_of({"C": "3"}, arm.env, arm.path)
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST", "DTBENCH_LAUNCH"} & set(env)
    assert (
        env.items() >= {"KEPT": "1", "SLOW": "2", "C": "3", "PYTHONPATH": os.pathsep.join(arm.path)}.items()
    )


def test_revision_imports_its_own_copies_of_the_folders_on_pythonpath(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, built = tmp_path / "outside", repository / "built"
    for folder in (Path("lib"), Path("linked"), built, outside):
        folder.mkdir()
        (folder / "helper.py").touch()
        if folder == Path("linked"):
            commit("lib and linked")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", str(built), str(outside), "lib", ""]))
    monkeypatch.setattr(sys, "path", [*sys.path, str(repository / "linked")])  # as a .pth file adds it
    with open_arms("rev:HEAD", "env:") as (base, head):
        assert [*base.path[1:]] == [*map(str, (base.root, base.root / "lib", base.root / "linked", outside))]
        assert f"PYTHONPATH entry {built} is left out: the commit does not contain it; commit it" in base.note
        assert base.note.endswith(f"with the folders of PYTHONPATH outside the repository: {outside}")
        assert [*head.path[1:]] == [*map(str, (repository / "lib", built, outside))]
        assert "PYTHONPATH" not in head.note


def test_interpreter_keeps_its_torch_where_pythonpath_has_another(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build" / "torch").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    build, library = (str(tmp_path / name) for name in ("build", "lib"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([build, library]))
    with open_arms(f"python:{sys.executable}", "env:") as (base, head):
        assert (base.path[1:], head.path[1:]) == ((library,), (build, library))
        assert f"PYTHONPATH entry {build} is left out: its torch would hide the interpreter's" in base.note


def test_problem_of_a_revision_names_the_file_in_the_repository(repository: Path) -> None:
    with open_arms("rev:HEAD", "env:") as (base, head):
        problem = f"no suite file at {base.root}/bench/new.py: expected one"
        explained = "no suite file at bench/new.py: expected one; a revision contains only committed files"
        assert (base.explain(problem), head.explain(problem)) == (explained, problem)


@pytest.mark.parametrize(
    ("text", "such"),
    [
        ("main", "rev:main"),
        ("NCCL_ALGO=Ring", "env:NCCL_ALGO=Ring"),
        (sys.executable, f"python:{sys.executable}"),
    ],
)
def test_arm_without_its_kind_is_refused_with_the_kind_that_is_meant(text: str, such: str) -> None:
    with pytest.raises(UsageError, match=f"is not an arm: .*, such as {re.escape(such)}$"):
        arms.check_text(text)
