"""Fixtures of the harness's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench import cli
from dtbench.cost.calibration import intervals
from dtbench.tests.made_up import Cli
from dtbench.tests.tiers import pytest_collection_modifyitems  # noqa: F401 - a hook of pytest


@pytest.fixture(scope="session", autouse=True)
def few_fits() -> Iterator[None]:
    """A tenth of the usual: no test asks for the last digit of a fitted constant's interval."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "FITS", 10)
        yield


@pytest.fixture
def dtbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The program in this process: (exit code, stdout, stderr) of a command line."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dtbench", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run
