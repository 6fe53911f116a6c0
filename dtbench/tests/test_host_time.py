"""Answers about host time in constructed runs: second calls that miss the sharding cache."""

import contextlib
import io
import json
from typing import Any

import msgspec
import pytest

from dtbench.engine.findings import findings
from dtbench.records.result import Result
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.stats.second_calls import second_calls
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
    call_of("stack", "torch", "cached", 10.0),
    call_of("stack", "torch", "first", 2000.0),
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
    assert calls[1][5:] == pytest.approx((20e-6, 2000e-6, 10e-6))
    assert calls[2][6:] == (None, None)
    assert [call.op for call in second_calls(RUN) if call.misses] == ["stack"]


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
    assert cells(page, "stack", "S(0)", "forward", "torch")[4:] == ["2", "2000.0", "20.0", "10.0"]


def test_run_without_second_calls_shows_none() -> None:
    cached = [result for result in RUN if result.params["call"] != "second"]
    assert second_calls(cached) == []
    assert "second call" not in printed(cached) + " ".join(section("dispatch", cached).notes)


def test_second_calls_of_a_damaged_file_are_shown_as_text() -> None:
    params = {"call": "second", "placements": 7, "pass": HOSTILE}
    (call,) = second_calls([call_of(HOSTILE, "core", "second", 1.0, -1.5, params=params)])
    assert (call.placements, call.misses) == ("7", False)
