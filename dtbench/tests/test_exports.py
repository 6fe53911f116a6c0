"""Times for other tools."""

import csv
import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from dtbench.errors import OutputError, UsageError
from dtbench.records import exports
from dtbench.records.comparison import Change, ComparedCase, Verdict
from dtbench.records.exports import (
    MAX_NAME_CHARS,
    PR_TIME_CASES,
    Point,
    compared_point,
    run_points,
    write_exports,
)
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


# The records of PyTorch's benchmark database, by pytorch/test-infra: the columns `benchmark`, `model` and `metric` of
# clickhouse_db_schema/benchmark.oss_ci_benchmark_v3/schema.sql. `unit` has no column, so it is not stored.
TEXTS = {str: str}
COLUMNS: dict[str, dict[str, Any]] = {
    "benchmark": {"name": str, "mode": str, "dtype": str, "extra_info": TEXTS},
    "model": {"name": str, "type": str, "backend": str, "origins": [str]},
    "metric": {"name": str, "unit": str, "benchmark_values": [float], "target_value": float},
}


def has_type(value: object, column: object) -> bool:
    """Whether ClickHouse stores the value in the column as it is. Numbers are Float32."""
    if isinstance(column, list):
        return isinstance(value, list) and all(has_type(item, column[0]) for item in value)
    if column is TEXTS:
        return isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
    if column is float:
        return isinstance(value, int | float) and math.isfinite(
            struct.unpack("f", struct.pack("f", value))[0]
        )
    return isinstance(value, str)


def uploaded(path: Path) -> list[dict[str, dict[str, Any]]]:
    """Reads the file by the rules of pytorch/test-infra, .github/scripts/upload_benchmark_results.py, and checks types.

    Files that do not end in .json are skipped. One JSON value may fill the file, else each line has one. A record
    without `metric` is skipped.
    """
    if path.suffix != ".json":
        return []
    text = path.read_text()
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in text.splitlines()]
    records = [record for record in values if "metric" in record]
    for record in records:
        assert record.keys() == COLUMNS.keys()
        for name, columns in COLUMNS.items():
            assert record[name].keys() == columns.keys()
            assert all(has_type(record[name][field], column) for field, column in columns.items()), record
    return records


def shown_by_hud(records: list[dict[str, dict[str, Any]]]) -> dict[tuple[str, ...], float]:
    """Returns the value of each row of a page: the mean of the values, by the columns that tell rows apart."""
    rows = {}
    for record in records:
        benchmark, model, metric = (record[name] for name in COLUMNS)
        key = (
            *(benchmark[n] for n in ("name", "mode", "dtype")),
            model["backend"],
            model["name"],
            metric["name"],
        )
        assert key not in rows
        rows[key] = sum(metric["benchmark_values"]) / len(metric["benchmark_values"])
    return rows


def test_hud_reads_estimates_of_launches_and_bandwidths(tmp_path: Path):
    params = {"dtype": "float32", "mode": "isolated", "size": 1024}
    results = [
        made_up.result(
            "collectives", HOSTILE, "c10d", params, [s] * 4, size_bytes=1024, factor=0.5, launch=launch
        )
        for launch, s in enumerate((2e-6, 4e-6))
    ]
    path = tmp_path / "hud.json"
    write_exports(run_points([made_up.run(results)]), [("hud", path)])
    latency, busbw = uploaded(path)
    assert latency["benchmark"]["name"] == "dtbench collectives" and latency["model"]["name"].isprintable()
    assert (latency["benchmark"]["mode"], latency["benchmark"]["dtype"]) == ("isolated", "float32")
    assert latency["metric"] == {
        "name": "latency",
        "unit": "us",
        "benchmark_values": [pytest.approx(2), pytest.approx(4)],
        "target_value": 0,
    }
    assert busbw["metric"]["name"] == "busbw" and busbw["metric"]["unit"] == "GB/s"
    assert busbw["metric"]["benchmark_values"] == [pytest.approx(0.256), pytest.approx(0.128)]
    assert [*shown_by_hud([latency, busbw]).values()] == [pytest.approx(3), pytest.approx(0.192)]
    write_exports(run_points([made_up.run(results[:1])])[:1], [("hud", path)])
    assert len(uploaded(path)) == 2


