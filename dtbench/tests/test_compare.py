"""Verdicts on made-up launches whose difference is known, and no verdict where none can be had."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtbench.comparison.run_comparison import Comparison, compare_runs
from dtbench.records.comparison import Change, ComparedCase
from dtbench.records.result import Result, Run
from dtbench.stats import summarize
from dtbench.tests import made_up


def result(
    seconds: float, launch: int = 0, suite: str = "dispatch", name: str = "add", **changes: Any
) -> Result:
    """A launch whose minimum is `seconds` and whose p25 is 10% more."""
    fields: dict[str, Any] = {
        "impl": "core",
        "params": {"mesh": "8"},
        "status": "ok",
        "time_s": summarize([seconds, *[1.1 * seconds] * 3, 4 * seconds]),
        "clock": "host",
    }
    return Result(suite, name, launch=launch, **fields | changes)


def run(*results: Result, path: str = "run.jsonl", complete: bool = True, **header: Any) -> Run:
    return Run(Path(path), made_up.read({"run_id": path, **header}), results, complete)


def launches(seconds: Sequence[float], path: str = "run.jsonl", **changes: Any) -> Run:
    return run(*(result(s, i, **changes) for i, s in enumerate(seconds)), path=path)


def spread(n: int, centre: float = 8e-6, width: float = 0.005) -> list[float]:
    """n launches evenly spread around a centre."""
    return [centre * (1 + width * (2 * i / (n - 1) - 1)) for i in range(n)]


def only(comparison: Comparison) -> ComparedCase:
    (row,) = comparison.rows
    return row


def verdict(base: Sequence[float], new: Sequence[float], **changes: Any) -> tuple[str, int]:
    comparison = compare_runs([launches(base, "base", **changes)], [launches(new, "new", **changes)])
    return only(comparison).verdict, comparison.exit_code


# --------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("base", "new", "expected", "code"),
    [
        *((spread(n), spread(n, 8.4e-6), "slower", 1) for n in (5, 10, 30)),  # 5%
        *((spread(n, 8.4e-6), spread(n), "faster", 0) for n in (5, 10, 30)),
        # Four launches decide a change beyond what launches of one build differ by, and no smaller one.
        *((spread(n), spread(4, 20e-6), "inconclusive", 3) for n in (4, 10)),
        *((spread(n), spread(4, 80e-6), "slower", 1) for n in (4, 10)),
        ([8e-6], [80e-6], "slower", 1),
        ([80e-6], [8e-6], "faster", 0),
        # Sameness has to be shown: by an interval of 97%, not by one of 90%.
        (spread(5), spread(5), "same", 0),
        (spread(4), spread(4), "same", 0),
        (spread(3), spread(3), "inconclusive", 3),
        (spread(5, width=0.2), spread(5, width=0.2), "inconclusive", 3),
        (spread(10), spread(10, 8e-6 * 1.015), "same", 0),  # below 2%
        # 15% are below a reading of the clock where they are 0.15 us.
        (spread(10, 1e-6), spread(10, 1.15e-6), "inconclusive", 3),
        (spread(10, 1e-6), spread(10, 1.25e-6), "slower", 1),
        (spread(10, 1.25e-6), spread(10, 1e-6), "faster", 0),
        ([0.0] * 5, spread(5), "inconclusive", 3),  # 0 s is not a valid time
        # Launches that overlap.
        ([8e-6, 8.1e-6, 8.2e-6, 8.3e-6, 9.5e-6], [8.2e-6, 8.4e-6, 8.5e-6, 8.6e-6, 8.9e-6], "inconclusive", 3),
    ],
)
def test_a_verdict_is_what_launches_show(
    base: list[float], new: list[float], expected: str, code: int
) -> None:
    assert verdict(base, new) == (expected, code)


def test_row_has_the_ratio_its_interval_and_the_times() -> None:
    row = only(compare_runs([launches(spread(5), "base")], [launches(spread(5, 8.8e-6), "new")]))
    assert row.effect and row.low is not None and row.high is not None and row.low < 1.1 < row.high
    figures = (row.ratio, row.effect.confidence, row.effect.p_slower, row.base_s, row.head_s)
    assert figures == pytest.approx((1.1, 1 - 2 * 4 / 252, 1 / 252, 8e-6, 8.8e-6))
    assert (row.base_launches, row.head_launches, row.estimator) == (5, 5, "min")


def test_single_launches_are_inconclusive_with_a_note() -> None:
    comparison = compare_runs([launches([8e-6], "base")], [launches([8e-6], "new")])
    row, effect = only(comparison), Change(ratio=1.0, p_slower=1.0, p_faster=1.0)
    assert (row.verdict, row.effect, comparison.exit_code) == ("inconclusive", effect, 3)
    assert any("as few as 1 launch" in note and "--launches 5" in note for note in comparison.notes)


def test_identical_launches_are_rarely_called_different() -> None:
    """The rule on noise between launches of 2%: at most 1% false alarms, and 10% is always found."""
    rng = np.random.default_rng(11)

    def side(factor: float = 1.0) -> list[float]:
        return (8e-6 * factor * rng.lognormal(0, 0.02, 10)).tolist()

    assert sum(verdict(side(), side())[0] in ("slower", "faster") for _ in range(300)) <= 6
    assert {verdict(side(), side(1.1))[0] for _ in range(50)} == {"slower"}


# ------------------------------------------------------------------------------------ drift


def arms(factors: dict[str, float], path: str, count: int, suite: str = "dispatch") -> list[Result]:
    """So many launches of each implementation, by what it takes of 8 us."""
    return [
        result(s * factor, i, suite, impl=impl)
        for impl, factor in factors.items()
        for i, s in enumerate(spread(count) if count > 1 else [8e-6])
    ]


ALL_SLOWER = {"core": 1.3, "torch": 1.3, "local": 1.3}


@pytest.mark.parametrize(
    ("moved", "slower", "drifts"),
    [
        (ALL_SLOWER, set(), "1.30x slower in dispatch"),
        ({impl: 1 / f for impl, f in ALL_SLOWER.items()}, set(), "1.30x faster in dispatch"),
        ({"core": 1.03, "local": 1.03}, set(), "1.03x slower in dispatch"),
        # The core is slower for another reason, too.
        (
            ALL_SLOWER | {"core": 2.0},
            {"core"},
            "1.30x slower in dispatch",
        ),
        ({"core": 1.3, "torch": 1.3, "local": 1.0}, {"core", "torch"}, ""),
        ({"core": 1.0, "torch": 1.0, "local": 1.3}, {"local"}, ""),  # alone
        ({"core": 1.3, "torch": 1.3}, {"core", "torch"}, ""),  # nothing tells the machine from the code
        ({"core": 1.3}, {"core"}, ""),
        ({"local": 1.3}, {"local"}, ""),
        ({"core": 1.3, "local": 0.7}, {"core"}, ""),
    ],
)
@pytest.mark.parametrize("count", [5, 1])
def test_change_shared_with_plain_torch_is_drift(
    moved: dict[str, float], slower: set[str], drifts: str, count: int
) -> None:
    base = run(*arms(dict.fromkeys(moved, 1.0), "a", count), path="a")
    comparison = compare_runs([base], [run(*arms(moved, "b", count), path="b")])
    found = {row.impl for row in comparison.rows if row.verdict == "slower"}
    assert found == (slower if count == 5 else set())
    assert comparison.exit_code == (1 if found else 3)
    if count == 5 or "1.03x" not in drifts:
        note = f"the machine drifted: plain torch and all other implementations became {drifts};"
        assert (note in " ".join(comparison.notes)) == bool(drifts)


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "inconclusive"), (2.0, "slower")])
def test_a_suite_without_plain_torch_is_judged_by_the_drift_of_the_others(
    factor: float, verdict: str
) -> None:
    suites = {
        "dispatch": ALL_SLOWER,
        "steady": dict.fromkeys(ALL_SLOWER, 1.0),
        "redistribute": {"core": factor},
    }
    base, new = (
        run(
            *(r for s, of in suites.items() for r in arms({i: f**p for i, f in of.items()}, "", 5, s)),
            path=path,
        )
        for path, p in (("a", 0), ("b", 1))
    )
    rows = {(row.suite, row.impl): row for row in compare_runs([base], [new]).rows}
    assert rows["redistribute", "core"].verdict == verdict
    assert {row.verdict for (suite, _), row in rows.items() if suite == "steady"} == {"same"}
    assert rows["dispatch", "core"].reason == "the machine drifted: plain torch became 1.30x slower, too"


def test_a_run_given_twice_counts_once() -> None:
    comparison = compare_runs([launches([8e-6], "a")] * 5, [launches([16e-6], "b")] * 5)
    row, reason = only(comparison), "cannot tell: one launch on each side; use --launches 5 or more"
    assert (row.verdict, row.base_launches, row.reason) == ("inconclusive", 1, reason)
    assert any(note.startswith("8 results ignored: the same run is given twice") for note in comparison.notes)


def test_an_interval_without_width_is_none() -> None:
    row = only(compare_runs([launches([8e-6] * 5, "a")], [launches([8e-6] * 5, "b")]))
    assert (row.effect.low, row.effect.high, row.effect.confidence) == (None, None, None)
    assert (row.low, row.verdict) == (None, "same")


# ---------------------------------------------------------------------- missing and failed


def failed(status: str = "failed", launch: int = 0) -> Result:
    return result(8e-6, launch, status=status, reason="boom", time_s=None)


def good(launch: int = 0, **changes: Any) -> Result:
    return result(8e-6, launch, **changes)


@pytest.mark.parametrize(
    ("base", "new", "expected", "reason", "code"),
    [
        ([good()], [failed()], "failed", "failed: boom", 1),
        ([good()], [failed("wrong")], "failed", "wrong: boom", 1),
        ([good()], [good(), failed(launch=1)], "failed", "failed: boom", 1),
        ([good()], [], "missing", "not measured in head", 4),
        ([good()], [failed("skipped")], "missing", "skipped: boom", 4),
        ([failed()], [good()], "new", "no valid time in base: failed: boom", 4),
        ([failed()], [failed()], "failed", "failed: boom", 4),
        ([failed()], [], "missing", "timed neither in base nor in head", 4),
        ([failed("skipped")], [good()], "new", "skipped in base", 4),
        ([], [good()], "new", "", 4),
        ([], [failed()], "failed", "failed: boom", 4),
    ],
)
def test_a_case_that_is_not_on_both_sides(
    base: list[Result], new: list[Result], expected: str, reason: str, code: int
) -> None:
    comparison = compare_runs([run(*base, path="base")], [run(*new, path="new")])
    row = only(comparison)
    assert (row.verdict, row.reason) == (expected, reason) and comparison.exit_code == code
    # Beside a case that is the same, what cannot be decided is inconclusive and not "nothing".
    same = [result(s, i, name="same") for i, s in enumerate(spread(5))]
    beside = compare_runs([run(*base, *same, path="base")], [run(*new, *same, path="new")])
    assert beside.exit_code == (1 if code == 1 else 0 if expected == "new" else 3)


def test_cases_are_matched_by_impl_and_params() -> None:
    base = [good(), good(params={"mesh": "2x4"}), good(impl="torch")]
    rows = compare_runs([run(*base, path="a")], [run(good(), path="b")]).rows
    assert [row.verdict for row in rows] == ["inconclusive", "missing", "missing"]
    assert [row.key for row in rows] == [result.case_key for result in base]


# ------------------------------------------------------------------------------------ notes


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"ranks": [{"rank": 0, "host": "b"}]}, "the hosts differ: unknown in base, b in head"),
        (
            {"machine": {"cpu": {"model": "Fast", "usable_cores": 4}}},
            "the CPU differs: unknown in base, Fast, 4 cores",
        ),
        (
            {"machine": {"gpus": [{"name": "H", "power_limit_W": 350}]}},
            "the GPUs differ: unknown in base, H at 350 W",
        ),
        ({"versions": {"torch": "2.11.0"}}, "the versions differ: unknown in base, torch 2.11.0 in head"),
        ({"mesh": {"dim_names": ["dp"], "shape": [4]}}, "the mesh differs: unknown in base, dp=4 in head"),
        ({"options": {"dtypes": ["bfloat16"]}}, "the dtypes differ: unknown in base, bfloat16 in head"),
        ({"options": {"quick": True}}, "one side is a quick run: full in base, --quick in head"),
        ({"env": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs: unset in base, Ring in head"),
    ],
)
def test_a_difference_in_provenance_is_noted(changes: dict[str, Any], note: str) -> None:
    same = [result(s, i) for i, s in enumerate(spread(5))]
    notes = compare_runs([run(*same, path="a")], [run(*same, path="b", **changes)]).notes
    assert [n for n in notes if n.startswith(note)] == list(notes) and len(notes) == 1


@pytest.mark.parametrize(
    ("base", "head", "note"),
    [
        (run(good(), complete=False), run(good(), complete=False), "is incomplete"),
        (run(good()), run(good()), "the same run is on both sides"),
        (
            run(good(), path="a"),
            run(good(reason="the GPU of rank 1 was throttled: sw_power_cap"), path="b"),
            "1 result with a caveat",
        ),
        (run(failed("skipped"), path="a"), run(failed("skipped"), path="b"), "1 case left out: skipped"),
        (launches(spread(5), "base"), launches(spread(5), "new"), ""),
    ],
)
def test_weakness_of_a_comparison_is_noted(base: Run, head: Run, note: str) -> None:
    notes = compare_runs([base], [head]).notes
    assert sum(note in text for text in notes) == 1 if note else notes == ()


_MACHINE: dict[str, Any] = {
    "machine": {
        "cpu": {"model": "Slow", "usable_cores": 4},
        "gpus": [{"name": "H100", "power_limit_W": 700}],
    },
    "versions": {"backend": "nccl"},
    "mesh": {"dim_names": ["dp"], "shape": [2]},
    "ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "a"}],
    "env": {"OMP_NUM_THREADS": "1"},
    "options": {"device_type": "cuda"},
}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"machine": {"cpu": {"model": "Fast"}}}, "CPU Slow in base, Fast in head"),
        ({"machine": {"cpu": {"usable_cores": 8}}}, "CPU cores 4 in base, 8 in head"),
        ({"machine": {"gpus": [{"name": "A100"}]}}, "GPU H100 in base, A100 in head"),
        (
            {"machine": {"gpus": [{"name": "H100", "power_limit_W": 350}]}},
            "GPU power limit 700 W in base, 350 W in head",
        ),
        ({"mesh": {"dim_names": ["tp"], "shape": [2]}}, "mesh dp=2 in base, tp=2 in head"),
        (
            {"ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]},
            "hosts 1 in base, 2 in head",
        ),
        ({"ranks": [{"rank": 0, "host": "a"}]}, "ranks 2 in base, 1 in head"),
        ({"env": {"OMP_NUM_THREADS": "8"}}, "OMP_NUM_THREADS 1 in base, 8 in head"),
        ({"env": {"NCCL_ALGO": "Ring"}}, "OMP_NUM_THREADS 1 in base, unset in head"),
        ({"options": {"device_type": "cpu"}}, "device type cuda in base, cpu in head"),
    ],
)
@pytest.mark.parametrize(
    "times", [spread(5, 16e-6), spread(5), [80e-6]], ids=["slower", "same", "one launch"]
)
def test_different_machines_are_inconclusive(
    changes: dict[str, Any], difference: str, times: list[float]
) -> None:
    base = run(*(result(s, i) for i, s in enumerate(spread(5)[: len(times)])), path="a", **_MACHINE)
    head = run(*(result(s, i) for i, s in enumerate(times)), path="b", **_MACHINE | changes)
    comparison, reason = compare_runs([base], [head]), f"the machines differ: {difference}"
    row = only(comparison)
    assert (row.verdict, row.reason, comparison.exit_code) == ("inconclusive", reason, 3)
    assert comparison.summary.startswith(f"cannot tell: {reason} (1 ")
    assert f"cannot tell: {reason}" in repr(comparison)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"machine": {}},  # what one side does not hold is no difference
        {"env": {}},
        {"ranks": [{"rank": 0, "host": "c"}, {"rank": 1, "host": "c"}]},  # another node of the cluster
        {"versions": {"backend": "nccl", "torch": "3.0"}},
        {"versions": {"backend": "nccl2"}},  # a backend is what two runs may be compared for
    ],
)
def test_machines_that_may_be_alike_are_compared(changes: dict[str, Any]) -> None:
    base, head = (
        run(*(result(s, i) for i, s in enumerate(spread(5, centre))), path=path, **header)
        for path, centre, header in (("a", 8e-6, _MACHINE), ("b", 16e-6, _MACHINE | changes))
    )
    comparison = compare_runs([base], [head])
    assert (only(comparison).verdict, comparison.exit_code, comparison.machines_differ) == ("slower", 1, "")


@pytest.mark.parametrize(
    ("new", "sentence", "column", "code"),
    [
        (460, "2 times, +0.0% to 460x slower, 1 slower, 1 inconclusive", "460x slower", 1),
        (0.1, "2 times, 10.0x faster to +0.0%, 1 inconclusive, 1 faster", "10.0x faster", 3),
        (
            1.03,
            "cannot tell: one launch on each side; use --launches 5 or more (2 times, +0.0% to +3.0%)",
            "+3.0%",
            3,
        ),
    ],
)
def test_single_launches_show_a_factor_but_not_a_few_percent(
    new: float, sentence: str, column: str, code: int
) -> None:
    base = run(result(8e-6), result(8e-6, name="mul"), path="a")
    comparison = compare_runs([base], [run(result(8e-6), result(8e-6 * new, name="mul"), path="b")])
    assert (comparison.summary, comparison.exit_code) == (sentence, code)
    text = repr(comparison)
    assert column in text and text.endswith(sentence) and ("verdict" in text) == (new != 1.03)
