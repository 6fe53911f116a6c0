"""`dtbench gpu-check` without a GPU: its runner on made-up parts, its commands as the program parses them."""

from __future__ import annotations

import contextlib
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.cli import gpu_check
from dtbench.cli.program import cli
from dtbench.gate.schedule import OutOfTimeError
from dtbench.machine import device
from dtbench.model.errors import EXIT_CASE_FAILED, EXIT_OK, EXIT_USAGE, UsageError
from dtbench.model.suites import load
from dtbench.records.atomic import HEAD_BYTES
from dtbench.tests import gate_selftest as gate
from dtbench.tests.gate_selftest import plan_on
from dtbench.tests.gate_selftest_suite import selftest
from dtbench.tests.gpu_check import check as module
from dtbench.tests.gpu_check import fake_gpu, truth
from dtbench.tests.gpu_check.parts import CHECKOUT, PARTS, Part, Setting, Step
from dtbench.tests.made_up import Cli


def part(name: str, *steps: Step) -> Part:
    return Part(name, "nothing", "all", lambda setting: iter(steps))


def run(code: str, **given: Any) -> Step:
    return Step(("-S", "-c", code), **given)


def check(folder: Path, *wanted: str, rehearse: bool = True) -> tuple[int, dict[str, str]]:
    code = module.check(Setting(folder, rehearse), wanted, lambda _text: None)
    state = json.loads((folder / "gpu-check.json").read_text())
    return code, {name: part["outcome"] for name, part in state["parts"].items()}


def test_a_failing_part_stops_no_other_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, count = tmp_path / "out", tmp_path / "count"
    noted = f"open({str(count)!r}, 'a').write('x')"
    fails = f"import os; raise SystemExit(0 if os.path.exists({str(tmp_path / 'mended')!r}) else 7)"
    parts = (
        part("one", run(noted), run(fails), run(noted, good=(0, 3))),
        part("two", run("raise SystemExit(3)", good=(3,))),
    )
    monkeypatch.setattr(module, "PARTS", parts)
    code, outcomes = check(folder)
    assert code == EXIT_CASE_FAILED
    assert outcomes == {"one": "1 of its commands failed, see one.log", "two": "done"}
    (tmp_path / "mended").touch()
    assert check(folder, "two")[0] == EXIT_OK  # the other was not asked for
    code, outcomes = check(folder)
    assert (code, set(outcomes.values())) == (EXIT_OK, {"done"})
    assert count.read_text() == "xx"  # what was done was not done again


def test_a_record_longer_than_the_head_of_a_file_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "PARTS", (part("one", *(run(f"print({'x' * 500!r}, {n})") for n in range(20))),)
    )
    assert check(tmp_path / "out") == (EXIT_OK, {"one": "done"})
    assert (tmp_path / "out" / module.STATE).stat().st_size > 2 * HEAD_BYTES


def test_what_the_parts_need_is_packed_for_machines_without_network() -> None:
    offline = runpy.run_path(str(CHECKOUT / ".ci/offline"))
    assert {"pytest", "pytest-benchmark", "hypothesis", "msgspec", "click"} <= set(offline["needed"]())


def test_a_part_ends_at_its_limit_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, waits = tmp_path / "made", tmp_path / "waits"
    waits.touch()
    code = f"import os, sys, time; print(sys.argv); time.sleep(60 * os.path.exists({str(waits)!r}))"
    monkeypatch.setattr(
        module, "PARTS", (part("one", run(code, makes=str(made), again=("--resume",)), run("")),)
    )
    monkeypatch.setattr(module, "LIMIT_S", 1.05)
    made.touch()
    assert check(tmp_path / "out") == (EXIT_CASE_FAILED, {"one": "out of its 1 s: the next call goes on"})
    waits.unlink()
    monkeypatch.setattr(module, "LIMIT_S", 60.0)
    assert check(tmp_path / "out") == (EXIT_OK, {"one": "done"})
    assert "'--resume'" in (tmp_path / "out/one.log").read_text()


def test_a_rehearsal_and_a_check_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtbench: Cli
) -> None:
    seen = "import os; raise SystemExit(not os.environ.get('DTBENCH_REHEARSAL', '').endswith('fake_gpu.py'))"
    monkeypatch.setattr(module, "PARTS", (part("one", run(seen)),))
    assert check(tmp_path / "out")[0] == EXIT_OK
    monkeypatch.setattr(module, "_card", lambda: "NVIDIA H200")
    with pytest.raises(
        UsageError, match=r"holds a check of no GPU \(rehearsal\), this is one of NVIDIA H200"
    ):
        check(tmp_path / "out", rehearse=False)
    assert check(tmp_path / "other", rehearse=False)[0] == EXIT_CASE_FAILED  # without the variable
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    with pytest.raises(UsageError, match="holds other files"):
        check(tmp_path / "taken")
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = dtbench("gpu-check", "-o", str(tmp_path / "new"))
    assert code == EXIT_USAGE and "torch finds no GPU here" in err and not (tmp_path / "new").exists()


