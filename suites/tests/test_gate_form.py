"""`pytest suites --dtbench-gate`: the tests that are left are what the gate judges, and each tells its verdict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.engine.options import RunRequest, list_tasks
from dtbench.gate import gate as gates
from dtbench.gate.benchmark import label_of
from dtbench.gate.gate import GateOptions
from dtbench.gate.verdict import judged
from dtbench.gate.worker import benchmark_of
from dtbench.pytest_plugin import PAIR
from dtbench.pytest_plugin.gate import GateTests
from dtbench.records.gate import Gate
from dtbench.records.judged import Verdict
from dtbench.suite.suites import load
from dtbench.tests.made_up_arm import concluded

OPTION = SimpleNamespace(
    dtbench_base="env:",
    dtbench_head="env:A=1",
    dtbench_budget="5m",
    dtbench_mesh=None,
    dtbench_size=None,
    dtbench_dtype=("float32",),
)


def form(
    monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict, reasons: tuple[str, ...] = ()
) -> tuple[Any, list[str]]:
    """The plugin with as many tests, of which the gate will say so, and their labels."""
    tests = GateTests(SimpleNamespace(option=OPTION))  # type: ignore[arg-type]
    tasks = list_tasks(load(["dispatch"]), RunRequest().resolve("cpu", 4), "relu")
    pairs = [(task, impl) for task in tasks for impl in task.impls][: len(verdicts)]

    def gate(options: GateOptions) -> Gate:
        assert options.folder is not None
        cases = [judged(benchmark_of(*pair), of) for pair, of in zip(pairs, verdicts, strict=True)]
        return concluded(cases, *reasons)

    monkeypatch.setattr(gates, "gate", gate)
    tests.pytest_deselected([])
    items = [SimpleNamespace(stash={PAIR: pair}) for pair in pairs]
    tests.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    return tests, [label_of(task.label, impl) for task, impl in pairs]


def test_the_tests_that_are_left_are_what_the_gate_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    tests, labels = form(monkeypatch, Verdict.PASS, Verdict.REGRESSION)
    asked = tests._options(Path("folder"))
    assert asked.only == frozenset(labels) and len(asked.only) == 2
    assert [selection.suite for selection in asked.selections] == ["dispatch"]
    assert all(label.rpartition(" [")[0] in asked.selections[0].text.split("\n") for label in labels)
    assert (asked.base, asked.head, asked.budget_s) == ("env:", "env:A=1", 300)


def test_each_test_tells_its_verdict_and_the_session_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    tests, (good, slow) = form(monkeypatch, Verdict.PASS, Verdict.REGRESSION)
    tests.judge(good)
    with pytest.raises(pytest.fail.Exception, match="REGRESSION"):
        tests.judge(slow)
    with pytest.raises(pytest.skip.Exception, match="skipped by both arms"):
        tests.judge("another")
    session = SimpleNamespace(exitstatus=0)
    tests.pytest_sessionfinish(session)
    assert session.exitstatus == 1


def test_no_test_passes_where_the_machine_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    tests, (good,) = form(monkeypatch, Verdict.PASS, reasons=("the control moved",))
    with pytest.raises(pytest.fail.Exception, match="UNTRUSTED: the control moved"):
        tests.judge(good)
