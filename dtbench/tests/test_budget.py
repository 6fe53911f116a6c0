"""Selection and order of cases under `dtbench run --budget`, and the time left that is printed."""

from collections import Counter
from typing import Any

import pytest

from dtbench.engine import budget
from dtbench.engine.options import RunRequest
from dtbench.engine.progress import Progress
from dtbench.engine.refine import is_calibrated_with
from dtbench.engine.tasks import Task, list_tasks
from dtbench.stats.dispatch_headline import SINGLE_OPS, is_headline
from dtbench.suite import Case, Param
from dtbench.suite.registry import Suite, WorldKind, load
from dtbench.tests import made_up


def build(_world: Any) -> Any:
    raise AssertionError("choosing builds nothing")


def task(suite: str, name: str, world: WorldKind = "ranks", **params: Param) -> Task:
    case = Case(name, params, {"core": build}, size_bytes=int(params["size"]) if "size" in params else None)
    return Task(Suite(suite, lambda plan: iter(()), world, ""), case, ("core",))


def curve_of(task: Task) -> str:
    return task.label.split(" size=")[0]


SWEEPS = [
    task("sweeps", name, mesh_dim=dim, mode="isolated", size=2**k)
    for name in ("reduce", "gather")
    for dim in ("dp", "tp")
    for k in range(9)
]
ALONE = [task("sweeps", "reduce", mesh_dim="dp", mode="back_to_back", size=16)]
OPS = [task("ops", name, "simulated", variant=k) for name in ("add", "mul") for k in range(20)]


def test_curves_have_their_ends_and_their_middle_before_one_has_more() -> None:
    ordered = budget.by_importance([*ALONE, *SWEEPS])
    assert [t.case.params["size"] for t in ordered[:12]] == [1, 256, 16] * 4
    assert [len({*map(curve_of, ordered[at : at + 3])}) for at in range(0, 12, 3)] == [1] * 4
    assert {t.case.name for t in ordered[:6]} == {"reduce", "gather"}
    assert ALONE[0] in ordered[12:17]  # what accompanies the sweep comes after three sizes of it
    assert {t.label for t in ordered} == {t.label for t in [*SWEEPS, *ALONE]}


@pytest.mark.parametrize("seconds", [0.4, 0.7, 1.3, 2.0])
def test_a_curve_has_three_sizes_or_none(seconds: float) -> None:
    """An impl takes 0.1 s, so none of these budgets suffices for all curves."""
    chosen = budget.choose(budget.by_importance(SWEEPS), budget.start_s(1) + 1.0 + seconds, False, 1)
    sizes = Counter(map(curve_of, chosen))
    assert min(sizes.values()) >= 3 and len(sizes) == min(max(int(seconds / 0.3 + 1e-9), 1), 4)


def test_curves_used_by_calibration_get_three_sizes_first() -> None:
    listed = list_tasks(load(["collectives"]), RunRequest().resolve("cpu", 4))
    ordered = budget.by_importance(listed)
    curves = {curve_of(t) for t in listed if is_calibrated_with(t.case)}
    assert Counter(map(curve_of, ordered[: 3 * len(curves)])) == dict.fromkeys(curves, 3)
    assert len({t.case.name for t in ordered[:18]}) == 6


@pytest.mark.parametrize("seconds", [1.0, 15.0, 60.0])
def test_the_ops_of_the_headline_are_the_first_of_every_budget(seconds: float) -> None:
    listed = list_tasks(load(["dispatch", "collectives"]), RunRequest().resolve("cpu", 4))
    headline = {
        t.label for t in listed if t.suite.name == "dispatch" and is_headline(t.case.name, t.case.params)
    }
    assert {label.split()[1] for label in headline} == SINGLE_OPS.keys() and len(headline) == len(SINGLE_OPS)
    assert {t.label for t in listed if t.case.passes > 1} == headline
    assert {
        t.label for t in budget.choose(budget.by_importance(listed), seconds, False, 4)[: len(headline)]
    } == headline