def test_hud_shows_base_and_head_apart_and_stores_both_with_the_verdict(tmp_path: Path):
    effect = Change(ratio=1.5, low=1.25, high=2)
    case = ComparedCase(
        suite="s", name="x", impl="core", params={"mode": "isolated"}, verdict=Verdict.SLOWER, tolerance=0.05,
        base_s=2e-6, head_s=3e-6, effect=effect,
    )  # fmt: skip
    point = compared_point(case, case.verdict, HOSTILE)
    assert point
    write_exports([point], [("hud", tmp_path / "hud.json")])
    records = uploaded(tmp_path / "hud.json")
    assert [(key[1], key[5], value) for key, value in shown_by_hud(records).items()] == [
        ("base", "latency", pytest.approx(2)),
        ("head", "latency", pytest.approx(3)),
        ("isolated", "base and head", pytest.approx(2.5)),
    ]
    (both,) = (record["metric"] for record in records if len(record["metric"]["benchmark_values"]) == 2)
    assert both["benchmark_values"] == [pytest.approx(2), pytest.approx(3)] and both["unit"] == "us"
    for record in records:
        extra = record["benchmark"]["extra_info"]
        assert (extra["verdict"], extra["interval_us"]) == ("slower", "2.5 to 4")
        assert extra["reason"].isprintable()


def dispatches(**counters: int | float | None) -> list[Result]:
    """Two launches of each case and implementation of pr_time_benchmarks; counter by name and implementation."""
    return [
        made_up.result(
            "dispatch",
            name,
            impl,
            {"mesh": "256"},
            [2.0004e-6],
            counters={}
            if (count := counters.get(f"{name}_{impl}", 1000)) is None
            else {"instructions": count + launch},
            launch=launch,
        )
        for name in PR_TIME_CASES
        for impl in ("torch", "core", "local")
        for launch in range(2)
    ]


def checked(text: str) -> dict[tuple[str, str], int]:
    """Reads rows by the rules of pytorch's benchmarks/dynamo/pr_time_benchmarks/check_results.py.

    A row has a name, a metric and an integer; a name and metric occur once.
    """
    results = {}
    for row in csv.reader(io.StringIO(text)):
        name, metric, value = row
        assert (name.strip(), metric.strip()) not in results
        results[name.strip(), metric.strip()] = int(value)
    return results


def test_pr_time_reads_instructions_and_times(capsys: pytest.CaptureFixture[str]):
    results = dispatches(dtensor_dispatch_detach_torch=1000.0)
    points = run_points([made_up.run([*results, made_up.result("dispatch", "add", "core", {}, [1e-6])])])
    rows = checked(exports.pr_time(points))
    assert len(rows) == 8 * 2 * 2 and rows["dtensor_dispatch_detach", "instruction_count"] == 1000
    assert rows["dtensor_dispatch_custom_handler_core", "time_ns"] == 2000
    assert {name.removesuffix("_core") for name, _ in rows} == {*PR_TIME_CASES}
    assert not capsys.readouterr().err


@pytest.mark.parametrize("counter", [None, 12.5, -3])
def test_pr_time_leaves_out_missing_counters_and_says_so(
    counter: float | None, capsys: pytest.CaptureFixture[str]
):
    results = dispatches(dtensor_dispatch_view_torch=counter)
    rows = checked(exports.pr_time(run_points([made_up.run(results)])))
    assert ("dtensor_dispatch_view", "instruction_count") not in rows
    assert {("dtensor_dispatch_view", "time_ns"), ("dtensor_dispatch_view_core", "instruction_count")} <= {
        *rows
    }
    assert capsys.readouterr().err.splitlines() == [
        "dtbench: pr-time: no instruction_count of dtensor_dispatch_view: the run has not counted them"
    ]


def test_pr_time_refuses_runs_that_do_not_fit(tmp_path: Path):
    other = Result(
        "dispatch", "dtensor_dispatch_view", "torch", {"mesh": "8"}, "ok", time_s=dispatches()[0].time_s
    )
    files = [("bmf", tmp_path / "a"), ("pr-time", tmp_path / "b")]
    for points, message in (
        (POINTS, "no result of the cases"),
        (run_points([made_up.run([*dispatches(), other])]), "several results of dtensor_dispatch_view,"),
    ):
        with pytest.raises(UsageError, match=message):
            write_exports(points, files)
    assert not [*tmp_path.iterdir()]


def test_export_replaces_its_own_files_only(tmp_path: Path):
    files = [(name, tmp_path / name) for name in exports.FORMATS if name != "pr-time"]
    for points in (POINTS, POINTS, [], POINTS):
        write_exports(points, files)
    cases = run_points([made_up.run(dispatches())])
    for _ in range(2):
        write_exports(cases, [("pr-time", tmp_path / "pr-time")])
    (tmp_path / "results.csv").write_text("dtensor_dispatch_detach,instruction_count,1\n")
    with pytest.raises(OutputError, match="is not a file of pr-time"):
        write_exports(cases, [("pr-time", tmp_path / "results.csv")])
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
        ("hud:times.jsonl", "such as hud:times.jsonl.json"),
        (f"pr-time:{out}", "no result of the cases dtensor_dispatch_*"),
    ):
        code, _, err = dtbench("show", run, "--export", points)
        assert code == 2 and message in err
    code, _, err = dtbench("compare", run, run, "--export", "pr-time:f.csv")
    assert code == 2 and "dtbench show RUN --export pr-time:f.csv" in err and not out.exists()
