"""The command line: its imports, its help, its error messages, and the options that it passes on."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dtbench.cli.program import cli
from dtbench.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_OWN_FAULT, EXIT_USAGE
from dtbench.machine.device import count_ranks
from dtbench.suite import RunOptions, registry
from dtbench.tests.made_up import Cli
from dtbench.tests.programs import FRESH, start_fresh

SUITE = str(Path(__file__).with_name("faults_suite.py"))


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the suites that a user's file registers, and its folder on `sys.path`, after the test."""
    registry.load([])
    for name, value in (("_registered", dict(registry._registered)), ("_folders", set())):
        monkeypatch.setattr(registry, name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])


HEAVY = {"torch", "numpy", "scipy", "pandas", "matplotlib", "rich", "jinja2", "pynvml"}
ROOT = Path(__file__).parents[2]
RUN = "results/baseline-cpu-gloo-4ranks.jsonl"


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ("--help", set()),
        ("run --help", set()),
        ("gate --help", set()),
        ("list", set()),
        (f"show {RUN} --json", HEAVY - {"torch", "scipy", "pandas", "matplotlib", "jinja2"}),
        (f"show {RUN}", HEAVY - {"torch", "scipy", "matplotlib", "jinja2"}),
        (f"compare {RUN} {RUN}", HEAVY - {"torch", "scipy", "pandas", "matplotlib", "jinja2"}),
    ],
)
def test_a_command_imports_what_it_needs_only(args: str, allowed: set[str]) -> None:
    program = (
        f"import sys; sys.argv = ['dtbench', *{args.split()}]; from dtbench import cli\n"
        "try: cli.main()\n"
        f"except SystemExit: print('loaded', *{HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith("loaded") and len(done.stdout) > 100, done.stderr
    assert set(done.stderr.split()[1:]) <= allowed


def test_help_says_what_each_command_does_with_an_example(dtbench: Cli) -> None:
    _, first, _ = dtbench("--help")
    assert "Exit codes: 0 done, 1 regression" in first
    for name in cli.list_commands(click.Context(cli)):
        (line,) = [line for line in first.splitlines() if line.startswith(f"  {name} ")]
        code, out, _ = dtbench(name, "--help")
        assert code == EXIT_OK and line.split(maxsplit=1)[1] in " ".join(out.split())
        assert not [wide for wide in out.splitlines() if len(wide) > 80], name
        assert line.endswith(".") and "..." not in line and "Example" in out and f"    dtbench {name}" in out
    out = dtbench("run", "--help")[1]
    assert "[default: core,torch]" in " ".join(out.split())
    assert all(f"  {suite} " in out for suite in registry.read_builtin())


# Command line -> part of its error. SUITE and RUN are files; so are taken, topology.json, gate.json and run.jsonl.
REFUSED = {
    "calibrat": "Did you mean 'calibrate'?; `dtbench --help`",
    "suite chek": "Did you mean 'check'?; `dtbench suite --help`",
    "suite check mine": "the .py file of a suite",
    "suite new taken.py": "exists already",
    "suite new a-b.py": "the name of a Python module",
    "show --jso": "Did you mean '--json'?; `dtbench show --help`",
    "run SUITE --filtr x": "`dtbench run --help` lists the options. Did you mean '--filter'?",
    "plan --gpus x": "--gpus: got 'x', expected a whole number from 1 to 1048576, such as --gpus 1; `dtbench",
    "plan --memory 0": "got 0.0, expected a number above 0 to 1048576, such as --memory 1;",
    "run nosuch": "no suite is called 'nosuch': the suites are",
    "run nosuch.py": "no suite file at nosuch.py",
    "run SUITE --mesh tp=3 --nproc 2": "--mesh tp=3 has 3 ranks, --nproc asks for 2",
    "run SUITE --dtype int4": "'int4' is unknown; expected one or more of float32",
    "run SUITE --filter zzz": "--filter 'zzz' matches none",
    "run SUITE --nproc two": "--nproc: got 'two', expected a whole number, such as --nproc 1; `dtbench run",
    "run SUITE --stepfactor 1": "got 1, expected a whole number from 2 on, such as -f 2; `dtbench run --help`",
    "run SUITE --budget 3": "'3' has no unit: expected s, m or h after it, such as 3m or 3s",
    "run SUITE --max-size 1MiB --size 1KiB": "--max-size and --size both say what to sweep",
    "run --resume -o nosuch.jsonl": "cannot read nosuch.jsonl: No such file",
    "run SUITE --resume -o taken": "taken is not a dtbench run",
    "run SUITE -o taken": "taken exists already: give another -o, or --resume",
    "run SUITE -o .": ". exists already (a folder): give another -o\n",
    "run SUITE -o /dev/full": "/dev/full exists already (no regular file): give another -o\n",
    "run SUITE -o nosuch/x.jsonl": "there is no folder nosuch",
    f"run SUITE -o {'x' * 300}": "File name too long; give another -o",
    "run --nonsense": "No such option '--nonsense'; `dtbench run --help`",
    "run SUITE --device cuda": "torch finds no CUDA device;",
    # A suite is expected.
    "run dispach/add": "no suite is called 'dispach/add': the suites are bucketer, ",
    "list dispach": "a .py file. Did you mean 'dispatch'?",
    "run bench/": "Did you mean 'bench/speed.py'?",
    "list bench": "Did you mean 'bench/speed.py'?",
    "run ./bench/speed": "Did you mean 'bench/speed.py'?",
    "run bench/speed.py/ad=1": "'ad=1' matches none of their 2 cases; the nearest are ",
    "run bench/speed.py/add --filter mul": "--filter 'add mul' matches none of their 2 cases",
    "list bench/speed.py bench/speed.py/nothing": "'nothing' matches none of their 2 cases",
    "run run.jsonl": "run.jsonl is a run of dtbench, expected a suite; read it with `dtbench show run.jsonl`",
    "list topology.json": "topology.json is a topology, expected a suite; read it with `dtbench export",
    "run bench/speed.py --impl cor": "expected one or more of core, torch. Did you mean 'core'?",
    # A file of another kind is expected.
    "show topology.json": "topology.json is a topology, expected a dtbench run (JSON Lines); read it with",
    "show gate.json": "is a result of gate, expected a dtbench run (JSON Lines); read it with `dtbench report",
    "compare RUN topology.json": "topology.json is a topology, expected a dtbench run",
    "export RUN --to torch -o x.py": "is a run of dtbench, expected a topology of `dtbench calibrate`; read it",
    "import RUN -o x.jsonl": "is a run of dtbench, expected the output of nccl-tests",
    "plan --validate RUN": "is a run of dtbench, expected a table of measured steps in CSV",
    "gate --base RUN --head RUN": "is a run of dtbench, expected an arm, rev:REVISION, python:PATH, env:",
    "gate --base env: --head env: RUN": "is a run of dtbench, expected a suite",
    "gate --base A=1 --head env: dispatch": ", such as env:A=1",
    "gate --base main --head env: dispatch": "'main' is not an arm: expected rev:REVISION, python:PATH, ",
    "gate --base env: dispatch": "Missing option '--head': The side to check; `dtbench gate --help`",
    "profile -o x torchrun --nproc-per-node 2 a.py": (
        "put -- before it, `dtbench profile -o x -- torchrun --nproc-per-node 2 a.py`"
    ),
    "profile python3 a.py": "put -- before it, `dtbench profile -- python3 a.py`",
    "show dispatch/add": "cannot read dispatch/add: No such file",
    "show RUN nosuch/add": "cannot read nosuch/add: No such file",
    **{
        f"report RUN --peak {peak} -o r.html": peak[0] for peak in ("q=4", "tp", "tp=fast", "tp=-1", "tp=inf")
    },
}


def modification_times() -> dict[Path, int]:
    """Returns file -> time of its last change. Folders are left out: Python adds `__pycache__` to them."""
    return {path: path.stat().st_mtime_ns for path in Path().iterdir() if path.is_file()}


@pytest.mark.parametrize("args", REFUSED)
def test_mistake_is_refused_in_one_line_and_no_file_is_touched(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_suite("bench", "beside_error", 4)
    kinds = {
        "run.jsonl": "run",
        "topology.json": "topology",
        "gate.json": "gate",
        "taken": "",
        "taken.py": "",
    }
    for name, kind in kinds.items():
        Path(name).write_text(json.dumps({"kind": kind}, indent=None if name == "run.jsonl" else 1))
    before = modification_times()
    code, out, err = dtbench(*args.replace("SUITE", SUITE).replace("RUN", str(ROOT / RUN)).split())
    assert (code, out, err.count("\n")) == (EXIT_USAGE, "", 1) and err.startswith("dtbench: "), err
    assert REFUSED[args] in err and modification_times() == before


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("x"), EXIT_OWN_FAULT, "an internal error, please report it with "),
        (OSError(errno.ENOENT, "No such file", "/x"), EXIT_OWN_FAULT, "FileNotFoundError: [Errno 2]"),
        (
            OSError(errno.EACCES, "Permission denied", "/x"),
            EXIT_USAGE,
            "cannot read /x: Permission denied; give",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), EXIT_USAGE, "no space left on device; make space"),
        (BrokenPipeError(), EXIT_OK, ""),
        (MemoryError(), EXIT_USAGE, "out of memory"),
    ],
)
def test_an_unexpected_error_has_its_exit_code(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, says: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("dtbench.cli.run.read_builtin", fail)
    monkeypatch.setattr("tempfile.tempdir", str(Path.cwd()))
    got, out, err = dtbench("list")
    assert (got, out, err.count("\n")) == (code, "", bool(says)) and says in err
    kept = [path.read_text() for path in Path.cwd().iterdir()]
    assert len(kept) == (code == EXIT_OWN_FAULT)
    assert all("Traceback (most recent call last)" in text and "['list']" in text for text in kept)


@pytest.mark.parametrize(
    "words", ["show {}", "report --base {} x.jsonl -o x.html", "plan --model {} --gpus 1 --batch 1", "run {}"]
)
def test_an_error_echoes_no_secret_of_its_command_line(dtbench: Cli, tmp_path: Path, words: str) -> None:
    for secret in ("https://me:hunter2@host/x.jsonl", "token=hunter2", "/opt/token=hunter2/x"):
        code, out, err = dtbench(*words.format(secret).split())
        assert code == 2 and err.count("\n") == 1 and "***" in err and "hunter2" not in out + err, err
    Path("mine.py").write_text("x = 1\n")
    assert "registers no suite" in dtbench("run", "./mine.py")[2]


def test_a_sweep_goes_through_what_the_run_asks_for() -> None:
    plan = RunOptions((("dp", 2), ("pp", 1), ("tp", 4)), (1024, 2048), ("float32", "bfloat16"))
    points = [tuple(at.params.values()) for at in registry.sweep(plan)]
    assert points[:3] == [("dp", 2, "float32", 1024), ("dp", 2, "float32", 2048), ("dp", 2, "bfloat16", 1024)]
    assert len(points) == len(set(points)) == 8 and points[-1] == ("tp", 4, "bfloat16", 2048)
    assert [at.size_bytes for at in registry.sweep(plan, [("x", 3)], ["int8"], [8])] == [8]
    plan = dataclasses.replace(plan, sizes_chosen=True)
    assert {at.size_bytes for at in registry.sweep(plan, sizes=[8])} == {1024, 2048}


def test_more_ranks_than_gpus_are_refused(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    code, _, err = dtbench("run", SUITE, "--nproc", "3")
    assert code == EXIT_USAGE and "3 ranks requested, but this host has 2 GPUs" in err
    assert count_ranks(3, "cuda", "gloo") == 3
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert count_ranks(3, "cuda") == 3


def test_list_for_people_and_machines(dtbench: Cli) -> None:
    code, out, err = dtbench("list", SUITE)
    assert (code, err) == (EXIT_OK, "") and "good all_reduce n=2  [core, c10d]" in out
    assert out.startswith("simulated add  [core, local]\n")  # simulated worlds come first
    (good,) = (e for e in json.loads(dtbench("list", SUITE, "--json")[1]) if e["suite"] == "good")
    assert (good["world"], good["help"]) == ("ranks", "cases that work")
    assert good["cases"][1] == {"name": "all_reduce", "params": {"n": 2}, "impls": ["core", "c10d"]}


@pytest.mark.parametrize(
    ("args", "launches", "refines"),
    [
        ("", 1, False),
        ("--max-size 16MiB", 5, True),
        ("--max-size 16MiB --launches 2", 2, True),
        ("--max-size 16MiB --no-refine", 5, False),
        ("--size 1KiB:1MiB:4x --refine", 1, True),
    ],
)
def test_a_run_to_calibrate_with_has_five_launches_and_refines(
    dtbench: Cli, monkeypatch: pytest.MonkeyPatch, args: str, launches: int, refines: bool
) -> None:
    runs = []
    monkeypatch.setattr("dtbench.engine.launch.run", lambda options, argv: runs.append(options) or 0)
    assert dtbench("run", "collectives", *args.split())[0] == EXIT_OK
    (options,) = runs
    assert (options.suites, options.launches, options.resolve("cpu", 4).refine) == (
        ("collectives",),
        launches,
        refines,
    )


def test_a_new_suite_lists_its_cases(dtbench: Cli) -> None:
    assert dtbench("suite", "new", "mine.py")[0] == EXIT_OK
    assert "mine matmul n=256  [plain]" in dtbench("list", "mine.py")[1]


NEIGHBOUR_SUITE = """
import torch
from dtbench.suite import Case, Workload, suite
import {module}

@suite("{module}_user", world="simulated", help="two cases")
def cases(options):
    for name in ("add", "mul"):
        yield Case(name, {{"n": {module}.N}}, build={{"plain": lambda world: Workload(run=lambda: None)}})
"""


def write_suite(folder: str, module: str, n: int) -> str:
    """A suite in `folder` that imports its neighbour `module`, of cases with this n; its path."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"{module}.py").write_text(f"N = {n}\n")
    Path(folder, "speed.py").write_text(NEIGHBOUR_SUITE.format(module=module))
    return f"{folder}/speed.py"


def test_suite_file_imports_the_module_beside_it(dtbench: Cli) -> None:
    write_suite("elsewhere", "beside_it", 3)
    sys.path.append("elsewhere")  # the folder of the file comes first
    code, out, err = dtbench("list", write_suite("bench", "beside_it", 5))
    assert (code, err) == (EXIT_OK, "") and "beside_it_user add n=5  [plain]" in out


def test_suites_with_neighbours_of_one_name_are_refused_together(dtbench: Cli) -> None:
    first, second = (write_suite(folder, "same_name", n) for n, folder in enumerate(("one", "two")))
    code, _, err = dtbench("list", first, second)
    assert code == EXIT_USAGE and err.count("\n") == 1
    assert "the folder of two/speed.py has a same_name.py, but" in err and "one after the other" in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module' (speed.py:2); as with",
        ),
        (
            "from . import helper",
            "no known parent package (speed.py:2); as with `python FILE`, it can import",
        ),
        ("1 / 0", "failed to load: ZeroDivisionError: division by zero (speed.py:2)\n"),
    ],
)
def test_suite_file_that_fails_to_load_is_named_with_line(dtbench: Cli, line: str, says: str) -> None:
    Path("speed.py").write_text(f"from dtbench.suite import suite\n{line}\n")
    code, out, err = dtbench("run", "speed.py")
    assert (code, out, err.count("\n")) == (EXIT_USAGE, "", 1) and says in err


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        ("bench/speed.py/add", ["add"]),
        ("bench/speed.py/add bench/speed.py/mul", ["add", "mul"]),
        ("bench/speed.py --filter MUL", ["mul"]),
        ("bench/speed.py/n=4 --filter mul", ["mul"]),
    ],
)
def test_target_with_text_selects_cases(dtbench: Cli, words: str, cases: list[str]) -> None:
    write_suite("bench", "beside_target", 4)
    code, out, err = dtbench("list", *words.split())
    assert (code, err) == (EXIT_OK, "") and [line.split()[1] for line in out.splitlines()] == cases


def test_show_takes_targets_as_run_does(dtbench: Cli) -> None:
    out = dtbench("show", str(ROOT / RUN), "dispatch/add", "collectives/all_gather", "--json")[1]
    names = {(line["suite"], line["name"]) for line in json.loads(out)[0]["results"]}
    ops = {name for suite, name in names if suite == "dispatch"}
    assert names == {("collectives", "all_gather"), *(("dispatch", name) for name in ops)}
    assert ops and all("add" in name for name in ops)
    rows = dtbench("show", "dispatch", str(ROOT / RUN), "--filter", "add", "--csv")[1].splitlines()
    assert len(rows) > 1 and all("dispatch" in row and "add" in row for row in rows[1:])


def test_interrupt_within_exec_of_a_string_exits_130(tmp_path: Path) -> None:
    # dataclasses do this if Ctrl-C arrives while torch is imported.
    (tmp_path / "x.py").write_text("from dtbench.suite import suite\nexec('raise KeyboardInterrupt')\n")
    ended = start_fresh(*FRESH, "list", "x.py", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (EXIT_INTERRUPTED, "dtbench: interrupted\n")