def test_suite_with_both_worlds_has_a_share_of_the_time_for_each() -> None:
    """Simulated ranks come first, so such a suite is measured in two parts with another suite between them."""
    cases = [
        Case(f"case{k}", {}, {"core": build}, world=world)
        for world in ("ranks", "simulated")
        for k in range(3)
    ]
    mixed = [Task(Suite("mixed", lambda plan: iter(()), "simulated", ""), case, ("core",)) for case in cases]
    listed = budget.by_importance([*mixed, *OPS, *SWEEPS])
    measured = sorted(listed, key=lambda t: t.world != "simulated")
    assert [t.suite.name for t in measured[:3] + measured[43:46]] == ["mixed"] * 6
    deadlines = budget.Deadlines(measured, 100.0, False)
    assert all(deadlines.allows(t, 0.1 * number) for number, t in enumerate(measured))
    assert Counter(t.label for t in budget.choose(listed, 100.0, False, 1)) == Counter(
        t.label for t in listed
    )


def test_cases_without_a_size_are_spread_over_each_name() -> None:
    ordered = [(t.case.name, t.case.params["variant"]) for t in budget.by_importance(OPS)]
    assert ordered[:6] == [("add", 0), ("mul", 0), ("add", 19), ("mul", 19), ("add", 9), ("mul", 9)]


@pytest.mark.parametrize("quick", [False, True])
def test_chosen_cases_fit_and_each_suite_keeps_its_share(quick: bool) -> None:
    tasks = budget.by_importance([*OPS, *SWEEPS, task("one", "only")])
    all_s, start_s = budget.estimate_s(tasks, quick), budget.start_s(2) + 1.0
    chosen = budget.choose(tasks, start_s + 0.51 * all_s, quick, 2)
    names = [t.suite.name for t in chosen]
    assert names.count("ops") == 20 and 18 <= names.count("sweeps") <= 20 and names.count("one") == 1
    assert budget.estimate_s(chosen, quick) == pytest.approx(0.51 * all_s, rel=0.06)
    assert names == sorted(names, key=["ops", "sweeps", "one"].index)
    assert len(budget.choose(tasks, start_s + all_s * 1.001, quick, 2)) == len(tasks)


def test_too_small_budget_still_chooses_one_curve() -> None:
    chosen = budget.choose(budget.by_importance([*SWEEPS, *OPS]), 1.0, False, 1)
    assert [t.label for t in chosen] == [SWEEPS[at].label for at in (0, 8, 4)]


def test_a_suite_that_is_late_leaves_the_others_their_share() -> None:
    tasks = budget.by_importance([*OPS, *SWEEPS])  # 40 and 36 impls of 0.1 s: shares of 0.53 and 0.47
    deadlines = budget.Deadlines(tasks, 101.0, quick=False)
    # A case took 17.5 s: another would end at 52.5 of 52.6 s, a third after it.
    begun_s = (0.0, 35.0 / 2, 35.0, 52.5, 52.5)
    allowed = [deadlines.allows(task, s) for task, s in zip(tasks, begun_s, strict=False)]
    assert allowed == [True, True, True, False, False]
    # A curve that was begun is ended.
    allowed = [deadlines.allows(tasks[len(OPS) + at], s) for at, s in ((0, 90.0), (2, 99.9), (3, 99.9))]
    assert allowed == [True, True, False]


@pytest.mark.parametrize(("left_s", "allowed"), [(0.31, True), (0.29, False)])
def test_first_curve_of_a_suite_may_take_twice_its_share(left_s: float, allowed: bool) -> None:
    tasks = budget.by_importance([*OPS, *SWEEPS[:9]])
    deadlines = budget.Deadlines(tasks, 1.0 + left_s, quick=False)
    deadlines.allows(tasks[0], 0.0)
    assert deadlines.allows(tasks[-9], 0.0) == allowed  # 3 x 0.1 s: all that is left for the last suite


def test_progress_prints_the_time_left_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    result = made_up.result("collectives", "all_reduce", "c10d", {}, [1e-3])
    progress = Progress("so much", [1.0] * 5 + [2.0] * 5, clock=lambda: now_s)
    for seconds in [40.0] * 5 + [80.0] * 5:
        now_s += seconds
        progress.result(result)
    progress = Progress("so long", [1.0] * 5, now_s + 100.0, lambda: now_s)
    now_s += 70.0
    progress.result(result)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("left")]
    assert lines[:2] == ["result 2 of 10, about 9 min left", "result 4 of 10, about 7 min left"]
    assert lines[-1] == "1 result, about 30 s left"
