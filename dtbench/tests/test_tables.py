"""What the terminal shows: every figure whole, foreign text harmless, JSON strict."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.cli.doctor import print_findings
from dtbench.comparison.comparison_table import print_comparison
from dtbench.comparison.runs import compare
from dtbench.engine.progress import line_of
from dtbench.machine.doctor import MachineFinding
from dtbench.records.frame import cases_frame, results_frame
from dtbench.records.frame import cells as cells_of
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.suite import Result, Run
from dtbench.suite.errors import EXIT_INCONCLUSIVE
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.text.terminal import new_console, print_columns, print_line
from dtbench.text.units import format_spread

Capture = pytest.CaptureFixture[str]


def result(suite: str, name: str, impl: str, seconds: float, launch: int = 0, **changes: Any) -> Result:
    """Minimum `seconds`, lower quartile 1.5 times that; `dispatch` alone times the host."""
    made = made_up.result(suite, name, impl, {}, [seconds, 2 * seconds, 3 * seconds], launch=launch)
    return msgspec.structs.replace(made, **changes)


def run(*results: Result, complete: bool = True, **header: Any) -> Run:
    machine = {
        "cpu": {"model": "Fast CPU", "usable_cores": 8},
        "gpus": [{"name": "G1"}, {"name": "G1"}],
    }
    git = {"commit": "abc123", "dirty": True}
    return made_up.run(
        results, "run.jsonl", complete, **{"machine": machine, "git": git, "run_id": "r"} | header
    )


def table_of(text: str, start: str) -> list[dict[str, str]]:
    """The plain table below the title that begins with `start`, as rows of title -> cell."""
    lines = text.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith(start))
    first = next(
        i for i, line in enumerate(lines) if i > title and line.startswith(("case", "verdict", "mesh dim"))
    )
    titles = re.split(r"  +", lines[first].strip())
    # A time's spread stands beside it.
    titles = [f"{titles[i - 1]} spread" if title == "spread" else title for i, title in enumerate(titles)]
    rows = []
    for line in lines[first + 1 :]:
        if not line.strip():
            break
        cells = re.split(r"  +", line.strip())
        assert len(cells) in (len(titles), len(titles) - 1)  # an empty last cell leaves nothing
        rows.append(dict(zip_longest(titles, cells, fillvalue="")))
    return rows


def test_the_impls_stand_side_by_side(capsys: Capture) -> None:
    params = {"placements": "S(0),S(0)", "mesh": "8", "pass": "forward"}
    other = params | {"placements": "R,R"}
    print_runs(
        [
            run(
                result("dispatch", "add", "torch", 8e-6, params=params),
                result("dispatch", "add", "core", 4e-6, params=params),
                result("dispatch", "add", "local", 1e-6, params=params),
                result("dispatch", "add", "core", 5e-6, params=other),
            )
        ]
    )
    out = capsys.readouterr().out
    title = "dispatch: min of the samples, spread up to their upper quartile, by one process"
    assert out.startswith(title)
    # Samples of 1, 2 and 3 times the minimum: the upper quartile lies 150 % above it.
    assert table_of(out, title) == [
        {
            "case": "add",
            "placements": "S(0),S(0)",
            "core [µs]": "4.000",
            "core [µs] spread": "+150%",
            "torch [µs]": "8.000",
            "torch [µs] spread": "+150%",
            "floor (local) [µs]": "1.000",
            "floor (local) [µs] spread": "+150%",
            "core/torch": "0.500x",
        },
        {
            "case": "add",
            "placements": "R,R",
            "core [µs]": "5.000",
            "core [µs] spread": "+150%",
            "torch [µs]": "-",
            "torch [µs] spread": "-",
            "floor (local) [µs]": "-",
            "floor (local) [µs] spread": "-",
            "core/torch": "-",
        },
    ]
    assert out.index("4 x ok") < out.index("run:      run.jsonl") < out.index("2 x G1")


def test_bandwidths_have_a_unit_of_their_own(capsys: Capture) -> None:
    results = [
        result(
            "collectives", "all_reduce", "c10d", 1e-4, params={"size": size}, algbw_Bps=bw, busbw_Bps=bw / 2
        )
        for size, bw in ((65536, 2e9), (65537, 3e9))
    ]
    print_runs([run(*results)])
    rows = table_of(capsys.readouterr().out, "collectives: p25 of the samples")
    assert [row["size"] for row in rows] == ["64 KiB", "65537 B"]
    assert [row["c10d [µs]"] for row in rows] == ["150.0", "150.0"]
    assert [row["algbw [GB/s]"] for row in rows] == ["2.000", "3.000"]
    assert [row["busbw [GB/s]"] for row in rows] == ["1.000", "1.500"]


def test_what_one_process_measures_has_no_ranks_and_no_mesh(capsys: Capture) -> None:
    alone = result("dispatch", "add", "core", 4e-6)
    samples = {str(rank): (1.0, 2.0, 3.0) for rank in range(4)}
    together = result("collectives", "all_reduce", "c10d", 1.0, rank_samples_s=samples)
    print_runs([run(alone)])
    out = capsys.readouterr().out
    assert (
        "one process, beside 3 that waited, on node-a" in out and "mesh:" not in out and "layout" not in out
    )
    print_runs([run(alone, together)])
    out = capsys.readouterr().out
    assert "dispatch: min of the samples, spread up to their upper quartile, by one process" in out
    assert "ranks:    4 on node-a" in out and "mesh:     dp=2, tp=2" in out
    assert "collectives: p25 of the samples, spread up to their upper quartile; " in out.replace("\n", "; ")


def test_the_same_figure_stands_on_the_line_of_a_run_in_its_table_and_in_frames(capsys: Capture) -> None:
    for suite, seconds, spread in (("dispatch", 4e-6, 1.5), ("collectives", 4e-6, 2 / 3)):
        one = result(suite, "a", "core", seconds)
        assert one.spread == pytest.approx(spread)
        print_runs([run(one)])
        (row,) = table_of(capsys.readouterr().out, suite)
        words = line_of(one).split()
        assert words[-2] == "µs" and words[-1] == row["core [µs] spread"] == format_spread(spread)
        (cell,) = cells_of(results_frame(run(one))["estimate_s"])
        assert float(words[-3]) == float(row["core [µs]"]) == pytest.approx(cell * 1e6)
        (merged,) = cells_of(cases_frame(run(one))["spread", "core"])
        assert merged == pytest.approx(spread)


def test_cases_are_chosen_and_sorted(dtbench: Cli, tmp_path: Path) -> None:
    cases = [("b", 3.0, 1024), ("a", 1.0, 65536), ("c", 2.0, 4096)]
    results = [result("s", name, "core", time, params={"size": size}) for name, time, size in cases]
    path = str(made_up.write(tmp_path / "x.jsonl", run(*results)))

    def names(*words: str) -> list[str]:
        code, out, error = dtbench("show", path, *words)
        assert (code, error) == (0, "")
        return [row["case"] for row in table_of(out, "s: p25")]

    assert names() == ["b", "a", "c"]
    assert names("--sort", "time") == ["a", "c", "b"] and names("--sort", "-time") == ["b", "c", "a"]
    assert names("--sort", "size") == ["b", "c", "a"] and names("--filter", "size=4KiB") == ["c"]
    code, out, _ = dtbench("show", path, "--filter", "size=4KiB", "--csv")
    assert code == 0 and out.count("\n") == 2
    for words, said in (
        (("--filter", "nothing"), "matches no result"),
        (("--sort", "colour"), "a param: size"),
    ):
        code, out, error = dtbench("show", path, *words)
        assert (code, out) == (2, "") and said in error


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_table_takes_no_more_than_the_terminal_has_and_names_what_it_leaves_out(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    words = [("what", ["forward activations of the tensor parallel part"] * 2)]
    figures = [("time", ["123.4 ms"] * 2), ("interval", ["366 ms .. 934 s"] * 2)]
    extras = [("why", ["because of it " * 3] * 2), ("remedy", ["do something else " * 3] * 2)]
    print_columns(new_console(), words, figures, extras=extras)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width
    assert out.count("366 ms .. 934 s") == 2
    left_out = {80: ["why, remedy"], 100: ["remedy"], 160: []}
    assert re.findall(r"^left out, as the terminal is narrow: (.*)$", out, re.MULTILINE) == left_out[width]


@pytest.mark.parametrize(("width", "form"), [("80", "row per impl"), ("100", "no spreads"), ("", "whole")])
def test_a_table_of_three_impls_fits_what_reads_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: str, form: str
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
    assert max(map(len, table.splitlines())) <= int(width or 120)
    rows = [line.split() for line in table.splitlines() if line.startswith("adamw")]
    if form == "row per impl":
        assert [row[-3:] for row in rows[:2]] == [["2.000", "+150%", "0.500x"], ["torch", "4.000", "+150%"]]
        assert len(rows) == 6
    else:
        assert len(rows) == 2 and all({"2.000", "4.000", "1.000", "0.500x"} <= set(row) for row in rows)
        assert ("+150%" in rows[0]) == (form == "whole")
    assert ("left out at 100 columns: spread, from last" in table) == (form == "no spreads")


def test_the_head_tells_where_it_was_measured(capsys: Capture) -> None:
    print_runs([run(complete=False)])
    out = capsys.readouterr().out
    for expected in (
        "run.jsonl  INCOMPLETE",
        "--resume",
        "torch 2.13.0",
        "abc123 with changes",
        "Fast CPU, 8 cores usable",
        "2 x G1",
        "4 on node-a, node-b",
        "dp=2, tp=2",
        "no results",
    ):
        assert expected in out
    assert "nccl" not in out
    print_runs([run()])
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_what_is_not_ok_is_listed_with_its_reason(capsys: Capture) -> None:
    print_runs(
        [
            run(
                result("s", "a", "core", 1.0, reason="GPU throttled"),
                result("s", "a", "torch", 1.0, status="wrong", reason="sum off by 1", time_s=None),
                result("s", "b", "core", 1.0, status="failed", time_s=None),
                *(
                    result("s", f"c{i}", "torch", 1.0, status="skipped", reason="no such op", time_s=None)
                    for i in range(7)
                ),
            )
        ]
    )
    out = capsys.readouterr().out
    rows = {row["case"]: row for row in table_of(out, "s: p25")}
    assert (rows["a"]["torch [s]"], rows["b"]["core [s]"], rows["c6"]["torch [s]"]) == (
        "wrong",
        "failed",
        "skipped",
    )
    assert "wrong: s/torch: sum off by 1 (a)\n" in out
    assert "ok: s/core: GPU throttled (a)\n" in out
    assert "failed: s/core: no reason given (b)\n" in out
    assert "skipped: s/torch: no such op (c0; c1; c2; c3; c4; and 2 more)\n" in out
    assert "\n1 x ok, 1 x wrong, 1 x failed, 7 x skipped\n" in out


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_no_terminal_is_so_narrow_that_a_figure_is_cut(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to be told of a terminal
    monkeypatch.setenv("COLUMNS", columns)
    params = {"placements": "S(0),S(1),Partial", "dtype": "bfloat16"}
    base = run(
        result("dispatch", "addmm", "core", 123.4567e-6, params=params),
        result("dispatch", "addmm", "torch", 9876.543e-6, params=params),
        result("dispatch", "add", "core", 1e-6, params=params | {"placements": "R"}),
    )
    print_runs([base])
    print_comparison(compare([base], [base]))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.split() for line in out.splitlines()]
    whole = ["addmm", "S(0),S(1),Partial", "123.5", "+150%", "9877", "+150%", "0.0125x"]
    assert (whole in lines) == (columns != "20")
    assert any({"123.5", "addmm"} <= set(line) for line in lines)
    assert sum(line[:5] == ["addmm", "core", "S(0),S(1),Partial", "123.5", "123.5"] for line in lines) == 1
    assert "…" not in out
    assert "core/torch" in out
    assert "launches" in out


def test_text_from_a_file_can_not_steer_the_terminal(capsys: Capture) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[red]x[/red]\u202e\r\nnext"
    bad = result("s", evil, "core", 1.0, status="failed", reason=evil, params={evil: evil}, time_s=None)
    one = run(
        bad,
        started=evil,
        versions={"torch": evil},
        machine={"cpu": {"model": evil}, "gpus": [{"name": evil}]},
    )
    print_runs([one])
    print_comparison(compare([one], [one]))
    print_findings([MachineFinding(evil, False, evil, evil, evil)])
    out = capsys.readouterr().out
    assert not set("\x1b\x07\u202e\r") & set(out)
    assert "[red]x[/red]" in out  # shown, and not taken as markup
    assert "\\x1b[2J" in out


def test_a_terminal_that_cannot_spell_micro(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_runs([run(result("dispatch", "añadir", "core", 4e-6))])
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "core [us]" in text
    assert "a\\xf1adir" in text


def test_a_comparison_shows_the_worst_first_and_its_notes(capsys: Capture) -> None:
    def side(factor: float, *more: Result) -> Run:
        launches = [(i, 1e-5 * (1 + i / 1000)) for i in range(5)]
        slow = [result("dispatch", "slow", "core", s * factor, i) for i, s in launches]
        same = [result("dispatch", "same", "core", s, i) for i, s in launches]
        return run(*same, *slow, *more)

    print_comparison(compare([side(1, result("dispatch", "gone", "core", 1e-5))], [side(1.5)]))
    out = capsys.readouterr().out
    rows = table_of(out, "dispatch: min of each launch, median over launches")
    assert [(row["verdict"], row["case"]) for row in rows] == [
        ("slower", "slow"),
        ("missing", "gone"),
        ("same", "same"),
    ]
    assert rows[0]["base [µs]"] == "10.02"
    assert rows[0]["new [µs]"] == "15.03"
    assert rows[0]["new/base"] == "1.50x"
    assert rows[0]["interval"].endswith("(97%)")
    assert rows[0]["p"] == "0.004"
    assert rows[0]["launches"] == "5/5"
    assert rows[1]["why"] == "not measured in new"
    assert "note: the same run is on both sides\n" in out
    assert out.endswith("\n1 slower, 1 missing, 1 same\n")


def test_findings_name_effect_and_remedy(capsys: Capture) -> None:
    print_findings(
        [
            MachineFinding("governor", False, "powersave", "slow start", "cpupower"),
            MachineFinding("swap", True, "none"),
            MachineFinding("turbo", None, "unknown: no switch"),
        ]
    )
    out = capsys.readouterr().out
    assert re.search(r"^DISTURBS +governor +powersave", out, re.MULTILINE)
    assert re.search(r"^ok +swap +none", out, re.MULTILINE)
    assert re.search(r"^unknown +turbo +unknown: no switch", out, re.MULTILINE)
    assert "    effect: slow start\n    remedy: cpupower\n" in out
    assert out.endswith("1 of 3 checks found something that disturbs a measurement\n")


def test_json_is_strict_and_alone_on_stdout(capsys: Capture) -> None:
    def load() -> Any:
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    one = run(result("s", "a", "core", 1.0, samples_s=(1.0,), rank_samples_s={"0": (1.0,)}))
    print_runs_json([one])
    (made,) = load()
    assert (made["path"], made["complete"], made["header"]["run_id"]) == ("run.jsonl", True, "r")
    (shown,) = made["results"]
    assert shown["time_s"]["median"] == 2.0
    assert "samples_s" not in shown
    print_comparison(compare([one], [one]), as_json=True)
    assert load()["rows"][0]["verdict"] == "inconclusive"
    print_findings([MachineFinding("a", None, "b")], as_json=True)
    assert load() == [{"check": "a", "ok": None, "got": "b", "effect": "", "remedy": ""}]


def test_one_launch_against_another_is_differences_and_no_verdict(capsys: Capture) -> None:
    def side(scale: float, *more: Result) -> Run:
        sizes = [
            result("collectives", "all_reduce", "c10d", scale * n * 1e-6, params={"size": n})
            for n in (64, 128)
        ]
        return run(*sizes, *more)

    comparison = compare([side(1, result("collectives", "gone", "c10d", 1e-6))], [side(1.25)])
    print_comparison(comparison)
    out = capsys.readouterr().out
    assert sum("+25.0%" in line for line in out.splitlines()[:-1]) == 2
    assert "missing: not measured in new" in out.lower()
    assert "inconclusive" not in out
    last = out.splitlines()[-1]
    assert "2 times differ by +25.0% to +25.0%: no verdict from one launch on each side" in last
    assert comparison.exit_code == EXIT_INCONCLUSIVE


def test_no_color_means_no_escape_sequence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for name in ("", "1"):
        monkeypatch.setenv("NO_COLOR", name)
        print_line(new_console(), "text", "bold")
        shown.append(capsys.readouterr().out)
    assert "\x1b" in shown[0] and shown[1] == "text\n"
