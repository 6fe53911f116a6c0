"""The list of faults: every row is started, and what must be seen is looked at. `make faults` writes what was seen."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.tests.faults import rows_files, rows_gate, rows_lab, rows_machine, rows_run
from dtbench.tests.faults.table import Done, Fault, check, contents, missing, place, seen, started
from dtbench.tests.made_up import Cli

ROWS = [*rows_files.ROWS, *rows_gate.ROWS, *rows_run.ROWS, *rows_lab.ROWS, *rows_machine.ROWS]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(row, id=row.name, marks=pytest.mark.slow if row.slow else pytest.mark.fast)
        for row in ROWS
    ],
)
def test_fault(
    fault: Fault,
    tmp_path: Path,
    dtbench: Cli,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", fault.name)
    if lacks := [why for ability in fault.needs if (why := missing(ability))]:
        pytest.skip("; ".join(lacks))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with place(tmp_path):
        if fault.given is not None:
            fault.given()
        before = contents()
        if fault.how == "here":
            for name, value in fault.patched.items():
                monkeypatch.setattr(name, value)
            for name, text in fault.env.items():
                monkeypatch.setenv(name, text)
            done = Done(*dtbench(*fault.command))
        else:
            done = started(fault, tmp_path)
        record_property("seen", seen(done, tmp_path))
        check(fault, done, before, tmp_path)


def test_every_row_has_a_name_of_its_own() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) and not any("|" in name for name in names)


def test_the_page_of_faults_names_tests_that_exist() -> None:
    tests = Path(__file__).parents[1]
    sources = [*tests.rglob("test_*.py"), *(tests.parents[1] / "core/tests").glob("test_*.py")]
    functions = {
        name for file in sources for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    known = functions | {row.name.replace("`", "") for row in ROWS}
    page = (tests.parents[1] / "docs/pages/reference/faults.md").read_text()
    rows = [
        line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ") and "| test |" not in line
    ]
    assert len(rows) > 20
    for fault, promise, shown in rows:
        named = re.findall(r"`([^`]+)`", shown)
        assert promise.strip() and named and not set(named) - known, (fault, set(named) - known)
