"""`--dtbench-gate`: the tests that were chosen are judged by one gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dtbench.pytest_plugin import PAIR

if TYPE_CHECKING:
    from dtbench.engine.options import Task
    from dtbench.gate.gate import GateOptions
    from dtbench.records.gate import Gate


class GateTests:
    """`--dtbench-gate`: the chosen tests become the selection of one gate, and each tells its verdict."""

    def __init__(self, config: pytest.Config) -> None:
        if config.option.dtbench_base is None:
            raise pytest.UsageError("--dtbench-gate needs --dtbench-base ARM, such as rev:origin/main")
        self._option = config.option
        self._report: Gate | None = None
        self._whole = True
        self._pairs: list[tuple[Task, str]] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Whether -k and the like left something out; otherwise whole suites are judged, in both arms."""
        self._whole = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is left of the tests after -k is what is judged."""
        self._pairs = [item.stash[PAIR] for item in session.items if PAIR in item.stash]

    def report(self) -> Gate:
        """The gate, run once."""
        if self._report is None:
            import tempfile

            from dtbench.gate.gate import gate
            from dtbench.suite.errors import DtbenchError

            try:
                with tempfile.TemporaryDirectory(prefix="dtbench-gate-") as folder:
                    self._report = gate(self._options(Path(folder)))
            except DtbenchError as error:
                pytest.exit(f"dtbench gate: {error}", returncode=error.exit_code)
        return self._report

    def _options(self, folder: Path) -> GateOptions:
        from dtbench.engine.options import parse_duration
        from dtbench.gate.benchmark import Selection, label_of
        from dtbench.gate.gate import GateOptions

        option = self._option
        suites = dict.fromkeys(task.suite.name for task, _ in self._pairs)
        text = "" if self._whole else "\n".join(dict.fromkeys(task.label for task, _ in self._pairs))
        chosen = [] if self._whole else [label_of(task.label, impl) for task, impl in self._pairs]
        impls = () if self._whole else tuple(dict.fromkeys(impl for _, impl in self._pairs))
        return GateOptions(
            option.dtbench_base,
            option.dtbench_head,
            tuple(Selection(suite, text) for suite in suites),
            impls=impls,
            mesh=option.dtbench_mesh,
            sizes_bytes=option.dtbench_size,
            dtypes=option.dtbench_dtype,
            budget_s=parse_duration(option.dtbench_budget) if option.dtbench_budget else None,
            folder=folder,
            only=frozenset(chosen),
        )

    def judge(self, label: str) -> None:
        """Fails the test unless its benchmark has passed."""
        from dtbench.gate.outputs import words
        from dtbench.records.judged import Verdict

        report = self.report()
        judged = next((j for j in report.benchmarks if j.label == label), None)
        if judged is None:
            pytest.skip("skipped by both arms")
        if judged.verdict not in (Verdict.PASS, Verdict.IMPROVED):
            pytest.fail(f"{judged.verdict.name}: {words(judged)}", pytrace=False)
        if report.trust.reasons:
            pytest.fail(f"UNTRUSTED: {'; '.join(report.trust.reasons)}", pytrace=False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The exit code is the gate's: benchmarks that only base has are no tests here, and count all the same."""
        if self._report is not None:
            session.exitstatus = self._report.exit_code

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The gate's own lines."""
        if self._report is not None:
            from dtbench.gate.outputs import lines

            terminalreporter.section("dtbench gate")
            for line in lines(self._report):
                terminalreporter.write_line(line)
