"""Writes the table of results/faults.md, where `make faults` asks for it: a line per row that ran."""

from __future__ import annotations

import datetime
import os
import platform
from multiprocessing import forkserver
from pathlib import Path

import pytest

from dtbench.tests.tiers import pytest_collection_modifyitems  # noqa: F401 - a hook of pytest

TABLE = os.environ.get("DTBENCH_FAULTS_TABLE")
_rows: list[tuple[str, str, str, float]] = []

HEAD = """# Faults, and what dtbench does

`make faults` wrote this on {date}: {count} rows, {short}. Each starts a fault and looks at the exit code, the one line
on standard error, the files that are left, and that no process and no temporary file is; what each row asks for stands
in [dtbench/tests/faults](../dtbench/tests/faults). Linux {kernel}, Python {python}, {cpus} CPUs shared with other
programs, so the times say little.

| fault | seen | s |
|---|---|---:|
"""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    given = {name: str(value) for name, value in report.user_properties}
    if report.when == "call" and "fault" in given:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            outcome = "not run: " + reason.removeprefix("Skipped: ")
        else:
            outcome = ("" if report.passed else "**FALLS SHORT** ") + given.get("seen", "")
        _rows.append((report.nodeid, given["fault"], outcome, report.duration))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if TABLE is None or hasattr(session.config, "workerinput"):
        return
    short = sum("FALLS SHORT" in outcome for _, _, outcome, _ in _rows)
    skipped = sum(outcome.startswith("not run") for _, _, outcome, _ in _rows)
    words = f"{short or 'none'} short of what is asked" + (f", {skipped} not run" if skipped else "")
    head = HEAD.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        count=len(_rows),
        short=words,
        kernel=platform.release().split("-")[0],
        python=platform.python_version(),
        cpus=os.cpu_count(),
    )
    lines = [
        f"| {fault} | {outcome.replace('|', '&#124;').replace('<', '&lt;')} | {seconds:.1f} |\n"
        for _, fault, outcome, seconds in sorted(_rows)
    ]
    Path(TABLE).write_text(head + "".join(lines), encoding="utf-8")


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> None:
    """Started before a row has its own folder: it would count as a process that the row left there."""
    forkserver.ensure_running()
