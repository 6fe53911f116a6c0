"""What the terminal shows: every figure whole, foreign text harmless, JSON strict."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dtbench.cli.doctor import print_findings
from dtbench.comparison.run_comparison import compare_runs, print_comparison
from dtbench.engine.progress import ProgressLine, format_result, format_status_counts, print_status
from dtbench.errors import EXIT_INCONCLUSIVE
from dtbench.machine.doctor import MachineFinding
from dtbench.records.result import Result, Run
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.stats import summarize
from dtbench.stats.frame import cells, results_frame
from dtbench.tests import made_up, made_up_logs
from dtbench.tests.made_up import Cli
from dtbench.text.terminal import new_console, print_columns, print_line

Capture = pytest.CaptureFixture[str]
MACHINE = {"cpu": {"model": "Fast CPU", "usable_cores": 8}, "gpus": [{"name": "G1"}, {"name": "G1"}]}
GIT = {"commit": "abc123", "dirty": True}


def result(suite: str, name: str, impl: str, seconds: float, launch: int = 0, **changes: Any) -> Result:
    """Minimum `seconds`, lower quartile 1.5 times that; `dispatch` alone times the host."""
    timed = made_up.result(suite, name, impl, {}, [seconds, 2 * seconds, 3 * seconds], launch=launch)
    return msgspec.structs.replace(timed, **changes)


def run(*results: Result, complete: bool = True, **header: Any) -> Run:
    header = {"machine": MACHINE, "git": GIT, "run_id": "r"} | header
    return made_up.run(results, "run.jsonl", complete, **header)


def table_of(text: str, start: str) -> list[dict[str, str]]:
    """The plain table below the title that begins with `start`, as rows of title -> cell."""
    lines = text.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith(start))
    heads = ("case", "verdict", "mesh dim")
    first = next(i for i, line in enumerate(lines) if i > title and line.startswith(heads))
    titles = re.split(r"  +", lines[first].strip())
    # A time's spread stands beside it.
    titles = [f"{titles[i - 1]} spread" if title == "spread" else title for i, title in enumerate(titles)]
    rows = []
    for line in lines[first + 1 :]:
        if not line.strip():
            break
        of_row = re.split(r"  +", line.strip())
        assert len(of_row) in (len(titles), len(titles) - 1)  # an empty last cell leaves nothing
        rows.append(dict(zip_longest(titles, of_row, fillvalue="")))
    return rows


def test_the_impls_stand_side_by_side(capsys: Capture) -> None:
    params = {"placements": "S(0),S(0)", "mesh": "8", "pass": "forward"}
    other = params | {"placements": "R,R"}
    times = {"torch": 8e-6, "core": 4e-6, "local": 1e-6}
    results = [result("dispatch", "add", impl, time, params=params) for impl, time in times.items()]
    print_runs([run(*results, result("dispatch", "add", "core", 5e-6, params=other))])
    out = capsys.readouterr().out
    title = "dispatch: min of the samples, spread to their upper quartile, measured in one process"
    assert out.startswith(title)
    titles = ["case", "placements"]
    for impl in ("core [µs]", "torch [µs]", "floor (local) [µs]"):
        titles += [impl, f"{impl} spread"]
    # Samples of 1, 2 and 3 times the minimum: the upper quartile lies 150 % above it.
    assert [list(row.items()) for row in table_of(out, title)] == [
        list(zip([*titles, "core/torch"], row.split(), strict=True))
        for row in (
            "add S(0),S(0) 4.000 +150% 8.000 +150% 1.000 +150% 0.500x",
            "add R,R 5.000 +150% - - - - -",
        )
    ]
    assert out.index("4 x ok") < out.index("run:      run.jsonl") < out.index("2 x G1")


def test_bandwidths_have_a_unit_and_times_are_those_of_the_run_and_of_frames(capsys: Capture) -> None:
    results = [
        result("collectives", "a", "c10d", 1e-4, params={"size": n}, algbw_Bps=bw, busbw_Bps=bw / 2)
        for n, bw in ((65536, 2e9), (65537, 3e9))
    ]
    print_runs([run(*results)])
    rows = table_of(capsys.readouterr().out, "collectives: p25 of the samples")
    titles = ("size", "c10d [µs]", "algbw [GB/s]", "busbw [GB/s]", "c10d [µs] spread")
    first, second = ([row[title] for title in titles] for row in rows)
    assert first == ["64 KiB", "150.0", "2.000", "1.000", "+67%"]
    assert second == ["65537 B", "150.0", "3.000", "1.500", "+67%"]
    assert "150 µs +67%" in " ".join(format_result(results[0]).split())
    assert cells(results_frame(run(*results))["estimate_s"]) == pytest.approx([150e-6] * 2)


def test_one_process_has_no_ranks_and_no_mesh(capsys: Capture) -> None:
    alone = result("dispatch", "add", "core", 4e-6)
    samples = {str(rank): (1.0, 2.0, 3.0) for rank in range(4)}
    together = result("collectives", "all_reduce", "c10d", 1.0, rank_samples_s=samples)
    print_runs([run(alone)])
    out = capsys.readouterr().out
    assert "one process of 4 (the others idle) on node-a" in out
    assert "mesh:" not in out and "layout" not in out
    print_runs([run(alone, together)])
    out = capsys.readouterr().out
    assert "ranks:    4 on node-a" in out and "mesh:     dp=2, tp=2" in out


def test_cases_are_chosen_and_sorted(dtbench: Cli, tmp_path: Path) -> None:
    cases = [("b", 3.0, 1024), ("a", 1.0, 65536), ("c", 2.0, 4096)]
    results = [result("s", name, "core", time, params={"size": size}) for name, time, size in cases]
    path = str(made_up.write(tmp_path / "x.jsonl", run(*results)))
    for words, names in (
        ((), "bac"),
        (("--sort", "time"), "acb"),
        (("--sort", "-time"), "bca"),
        (("--sort", "size"), "bca"),
        (("--filter", "size=4KiB"), "c"),
    ):
        code, out, _ = dtbench("show", path, *words)
        assert code == 0 and [row["case"] for row in table_of(out, "s: p25")] == list(names)
    code, out, _ = dtbench("show", path, "--filter", "size=4KiB", "--csv")
    assert code == 0 and out.count("\n") == 2
    for words, message in (("--filter nothing", "matches no result"), ("--sort colour", "a param: size")):
        code, out, error = dtbench("show", path, *words.split())
        assert (code, out) == (2, "") and message in error


@pytest.mark.parametrize("width", ["20", "80", ""])
def test_impls_that_do_not_fit_beside_each_other_have_rows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    results = [
        result("dispatch", name, impl, seconds, params={"placements": "Colwise,Rowwise", "pass": way})
        for way in ("forward", "forward+backward")
        for name in ("adamw_step_x100", "redistribute")
        for impl, seconds in (("core", 2e-6), ("torch", 4e-6), ("local", 1e-6))
    ]
    print_runs([run(*results)])
    table = capsys.readouterr().out.partition("12 x ok")[0]
    assert "…" not in table and (width == "20" or max(map(len, table.splitlines())) <= int(width or 120))
    rows = [line.split() for line in table.splitlines() if line.startswith("adamw")]
    if width:
        assert [row[-3:] for row in rows[:2]] == [["2.000", "+150%", "0.500x"], ["torch", "4.000", "+150%"]]
    assert len(rows) == (6 if width else 2)


@pytest.mark.parametrize(("width", "left_out"), [(80, ["remedy"]), (160, [])])
def test_a_table_fits_the_terminal_and_names_what_it_leaves_out(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int, left_out: list[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to be told of a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    words, figures = [("what", ["forward activations of the part"])], [("time", ["366 ms .. 934 s"])]
    print_columns(new_console(), words, figures, extras=[("why", ["for it " * 6]), ("remedy", ["do " * 14])])
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width and "366 ms .. 934 s" in out
    assert re.findall(r"^columns omitted \(narrow terminal\): (.*)$", out, re.MULTILINE) == left_out


def test_the_head_tells_where_it_was_measured(capsys: Capture) -> None:
    print_runs([run(complete=False)])
    out = capsys.readouterr().out
    facts = (
        "torch 2.13.0",
        "abc123 with changes",
        "Fast CPU, 8 cores usable",
        "2 x G1",
        "4 on node-a, node-b",
    )
    for words in ("run.jsonl  INCOMPLETE", "--resume", *facts, "dp=2, tp=2", "no results"):
        assert words in out
    print_runs([run()])
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_what_is_not_ok_is_listed_with_its_reason(capsys: Capture) -> None:
    def bad(name: str, impl: str, status: str, reason: str | None = None) -> Result:
        return result("s", name, impl, 1.0, status=status, reason=reason, time_s=None)

    skipped = [bad(f"c{i}", "torch", "skipped", "no such op") for i in range(7)]
    wrong, failed = bad("a", "torch", "wrong", "sum off by 1"), bad("b", "core", "failed")
    print_runs([run(result("s", "a", "core", 1.0, reason="GPU throttled"), wrong, failed, *skipped)])
    out = capsys.readouterr().out
    rows = {row["case"]: row for row in table_of(out, "s: p25")}
    statuses = rows["a"]["torch [s]"], rows["b"]["core [s]"], rows["c6"]["torch [s]"]
    assert statuses == ("wrong", "failed", "skipped")
    for line in (
        "wrong: s/torch: sum off by 1 (a)",
        "with caveat: s/core: GPU throttled (a)",
        "failed: s/core: no reason given (b)",
        "skipped: s/torch: no such op (c0; c1; c2; c3; c4; and 2 more)",
        "1 x with caveat, 1 x wrong, 1 x failed, 7 x skipped",
    ):
        assert f"\n{line}\n" in out
    scattered = [result("s", "a", "core", 1.0, reason="scattered: half of the samples span 860%"), failed]
    assert (
        format_status_counts([*scattered, result("s", "b", "core", 1.0)]) == "1 ok, 1 with caveat, 1 failed"
    )


def test_headers_describe_only_the_samples_that_there_are(
    capsys: Capture, dtbench: Cli, tmp_path: Path
) -> None:
    """A log has one time of each size: no quartile of samples, and no spread of them."""
    (tmp_path / "a.log").write_text(made_up_logs.table())
    assert dtbench("import", "a.log", "-o", "a.jsonl")[0] == 0
    shown = dtbench("show", "a.jsonl")[1]
    assert "collectives: one time per case" in shown
    assert dtbench("report", "a.jsonl", "-o", "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text()
    assert "There is one time per size" in page
    assert "p25" not in shown and "quartile" not in shown
    assert "A sample is the longest" not in page and "<th>lower quartile" not in page
    print_runs([run(result("s", "a", "core", 1.0, time_s=summarize([1.0, 2.0])))])
    assert "s: p25 of the samples, spread to their upper quartile" in capsys.readouterr().out


def test_progress_through_a_pipe_is_a_line_per_result(capsys: Capture) -> None:
    line = ProgressLine(True)
    for text in ("first", "second"):
        line.show(text)
    line.close()
    assert capsys.readouterr().out == "first\nsecond\n"


def test_say_writes_a_line_and_its_newline_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(
        "sys.stdout", SimpleNamespace(encoding="ascii", write=pieces.append, flush=lambda: None)
    )
    print_status("12 µs")
    assert [piece for piece in pieces if piece] == ["12 ?s\n"]


def test_progress_on_a_terminal_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    line = ProgressLine(True)
    for text in ("first", "2nd"):
        line.show(text)
    line.close()
    assert capsys.readouterr().out == "\rfirst\r2nd  \n"


def test_text_from_a_file_can_not_steer_the_terminal(capsys: Capture) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[red]x[/red]\u202e\r\nnext"
    bad = result("s", evil, "core", 1.0, status="failed", reason=evil, params={evil: evil}, time_s=None)
    machine = {"cpu": {"model": evil}, "gpus": [{"name": evil}]}
    one = run(bad, started=evil, versions={"torch": evil}, machine=machine)
    print_runs([one])
    print_comparison(compare_runs([one], [one]))
    print_findings([MachineFinding(evil, False, evil, evil, "cpupower")])
    out = capsys.readouterr().out
    assert not set("\x1b\x07\u202e\r") & set(out)
    assert re.search(r"^NOISE ", out, re.MULTILINE) and "    remedy: cpupower\n" in out
    assert "[red]x[/red]" in out and "\\x1b[2J" in out  # shown, and not taken as markup


def test_a_terminal_that_cannot_spell_micro_and_one_without_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for name in ("", "1"):
        monkeypatch.setenv("NO_COLOR", name)
        print_line(new_console(), "text", "bold")
        shown.append(capsys.readouterr().out)
    assert "\x1b" in shown[0] and shown[1] == "text\n"
    monkeypatch.delenv("FORCE_COLOR")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_runs([run(result("dispatch", "añadir", "core", 4e-6))])
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "core [us]" in text and "a\\xf1adir" in text


def test_a_comparison_shows_the_worst_first_and_its_notes(capsys: Capture) -> None:
    def side(factor: float, *more: Result) -> Run:
        launches = [(i, 1e-5 * (1 + i / 1000)) for i in range(5)]
        slow = [result("dispatch", "slow", "core", s * factor, i) for i, s in launches]
        same = [result("dispatch", "same", "core", s, i) for i, s in launches]
        return run(*same, *slow, *more)

    print_comparison(compare_runs([side(1, result("dispatch", "gone", "core", 1e-5))], [side(1.5)]))
    out = capsys.readouterr().out
    slow, gone, same = table_of(out, "dispatch; base, head: median over launches of each launch's min")
    verdicts = [(row["verdict"], row["case"]) for row in (slow, gone, same)]
    assert verdicts == [("slower", "slow"), ("missing", "gone"), ("same", "same")]
    titles = ("base [µs]", "head [µs]", "head/base", "p", "launches")
    assert [slow[title] for title in titles] == ["10.02", "15.03", "1.50x", "0.004", "5/5"]
    assert slow["interval"].endswith("(97%)") and gone["reason"] == "not measured in head"
    assert "note: the same run is on both sides\n" in out and out.endswith("\n1 slower, 1 missing, 1 same\n")


def test_one_launch_against_another_has_no_verdict(capsys: Capture) -> None:
    def side(scale: float) -> list[Result]:
        return [result("s", "a", "c10d", scale * n * 1e-6, params={"size": n}) for n in (64, 128)]

    comparison = compare_runs([run(*side(1), result("s", "gone", "c10d", 1e-6))], [run(*side(1.25))])
    print_comparison(comparison)
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum("+25.0%" in line for line in lines) == 2 and "inconclusive" not in " ".join(lines)
    assert any("missing: not measured in head" in line for line in lines)
    assert last == (
        "cannot tell: one launch on each side; use --launches 5 or more (2 times, +25.0% to +25.0%, 1 missing)"
    )
    assert comparison.exit_code == EXIT_INCONCLUSIVE


def test_json_is_strict_and_alone_on_stdout(capsys: Capture) -> None:
    def load() -> Any:
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    one = run(result("s", "a", "core", 1.0, samples_s=(1.0,), rank_samples_s={"0": (1.0,)}))
    print_runs_json([one])
    (written,) = load()
    assert (written["path"], written["complete"], written["header"]["run_id"]) == ("run.jsonl", True, "r")
    (shown,) = written["results"]
    assert shown["time_s"]["median"] == 2.0 and "samples_s" not in shown
    print_comparison(compare_runs([one], [one]), as_json=True)
    assert load()["rows"][0]["verdict"] == "inconclusive"
    print_findings([MachineFinding("a", None, "b")], as_json=True)
    assert load() == [{"check": "a", "ok": None, "got": "b", "effect": "", "remedy": ""}]
