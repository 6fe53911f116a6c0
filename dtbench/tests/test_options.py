"""Options of a run, the cases that they select, and the refinement of sweeps."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtbench.cli.run import options_of, run_command
from dtbench.engine import options, selection
from dtbench.engine.options import RunRequest
from dtbench.engine.refine import MAX_ADDED_SIZES, middles, sizes_between
from dtbench.engine.tasks import list_tasks, matcher, refinement_tasks, remaining
from dtbench.errors import UsageError
from dtbench.records.result import Result
from dtbench.records.run import read_run
from dtbench.stats import summarize
from dtbench.suite import Case, Param, RunOptions
from dtbench.suite.mesh import default_mesh, format_mesh, parse_mesh
from dtbench.suite.registry import Refinement, Suite, WorldKind
from dtbench.tests import made_up
from dtbench.tests.test_runs import kinds, run

PLAN = RunOptions(mesh=(("tp", 2),), sizes_bytes=(1024,))
IMPLS = partial(options.parse_list, allowed=("core", "torch"), option="--impl")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (options.parse_sizes, "64KiB", (65536,)),
        (options.parse_sizes, "1.5KiB,100B,100", (100, 1536)),
        (options.parse_sizes, "1gib", (2**30,)),
        (options.parse_sizes, "1KiB:16MiB:4x", tuple(1024 * 4**i for i in range(8))),
        (options.parse_sizes, "1KiB:5KiB", (1024, 2048, 4096)),  # the factor is 2 unless given
        (options.parse_sizes, "1KiB:4KiB:2x,3KiB", (1024, 2048, 3072, 4096)),
        (options.parse_dtypes, "bf16,float32, fp16,fp32", ("bfloat16", "float32", "float16")),
        (IMPLS, "torch,core,torch", ("torch", "core")),
        (options.parse_duration, "90s", 90.0),
        (options.parse_duration, "1.5 h", 5400.0),
        (parse_mesh, "dp=2, tp=4", (("dp", 2), ("tp", 4))),
        (lambda ranks: format_mesh(default_mesh(int(ranks))), "12", "dp=3,tp=4"),
        (lambda ranks: format_mesh(default_mesh(int(ranks))), "7", "tp=7"),
    ],
)
def test_option_types_parse_their_text(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (options.parse_sizes, "", "'' is not a size"),
        (options.parse_sizes, "64KB", "expected a number with B, KiB, MiB or GiB"),
        (options.parse_sizes, "0", "expected a whole number of bytes from 1"),
        (options.parse_sizes, "5000GiB", "to 2\\^40"),
        (options.parse_sizes, "1KiB:2KiB:1x", "'1x' in --size 1KiB:2KiB:1x is not a factor"),
        (options.parse_sizes, "1:2:3:4", "expected FIRST:LAST:FACTORx"),
        (options.parse_sizes, "2KiB:1KiB:2x", "swap them"),
        (options.parse_sizes, ",".join(map(str, range(1, 300))), "more than 200 sizes"),
        (options.parse_dtypes, "fp8", "--dtype fp8: 'fp8' is unknown"),
        (IMPLS, "core,foo", "--impl core,foo: 'foo' is unknown; expected one or more of core, torch"),
        (options.parse_duration, "3", "'3' has no unit: expected s, m or h"),
        (parse_mesh, "dp", "expected NAME=RANKS"),
        (parse_mesh, "dp=0", "expected"),
        (parse_mesh, "dp=2,dp=2", "twice"),
    ],
)
def test_option_types_refuse_invalid_text(parse: Callable[[str], object], text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"resume": True}, "--resume needs -o"),
        ({"launches": 0}, "--launches 0"),
        ({"timeout_s": float("nan")}, "--timeout nan"),
        ({"nproc": 0}, "--nproc 0"),
        ({"nproc": 2, "mesh": (("tp", 4),)}, "--mesh tp=4 has 4 ranks, --nproc asks for 2"),
        ({"max_size_bytes": 4096, "sizes_bytes": (1,)}, "--max-size and --size both say what to sweep"),
        ({"max_size_bytes": 1000}, "--max-size 1000: the sweep starts at 1 KiB"),
        (
            {"budget_s": 60.0, "launches": 2},
            "--budget measures in one launch as many cases as fit into a time",
        ),
        ({"budget_s": 60.0, "refine": True}, "--budget measures in one launch"),
    ],
)
def test_run_request_refuses_contradictory_options(request_: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RunRequest(**request_)


@pytest.mark.parametrize("text", ["size=4KiB", "size=4 KiB", "size=4096", "'size=4 KiB' x", "b=2 size"])
def test_a_filter_takes_sizes_with_their_units(text: str) -> None:
    labels = [
        f"x all_reduce {params}" for params in ("b=2 size=4096 n=1", "size=40960 n=1", "bsize=64 n=4096")
    ]
    assert [label for label in labels if matcher(text)(label)] == labels[:1]


def build(_world: Any) -> Any:
    raise AssertionError("listing builds nothing")


def a_suite(name: str, cases: list[Case], world: WorldKind = "ranks") -> Suite:
    return Suite(name, lambda plan: iter(cases), world, "")


CASE = Case("reduce", {"size": 4, "dim": "tp"}, {"core": build, "torch": build, "c10d": build})


def test_tasks_hold_the_wanted_impls_and_the_references() -> None:
    (task,) = list_tasks(
        [a_suite("a", [CASE, Case("x", {}, {"core": build})])], replace(PLAN, impls=("torch",))
    )
    assert task.impls == ("torch", "c10d")


TWO_CASES = [a_suite("abc", [CASE, Case("gather", {"size": 8}, {"core": build})])]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("SIZE=8", ["gather"]),
        ("abc", ["reduce", "gather"]),
        ("dim=tp reduce", ["reduce"]),  # each word on its own
        ("dim= 4", ["reduce"]),
        ("'size=4 dim=tp'", ["reduce"]),  # the whole
        ("gather\n'reduce size=4'", ["reduce", "gather"]),  # lines are alternatives
    ],
)
def test_filter_looks_at_the_whole_label(text: str, names: list[str]) -> None:
    assert [task.case.name for task in list_tasks(TWO_CASES, PLAN, text)] == names


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("size=8 dim=tp", "`dtbench list SUITE`"),
        ("dim=t", "the nearest are dim=tp, size=8"),  # a value is matched whole
        ("'dim=tp size=4'", "the nearest are size=4, dim=tp"),  # quoted words in their order
        ("it's", "the nearest are dim=tp, size=8"),
        ("zzz", "the nearest are size=8, size=4"),
    ],
)
def test_filter_that_matches_nothing_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"{text}.* matches none of their 2 cases; {hint}"):
        list_tasks(TWO_CASES, PLAN, text)


def test_a_suite_that_lists_a_case_twice_or_fails_is_refused() -> None:
    with pytest.raises(UsageError, match="has the case 'a reduce size=4 dim=tp' twice"):
        list_tasks([a_suite("a", [CASE, CASE])], PLAN)

    def fails(plan: RunOptions) -> Iterator[Case]:
        yield CASE
        raise KeyError("x")

    with pytest.raises(
        UsageError, match=r"the suite s failed to list its cases: KeyError: 'x' \(test_options.py:"
    ):
        list_tasks([Suite("s", fails, "ranks", "")], PLAN)

    with pytest.raises(UsageError, match=r"TypeError: it yielded 1, expected a dtbench\.suite\.Case"):
        list_tasks([Suite("s", lambda plan: iter([1]), "ranks", "")], PLAN)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="world='rank', expected one of ranks, simulated"):
        Suite("s", fails, "rank", "")  # type: ignore[arg-type]
    for impl_s in (0.5, (0.5,), (0.5, 0.0), ("1", "1")):
        with pytest.raises(ValueError, match="expected two numbers of seconds above 0"):
            Suite("mine", lambda options: iter(()), "simulated", "", impl_s=impl_s)  # type: ignore[arg-type]


def test_remaining_leaves_out_what_is_done_in_that_launch() -> None:
    tasks = list_tasks([a_suite("a", [CASE])], PLAN)
    done = frozenset({tasks[0].key("core", 0), tasks[0].key("torch", 0), tasks[0].key("c10d", 1)})
    assert [t.impls for t in remaining(tasks, done, 0)] == [("c10d",)]
    assert [t.impls for t in remaining(tasks, done, 1)] == [("core", "torch")]
    assert remaining(tasks, done | {tasks[0].key("c10d", 0)}, 0) == []


@pytest.mark.parametrize(
    ("plan", "suites", "launches", "backend", "says"),
    [
        (RunOptions((("dp", 2),), (1024,)), ["a"], 1, "gloo", "its mesh is tp=2, the options ask for dp=2"),
        (RunOptions(PLAN.mesh, (1, 2)), ["a"], 1, "gloo", "its sizes_bytes is 1024, the options ask for 1,2"),
        (PLAN, ["a", "b"], 1, "gloo", "its suites is a, the options ask for a,b"),
        (PLAN, ["a"], 2, "gloo", "its launches is 1, the options ask for 2"),
        (PLAN, ["a"], 1, "gloo:tcp", "its backend is gloo, the options ask for gloo:tcp"),
    ],
)
def test_resume_refuses_a_run_of_something_else(
    plan: Any, suites: Any, launches: int, backend: str, says: str
) -> None:
    header = made_up.read(
        json.loads(
            json.dumps(
                {
                    "options": asdict(PLAN),
                    "suites": ["a"],
                    "launches": 1,
                    "versions": {"backend": "gloo"},
                }
            )
        )
    )
    selection.refuse_other_run(header, PLAN, ["a"], 1, "gloo", Path("x.jsonl"))
    with pytest.raises(UsageError, match=says):
        selection.refuse_other_run(header, plan, suites, launches, backend, Path("x.jsonl"))


def suite_with(name: str, **declared: str) -> Suite:
    return Suite(name, lambda plan: iter(()), "ranks", "", options=declared)


def test_split_words_separates_suites_and_options() -> None:
    assert options.split_words(["a", "--mode", "even", "b.py", "--ops=x=y", "--last"]) == (
        ("a", "b.py"),
        {"mode": "even", "ops": "x=y", "last": ""},
    )
    with pytest.raises(UsageError, match="--mode is given twice"):
        options.split_words(["--mode", "a", "--mode=b"])


@pytest.mark.parametrize(
    ("suite", "values", "says"),
    [
        (suite_with("a", mode=""), {"nonsense": "1"}, "No such option '--nonsense'.* a has --mode"),
        (suite_with("a", mode=""), {"mode": ""}, "--mode needs a value"),
        (suite_with("a", mode=""), {"mode": "--other"}, "--mode needs a value"),
        (suite_with("a"), {"-x": "1"}, "No such option '-x'"),
    ],
)
def test_undeclared_suite_options_are_refused(suite: Suite, values: dict[str, str], says: str) -> None:
    selection.refuse_foreign_options([suite_with("a", mode=""), suite_with("b")], {"mode": "x"})
    with pytest.raises(UsageError, match=says):
        selection.refuse_foreign_options([suite], values)


def request_of(words: str) -> RunRequest:
    context = run_command.make_context("run", words.split())
    return options_of(context.params.pop("words"), **context.params)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("-b 8 -e 64 -f 2", (8, 16, 32, 64)),
        ("-b 1K -e 1M -f 32", (2**10, 2**15, 2**20)),
        ("-b 8 -e 16", (8, 16)),
    ],
)
def test_sizes_are_taken_as_nccl_tests_takes_them(words: str, sizes: tuple[int, ...]) -> None:
    assert request_of(words).sizes_bytes == sizes


@pytest.mark.parametrize("words", ["-b 8", "-e 8", "-b 8 -e 16 --size 1KiB"])
def test_b_and_e_must_be_given_together(words: str) -> None:
    with pytest.raises(UsageError, match="-b and -e require each other"):
        request_of(words)


BENDING_SUITE = str(Path(__file__).with_name("bending_suite.py"))
KIB = 1024
SIZES = tuple(KIB * 4**k for k in range(8))  # 1 KiB to 16 MiB
SWEEP = RunOptions((("dp", 2), ("tp", 2)), SIZES, refine=True)
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


@pytest.mark.parametrize(
    ("miss", "spread", "is_refined"),
    [(1.3, 1.2, True), (1.2, 1.2, False), (1.3, 1.3, False), (1.5, 1.3, True)],
)
def test_a_miss_within_the_spread_of_the_samples_counts_for_nothing(
    miss: float, spread: float, is_refined: bool
) -> None:
    times = {1024: 1.0, 4096: 1.6 * miss, 16384: 4.0}
    assert bool(middles({size: samples(seconds, spread) for size, seconds in times.items()})) == is_refined


# ------------------------------------------------------------------------------------- a suite's results


def swept_result(name: str, size: int, seconds: float, impl: str = "c10d", **more: Any) -> Result:
    taken = samples(seconds)
    fields = {"status": "ok", "time_s": summarize(taken), "samples_s": taken, "size_bytes": size} | more
    return Result("s", name, impl, WHERE | {"size": size} | fields.pop("params", {}), **fields)


def refined(curve: Curve, sizes: Iterable[int] = SIZES) -> list[int]:
    """Returns the sizes that refinement adds to the sweep of a curve, in the order of measuring."""
    added: list[Result] = []
    while True:
        swept = [swept_result("x", size, curve(size)) for size in sizes]
        wanted = [int(params["size"]) for _, params in sizes_between(SWEEP, swept, added)]
        assert len(wanted) == len(set(wanted)) and not set(wanted) & {r.size_bytes for r in swept + added}
        if not wanted:
            return [int(r.params["size"]) for r in added]
        added += [swept_result("x", size, curve(size)) for size in wanted]


def test_bisection_closes_in_on_a_jump_and_stops() -> None:
    added = refined(jump)
    assert (added[0], {*added[1:3]}) == (128 * KIB, {32 * KIB, 512 * KIB})  # the jump is at 100 KiB
    assert len(added) == MAX_ADDED_SIZES and 64 * KIB < added[3] < 128 * KIB


def test_only_the_sweep_of_all_groups_isolated_is_refined() -> None:
    for odd in ({"mode": "back_to_back"}, {"groups": "alone"}):
        swept = [swept_result("x", size, jump(size), params=odd) for size in SIZES]
        assert list(sizes_between(SWEEP, swept, [])) == []
    curves = [{"mesh_dim": "dp"}, {"dtype": "float32"}, {"dtype": "bfloat16"}]
    swept = [swept_result(n, s, jump(s), params=p) for n in "ab" for p in curves for s in SIZES]
    assert Counter(
        (name, params["mesh_dim"], params.get("dtype")) for name, params in sizes_between(SWEEP, swept, [])
    ) == {(name, curve.get("mesh_dim", "tp"), curve.get("dtype")): 3 for name in "ab" for curve in curves}


def test_the_impl_that_misses_most_decides_and_failures_have_no_say() -> None:
    straight = [swept_result("x", s, line(s), "torch") for s in SIZES]
    bent = [swept_result("x", s, jump(s), "core") for s in SIZES]
    assert [len(list(sizes_between(SWEEP, swept, []))) for swept in (straight + bent, straight)] == [3, 0]
    failed = [
        swept_result("x", 32 * KIB, 1.0, i, status="failed", time_s=None, samples_s=())
        for i in ("core", "torch")
    ]
    remaining_sizes = {params["size"] for _, params in sizes_between(SWEEP, straight + bent, failed)}
    assert remaining_sizes == {128 * KIB, 512 * KIB}  # not the failed one again


def test_the_time_from_the_last_arrival_decides() -> None:
    def late(size: int) -> Result:
        """Ranks 0 and 2 wait long for the others, from 256 KiB on; the transfers are a line."""
        times = {rank: line(size) + (rank in "02" and size >= 256 * KIB) for rank in "0123"}
        by_rank = {rank: samples(seconds) for rank, seconds in times.items()}
        return swept_result("x", size, max(times.values()), rank_samples_s=by_rank)

    assert list(sizes_between(SWEEP, [late(size) for size in SIZES], [])) == []
    assert (
        list(sizes_between(SWEEP, [swept_result("x", size, late(size).samples_s[1]) for size in SIZES], []))
        != []
    )


# ------------------------------------------------------------------------------------- what is left to do


def case_of(_plan: RunOptions, name: str, params: Mapping[str, Param]) -> Case:
    return Case(name, {**params, "size": int(params["size"]) // 4 * 4}, {"core": build, "torch": build})


def refined_suite(wanted: Any = sizes_between) -> Suite:
    cases = [case_of(SWEEP, "x", WHERE | {"size": size}) for size in SIZES]
    return Suite("s", lambda plan: iter(cases), "ranks", "", refinement=Refinement(wanted, case_of))


def test_the_first_launch_decides_and_the_others_follow() -> None:
    first = [swept_result("x", size, jump(size), "core") for size in SIZES]
    tasks = refinement_tasks([refined_suite()], SWEEP, {}, first, launch=0)
    assert {(task.case.params["size"], task.impls) for task in tasks} == {
        (size * KIB, ("core", "torch")) for size in (32, 128, 512)
    }
    assert refinement_tasks([refined_suite()], SWEEP, {}, first, launch=1) == []  # nothing was added yet
    added = [swept_result("x", 32 * KIB, 1e-4, "core"), swept_result("x", 32 * KIB, 1e-4, "torch")]
    second = [swept_result("x", size, line(size), "core", launch=1) for size in SIZES]
    for launch in (0, 1):  # in the first beside what it wants now, in case an impl is still to be measured
        tasks = refinement_tasks([refined_suite()], SWEEP, {}, first + added + second, launch)
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
    assert (list(plan.sizes_bytes), plan.refine, plan.sizes_chosen) == (sizes, True, False)


@pytest.mark.parametrize(
    ("request_", "is_refined"),
    [
        ({"max_size_bytes": 4096, "refine": False}, False),
        ({"sizes_bytes": (7,), "refine": True}, True),
        ({}, False),
    ],
)
def test_only_a_sweep_without_chosen_sizes_is_refined_by_default(
    request_: dict[str, Any], is_refined: bool
) -> None:
    assert RunRequest(**request_).resolve("cpu", 4).refine == is_refined


# ------------------------------------------------------------------------------------- real ranks


def test_real_ranks_refine_in_the_first_launch_and_repeat_it_in_the_next(here: Path) -> None:
    args = (BENDING_SUITE, "--nproc", "2", "--max-size", "64KiB", "--launches", "2", "--filter", "bends")
    done = run(*args)
    assert done.returncode == 5 and done.stderr == ""  # the broken size fails, and the run goes on
    whole = read_run("x.jsonl")
    assert whole.complete and kinds()[-1] == "end"
    sizes: dict[tuple[str, int], list[int]] = {}
    for r in whole.results:
        sizes.setdefault((r.impl, r.launch), []).append(int(r.params["size"]))
    swept, added = sizes["c10d", 0][:4], sizes["c10d", 0][4:]
    assert (swept, {*added[:3]}) == ([KIB, 4 * KIB, 16 * KIB, 64 * KIB], {2 * KIB, 8 * KIB, 32 * KIB})
    assert len(added) == MAX_ADDED_SIZES and added[3] in range(2 * KIB + 256, 32 * KIB, 256)
    for key in (("core", 0), ("c10d", 1), ("core", 1)):
        assert set(sizes[key]) == {*swept, *added}
    failed = [(r.impl, r.params["size"], r.launch) for r in whole.results if r.status != "ok"]
    assert failed == [("c10d", 8 * KIB, 0), ("c10d", 8 * KIB, 1)]
    assert "more results to measure" in done.stdout

    # Cut within the refinement of the first launch: the sweep is whole, and one impl of an added size there.
    Path("x.jsonl").write_bytes(
        b"".join(Path("x.jsonl").read_bytes().splitlines(keepends=True)[: 1 + 2 * 4 + 3])
    )
    resumed = run(*args, "--resume")
    assert resumed.returncode == 5 and resumed.stderr == ""
    back = read_run("x.jsonl")
    assert back.complete and back.results[:11] == whole.results[:11]
    by_launch = [{r.case_key for r in back.results if r.launch == launch} for launch in (0, 1)]
    assert by_launch[0] == by_launch[1] and len(by_launch[0]) == 2 * (4 + MAX_ADDED_SIZES)


def test_case_of_another_world_is_listed_with_it_and_unknown_worlds_are_refused() -> None:
    fake = replace(CASE, name="fake", world="simulated")
    tasks = list_tasks([a_suite("a", [CASE, fake])], PLAN)
    assert [(task.case.name, task.world) for task in tasks] == [("reduce", "ranks"), ("fake", "simulated")]
    with pytest.raises(ValueError, match="got world='gpu', expected one of ranks, simulated"):
        replace(CASE, world="gpu")