def test_an_installation_without_the_tests_says_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtbench: Cli
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    code, _, err = dtbench("gpu-check", "-o", str(tmp_path / "new"))
    assert code == EXIT_USAGE and "runs from a checkout" in err and len(err.splitlines()) == 1


def steps_of(rehearse: bool, folder: Path) -> Iterator[tuple[str, Step]]:
    (folder / "x-one-rank-y.jsonl").touch()
    for each in PARTS:
        for step in each.steps(Setting(folder, rehearse)):
            yield each.name, step


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_command_is_one(tmp_path: Path, rehearse: bool) -> None:
    names = set()
    for name, step in steps_of(rehearse, tmp_path):
        names.add(name)
        if step.makes:
            assert Path(step.makes).parent == tmp_path
            assert Path(step.makes).name.startswith("rehearsal-") == rehearse
        if step.argv[2:3] != ("dtbench",):
            continue
        command = cli.get_command(None, step.argv[3])  # type: ignore[arg-type]
        assert command is not None
        context = command.make_context(step.argv[3], [*step.argv[4:], *step.again])
        if step.argv[3] == "run":  # what it does not know itself it leaves to suites
            assert [s.name for s in load(context.params["words"])] == list(context.params["words"])
        if step.argv[3] != "report":
            assert context.params["device"] == ("cpu" if rehearse else "cuda")
    assert names == {each.name for each in PARTS} == set(gpu_check.PARTS)


def test_the_truth_of_instruments_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    monkeypatch.setattr(truth, "TRIES", 2)
    monkeypatch.setattr(truth, "L2_READ_BYTES", 2**16)
    path = tmp_path / "rehearsal-truth.json"
    assert truth.main(path) == 0
    made = json.loads(path.read_text())
    assert made["rehearsal"] == "no GPU (rehearsal)"
    found = {c["name"]: c for c in made["checks"]}
    assert len(found) == len(truth.CHECKS) and all(c["met"] is None for c in found.values())
    assert {n for n, c in found.items() if c["left_out"]} == {"events_against_kernels", "graph"}
    assert found["start_of_a_sample"]["got"]["error_us"] > 0
    monkeypatch.setattr(truth, "CHECKS", (truth.flush, lambda bench: [][1]))
    assert truth.main(path) == 5  # what fails is told, and the others are kept
    assert [c["left_out"] for c in json.loads(path.read_text())["checks"]] == [
        "",
        "failed: IndexError: list index out of range",
    ]


def test_the_table_says_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "rehearsal-test_x.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1"/></testsuites>'
    )
    checks = [{"name": "flush", "goal": "g", "got": {"warm_us": 1.23456}, "met": False, "left_out": ""}]
    (tmp_path / "rehearsal-truth.json").write_text(json.dumps({"kind": "gpu-truth", "checks": checks}))
    state = module.State("no GPU (rehearsal)", True, {"truth": module.Record("done")})
    text = "\n".join(module.lines(tmp_path, state))
    assert text.startswith("# Rehearsal: no GPU") and "No figure here says anything of a GPU" in text
    assert "| truth | done | 0 | a GPU, NVML |" in text and "| gate | not run |" in text
    assert "3 tests, 1 failures" in text and "| flush | warm_us 1.235 | g | NO |" in text
    on_gpu = "\n".join(module.lines(tmp_path, module.State("NVIDIA H200", False, {})))
    assert on_gpu.startswith("# One GPU: NVIDIA H200\n\n| part")


def test_a_self_test_whose_budget_holds_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launcher:
        def __init__(self, *_args: Any, **_given: Any) -> None:
            self.close = lambda: None

        def count(self, _role: str) -> Any:
            raise OutOfTimeError("the budget of 1 s holds no further launch")

    monkeypatch.setattr(gate, "Launcher", Launcher)
    arms = contextlib.nullcontext([SimpleNamespace(path=["x"]), None])
    monkeypatch.setattr(gate, "open_arms", lambda *_: arms)
    with pytest.raises(UsageError, match="the budget held 0 rounds of four launches, trials need 30"):
        gate.selftest(1.0, tmp_path / "gate", False, "cpu", lambda _text: None)


def test_what_is_taken_along_is_pinned(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    offline = runpy.run_path(str(root / ".ci/offline"))
    pinned = {
        line.partition("==")[0].lower() for line in (root / ".ci/constraints.txt").read_text().split("\n")
    }
    assert set(offline["needed"]()) <= pinned
    assert "torch" not in offline["needed"]()
    assert offline["is_there"]("pytest>=8.0") and not offline["is_there"]("pytest>=999.0")
    assert not offline["is_there"]("no-such-distribution>=1")


def test_the_gate_judges_a_gpus_times_on_a_gpu() -> None:
    assert {case.clock for case in selftest.cases(plan_on("cuda"))} == {"device"}
    assert {case.clock for case in selftest.cases(plan_on("auto"))} == {"host"}
