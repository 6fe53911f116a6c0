from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtbench.cli.run import options_of, run_command
from dtbench.engine import options, selection
from dtbench.engine.options import RunRequest
from dtbench.engine.tasks import list_tasks, matcher, remaining
from dtbench.errors import UsageError
from dtbench.suite import Case, RunOptions
from dtbench.suite.mesh import default_mesh, format_mesh, parse_mesh
from dtbench.suite.registry import Suite, WorldKind
from dtbench.tests import made_up

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
def test_words_of_the_command_line(parse: Callable[[str], object], text: str, value: object) -> None:
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
def test_words_that_are_refused(parse: Callable[[str], object], text: str, says: str) -> None:
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
def test_options_that_contradict(request_: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RunRequest(**request_)


@pytest.mark.parametrize("text", ["size=4KiB", "size=4 KiB", "size=4096", "'size=4 KiB' x", "b=2 size"])
def test_a_filter_takes_sizes_with_their_units(text: str) -> None:
    matches = matcher(text)
    assert matches("x all_reduce b=2 size=4096 n=1")
    assert not matches("x all_reduce size=40960 n=1") and not matches("x all_reduce bsize=64 n=4096")


def build(_world: Any) -> Any:
    raise AssertionError("listing builds nothing")


def a_suite(name: str, cases: list[Case], world: WorldKind = "ranks") -> Suite:
    return Suite(name, lambda plan: iter(cases), world, "")


CASE = Case("reduce", {"size": 4, "dim": "tp"}, {"core": build, "torch": build, "c10d": build})


def test_tasks_hold_the_wanted_impls_and_the_references() -> None:
    plan = RunOptions(mesh=PLAN.mesh, sizes_bytes=(1,), impls=("torch",))
    only_core = Case("x", {}, {"core": build})
    (task,) = list_tasks([a_suite("a", [CASE, only_core])], plan)
    assert task.impls == ("torch", "c10d")


def test_filter_looks_at_the_whole_label() -> None:
    other = Case("gather", {"size": 8}, {"core": build})
    suites = [a_suite("abc", [CASE, other])]
    assert [t.case.name for t in list_tasks(suites, PLAN, "SIZE=8")] == ["gather"]
    assert len(list_tasks(suites, PLAN, "abc")) == 2
    for text, names in (
        ("dim=tp reduce", ["reduce"]),  # each word on its own
        ("size=8 dim=tp", []),
        ("dim=t", []),  # a value is meant whole
        ("dim= 4", ["reduce"]),
        ("'size=4 dim=tp'", ["reduce"]),  # the whole
        ("'dim=tp size=4'", []),
        ("it's", []),
        ("gather\n'reduce size=4'", ["reduce", "gather"]),  # lines are alternatives
    ):
        if names:
            assert [t.case.name for t in list_tasks(suites, PLAN, text)] == names
        else:
            with pytest.raises(UsageError, match="matches none of their 2 cases"):
                list_tasks(suites, PLAN, text)
    with pytest.raises(
        UsageError, match="'zzz' matches none of their 2 cases; expected such as size=8, size=4"
    ):
        list_tasks(suites, PLAN, "zzz")


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


def test_resume_refuses_a_run_of_something_else() -> None:
    header = json.loads(json.dumps({"options": asdict(PLAN), "suites": ["a"], "launches": 1}))
    path = Path("x.jsonl")
    selection.refuse_other_run(made_up.read(header), PLAN, ["a"], 1, path)
    for plan, suites, launches, says in [
        (RunOptions((("dp", 2),), (1024,)), ["a"], 1, "its mesh is tp=2, the options ask for dp=2"),
        (RunOptions(PLAN.mesh, (1, 2)), ["a"], 1, "its sizes_bytes is 1024, the options ask for 1,2"),
        (PLAN, ["a", "b"], 1, "its suites is a, the options ask for a,b"),
        (PLAN, ["a"], 2, "its launches is 1, the options ask for 2"),
    ]:
        with pytest.raises(UsageError, match=says):
            selection.refuse_other_run(made_up.read(header), plan, suites, launches, path)


def suite_with(name: str, **declared: str) -> Suite:
    return Suite(name, lambda plan: iter(()), "ranks", "", options=declared)


def test_words_are_suites_and_options() -> None:
    words = ["a", "--mode", "even", "b.py", "--ops=x=y"]
    assert options.split_words(words) == (("a", "b.py"), {"mode": "even", "ops": "x=y"})
    assert options.split_words(["--last"]) == ((), {"last": ""})
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
def test_options_nobody_declared_are_refused(suite: Suite, values: dict[str, str], says: str) -> None:
    selection.refuse_foreign_options([suite_with("a", mode=""), suite_with("b")], {"mode": "x"})
    with pytest.raises(UsageError, match=says):
        selection.refuse_foreign_options([suite], values)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("-b 8 -e 64 -f 2", (8, 16, 32, 64)),
        ("-b 1K -e 1M -f 32", (2**10, 2**15, 2**20)),
        ("-b 8 -e 16", (8, 16)),
    ],
)
def test_sizes_are_taken_as_nccl_tests_takes_them(words: str, sizes: tuple[int, ...]) -> None:
    context = run_command.make_context("run", words.split())
    assert options_of(context.params.pop("words"), **context.params).sizes_bytes == sizes


@pytest.mark.parametrize("words", ["-b 8", "-e 8", "-b 8 -e 16 --size 1KiB"])
def test_half_a_range_of_sizes_is_refused(words: str) -> None:
    context = run_command.make_context("run", words.split())
    with pytest.raises(UsageError, match="-b and -e go together"):
        options_of(context.params.pop("words"), **context.params)
