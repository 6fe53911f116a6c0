"""Fixtures of the harness's tests."""

import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dtbench.cli import program as cli
from dtbench.cost.calibration import intervals
from dtbench.tests.made_up import Cli
from dtbench.tests.tiers import pytest_collection_modifyitems  # noqa: F401 - a hook of pytest


@pytest.fixture(scope="session", autouse=True)
def few_fits_and_default_width() -> Iterator[None]:
    """Sets the number of fits to a tenth, since no test needs the last digit of an interval, and removes the width of
    tables that pytest's workers have in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "FITS", 10)
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def legible() -> Iterator[None]:
    """No text of a drawing lies on another and every axis has three labelled ticks where it can have them, on any page
    that a test of these makes in its process."""
    # Imported where tests draw; it takes a second.
    figures = sys.modules.get("dtbench.reporting.html.figures")
    if figures is None:
        yield
        return
    from dtbench.reporting.html.axes import Axis
    from dtbench.tests.html_page import overlapping_texts

    draw, spaced = figures.draw, Axis.spaced_ticks

    def ticks_of(axis: Axis, *where: Any) -> Sequence[float]:
        ticks = spaced(axis, *where)
        possible = {tick for kind in axis.ticks for tick in kind if axis.low <= tick <= axis.high}
        assert len(ticks) >= min(3, len(possible)), f"{axis}: {ticks}"
        return ticks

    def drawn(width: float, height: float, paint: Callable[[Any], None], **rest: Any) -> object:
        def painted(canvas: Any) -> None:
            paint(canvas)
            overlaps = overlapping_texts(canvas)
            assert not overlaps, f"{rest.get('title')}: {overlaps}"

        return draw(width, height, painted, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw", drawn)
        patch.setattr(Axis, "spaced_ticks", ticks_of)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder, which is the working directory during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dtbench(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process and returns its exit code, stdout and stderr."""
    # No progress messages, however busy the machine is.
    monkeypatch.setattr("dtbench.engine.progress.SILENT_S", 3600.0)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dtbench", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


# For a test of many small files: what needs more would do so without end.
_LIMIT_S, _LIMIT_BYTES = 1800, 2 * 2**30


@pytest.fixture
def bounded() -> Iterator[None]:
    """Without end is an error that no reader expects, and so are gigabytes of memory."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"takes longer than {_LIMIT_S} s")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _LIMIT_BYTES, before[1]))
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)
