"""Figures at the end of what a float holds, and lists without an entry, in every file that a report draws."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtbench.tests.made_up import Cli
from dtbench.tests.test_damaged_files import READERS

Value = Any  # of JSON
RESULTS = Path(__file__).parents[2] / "results"
EXTREMES = (0, 5e-324, 1e-300, 1e308)
STEPS = RESULTS / "reference/step-times/a100-64-gpus.csv"
PLAN = "plan --model llama-8b --gpus 16 --batch 64 --json"
COMMITTED = {
    "profile": "profile/add/table.json",
    "profile of ranks": "profile/mlp/table.json",
}


def figures_of(whole: Value, place: tuple[Value, ...] = ()) -> Iterator[tuple[tuple[Value, ...], Value]]:
    """Where a number or a list stands, and what to put there; of a list's entries, the first."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            yield from figures_of(value, (*place, key))
    elif isinstance(whole, list):
        if whole:
            yield place, []
            yield from figures_of(whole[0], (*place, 0))
    elif isinstance(whole, int | float) and not isinstance(whole, bool):
        yield from ((place, extreme) for extreme in EXTREMES)


def with_value(whole: Value, place: tuple[Value, ...], value: Value) -> Value:
    changed = inner = copy.deepcopy(whole)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


@pytest.mark.parametrize("kind", COMMITTED)
def test_a_report_of_an_extreme_figure_is_a_page_or_a_line(dtbench: Cli, tmp_path: Path, kind: str) -> None:
    whole = json.loads((RESULTS / COMMITTED[kind]).read_text())
    codes = set()
    for place, value in figures_of(whole):
        Path("f.json").write_text(json.dumps(with_value(whole, place, value)))
        code, _, err = dtbench("report", "f.json", "-o", "f.html")
        if code == 2 and value != []:
            assert f"f.json is damaged: {place[0]}" in err, (place, value, err)
        assert code == 0 or (code == 2 and err.count("\n") == 1), (place, value, err)
        codes.add(code)
        Path("f.html").unlink(missing_ok=True)
    assert codes == {0, 2}


def test_a_machine_of_a_figure_near_0_is_a_line(dtbench: Cli, tmp_path: Path) -> None:
    dtbench("plan", "--fit", str(STEPS), "-o", "made.json")
    whole = json.loads(Path("made.json").read_text())
    for place, value in figures_of(whole):
        if value == 5e-324:
            Path("m.json").write_text(json.dumps(with_value(whole, place, value)))
            code, _, err = dtbench(
                *[
                    "plan",
                    "--model",
                    "llama-8b",
                    "--gpus",
                    "16",
                    "--batch",
                    "64",
                    "--json",
                    "--machine",
                    "m.json",
                ]
            )
            assert (code, err.count("\n")) == (2, 1), (place, err)


def test_launches_of_a_topology_that_took_no_time_are_a_line(dtbench: Cli, tmp_path: Path) -> None:
    topology = (RESULTS / "baseline-cpu-gloo-4ranks.topology.json").read_text()
    first = re.sub(r'("launch_us": \[\s*)[\d.]+', r"\g<1>5e-324", topology, count=1)
    Path("t.json").write_text(first)
    run = str(RESULTS / "baseline-cpu-gloo-4ranks.jsonl")
    code, _, err = dtbench("calibrate", "--validate", "t.json", run, "--json")
    assert (code, err.count("\n")) == (
        2,
        1,
    ) and "launch_us[0] is 5e-324, expected a number of at least 1e-30" in err


def test_a_preflight_of_work_that_took_no_time_is_a_page(dtbench: Cli, tmp_path: Path) -> None:
    for time_s in (0, 5e-324):
        whole = json.loads(READERS["preflight"][0]()) | {"work_s": {"matmul": [time_s] * 4}}
        Path("p.json").write_text(json.dumps(whole))
        assert dtbench("report", "p.json", "-o", "p.html")[::2] == (0, "")


def test_a_gate_of_ratios_near_0_is_a_line_and_of_such_bounds_a_page(dtbench: Cli, tmp_path: Path) -> None:
    text = (RESULTS / "gate/same.json").read_text()
    Path("g.json").write_text(re.sub(r'"low": [\d.]+', '"low": 5e-324', text))
    assert dtbench("report", "g.json", "-o", "g.html")[::2] == (0, "")
    Path("g.json").write_text(re.sub(r'"ratio": [\d.]+', '"ratio": 5e-324', text))
    code, _, err = dtbench("report", "g.json", "-o", "h.html")
    assert (code, err.count("\n")) == (2, 1) and "ratio is 5e-324, expected a number of at least 1e-30" in err
