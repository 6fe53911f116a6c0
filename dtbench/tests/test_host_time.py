"""Answers about host time in constructed runs: cache misses, leaks of repeated steps, cost of sharded groups."""

import contextlib
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.engine.findings import findings
from dtbench.records.result import Result
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.stats.host_time import fit_group_cost, group_costs, second_calls, step_growths
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


# ---- groups of sharded parameters ----

SWEEP = [(groups, params) for groups in (1, 8, 32) for params in (1, 8, 64)]
FIXED, PER_GROUP, PER_PARAMETER = 50.0, 300.0, 7.0


def time_of(groups: int, params: int) -> float:
    return FIXED + PER_GROUP * groups + PER_PARAMETER * groups * params


def steps_by_groups(impl: str, scale: float = 1e-6, stages: bool = False, **about: Any) -> list[Result]:
    results = []
    for groups, params in SWEEP:
        step_s = scale * time_of(groups, params)
        counters = {"stage_s:pre_forward": step_s / 2, "stage_s:rest": step_s / 4} if stages else {}
        fields = {"group": "simulated", "ranks": 8, "groups": groups, "params": params}
        result = made_up.result("fsdp", "step", impl, fields, [step_s, 2 * step_s], counters=counters)
        results.append(msgspec.structs.replace(result, clock="host", **about))
    return results


def test_fit_finds_the_coefficients_of_exact_times() -> None:
    fit = fit_group_cost([(groups, params, time_of(groups, params)) for groups, params in SWEEP])
    assert fit is not None
    for (value, low, high), expected in zip(fit, (FIXED, PER_GROUP, PER_PARAMETER), strict=True):
        assert (value, low, high) == pytest.approx((expected,) * 3, rel=1e-6)


def test_intervals_hold_the_coefficients_in_95_of_100_noisy_fits() -> None:
    rng = np.random.default_rng(0)
    held = np.zeros(3)
    for _ in range(400):
        noise = 1 + 0.05 * rng.standard_normal(len(SWEEP))
        points = [(g, p, time_of(g, p) * factor) for (g, p), factor in zip(SWEEP, noise, strict=True)]
        fit = fit_group_cost(points)
        assert fit is not None
        expected = (FIXED, PER_GROUP, PER_PARAMETER)
        held += [low <= want <= high for (_, low, high), want in zip(fit, expected, strict=True)]
    assert (held / 400 > 0.92).all() and (held / 400 < 0.98).all()


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 1, 1.0), (8, 1, 2.0), (8, 8, 3.0)],  # no degree of freedom
        [(groups, 1, 1.0 + groups) for groups in (1, 2, 3, 4, 5)],  # one number of parameters
        [(1, params, 1.0 + params) for params in (1, 2, 3, 4, 5)],
    ],
)
def test_fit_needs_enough_different_points(points: list[tuple[int, int, float]]) -> None:
    assert fit_group_cost(points) is None


def test_cost_of_groups_is_fitted_per_implementation_and_stage() -> None:
    torch, local = steps_by_groups("torch", stages=True), steps_by_groups("local", 1e-7)
    failed = steps_by_groups("core", status="failed")
    few = steps_by_groups("core")[:3]
    costs = group_costs([*torch, *local, *failed, *few])
    assert [(cost.group, cost.impl, cost.stage) for cost in costs] == [
        ("simulated", "torch", "step"),
        ("simulated", "torch", "pre_forward"),
        ("simulated", "torch", "rest"),
        ("simulated", "local", "step"),
    ]
    for cost, factor in zip(costs, (1e-6, 0.5e-6, 0.25e-6, 1e-7), strict=True):
        assert cost.per_group_s[0] == pytest.approx(PER_GROUP * factor)
        assert cost.per_parameter_s[0] == pytest.approx(PER_PARAMETER * factor)
        assert cost.fixed_s[0] == pytest.approx(FIXED * factor)


def test_damaged_params_and_counters_have_no_cost() -> None:
    damaged = [
        msgspec.structs.replace(r, params={"group": HOSTILE, "groups": "8", "params": True}, counters={})
        for r in steps_by_groups("torch")
    ]
    negative = [
        msgspec.structs.replace(r, counters={"stage_s:rest": -1.0, f"stage_s:{HOSTILE}": 0.0})
        for r in steps_by_groups("torch")
    ]
    assert [cost.stage for cost in group_costs([*damaged, *negative])] == ["step"]


def test_cost_of_groups_is_shown_in_the_terminal_in_json_and_on_the_page() -> None:
    results = steps_by_groups("torch", stages=True)
    slower = 1.2 * time_of(1, 1) * 1e-6
    results.append(made_up.result("fsdp", "step", "torch", results[0].params, [slower] * 2, launch=1))
    (step, *_) = group_costs(results)
    shown = f"{1e6 * step.per_group_s[0]:.1f}"
    text = printed(results)
    row = text.partition("Host time of sharded parameters")[2].splitlines()[2].split()
    assert row[:4] == ["simulated", "torch", "step", shown]
    low, high = (float(bound) for bound in (row[4], row[6]))
    assert (low, high) == pytest.approx((1e6 * step.per_group_s[1], 1e6 * step.per_group_s[2]), rel=0.01)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_runs_json([made_up.run(results)])
    (document,) = json.loads(out.getvalue())
    assert document["group_costs"][0]["per_group_s"] == pytest.approx(list(step.per_group_s))
    assert cells(section("others", results), "simulated", "torch", "step")[3] == shown
