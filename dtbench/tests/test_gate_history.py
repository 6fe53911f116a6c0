"""The history of a gate: what is kept, refused, and found in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtbench.gate import history
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.verdict import judged
from dtbench.records.gate import Gate
from dtbench.records.judged import Verdict
from dtbench.suite.errors import UnreadableRunError
from dtbench.tests.made_up_arm import concluded

MACHINE = {"cpu": "Some CPU @ 2 GHz", "cores": 2}


def report(time_s: float | None, commit: str = "c" * 40, *reasons: str) -> Gate:
    benchmark = Benchmark(("s", "n", "core", ()), "s n [core]", "simulated", "min")
    return concluded([judged(benchmark, Verdict.PASS, head_s=time_s)], *reasons, head=commit)


def kept(path: Path) -> list[tuple[str, float]]:
    return history.read(path, MACHINE).get("s n [core]", [])


def test_lines_are_only_added(tmp_path: Path):
    path = history.file_of(tmp_path / "h", MACHINE)
    history.append(path, MACHINE, report(1e-5, "a"))
    first = path.read_bytes()
    history.append(path, MACHINE, report(2e-5, "b"))
    assert path.read_bytes().startswith(first)
    assert kept(path) == [("a", 1e-5), ("b", 2e-5)]


def test_what_is_not_trusted_or_not_measured_is_not_kept(tmp_path: Path):
    path = history.file_of(tmp_path, MACHINE)
    history.append(path, MACHINE, report(1e-5, "a", "the control moved"))
    history.append(path, MACHINE, report(None))
    assert not path.exists()


def test_another_machine_is_no_baseline(tmp_path: Path):
    path = history.file_of(tmp_path, MACHINE)
    history.append(path, MACHINE, report(1e-5))
    with pytest.raises(UnreadableRunError, match="another machine are no baseline"):
        history.read(path, {**MACHINE, "cores": 4})
    assert history.file_of(tmp_path, {**MACHINE, "cores": 4}) != path


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"kind":"history","schema":99}',
        "nonsense",
        '{"kind":"history","schema":1,"revision":"a","times_s":{"x":-1}}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str):
    path = history.file_of(tmp_path, MACHINE)
    path.write_text(line + "\n")
    with pytest.raises(UnreadableRunError, match="line 1"):
        history.read(path, MACHINE)


def test_a_line_cut_short_is_left_out(tmp_path: Path):
    path = history.file_of(tmp_path, MACHINE)
    history.append(path, MACHINE, report(1e-5, "a"))
    with path.open("a") as file:
        file.write('{"kind":"hist')
    assert kept(path) == [("a", 1e-5)]


def test_without_ruptures_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "ruptures", None)
    monkeypatch.setattr(history, "machine_kind", lambda: MACHINE)
    lines = history.follow(tmp_path, report(1e-5), record=True)
    assert "advisory" in lines[0] and "pip install 'dtbench[history]'" in lines[0]


def test_a_step_is_found_where_it_is_and_noise_is_not():
    pytest.importorskip("ruptures", reason="the extra `history` is not installed")
    import numpy as np

    draw = np.random.default_rng(0)
    steady = np.exp(draw.normal(0, 0.01, 40)) * 1e-5
    stepped = steady * np.where(np.arange(40) >= 25, 1.08, 1.0)
    series = {
        "steady": [(f"r{i}", float(t)) for i, t in enumerate(steady)],
        "stepped": [(f"r{i}", float(t)) for i, t in enumerate(stepped)],
        "short": [("r0", 1.0)] * 3,
    }
    lines = history.advice(series)
    assert lines == ["stepped: +7.4% since r25"]
    assert json.dumps(history.advice({"steady": series["steady"]})) == '["no change point in 1 series"]'
