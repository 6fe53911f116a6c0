"""Where a sweep is refined: against curves whose bends are known, and on real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dtbench.engine.options import RunRequest
from dtbench.engine.refine import MAX_ADDED_SIZES, middles, sizes_between
from dtbench.engine.tasks import refinement_tasks, remaining
from dtbench.records.result import Result
from dtbench.records.run import read_run
from dtbench.stats import summarize
from dtbench.suite import Case, Param, RunOptions
from dtbench.suite.registry import Refinement, Suite
from dtbench.tests.test_runs import here, kinds, run  # noqa: F401 - `here` is a fixture

SUITE = str(Path(__file__).with_name("bending_suite.py"))
KIB = 1024
SIZES = tuple(KIB * 4**k for k in range(8))  # 1 KiB to 16 MiB
PLAN = RunOptions((("dp", 2), ("tp", 2)), SIZES, refine=True)
WHERE: dict[str, Param] = {"mesh_dim": "tp", "groups": "together", "mode": "isolated"}
Curve = Callable[[int], float]


def line(size: int) -> float:
    return 1e-4 + size / 1e9


def jump(size: int) -> float:
    return 1e-4 if size < 100 * KIB else 1e-3


def samples(seconds: float, spread: float = 1.0) -> tuple[float, ...]:
    """Five around `seconds`, whose upper quartile is `spread` times the lower one."""
    return tuple(seconds * spread**k for k in (-0.5, 0, 0.5, 1, 1.5))


# ------------------------------------------------------------------------------------- one curve


def test_both_sides_of_a_missed_point_are_halved() -> None:
    sizes = middles({size: samples(jump(size)) for size in SIZES})
    # Missed are 64 KiB and 256 KiB; each is a fifth of the way between its neighbours, 16 to 256 KiB and
    # 64 to 1024 KiB, where a line gives 2.8 times the time before the jump.
    assert sorted(sizes) == [32 * KIB, 128 * KIB, 512 * KIB]
    before, after = math.log(2.8), math.log(10 / 2.8)
    assert [sizes[s * KIB] for s in (32, 128, 512)] == pytest.approx([before, before + after, after])


def test_a_miss_within_the_spread_of_the_samples_counts_for_nothing() -> None:
    def resolves(miss: float, spread: float) -> bool:
        times = {1024: 1.0, 4096: 1.6 * miss, 16384: 4.0}
        return bool(middles({size: samples(t, spread) for size, t in times.items()}))

    assert resolves(1.3, 1.2) and not resolves(1.2, 1.2)
    assert not resolves(1.3, 1.3) and resolves(1.5, 1.3)


# ------------------------------------------------------------------------------------- a suite's results


def result(name: str, size: int, seconds: float, impl: str = "c10d", **more: Any) -> Result:
    params = WHERE | {"size": size} | more.pop("params", {})
    taken = samples(seconds)
    fields = {"status": "ok", "time_s": summarize(taken), "samples_s": taken, "size_bytes": size}
    return Result("s", name, impl, params, **fields | more)


def refined(curve: Curve, sizes: Iterable[int] = SIZES) -> list[int]:
    """What is added to the sweep of a curve, in the order of measuring."""
    added: list[Result] = []
    while True:
        swept = [result("x", size, curve(size)) for size in sizes]
        wanted = [int(params["size"]) for _, params in sizes_between(PLAN, swept, added)]
        assert len(wanted) == len(set(wanted)) and not set(wanted) & {r.size_bytes for r in swept + added}
        if not wanted:
            return [int(r.params["size"]) for r in added]
        added += [result("x", size, curve(size)) for size in wanted]


def test_bisection_closes_in_on_a_jump_and_stops() -> None:
    added = refined(jump)
    assert len(added) == MAX_ADDED_SIZES
    assert added[0] == 128 * KIB and sorted(added[1:3]) == [32 * KIB, 512 * KIB]  # the jump is at 100 KiB
    assert 64 * KIB < added[3] < 128 * KIB


def test_only_the_sweep_of_all_groups_isolated_is_refined() -> None:
    for odd in ({"mode": "back_to_back"}, {"groups": "alone"}):
        swept = [result("x", size, jump(size), params=odd) for size in SIZES]
        assert list(sizes_between(PLAN, swept, [])) == []
    curves = [{"mesh_dim": "dp"}, {"dtype": "float32"}, {"dtype": "bfloat16"}]
    swept = [result(n, s, jump(s), params=p) for n in "ab" for p in curves for s in SIZES]
    wanted = list(sizes_between(PLAN, swept, []))
    assert len(wanted) == 2 * 3 * 3
    assert {name for name, _ in wanted} == {"a", "b"}
    assert {params["mesh_dim"] for _, params in wanted} == {"tp", "dp"}
    assert {params.get("dtype") for _, params in wanted} == {None, "float32", "bfloat16"}


def test_the_impl_that_misses_most_decides_and_failures_have_no_say() -> None:
    straight = [result("x", s, line(s), "torch") for s in SIZES]
    bent = [result("x", s, jump(s), "core") for s in SIZES]
    assert len(list(sizes_between(PLAN, straight + bent, []))) == 3
    assert len(list(sizes_between(PLAN, straight, []))) == 0
    failed = [
        result("x", 32 * KIB, 1.0, i, status="failed", time_s=None, samples_s=()) for i in ("core", "torch")
    ]
    again = [params["size"] for _, params in sizes_between(PLAN, straight + bent, failed)]
    assert sorted(again) == [128 * KIB, 512 * KIB]  # not the failed one again


def test_the_time_from_the_last_arrival_decides() -> None:
    def late(size: int) -> Result:
        """Ranks 0 and 2 wait long for the others, from 256 KiB on; the transfers are a line."""
        wait = 1.0 if size >= 256 * KIB else 0.0
        times = {rank: line(size) + (wait if rank in "02" else 0.0) for rank in "0123"}
        return result(
            "x", size, max(times.values()), rank_samples_s={r: samples(t) for r, t in times.items()}
        )

    assert list(sizes_between(PLAN, [late(size) for size in SIZES], [])) == []
    without = [result("x", size, late(size).samples_s[1]) for size in SIZES]
    assert list(sizes_between(PLAN, without, [])) != []


# ------------------------------------------------------------------------------------- what is left to do


def build(_world: Any) -> Any:
    raise AssertionError("listing builds nothing")


def case_of(_plan: RunOptions, name: str, params: Mapping[str, Param]) -> Case:
    size = int(params["size"]) // 4 * 4
    return Case(name, {**params, "size": size}, {"core": build, "torch": build})


def a_suite(wanted: Any = sizes_between) -> Suite:
    cases = [case_of(PLAN, "x", WHERE | {"size": size}) for size in SIZES]
    return Suite("s", lambda plan: iter(cases), "ranks", "", refinement=Refinement(wanted, case_of))


def test_the_first_launch_decides_and_the_others_follow() -> None:
    first = [result("x", size, jump(size), "core") for size in SIZES]
    tasks = refinement_tasks([a_suite()], PLAN, {}, first, launch=0)
    assert sorted(t.case.params["size"] for t in tasks) == [32 * KIB, 128 * KIB, 512 * KIB]
    assert {t.impls for t in tasks} == {("core", "torch")}
    assert refinement_tasks([a_suite()], PLAN, {}, first, launch=1) == []  # nothing was added yet
    added = [result("x", 32 * KIB, 1e-4, "core"), result("x", 32 * KIB, 1e-4, "torch")]
    second = [result("x", size, line(size), "core", launch=1) for size in SIZES]
    for launch in (0, 1):  # in the first beside what it wants now, in case an impl is still to be measured
        tasks = refinement_tasks([a_suite()], PLAN, {}, first + added + second, launch)
        assert (32 * KIB in {t.case.params["size"] for t in tasks}) and (len(tasks) == 1) == (launch == 1)
    (task,) = tasks
    assert task.case.params["size"] == 32 * KIB
    assert remaining([task], frozenset({r.key for r in added}), 1) == [task]


# ------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("last", "sizes"),
    [
        (1024, [1024]),
        (1025, [1024, 1025]),
        (4096, [1024, 4096]),
        (5000, [1024, 4096, 5000]),
        (16 * 2**20, list(SIZES)),
    ],
)
def test_max_size_ends_the_sweep(last: int, sizes: list[int]) -> None:
    plan = RunRequest(max_size_bytes=last).resolve("cpu", 4)
    assert list(plan.sizes_bytes) == sizes and plan.refine and not plan.sizes_chosen
    assert not RunRequest(max_size_bytes=last, refine=False).resolve("cpu", 4).refine
    assert RunRequest(sizes_bytes=(7,), refine=True).resolve("cpu", 4).refine
    assert not RunRequest().resolve("cpu", 4).refine


# ------------------------------------------------------------------------------------- real ranks


def test_real_ranks_refine_in_the_first_launch_and_repeat_it_in_the_next(here: Path) -> None:  # noqa: F811
    args = (SUITE, "--nproc", "2", "--max-size", "64KiB", "--launches", "2", "--filter", "bends")
    done = run(*args)
    assert done.returncode == 5 and done.stderr == ""  # the broken size fails, and the run goes on
    whole = read_run("x.jsonl")
    assert whole.complete and kinds()[-1] == "end"
    sizes: dict[tuple[str, int], list[int]] = {}
    for r in whole.results:
        sizes.setdefault((r.impl, r.launch), []).append(int(r.params["size"]))
    swept, added = sizes["c10d", 0][:4], sizes["c10d", 0][4:]
    assert swept == [KIB, 4 * KIB, 16 * KIB, 64 * KIB]
    assert sorted(added[:3]) == [2 * KIB, 8 * KIB, 32 * KIB] and len(added) == MAX_ADDED_SIZES
    assert 2 * KIB < added[3] < 32 * KIB and added[3] % 256 == 0
    for key in (("core", 0), ("c10d", 1), ("core", 1)):
        assert set(sizes[key]) == {*swept, *added}
    failed = [(r.impl, r.params["size"], r.launch) for r in whole.results if r.status != "ok"]
    assert failed == [("c10d", 8 * KIB, launch) for launch in (0, 1)]
    assert "more results to measure" in done.stdout

    # Cut within the refinement of the first launch: the sweep is whole, and one impl of an added size there.
    lines = Path("x.jsonl").read_bytes().splitlines(keepends=True)
    Path("x.jsonl").write_bytes(b"".join(lines[: 1 + 2 * 4 + 3]))
    resumed = run(*args, "--resume")
    assert resumed.returncode == 5 and resumed.stderr == ""
    back = read_run("x.jsonl")
    assert back.complete and back.results[:11] == whole.results[:11]
    by_launch = [{r.case_key for r in back.results if r.launch == launch} for launch in (0, 1)]
    assert by_launch[0] == by_launch[1] and len(by_launch[0]) == 2 * (4 + MAX_ADDED_SIZES)
