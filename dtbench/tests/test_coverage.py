"""Verdicts on ops: sums, the table, the baseline and what became worse. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.comparison import op_verdicts as coverage
from dtbench.comparison.op_verdicts import baseline_of, became_worse, markdown
from dtbench.engine.options import refuse_foreign_options, split_words
from dtbench.records.verdicts import Baseline, OpVerdict, read_baseline, verdicts_of, write_baseline
from dtbench.suite import Result, Run, RunOptions
from dtbench.suite.errors import UnreadableRunError, UsageError
from dtbench.suite.suites import Suite
from dtbench.tests import made_up


def result(op: str, verdict: str, mode: str = "even", impl: str = "core", **given: Any) -> Result:
    cases = {} if verdict == "n/a" else {"pass": 3, verdict: 2}
    reason = "" if verdict == "pass" else f"why {verdict}"
    return OpVerdict(op=op, mode=mode, impl=impl, cases=cases, reason=reason, **given).result()


def run_of(*results: Result, torch: str = "2.13.0", options: dict[str, str] | None = None) -> Run:
    header = {
        "started": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": torch},
        "git": {"commit": "0123456789abcdef"},
        "plan": {"impls": ["core", "torch"], "quick": True, "options": options or {}},
    }
    return Run(Path("run.jsonl"), made_up.read(header), results, True)


def made(torch: str, options: dict[str, str] | None = None, **verdicts: str) -> Baseline:
    by_op = {op: {"even": verdict} for op, verdict in verdicts.items()}
    return Baseline(torch=torch, options=options or {}, verdicts=by_op)


RUN = run_of(
    result("mul", "pass"),
    result("add", "pass", fallbacks=4),
    result("add", "wrong", impl="torch"),
    result("add", "refused", "inplace"),
    result("add", "hang", "inplace", "torch"),
    result("empty", "n/a"),
    result("empty", "n/a", impl="torch"),
    result("sub", "no rule"),
)


def test_an_op_has_the_worst_verdict_of_its_cases() -> None:
    assert [OpVerdict.of(r).verdict for r in RUN.results[:4]] == ["pass", "pass", "wrong", "refused"]
    assert OpVerdict.of(result("x", "n/a")).verdict == "n/a"


def test_sums_per_mode_and_impl() -> None:
    head, rows = coverage.summary_rows(verdicts_of(RUN))
    assert head[4:-4] == ["wrong", "hang", "no rule", "refused", "pass"]
    even, even_torch, inplace, _ = (dict(zip(head, row, strict=True)) for row in rows)
    wanted = {"mode": "even", "impl": "core", "ops": "3", "fully pass": "66.7%", "by fallback": "1"}
    wanted |= {"wrong": "0", "hang": "0", "no rule": "1", "refused": "0", "pass": "2", "n/a": "1"}
    assert even == wanted | {"cases": "9", "cases pass": "77.8%"}
    assert (even_torch["ops"], even_torch["fully pass"], inplace["fully pass"]) == ("1", "0.0%", "0.0%")
    assert even_torch["by fallback"] == "-"


def test_the_page_has_a_line_per_op() -> None:
    page = markdown([RUN])
    assert markdown([RUN, RUN]) == page  # what was run is said once
    lines = page.splitlines()
    assert "| add | pass* / wrong | refused / hang |" in lines
    assert "| mul | pass / - |  |" in lines and "| sub | no rule / - |  |" in lines
    assert not any(line.startswith("| empty") for line in lines)
    assert lines.index("| add | pass* / wrong | refused / hang |") < lines.index("| mul | pass / - |  |")
    assert "Made 2026-01-02 with torch 2.13.0 at commit 0123456789ab" in page
    assert "`dtbench run coverage --impl core,torch --quick`" in page


def test_names_on_the_page_are_neither_html_nor_obeyed() -> None:
    hostile = "\x1b[2J|<img src=x>"
    for suite in ("coverage", "compat"):
        one = msgspec.structs.replace(result(hostile, "wrong", hostile), suite=suite)
        page = markdown([run_of(one, torch=hostile, options={hostile: hostile + "`"})])
        assert "\x1b" not in page and page.count("&#124;&lt;img") >= 3
        outside = "".join(page.split("`")[::2])  # of code
        assert "<img" not in outside and page.count("`") % 2 == 0


def test_the_page_of_programs_says_why() -> None:
    found = [
        msgspec.structs.replace(result("in a graph", verdict, "compile", impl), suite="compat")
        for verdict, impl in (("pass", "core"), ("differs", "torch"))
    ]
    page = markdown([run_of(*found)])
    assert "## compile" in page and "| in a graph | pass | differs: why differs |" in page
    assert "`dtbench run compat --impl core,torch --quick`" in page


def test_the_page_lists_of_a_variant_what_does_not_pass() -> None:
    found = [
        result("in a graph", "pass", "writes"),
        result("in a graph", "pass", "order"),
        result("in a graph", "n/a", "inductor"),
        result("added to", "pass", "order"),
        result("added to", "wrong", "order", "torch"),
    ]
    page = markdown([run_of(*(msgspec.structs.replace(one, suite="compat") for one in found))])
    order, inductor = page.partition("## Variant order")[2].split("## Variant inductor")
    assert page.index("## writes") < page.index("## Variant order")
    assert "| added to | pass | wrong: why wrong |" in order and "in a graph" not in order
    assert "Left out, why n/a: in a graph." in inductor


def test_the_last_of_several_runs_counts() -> None:
    later = run_of(result("sub", "pass"))
    assert [v.verdict for v in coverage.merged([RUN, later]) if v.op == "sub"] == ["pass"]


SOME = run_of(
    result("mul", "pass", samples=200, not_judged=1),
    result("add", "n/a", samples=3, not_judged=3),
    result("add", "pass", "out", "torch", samples=7),
)


def test_what_is_not_judged_is_counted() -> None:
    head, rows = coverage.summary_rows(coverage.merged([SOME]))
    assert head[-1] == "not judged" and [row[-1] for row in rows] == ["4 of 203", "0 of 7"]
    lines = coverage.not_judged_lines(coverage.merged([SOME]))
    assert lines[0] == "not judged: 4 of 210 samples (1.90%)"
    assert lines[1:] == [
        "not judged: core even add: 3 of 3 samples",
        "not judged: core even mul: 1 of 200 samples",
    ]
    assert all(line in markdown([SOME]) for line in lines)
    assert coverage.not_judged_lines(verdicts_of(RUN)) == []  # a run of before, which did not count


def test_more_than_one_sample_in_200_that_is_not_judged_is_worse(tmp_path: Path) -> None:
    found = baseline_of(SOME)
    assert (found.samples, found.not_judged) == (203, {"add": {"even": 3}, "mul": {"even": 1}})
    write_baseline(found, tmp_path / "base.json")
    assert read_baseline(tmp_path / "base.json") == found
    assert became_worse(found, found) == (["4 of 203 samples are not judged, at most 0.5% may be"], 0)
    enough = run_of(result("mul", "pass", samples=200, not_judged=1))
    assert became_worse(baseline_of(enough), baseline_of(enough)) == ([], 0)


def test_a_baseline_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(baseline_of(RUN), path)
    known = read_baseline(path)
    assert known == baseline_of(RUN)
    assert known.verdicts["add"] == {"even": "pass", "inplace": "refused"}  # the core's alone
    assert known.options == {"quick": "True"}
    assert len(path.read_text().splitlines()) == len(known.verdicts) + 2


@pytest.mark.parametrize(
    ("before", "after", "worse", "better"),
    [
        ("pass", "pass", 0, 0),
        ("pass", "refused", 1, 0),
        ("pass", "wrong", 1, 0),
        ("pass", "n/a", 1, 0),
        ("no rule", "pass", 0, 1),
        ("no rule", "error", 0, 0),
        ("no rule", "wrong", 1, 0),
        ("error", "hang", 1, 0),
        ("refused", "died", 1, 0),
        ("error", "differs", 1, 0),
        ("wrong", "wrong", 0, 0),
        ("n/a", "n/a", 0, 0),
    ],
)
def test_what_became_worse(before: str, after: str, worse: int, better: int) -> None:
    was, now = (made("2.13", add=v) for v in (before, after))
    lines, count = became_worse(was, now)
    assert (len(lines), count) == (worse, better)
    assert lines == [f"add (even): was {before}, is {after}"] * worse


def test_an_op_that_was_not_measured_is_worse() -> None:
    lines, _ = became_worse(made("2.13", add="error"), made("2.13"))
    assert lines == ["add (even): was error, is not measured"]


@pytest.mark.parametrize("other", [made("2.11"), made("2.13", {"samples": "2"})])
def test_baselines_of_other_measurements_are_refused(other: Baseline) -> None:
    with pytest.raises(UsageError, match="the baseline was made with"):
        became_worse(made("2.13"), other)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 9}', '{"schema": 1, "torch": "2", "options": {}, "verdicts": {"a": 1}}'],
)
def test_other_files_are_no_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(UnreadableRunError, match=r"baseline\.json"):
        read_baseline(path)


def test_runs_without_verdicts_are_refused() -> None:
    with pytest.raises(UsageError, match="no verdicts in these runs"):
        markdown([run_of()])


# ---- options that suites declare ----


def suite_of(name: str, world: Any = "ranks", **options: str) -> Suite:
    measure = (lambda plan, tasks, record: None) if world == "own" else None
    return Suite(name, lambda plan: iter(()), world, "", measure, options)


def test_words_are_suites_and_options() -> None:
    assert split_words(["a", "--mode", "even", "b.py", "--ops=x=y"]) == (
        ("a", "b.py"),
        {"mode": "even", "ops": "x=y"},
    )
    assert split_words(["--last"]) == ((), {"last": ""})
    with pytest.raises(UsageError, match="--mode is given twice"):
        split_words(["--mode", "a", "--mode=b"])


@pytest.mark.parametrize(
    ("suites", "given", "says"),
    [
        ([suite_of("a", mode="")], {"nonsense": "1"}, "No such option '--nonsense'.* a has --mode"),
        ([suite_of("a", mode="")], {"mode": ""}, "--mode needs a value"),
        ([suite_of("a", mode="")], {"mode": "--other"}, "--mode needs a value"),
        ([suite_of("a")], {"-x": "1"}, "No such option '-x'"),
        ([suite_of("a"), suite_of("b", "own")], {}, "b measures without ranks"),
    ],
)
def test_options_nobody_declared_are_refused(suites: list[Suite], given: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refuse_foreign_options(suites, given)


def test_declared_options_pass() -> None:
    refuse_foreign_options([suite_of("a", mode=""), suite_of("b")], {"mode": "x"})
    assert RunOptions((("tp", 2),), (1,), options={"mode": "x"}).options["mode"] == "x"
