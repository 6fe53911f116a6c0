"""Times for other tools."""

import json
from pathlib import Path

import pytest

from dtbench.errors import OutputError
from dtbench.records import exports
from dtbench.records.exports import MAX_NAME_CHARS, Point, run_points, write_exports
from dtbench.records.result import Result
from dtbench.tests import made_up

HOSTILE = 'a"b\\c\n# TYPE x\r}\x1b[31m\ud800{z="1"} 5'
POINTS = [
    Point(("s", HOSTILE, "core", (("n", 1),)), 2e-6, 1e-6, 3e-6, "slower", HOSTILE),
    Point(("s", "plain", "torch", ()), 4e-6),
]


def test_bmf_is_what_bencher_reads():
    exported = json.loads(exports.bmf(POINTS))
    assert list(exported.values()) == [
        {"latency": {"value": 2000, "lower_value": 1000, "upper_value": pytest.approx(3000)}},
        {"latency": {"value": 4000}},
    ]
    assert list(exported)[1] == "s plain [torch]" and all(name.isprintable() for name in exported)


def test_long_names_stay_apart():
    names = {Point(("s", "x" * 3000 + end, "core", ()), 1.0).label for end in "ab"}
    assert len(names) == 2 and all(len(name) <= MAX_NAME_CHARS for name in names)


def test_github_is_what_the_action_reads():
    first, second = json.loads(exports.github(POINTS))
    assert first["range"] == "1 to 3" and first["extra"].startswith("slower: a")
    assert "\n" not in first["name"] + first["extra"]
    assert second == {"name": "s plain [torch]", "unit": "us", "value": pytest.approx(4)}


def test_points_are_medians_over_launches_with_their_range():
    def add(seconds: list[float], launch: int = 0) -> Result:
        return made_up.result("dispatch", "add", "core", {}, seconds, launch=launch)

    for results, point in (
        ([add([3e-6]), add([1e-6], 1), add([2e-6], 2), made_up.NOT_OK[0]], (2e-6, 1e-6, 3e-6)),
        ([add([1e-6, 2e-6, 3e-6, 4e-6, 5e-6])], (1e-6, 1e-6, 4e-6)),
    ):
        assert [(p.time_s, p.low_s, p.high_s) for p in run_points([made_up.run(results)])] == [point]


def test_export_replaces_its_own_files_only(tmp_path: Path):
    files = [(name, tmp_path / name) for name in exports.FORMATS]
    for points in (POINTS, POINTS, [], POINTS):
        write_exports(points, files)
    files[0][1].write_text('{"kind": "gate"}')
    with pytest.raises(OutputError, match="is not a file of github"):
        write_exports(POINTS, files)


def test_commands_export(tmp_path: Path, dtbench: made_up.Cli):
    results = [made_up.result("dispatch", "add", "core", {}, [1e-6, 2e-6])]
    run, out = str(made_up.write(tmp_path / "run.jsonl", made_up.run(results))), tmp_path / "out.json"
    for words in (("show", run, "--export", f"github:{tmp_path / 'x'}"), ("compare", run, run)):
        dtbench(*words, "--export", f"bmf:{out}")
        assert list(json.loads(out.read_text())) == ["dispatch add [core]"]
        out.unlink()
    for points, message in (
        ("xml:f", "expected FORMAT:FILE"),
        ("bmf:", "expected"),
        ("bmf:no/f", "there is no folder no"),
    ):
        code, _, err = dtbench("show", run, "--export", points)
        assert code == 2 and message in err
