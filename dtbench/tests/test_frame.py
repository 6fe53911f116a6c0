"""Data frames of runs: one row per result without loss, and one row per case with its launches combined."""

import csv
import io
import math
import statistics
from collections import defaultdict
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtbench.records.result import STATUSES, Result
from dtbench.reporting.run_tables import print_csv
from dtbench.stats import summarize
from dtbench.stats.frame import TIME_COLUMNS, cases_frame, cells, impls_of, params_of, results_frame
from dtbench.tests import made_up

EVIL = ("=1+1", "+1", "-1", "@SUM(A1)", "a\0b", "a\0c", "\x1b[2J", '","', "\r\nnext", "\u202e", "'", " ", "é")
TIMES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5).map(summarize)
# Without null characters, which have a test of their own.
TEXT = st.sampled_from([text for text in EVIL if "\0" not in text])
TEXT |= st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
NAME = st.sampled_from(["core", "torch", "a", "min_s", "core/torch", "suite", "param.name"]) | TEXT.filter(
    bool
)
INT = st.integers(-(2**63) + 1, 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
AMOUNT = st.none() | st.floats(1e-3, 1e15)
RESULTS = st.lists(
    st.builds(
        Result,
        suite=NAME,
        name=NAME,
        impl=NAME,
        params=st.dictionaries(NAME | TEXT, TEXT | INT | FLOAT | st.booleans(), max_size=3),
        status=st.sampled_from(STATUSES),
        reason=TEXT,
        rank=st.none() | st.integers(0, 2**31),
        size_bytes=st.none() | st.integers(0, 2**63 - 1),
        time_s=st.none() | TIMES,
        algbw_Bps=AMOUNT,
        busbw_Bps=AMOUNT,
        counters=st.dictionaries(NAME | TEXT, st.integers(-(2**53), 2**53) | FLOAT, max_size=2),
        launch=st.integers(0, 3),
        clock=st.sampled_from(["host", "device"]),
    ),
    max_size=12,
)
MANY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def result(impl: str, seconds: float, launch: int = 0, name: str = "add", **changes: Any) -> Result:
    """Median `seconds`, minimum half of that."""
    times = summarize([seconds / 2, seconds, 3 * seconds])
    fields: dict[str, Any] = {"params": {"size": 64}, "status": "ok", "time_s": times}
    return Result("s", name, impl, launch=launch, **fields | changes)


def frame(*results: Result) -> pd.DataFrame:
    return results_frame([made_up.run(results)])


FIELDS = (
    "suite",
    "name",
    "impl",
    "launch",
    "status",
    "reason",
    "rank",
    "size_bytes",
    "algbw_Bps",
    "busbw_Bps",
)


def same(got: Any, expected: Any) -> bool:
    """Returns whether values are equal and of one type: 1 is neither True nor 1.0."""
    return type(got) is type(expected) and bool(got == expected)


# ------------------------------------------------------------------------------------- one row per result


def time_of(result: Result, column: str) -> Any:
    """The figure of a column of times."""
    estimator = {"host": "min", "device": "p25"}[result.clock]
    name = estimator if column == "estimate_s" else column.removesuffix("_s")
    return result.time_s and getattr(result.time_s, name)


@MANY
@given(RESULTS)
def test_every_value_of_every_result_is_there(results: list[Result]) -> None:
    table = results_frame([made_up.run(results[:5]), made_up.run(results[5:], run_id="second")])
    columns: dict[str, list[Any]] = {
        "run_id": ["20260101-120000-abcd"] * len(results[:5]) + ["second"] * len(results[5:]),
        "samples": [r.time_s and r.time_s.n for r in results],
    }
    columns |= {field: [getattr(r, field) for r in results] for field in FIELDS}
    columns |= {field: [time_of(r, field) for r in results] for field in TIME_COLUMNS}
    params = {name for r in results for name in r.params}
    columns |= {"param." + name: [r.params.get(name) for r in results] for name in params}
    for name in {name for r in results for name in r.counters}:
        counts = [r.counters.get(name) for r in results]
        if any(isinstance(count, float) for count in counts):  # the column holds floats
            counts = [None if count is None else float(count) for count in counts]
        columns["counter." + name] = counts
    for name, values in columns.items():
        assert all(map(same, cells(table[name]), values)) and len(table[name]) == len(values), name
    prefixes = ("param.", "counter.")
    assert {c for c in columns if c.startswith(prefixes)} == {
        c for c in table.columns if c.startswith(prefixes)
    }


def test_no_results_make_an_empty_frame() -> None:
    table = results_frame([])
    cases = cases_frame(table)
    assert {"run_id", "case", "median_s", "busbw_Bps"} <= set(table.columns)
    assert (len(table), len(cases), impls_of(cases), params_of(cases)) == (0, 0, [], [])


@pytest.mark.parametrize(
    ("samples", "spread"),
    [
        ({"0": (1.0, 2.0, 8.0), "1": (2.0, 2.0, 2.0)}, 2.0),
        ({"0": (1.0, 5.0), "1": (3.0,), "2": ()}, 3.0),
        ({"0": (0.0, 1.0), "1": (3.0, 4.0)}, 4.0),
        ({"0": (0.0,), "1": (3.0,)}, None),
        ({"0": (1.0,)}, None),
        ({"0": (1e-300,), "1": (1e300,)}, math.inf),
    ],
)
def test_rank_spread_is_the_median_ratio_of_slowest_to_fastest(
    samples: dict[str, tuple[float, ...]], spread: float | None
) -> None:
    assert cells(frame(result("core", 1.0, rank_samples_s=samples))["rank_spread"]) == [spread]


# --------------------------------------------------------------------------------------- one row per case


@MANY
@given(RESULTS)
def test_cases_hold_the_medians_of_their_good_launches(results: list[Result]) -> None:
    # Done here again with dicts, apart from the frame's own way.
    by_case: dict[Any, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        by_case[r.suite, r.name, tuple(sorted(r.params.items()))][r.impl].append(r)
    cases = cases_frame(frame(*results))
    assert cases.columns.is_unique and impls_of(cases) == list(dict.fromkeys(r.impl for r in results))
    rows = zip(cells(cases["suite", ""]), cells(cases["name", ""]), params_of(cases), strict=True)
    assert [*rows] == [(suite, name, dict(params)) for suite, name, params in by_case]
    for impl in impls_of(cases):
        columns = {c: cells(cases[c, impl]) for c in (*TIME_COLUMNS, "samples", "launches", "status")}
        for row, impls in enumerate(by_case.values()):
            of_impl = impls.get(impl, [])
            good = [r for r in of_impl if r.status == "ok" and r.time_s]
            for name in TIME_COLUMNS:
                assert columns[name][row] == (
                    statistics.median(time_of(r, name) for r in good) if good else None
                )
            assert columns["samples"][row] == (sum(r.time_s.n for r in good if r.time_s) if good else None)
            assert columns["launches"][row] == (len(good) or None)
            bad = [r.status for r in of_impl if r.status != "ok"]
            assert columns["status"][row] == ([*bad, "ok"][0] if of_impl else None)


def test_core_over_torch_where_both_were_measured() -> None:
    cases = cases_frame(
        frame(
            result("core", 2.0),
            result("core", 4.0, 1),
            result("torch", 6.0),
            result("core", 1.0, name="alone"),
            result("torch", 1.0, name="failed", status="failed", time_s=None),
            result("core", 1.0, name="failed"),
            result("core", 1.0, name="zero"),
            result("torch", 0.0, name="zero"),
        )
    )
    for column in ("median_s", "min_s"):
        assert cells(cases["core/torch", column]) == [0.5, None, None, None]
    assert cells(cases["status", "torch"]) == ["ok", None, "failed", "ok"]


# ---------------------------------------------------------------------------------------------------- CSV


def test_csv_cells_are_neither_formulas_nor_terminal_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result(e, e, e, {e: e, "mixed": e, "plain": i}, "failed", e) for e in EVIL for i in (-1, 2)
    ] + [Result("s", "n", "core", {"mixed": -5}, "ok", counters={"=x": -2.5})]
    print_csv([made_up.run(results, run_id="=run")])
    out = capsys.readouterr().out
    assert not set("\x1b\r\0\u202e") & set(out) and out.count("\n") == len(results) + 1
    head, *rows = csv.reader(io.StringIO(out))
    for cell in (cell for row in [head, *rows] for cell in row):
        assert not cell.startswith(("=", "+", "@"))
        assert not cell.startswith("-") or math.isfinite(float(cell))
    first, *_, last = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["run_id"], first["reason"], first["param.plain"]) == ("'=run", "'=1+1", "-1")
    assert (last["param.mixed"], last["counter.=x"]) == ("-5", "-2.5")
