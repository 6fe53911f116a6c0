"""The check of one GPU without a GPU: its runner on made-up steps, its commands as the program parses them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from dtbench.cli.program import cli
from dtbench.engine.options import RunRequest
from dtbench.engine.tasks import list_tasks
from dtbench.machine import device
from dtbench.suite.registry import load
from dtbench.tests.gpu import __main__ as module
from dtbench.tests.gpu import fake_gpu, instruments, pair, sharing
from dtbench.tests.gpu.steps import GRAD_FILTER, REPEATED, ROOT, Step, steps_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def step(name: str, file: str, limit_s: float = 20) -> Step:
    return Step(name, 1, limit_s, f"-S {Path(file).absolute()} {{out}}/{name}.txt")


def check(monkeypatch: pytest.MonkeyPatch, *steps: Step, within: str = "60s") -> dict[str, str]:
    """Runs the steps; of each the outcome and why, as the bundle has them."""
    monkeypatch.setattr(module, "steps_of", lambda _rehearse: steps)
    code = module.main(["--rehearse", "-o", "gpu.zip", "--within", within])
    outcomes = json.loads(read("check.json"))
    assert code == (0 if all(how == "ok" for how, _, _ in outcomes.values()) else 5)
    return {name: f"{how} {why}".strip() for name, (how, _, why) in outcomes.items()}


def read(name: str) -> str:
    with zipfile.ZipFile("gpu.zip") as archive:
        return archive.read(f"no-gpu-rehearsal/{name}").decode()


def test_second_call_repeats_failed_and_skipped_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("notes.py").write_text("import sys; open(sys.argv[1], 'a').write('x')")
    Path("fails.py").write_text("1 / 0")
    steps = [step("one", "notes.py"), step("two", "fails.py"), step("three", "notes.py")]
    steps += [step("slow", "notes.py", 900), step("report", "notes.py", 5)._replace(last=True)]
    why = "failed exit 1: ZeroDivisionError: division by zero"
    *others, late, last = check(monkeypatch, *steps).values()
    assert [*others, last] == ["ok", why, "ok", "ok"] and late.startswith("skipped it may take 900 s, 5")
    assert re.search(r"No figure here says any(.*\n)*\| two \| failed \| 0 \| exit 1: Z", read("summary.md"))
    assert check(monkeypatch, *steps, within="15s")["two"] == why  # it is not begun, and what it said is kept
    Path("fails.py").write_text("")
    assert set(check(monkeypatch, *steps, within="16m").values()) == {"ok"}
    # Only the last one again.
    assert [read(f"{name}.txt") for name in ("one", "slow", "report")] == ["x", "x", "xxx"]
    shutil.unpack_archive("gpu.zip", "taken")
    Path("taken/no-gpu-rehearsal/one.txt").unlink()
    shutil.make_archive("gpu", "zip", "taken")
    check(monkeypatch, *steps)
    assert [read(f"{name}.txt") for name in ("one", "three", "report")] == ["x", "x", "xxxx"]


def test_a_step_ends_at_its_limit_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hangs.py").write_text("import subprocess; subprocess.run(['sleep', '977'])")
    assert check(monkeypatch, step("hangs", "hangs.py", 1)) == {"hangs": "cut off at its 1 s"}
    assert subprocess.run(["pgrep", "-f", "sleep 977"], check=False).returncode == 1


def test_a_killed_check_leaves_the_last_bundle_and_no_process() -> None:
    argv = [sys.executable, "-m", "dtbench.tests.gpu", "--rehearse", "-o", f"{Path.cwd()}/gpu.zip"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL) as child:
        while not Path("gpu.zip").exists():  # after the first step
            assert child.poll() is None
            time.sleep(0.05)
        child.kill()
    assert json.loads(read("check.json"))["smoke"][0] == "ok" and "op_and_bucket" in read("summary.md")
    deadline = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", "dtbench.tests.gpu.instruments"], check=False).returncode != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_results_of_another_card_lie_beside_or_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("writes.py").write_text("import os, sys; open(sys.argv[1], 'wb').write(os.urandom(2**17))")
    check(monkeypatch, step("one", "writes.py"))
    monkeypatch.setattr(fake_gpu, "NAME", "NVIDIA H200, 580.1")
    monkeypatch.setattr(module, "BUNDLE_BYTES", 2**16)
    Path("notes.py").write_text("")
    check(monkeypatch, step("one", "notes.py"))
    with zipfile.ZipFile("gpu.zip") as archive:
        assert {"no-gpu-rehearsal/check.json", "nvidia-h200/check.json"} <= set(archive.namelist())
        assert "left out: no-gpu-rehearsal/one.txt" in archive.read("nvidia-h200/summary.md").decode()


def test_summary_leaves_out_damaged_results(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tears.py").write_text(
        "import os, sys; os.mkdir(sys.argv[1] + '.json'); open(sys.argv[1][:-4] + '.json', 'w').write('[[')"
    )
    assert check(monkeypatch, step("torn", "tears.py")._replace(good=(0,)))["torn"] == "ok"
    assert "| torn | ok |" in read("summary.md")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-o new.zip", "nvidia-smi names no GPU here"),
        ("--rehearse -o broken.zip", "broken.zip cannot be gone on with"),
    ],
)
def test_mistakes_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, words: str, message: str) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    Path("broken.zip").write_bytes(b"PK")
    with pytest.raises(SystemExit, match=message):
        module.main(words.split())


def test_steps_of_two_ranks_run_only_if_two_ranks_share_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fails.py").write_text("1 / 0")
    Path("notes.py").write_text(
        "import os, sys; open(sys.argv[1], 'a').write(os.environ['DTBENCH_TEST_BACKEND'])"
    )
    steps = [step("pair", "fails.py")._replace(pair=True), step("attach", "notes.py")._replace(pair=True)]
    assert check(monkeypatch, *steps)["attach"] == "skipped two ranks do not share this card: see pair"
    Path("fails.py").write_text("import sys; open(sys.argv[1], 'w')")
    assert set(check(monkeypatch, *steps).values()) == {"ok"} and read("attach.txt") == "gloo"


def test_later_steps_use_the_variables_that_worked(tmp_path: Path) -> None:
    results = tmp_path / "pair.json"
    assert sharing.environ_of(results, rehearsal=False) == sharing.NCCL
    variables = sharing.format_variables(sharing.MODES[1])
    results.write_text(json.dumps([["pair", {"variables": variables}, "", "yes"]]))
    assert sharing.environ_of(results, rehearsal=False) == sharing.NCCL | {"NCCL_P2P_DISABLE": "1"}
    assert "LD_PRELOAD" not in sharing.environ_of(results, rehearsal=True)


def test_pair_falls_back_and_records_what_worked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(_check: str, variables: dict[str, str], _seconds: float, _folder: Path) -> pair.Figures:
        if "NCCL_P2P_DISABLE" not in variables:
            raise pair.RanksFailedError("rank 0: exit 1")
        return {"version": "2.30.7", "debug": variables["NCCL_DEBUG"]}

    library, results = tmp_path / "libnccl.so.2", tmp_path / "pair.json"
    monkeypatch.setattr(pair, "LIBRARY", library)
    monkeypatch.setattr(pair, "start_ranks", start)
    assert pair.main("pair", 30, results) == 5, "without a library"
    library.touch()
    assert pair.main("pair", 30, results) == 0
    ((_, figures, _, met),) = json.loads(results.read_text())
    assert figures["variables"] == "NCCL_P2P_DISABLE=1" and "rank 0: exit 1" in figures["failed before"]
    assert (met, figures["debug"]) == ("yes", "INFO")


@pytest.mark.parametrize("name", pair.CHECKS)
def test_checks_of_two_ranks_are_rehearsed_on_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for variable, value in (fake_gpu.ENVIRON | sharing.GLOO).items():
        monkeypatch.setenv(variable, value)
    assert pair.main(name, 60, tmp_path / "found.json") == 0
    ((_, figures, *_),) = json.loads((tmp_path / "found.json").read_text())
    assert figures and "failed" not in figures


def test_pair_tells_how_ranks_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (fake_gpu.ENVIRON | sharing.GLOO).items():
        monkeypatch.setenv(name, value)
    # The first rank to fail ends the other, and either may be the first.
    with pytest.raises(pair.RanksFailedError, match=r"rank [01]: exit 1"):
        pair.start_ranks("no such check", {}, 60, tmp_path)
    with pytest.raises(pair.RanksFailedError, match=r"rank 0: still running \d s after its start"):
        pair.start_ranks("pair", {}, 0.1, tmp_path)


def test_expected_times_fit_into_nine_minutes() -> None:
    steps = steps_of(rehearse=False)
    assert {step.name for step in steps} >= REPEATED
    assert sum(step.expected_s for step in steps if step.name not in REPEATED) <= 540
    assert not [step.name for step in steps if step.expected_s > step.limit_s]


@pytest.mark.parametrize(
    "word", ["pass=forward+requires_grad", "pass=forward+backward", "adamw_step_foreach_x100"]
)
def test_grad_filter_takes_calls_with_gradients_and_optimizers(word: str) -> None:
    tasks = list_tasks(load(["dispatch"]), RunRequest().resolve("cuda", 1), GRAD_FILTER)
    labels = [f"{task.label} " for task in tasks]
    assert any(word in label for label in labels)
    assert not [label for label in labels if "pass=forward " in label and "_x100 " not in label]


@pytest.mark.parametrize("rehearse", [False, True])
def test_commands_of_steps_have_valid_arguments(rehearse: bool) -> None:
    programs = {"dtbench.tests.gate_selftest", *instruments.GROUPS, *pair.CHECKS}
    for words in (shlex.split(step.command) for step in steps_of(rehearse)):
        if words[2] == "dtbench":
            command = cli.get_command(None, words[3])  # type: ignore[arg-type]
            assert command is not None
            params = command.make_context(words[3], words[4:], cli.make_context("dtbench", words[3:])).params
            assert params.get("device") in (None, "cpu" if rehearse else "cuda")
            if words[3] == "run":
                assert [suite.name for suite in load(params["words"][0])] == list(params["words"][0])
        else:
            assert programs & {words[2], words[3]} or any((ROOT / word).is_file() for word in words)


def test_the_instruments_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    monkeypatch.setattr(instruments, "TRIES", 2)
    monkeypatch.setitem(instruments.GROUPS, "all", (instruments.limits, lambda _: [][1], instruments.flush))
    assert instruments.main("all", Path("all.json")) == 5  # what fails is told, and the others are kept
    limits, failed, flush = json.loads(Path("all.json").read_text())
    assert limits[1]["copy_GBps"] > 0 and flush[3] == "" and failed[1]["failed"].startswith("IndexError:")


@pytest.mark.parametrize("group", instruments.GROUPS)
def test_each_instrument_is_rehearsed(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """So that what a GPU is to measure still runs after a change elsewhere."""
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    monkeypatch.setattr(instruments, "TRIES", 2)
    assert instruments.main(group, Path("found.json")) == 0
    names = [name for name, *_ in json.loads(Path("found.json").read_text())]
    assert names == [check.__name__ for check in instruments.GROUPS[group]]


@pytest.mark.parametrize("size", [0, 2])
def test_moves_are_copied_as_the_core_does(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    monkeypatch.setattr(instruments, "TRIES", 1)
    shares, *_ = instruments.moves_of(size)(instruments.Bench())
    assert all(type(share) is float and share > 0 for share in shares.values()) and "uneven S(1)->R" in shares


def test_makefile_lists_the_wheels_of_all_small_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["pytest"]]
    wheels = (ROOT / "Makefile").read_text().partition("WHEELS :=")[2].partition("\n\n")[0].split()
    large = ("torch", "numpy", "scipy", "pandas", "matplotlib")
    assert {text.partition(">")[0] for text in dependencies} <= {*wheels, *large}
