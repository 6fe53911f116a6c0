"""Answers about host time in constructed runs: cache misses of second calls, and leaks of repeated steps."""

import contextlib
import io
import json
from typing import Any

import msgspec
import pytest

from dtbench.engine.findings import findings
from dtbench.records.result import Result
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.stats.host_time import second_calls, step_growths
from dtbench.tests import made_up
from dtbench.tests.html_page import HOSTILE, cells, section


def call_of(
    op: str, impl: str, call: str, us: float, decisions: float | None = None, **changes: Any
) -> Result:
    params = {"placements": "S(0)", "mesh": "8", "pass": "forward", "call": call}
    counters = {} if decisions is None else {"decisions": decisions}
    result = made_up.result("dispatch", op, impl, params, [us * 1e-6] * 3, counters=counters)
    return msgspec.structs.replace(result, **changes)


# The second call of `add` is slow and hits the cache, that of `stack` is fast with one decision made again.
RUN = [
    call_of("add", "core", "cached", 5.0),
    call_of("add", "core", "first", 200.0),
    call_of("add", "core", "second", 40.0, 0),
    call_of("stack", "torch", "cached", 10.0, launch=1),
    call_of("stack", "torch", "first", 2000.0, launch=1),
    call_of("stack", "torch", "second", 15.0, 0),
    call_of("stack", "torch", "second", 25.0, 2, launch=1),
    call_of("sort", "torch", "second", 9.0, 0),
    call_of("sort", "core", "second", 9.0),  # not counted
    call_of("topk", "core", "second", 9.0, 5, status="failed"),
]


def printed(results: list[Result]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_runs([made_up.run(results)])
    return out.getvalue()


def test_second_call_misses_if_it_makes_a_decision_again_whatever_its_time() -> None:
    calls = [msgspec.structs.astuple(call) for call in second_calls(RUN)]
    assert [call[:5] for call in calls] == [
        ("add", "core", "S(0)", "forward", 0),
        ("stack", "torch", "S(0)", "forward", 2),
        ("sort", "torch", "S(0)", "forward", 0),
    ]
    assert calls[0][5:] == pytest.approx((40e-6, 200e-6, 5e-6))
    assert calls[1][5:] == pytest.approx((25e-6, 2000e-6, 10e-6))
    assert calls[2][6:] == (None, None)


def test_misses_are_listed_in_the_terminal_in_json_and_on_the_page() -> None:
    words = "second calls that miss the sharding cache: 0 of 1 with core, 1 of 2 with torch (stack)"
    assert f"dispatch: {words}" in findings(made_up.run(RUN))
    text = printed(RUN)
    assert f"dispatch: {words}\n" in text
    table = text.partition("Ops whose second call")[2].splitlines()[1:3]
    assert [line.split()[:6] for line in table][1] == ["stack", "S(0)", "forward", "torch", "2", "2000.0"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_runs_json([made_up.run(RUN)])
    (shown,) = json.loads(out.getvalue())
    assert [(call["op"], call["decisions"]) for call in shown["second_calls"]] == [
        ("add", 0),
        ("stack", 2),
        ("sort", 0),
    ]
    page = section("dispatch", RUN)
    assert f"{words[0].upper()}{words[1:]}." in page.notes
    assert cells(page, "stack", "S(0)", "forward", "torch")[4:] == ["2", "2000.0", "25.0", "10.0"]


def test_run_without_second_calls_shows_none() -> None:
    cached = [result for result in RUN if result.params["call"] != "second"]
    assert second_calls(cached) == []
    assert "second call" not in printed(cached) + " ".join(section("dispatch", cached).notes)


def test_second_calls_of_a_damaged_file_are_shown_as_text() -> None:
    params = {"call": "second", "placements": 7, "pass": HOSTILE}
    (call,) = second_calls([call_of(HOSTILE, "core", "second", 1.0, -1.5, params=params)])
    assert (call.placements, call.decisions) == ("7", -1.5)


# ---- steps in a row ----


def steps_of(
    objects: list[float],
    bytes_kept: list[float] | None = None,
    types: dict[str, float] | None = None,
    **about: Any,
) -> Result:
    counters = {"steps": 200, "late_over_early": 1.25}
    counters |= {f"objects_per_step_{i}": growth for i, growth in enumerate(objects, 1)}
    counters |= {f"bytes_per_step_{i}": growth for i, growth in enumerate(bytes_kept or [], 1)}
    counters |= {f"kept_per_step:{name}": growth for name, growth in (types or {}).items()}
    params = {"placements": "S(0)", "mesh": "8", "pass": "forward", "call": "repeated"}
    result = made_up.result("dispatch", "adamw", "core", params, [1e-3] * 3, counters=counters)
    return msgspec.structs.replace(result, **about)


@pytest.mark.parametrize(
    ("objects", "bytes_kept", "verdict"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.0] * 4, "flat"),
        ([1.0, 1.0, 1.0, 1.0], [100.0] * 4, "leak of 1 dict per step"),
        ([9.0, 3.0, 0.0, 0.0], [9e6, 5e4, 0.0, 0.0], "flat"),  # caches that fill
        ([0.0, 40.0, -40.0, 40.0], [0.0, 1e5, -1e5, 1e5], "flat"),  # garbage that is collected later
        ([0.0, 0.0, 0.0, 50.0], [0.0, 0.0, 0.0, 1e6], "flat"),  # a single growth
        ([0.1, 0.1, 0.1, 0.1], None, "flat"),  # that of counting
        ([0.0] * 4, [0.0, 5e4, 8e4, 5e4], "leak of memory outside Python's objects"),
        ([0.0] * 4, [900.0, 900.0, 900.0, 900.0], "flat"),  # pages that come and go
    ],
)
def test_steps_leak_if_every_interval_but_the_first_grows(
    objects: list[float], bytes_kept: list[float] | None, verdict: str
) -> None:
    (growth,) = step_growths([steps_of(objects, bytes_kept, {"dict": objects[-1]})])
    assert growth.verdict == verdict
    assert growth.objects_per_step == pytest.approx(sum(objects[1:]) / 3)
    assert growth.bytes_per_step == (None if bytes_kept is None else pytest.approx(sum(bytes_kept[1:]) / 3))


