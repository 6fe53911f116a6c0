"""What fits into `dtbench run --budget`, and what of it comes first."""

from __future__ import annotations

from typing import Any

import pytest

from dtbench.engine import budget
from dtbench.engine.options import RunRequest, Task, list_tasks
from dtbench.engine.progress import Progress
from dtbench.engine.refine import is_calibrated_with
from dtbench.suite import Case, Param
from dtbench.suite.suites import Suite, WorldKind, load
from dtbench.tests import made_up


def build(_world: Any) -> Any:
    raise AssertionError("choosing builds nothing")


def task(suite: str, name: str, world: WorldKind = "ranks", **params: Param) -> Task:
    size = params.get("size")
    case = Case(name, params, {"core": build}, size_bytes=int(size) if size is not None else None)
    return Task(Suite(suite, lambda plan: iter(()), world, ""), case, ("core",))


SWEEPS = [
    task("sweeps", name, mesh_dim=dim, mode="isolated", size=2**k)
    for name in ("reduce", "gather")
    for dim in ("dp", "tp")
    for k in range(9)
]
ALONE = [task("sweeps", "reduce", mesh_dim="dp", mode="back_to_back", size=16)]
OPS = [task("ops", name, "simulated", variant=k) for name in ("add", "mul") for k in range(20)]


def test_every_curve_has_a_size_before_one_has_the_next() -> None:
    ordered = budget.by_importance([*ALONE, *SWEEPS])
    sizes = [t.case.params["size"] for t in ordered[:12]]
    assert sizes == [1] * 4 + [256] * 4 + [16] * 4
    assert ALONE[0] in ordered[12:17]  # what accompanies the sweep comes after three sizes of it
    assert {t.label for t in ordered} == {t.label for t in [*SWEEPS, *ALONE]}


def test_what_a_suite_calls_telling_has_three_sizes_before_the_rest_has_one() -> None:
    listed = list_tasks(load(["collectives"]), RunRequest().resolve("cpu", 4))
    ordered = budget.by_importance(listed)
    curves = {t.label.split(" size=")[0] for t in listed if is_calibrated_with(t.case)}
    first = ordered[: 3 * len(curves)]
    assert {t.label.split(" size=")[0] for t in first} == curves
    assert {t.case.params["size"] for t in first[: len(curves)]} == {1024}
    assert len({t.case.name for t in ordered[:6]}) == 6


def test_cases_without_a_size_are_spread_over_each_name() -> None:
    ordered = [(t.case.name, t.case.params["variant"]) for t in budget.by_importance(OPS)]
    assert ordered[:6] == [("add", 0), ("mul", 0), ("add", 19), ("mul", 19), ("add", 9), ("mul", 9)]


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_chosen_fits_and_every_suite_keeps_its_share(quick: bool) -> None:
    tasks = [*OPS, *SWEEPS, task("one", "only")]
    whole = budget.estimate_s(tasks, quick)
    chosen = budget.choose(tasks, budget.START_S + 0.51 * whole, quick)
    names = [t.suite.name for t in chosen]
    assert names.count("ops") == 20 and names.count("sweeps") == 18 and names.count("one") == 1
    assert budget.estimate_s(chosen, quick) == pytest.approx(0.51 * whole, rel=0.05)
    assert names == sorted(names, key=["ops", "sweeps", "one"].index)
    assert {t.label for t in budget.choose(tasks, budget.START_S + whole * 1.001, quick)} == {
        t.label for t in tasks
    }


def test_a_budget_that_holds_nothing_holds_a_case_of_every_suite() -> None:
    chosen = budget.choose([*OPS, *SWEEPS], 1.0, False)
    assert [t.label for t in chosen] == [OPS[0].label, SWEEPS[0].label]


def test_a_suite_that_is_late_leaves_the_others_their_share() -> None:
    tasks = [*OPS, *SWEEPS]  # 40 x 0.15 s and 36 x 0.18 s: shares of 0.48 and 0.52
    deadlines = budget.Deadlines(tasks, end_s=100.0)
    assert deadlines.allows(OPS[0], 0.0)
    assert deadlines.allows(OPS[1], 47.0) and not deadlines.allows(OPS[2], 49.0)
    assert deadlines.allows(SWEEPS[0], 90.0)
    assert deadlines.allows(SWEEPS[1], 99.9) and not deadlines.allows(SWEEPS[2], 100.0)


def test_a_log_is_told_now_and_then_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    progress = Progress(lambda: now_s)
    progress.begin("so much", 10)
    for _ in range(10):
        now_s += 40.0
        progress.result(made_up.result("collectives", "all_reduce", "c10d", {}, [1e-3]))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("left")]
    assert lines[0] == "result 2 of 10, about 5 min left" and len(lines) == 4