def test_leak_names_the_types_that_grow_most() -> None:
    types = {f"t{i}": float(i) for i in range(1, 8)}
    (growth,) = step_growths([steps_of([28.0] * 4, types=types)])
    assert growth.verdict == "leak of 7 t7, 6 t6, 5 t5, 4 t4, 3 t3 per step"
    (growth,) = step_growths([steps_of([28.0] * 4)])
    assert growth.verdict == "leak of objects of several types per step"


def test_each_launch_has_its_growth_and_failed_results_have_none() -> None:
    launches = [steps_of([0.0] * 4), steps_of([2.0] * 4, launch=1), steps_of([1.0] * 4, status="failed")]
    assert [growth.objects_per_step for growth in step_growths(launches)] == [0.0, 2.0]
    assert step_growths([steps_of([1.0, 1.0, 1.0])]) == []


def test_growth_is_shown_in_the_terminal_in_json_and_on_the_page() -> None:
    results = [steps_of([2.0] * 4, [512.0] * 4, {"dict": 2.0}), steps_of([0.0] * 4, [0.0] * 4, impl="torch")]
    words = "objects and memory kept by 200 adamw: core leak of 2 dict per step; torch flat"
    assert f"dispatch: {words}" in findings(made_up.run(results))
    text = printed(results)
    assert f"dispatch: {words}" in text
    row = text.partition("Steps in a row")[2].splitlines()[2].split()
    assert row[:6] == ["adamw", "core", "200", "2.00", "512", "1.25×"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_runs_json([made_up.run(results)])
    (shown,) = json.loads(out.getvalue())
    assert shown["step_growths"][0]["types"] == {"dict": 2.0}
    page = section("dispatch", results)
    assert f"{words[0].upper()}{words[1:]}." in page.notes
    assert cells(page, "adamw", "core", "200")[3:] == ["2.00", "512", "1.25×", "leak of 2 dict per step"]
