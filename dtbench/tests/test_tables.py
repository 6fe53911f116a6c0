"""Terminal tables and the layout of ranks: complete figures, escaped foreign text, strict JSON."""

import io
import json
import re
import sys
from itertools import takewhile, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtbench.cli.doctor import print_findings
from dtbench.comparison.run_comparison import compare_runs, print_comparison
from dtbench.engine.clock_offsets import SAME_CLOCK, Offset, lateness_s
from dtbench.engine.progress import ProgressLine, format_result, format_status_counts, print_status
from dtbench.errors import EXIT_INCONCLUSIVE
from dtbench.machine.doctor import MachineFinding
from dtbench.records.result import Header, Result, Run
from dtbench.reporting.run_tables import print_runs, print_runs_json
from dtbench.stats import summarize
from dtbench.stats.frame import cases_frame, cells, results_frame
from dtbench.stats.layout import format_hosts, from_last_arrival_s, layout_of, mesh_groups
from dtbench.suite.mesh import groups_of
from dtbench.tests import made_up, made_up_logs
from dtbench.tests.made_up import Cli
from dtbench.text import columns
from dtbench.text.table import Table, compact
from dtbench.text.terminal import new_console, print_columns, print_json, print_line

Capture = pytest.CaptureFixture[str]
MACHINE = {"cpu": {"model": "Fast CPU", "usable_cores": 8}, "gpus": [{"name": "G1"}, {"name": "G1"}]}
GIT = {"commit": "abc123", "dirty": True}


def result(suite: str, name: str, impl: str, seconds: float, launch: int = 0, **changes: Any) -> Result:
    """Minimum `seconds`, lower quartile 1.5 times that; `dispatch` alone times the host."""
    return msgspec.structs.replace(
        made_up.result(suite, name, impl, {}, [seconds, 2 * seconds, 3 * seconds], launch=launch), **changes
    )


def run(*results: Result, complete: bool = True, **header: Any) -> Run:
    changes = {"machine": MACHINE, "git": GIT, "run_id": "r"} | header
    return made_up.run(results, "run.jsonl", complete, **changes)


def table_of(text: str, start: str) -> list[dict[str, str]]:
    """The plain table below the title that begins with `start`, as rows of title -> cell."""
    lines = text.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith(start))
    first_titles = ("case", "verdict", "mesh dim")
    first = next(i for i, line in enumerate(lines) if i > title and line.startswith(first_titles))
    titles = re.split(r"  +", lines[first].strip())
    # A time's spread stands beside it.
    titles = [f"{titles[i - 1]} spread" if title == "spread" else title for i, title in enumerate(titles)]
    rows = [re.split(r"  +", line.strip()) for line in takewhile(str.strip, lines[first + 1 :])]
    assert {len(row) for row in rows} <= {len(titles), len(titles) - 1}  # an empty last cell leaves nothing
    return [dict(zip_longest(titles, row, fillvalue="")) for row in rows]


def test_print_runs_shows_impls_side_by_side(capsys: Capture) -> None:
    params = {"placements": "S(0),S(0)", "mesh": "8", "pass": "forward"}
    times = {"torch": 8e-6, "core": 4e-6, "local": 1e-6}
    results = [result("dispatch", "add", impl, time, params=params) for impl, time in times.items()]
    replicated = result("dispatch", "add", "core", 5e-6, params=params | {"placements": "R,R"})
    print_runs([run(*results, replicated)])
    out = capsys.readouterr().out
    title = "dispatch: min of the samples, spread to their upper quartile, measured in one process"
    assert out.startswith(title)
    impls = ("core [µs]", "torch [µs]", "floor (local) [µs]")
    titles = [
        "case",
        "placements",
        *(f"{impl}{suffix}" for impl in impls for suffix in ("", " spread")),
        "core/torch",
    ]
    # Samples of 1, 2 and 3 times the minimum: the upper quartile lies 150 % above it.
    assert [list(row.items()) for row in table_of(out, title)] == [
        list(zip(titles, row.split(), strict=True))
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
    titles = ("size", "c10d [µs]", "algbw [GB/s]", "busbw [GB/s]", "c10d [µs] spread")
    rows = table_of(capsys.readouterr().out, "collectives: p25 of the samples")
    assert [[row[title] for title in titles] for row in rows] == [
        ["64 KiB", "150.0", "2.000", "1.000", "+67%"],
        ["65537 B", "150.0", "3.000", "1.500", "+67%"],
    ]
    assert "150 µs +67%" in " ".join(format_result(results[0]).split())
    assert cells(results_frame(run(*results))["estimate_s"]) == pytest.approx([150e-6] * 2)


def test_print_runs_of_one_process_shows_no_ranks_and_no_mesh(capsys: Capture) -> None:
    alone = result("dispatch", "add", "core", 4e-6)
    samples = {str(rank): (1.0, 2.0, 3.0) for rank in range(4)}
    print_runs([run(alone)])
    out = capsys.readouterr().out
    assert re.findall("one process of 4 .the others idle. on node-a|mesh:|layout", out) == [
        "one process of 4 (the others idle) on node-a"
    ]
    print_runs([run(alone, result("collectives", "all_reduce", "c10d", 1.0, rank_samples_s=samples))])
    out = capsys.readouterr().out
    assert "ranks:    4 on node-a" in out and "mesh:     dp=2, tp=2" in out


def test_cases_are_chosen_and_sorted(dtbench: Cli, tmp_path: Path) -> None:
    results = [
        result("s", name, "core", time, params={"size": size})
        for name, time, size in (("b", 3.0, 1024), ("a", 1.0, 65536), ("c", 2.0, 4096))
    ]
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
    results = (
        result("dispatch", name, impl, seconds, params={"placements": "Colwise,Rowwise", "pass": way})
        for way in ("forward", "forward+backward")
        for name in ("adamw_step_x100", "redistribute")
        for impl, seconds in (("core", 2e-6), ("torch", 4e-6), ("local", 1e-6))
    )
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


def test_print_runs_head_shows_the_machine(capsys: Capture) -> None:
    print_runs([run(complete=False)])
    out = capsys.readouterr().out
    facts = (
        "torch 2.13.0",
        "abc123 with changes",
        "Fast CPU, 8 cores usable",
        "2 x G1",
        "4 on node-a, node-b",
    )
    shown = ("run.jsonl  INCOMPLETE", "--resume", *facts, "dp=2, tp=2", "no results")
    assert [words for words in shown if words not in out] == []
    print_runs([run()])
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_print_runs_lists_failed_results_with_reasons(capsys: Capture) -> None:
    def bad(name: str, impl: str, status: str, reason: str | None = None) -> Result:
        return result("s", name, impl, 1.0, status=status, reason=reason, time_s=None)

    skipped = [bad(f"c{i}", "torch", "skipped", "no such op") for i in range(7)]
    wrong, failed = bad("a", "torch", "wrong", "sum off by 1"), bad("b", "core", "failed")
    with_caveat = result("s", "a", "core", 1.0, reason="GPU throttled")
    print_runs([run(with_caveat, wrong, failed, *skipped)])
    out = capsys.readouterr().out
    rows = {row["case"]: row for row in table_of(out, "s: p25")}
    assert (rows["a"]["torch [s]"], rows["b"]["core [s]"], rows["c6"]["torch [s]"]) == (
        "wrong",
        "failed",
        "skipped",
    )
    assert {
        "wrong: s/torch: sum off by 1 (a)",
        "with caveat: s/core: GPU throttled (a)",
        "failed: s/core: no reason given (b)",
        "skipped: s/torch: no such op (c0; c1; c2; c3; c4; and 2 more)",
        "1 x with caveat, 1 x wrong, 1 x failed, 7 x skipped",
    } <= set(out.splitlines())
    counted = [with_caveat, failed, result("s", "b", "core", 1.0)]
    assert format_status_counts(counted) == "1 ok, 1 with caveat, 1 failed"


def test_headers_describe_only_the_samples_that_there_are(
    capsys: Capture, dtbench: Cli, tmp_path: Path
) -> None:
    """A log has one time of each size: no quartile of samples, and no spread of them."""
    (tmp_path / "a.log").write_text(made_up_logs.table())
    dtbench("import", "a.log", "-o", "a.jsonl")
    shown = dtbench("show", "a.jsonl")[1]
    assert "collectives: one time per case" in shown
    assert not re.search("p25|quartile", shown)
    dtbench("report", "a.jsonl", "-o", "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "There is one time per size" in page
    assert not re.search("A sample is the longest|<th>lower quartile", page)
    print_runs([run(result("s", "a", "core", 1.0, time_s=summarize([1.0, 2.0])))])
    assert "s: p25 of the samples, spread to their upper quartile" in capsys.readouterr().out


@pytest.mark.parametrize(("is_terminal", "output"), [(False, "first\n2nd\n"), (True, "\rfirst\r2nd  \n")])
def test_progress_is_one_line_on_a_terminal_and_a_line_per_result_in_a_pipe(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, output: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    line = ProgressLine(True)
    for text in ("first", "2nd"):
        line.show(text)
    line.close()
    assert capsys.readouterr().out == output


def test_print_status_writes_line_and_newline_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(
        "sys.stdout", SimpleNamespace(encoding="ascii", write=pieces.append, flush=lambda: None)
    )
    print_status("12 µs")
    assert [piece for piece in pieces if piece] == ["12 ?s\n"]


def test_text_from_a_file_can_not_steer_the_terminal(capsys: Capture) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[red]x[/red]\u202e\r\nnext"
    failed = result("s", evil, "core", 1.0, status="failed", reason=evil, params={evil: evil}, time_s=None)
    machine = {"cpu": {"model": evil}, "gpus": [{"name": evil}]}
    hostile_run = run(failed, started=evil, versions={"torch": evil}, machine=machine)
    print_runs([hostile_run])
    print_comparison(compare_runs([hostile_run], [hostile_run]))
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
        timed = (
            result("dispatch", name, "core", 1e-5 * (1 + launch / 1000) * times, launch)
            for name, times in (("same", 1), ("slow", factor))
            for launch in range(5)
        )
        return run(*timed, *more)

    print_comparison(compare_runs([side(1, result("dispatch", "gone", "core", 1e-5))], [side(1.5)]))
    out = capsys.readouterr().out
    slow, gone, same = table_of(out, "dispatch; base, head: median over launches of each launch's min")
    titles = ("verdict", "case", "base [µs]", "head [µs]", "head/base", "p", "launches")
    assert [slow[title] for title in titles] == ["slower", "slow", "10.02", "15.03", "1.50x", "0.004", "5/5"]
    assert [(row["verdict"], row["case"]) for row in (gone, same)] == [("missing", "gone"), ("same", "same")]
    assert slow["interval"].endswith("(97%)") and gone["reason"] == "not measured in head"
    assert "note: the same run is on both sides\n" in out and out.endswith("\n1 slower, 1 missing, 1 same\n")


def test_comparison_of_single_launches_has_no_verdict(capsys: Capture) -> None:
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
    (timed,) = written["results"]
    assert timed["time_s"]["median"] == 2.0 and "samples_s" not in timed
    print_comparison(compare_runs([one], [one]), as_json=True)
    assert load()["rows"][0]["verdict"] == "inconclusive"
    print_findings([MachineFinding("a", None, "b")], as_json=True)
    assert load() == [{"check": "a", "ok": None, "got": "b", "effect": "", "remedy": ""}]


def test_table_counts_rows_that_its_columns_do_not_hold() -> None:
    case_and_impl = [columns.text("Case", list("abcde")), columns.text("Impl", ["core"] * 5)]
    assert [c.header for c in compact(Table("", case_and_impl)).columns] == ["Case"]
    # The rows that are left out may differ, so the column stays.
    cut = compact(Table("", case_and_impl, total=9))
    assert ([c.header for c in cut.columns], cut.total_rows) == (["Case", "Impl"], 9)


@pytest.mark.parametrize("text", ["µ", 'quoted " \\ \x1b', "\udcff"], ids=["latin", "escaped", "surrogate"])
def test_printed_json_is_indented_as_by_the_standard_library(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"a": [1, 2.5e-7, True, None], "b": {}, "c": [], text: text, "d": [{"e": [[]]}]}
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    print_json(value)
    assert out.getvalue() == json.dumps(value, indent=2) + "\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json([float("nan")])


def header(mesh: dict[str, int], hosts: list[str], **facts: list[Any]) -> dict[str, Any]:
    described = made_up.header(mesh, hosts)
    for rank in described["ranks"]:
        rank |= {name: values[rank["rank"]] for name, values in facts.items()}
    return described


def read_by(*args: Any, **facts: list[Any]) -> Header:
    return made_up.read(header(*args, **facts))


def test_a_file_that_lists_other_ranks_than_its_mesh_has_no_layout() -> None:
    described = header({"dp": 2, "tp": 2}, ["a"] * 4)
    assert set(mesh_groups(made_up.read(described))) == {"dp", "tp", "dp+tp"}
    described["mesh"]["shape"] = [2**10, 2**10]
    assert layout_of(made_up.read(described)) == [] and mesh_groups(made_up.read(described)) == {}


def test_hosts_are_counted_per_group_and_per_pair() -> None:
    assert [
        (dim.name, dim.ranks, dim.groups, dim.hosts_per_group, dim.ranks_per_host, dim.groups_per_host_pair)
        for dim in layout_of(read_by({"dp": 2, "tp": 4}, ["a"] * 4 + ["b"] * 4))
    ] == [
        ("dp", 2, 4, (2, 2), (1, 1), 4),
        ("tp", 4, 2, (1, 1), (4, 4), 0),
        ("dp+tp", 8, 1, (2, 2), (4, 4), 1),
    ]
    (tp,) = layout_of(read_by({"tp": 6}, ["a", "a", "a", "b", "b", "c"]))
    assert (tp.hosts_per_group, tp.ranks_per_host, tp.groups_per_host_pair) == ((3, 3), (1, 3), 1)
    mixed, *_ = layout_of(read_by({"dp": 2, "tp": 2}, ["a", "a", "a", "b"]))  # groups 0,2 and 1,3
    assert (mixed.hosts_per_group, mixed.groups_per_host_pair) == ((1, 2), 1)
    unknown = header({"tp": 2}, ["a", "b"])
    del unknown["ranks"][1]["host"]
    assert layout_of(made_up.read(unknown))[0].hosts_per_group is None


@pytest.mark.parametrize(
    ("mesh", "hosts", "words"),
    [
        (
            {"dp": 2, "tp": 4},
            ["a"] * 4 + ["b"] * 4,
            {"dp": "2 hosts x 1 rank", "tp": "1 host x 4 ranks", "dp+tp": "2 hosts x 4 ranks"},
        ),
        ({"tp": 6}, ["a", "a", "a", "b", "b", "c"], {"tp": "3 hosts x 1..3 ranks"}),
        ({"dp": 2, "tp": 2}, ["a"] * 4, {}),  # one host
        ({"dp": 2, "tp": 2}, ["a", "b", "c", "d"], {}),  # one rank per host
    ],
)
def test_dims_are_named_by_hosts_and_ranks_per_host_if_the_mesh_has_both(
    mesh: dict[str, int], hosts: list[str], words: dict[str, str]
) -> None:
    dims = layout_of(read_by(mesh, hosts))
    assert format_hosts({d.name: (d.hosts_per_group, d.ranks_per_host) for d in dims}) == words
    unknown = {f"{name}?": (None, None) for name in words}
    known = {d.name: (d.hosts_per_group, d.ranks_per_host) for d in dims}
    assert format_hosts(known | unknown) == words


@pytest.mark.parametrize(
    ("hosts", "boots", "count"),
    [
        (["a", "b"], ["k", "k"], 2),  # namespaces of one machine, each with a name of its own
        (["localhost", "localhost"], ["k", "m"], 2),  # nodes of one name
        (["a", "a"], ["k", "k"], 1),
        (["a", "a"], [None, None], 1),
    ],
)
def test_a_host_is_a_name_and_a_kernel(
    hosts: list[str], boots: list[str | None], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    described = header({"tp": 2}, hosts, boot_id=boots)
    assert layout_of(made_up.read(described))[0].hosts_per_group == (count, count)
    print_runs([made_up.run([], mesh={"tp": 2}, ranks=described["ranks"])])
    out = capsys.readouterr().out
    assert f"2 on {', '.join(hosts[:count])}\n" in out
    (row,) = table_of(out, "layout")
    assert row["hosts per group"] == str(count)
    assert row["groups per host pair" if count == 2 else "ranks per host"] == ("1" if count == 2 else "2")


def test_numa_nodes_and_nvlink_neighbours() -> None:
    peers = [{"neighbours": {bus: 4}, "switch_links": 0} for bus in ("1", "0", "3", "2")]
    facts = {"nvlink": peers, "device_numa_node": [0, 0, 1, None], "numa_nodes": [[0, 1]] * 4}
    dp, tp, _ = layout_of(read_by({"dp": 2, "tp": 2}, ["a"] * 4, pci_bus_id=list("0123"), **facts))
    assert (dp.nvlink, dp.numa_nodes_per_group) == ((0, 2), (2, 2))
    assert (tp.nvlink, tp.numa_nodes_per_group) == ((2, 2), (1, 2))
    switched = [{"neighbours": {}, "switch_links": 18}] * 2
    assert layout_of(read_by({"tp": 2}, ["a"] * 2, nvlink=switched))[0].nvlink == (1, 1)
    assert layout_of(read_by({"tp": 2}, ["a", "b"], nvlink=peers[:2]))[0].nvlink is None


# ------------------------------------------------------------------------------------- times

# Two samples of four ranks. Groups of dp: 0,2 and 1,3; of tp: 0,1 and 2,3.
READINGS = {"0": (5.0, 9.0), "1": (4.0, 2.0), "2": (3.0, 8.0), "3": (7.0, 6.0)}


def timed(dim: str, **changes: Any) -> Result:
    longest = (7.0, 9.0)
    fields = {"time_s": summarize(longest), "samples_s": longest, "rank_samples_s": READINGS}
    return Result("collectives", "all_reduce", "c10d", {"mesh_dim": dim}, "ok", **fields | changes)


@pytest.mark.parametrize(
    ("readings", "dim", "expected"),
    [
        (READINGS, 0, (4.0, 8.0)),  # max(3, 4), max(8, 2)
        (READINGS, 1, (4.0, 6.0)),  # max(4, 3), max(2, 6)
        ({rank: READINGS[rank] for rank in ("0", "1")}, 1, (4.0, 2.0)),
        ({}, 1, ()),
        ({"0": (1.0,), "1": (1.0, 2.0)}, 1, ()),
        ({"9": (1.0,)}, 1, ()),
    ],
)
def test_the_last_arrival_is_the_shortest_reading_of_a_group_and_the_slowest_group_counts(
    readings: dict[str, tuple[float, ...]], dim: int, expected: tuple[float, ...]
) -> None:
    assert from_last_arrival_s(timed("dp", rank_samples_s=readings), groups_of((2, 2), dim)) == expected


def test_arrivals_extend_a_sample_to_the_end_of_the_last_rank() -> None:
    # Rank 2 came first and waited; rank 0 came 2 s later and ended at 7 s, the last.
    result = timed("dp", rank_arrivals_s={"0": (2.0, 0.0), "1": (1.0, 0.0), "2": (0.0, 1.0), "3": (0.0, 0.0)})
    assert from_last_arrival_s(result, groups_of((2, 2), 0)) == (6.0, 8.0)  # max(7 - 2, 7 - 1), max(9 - 1, 6)
    assert from_last_arrival_s(result, [[0, 2]]) == (5.0, 8.0)
    # Impossible arrivals are limited to the range of the readings.
    impossible = timed("dp", rank_arrivals_s={"0": (0.0, 0.0), "2": (9.0, 0.0)})
    assert from_last_arrival_s(impossible, [[0, 2]]) == (3.0, 9.0)
    assert from_last_arrival_s(timed("dp", rank_arrivals_s={"0": (2.0,)}), [[0, 2]]) == ()


# With a loose bound from the ping, the barriers decide; otherwise only within that bound.
@pytest.mark.parametrize(("error_ns", "late_ns"), [(1, 10_039), (100, 9_940), (10**9, 0)])
def test_measured_offsets_correct_what_barriers_suggest(error_ns: float, late_ns: float) -> None:
    """Rank 1, on another host whose clock is 5 s ahead, leaves every barrier 10 us after rank 0."""
    times_ns = [100, 200_100, 400_100]
    started = {0: times_ns, 1: [5 * 10**9 + time_ns + 10_000 for time_ns in times_ns]}
    late_s = lateness_s(started, {0: "a", 1: "b"}, {0: SAME_CLOCK, 1: Offset(-5e9 + 40, error_ns)})
    assert late_s[1] * 1e9 == pytest.approx([late_ns] * 3, abs=1e-3)


@given(st.data())
def test_arrivals_are_found_whatever_the_clocks_of_the_hosts_show(data: st.DataObject) -> None:
    samples = 9
    times = st.lists(st.integers(0, 10**9), min_size=samples, max_size=samples)
    barrier = np.array(data.draw(times))
    behind = np.array([data.draw(times) for _ in range(4)])
    clocks = (0, 0, data.draw(st.integers(-(10**17), 10**17)), data.draw(st.integers(0, 10**17)))
    started = {rank: (barrier + behind[rank] + clock).tolist() for rank, clock in enumerate(clocks)}
    late_s = lateness_s(started, {0: "a", 1: "a", 2: "b", 3: None})
    # On one kernel exactly; between kernels but for a shift, which leaves both together in the median.
    assert late_s[1] - late_s[0] == pytest.approx((behind[1] - behind[0]) * 1e-9, abs=1e-7)
    for rank in (2, 3):
        late_ns = (late_s[rank] - (late_s[0] + late_s[1]) / 2) * 1e9
        assert np.median(late_ns) == pytest.approx(0.0, abs=100.0)
        shift_ns = late_ns - behind[rank] + (behind[0] + behind[1]) / 2
        assert shift_ns == pytest.approx(np.full(samples, shift_ns[0]), abs=100.0)
    assert np.min(list(late_s.values()), axis=0) == pytest.approx(np.zeros(samples))


def test_from_last_arrival_is_in_frames_and_printed_tables(capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up.run([timed("dp"), timed("tp"), timed("tp", launch=1, rank_samples_s={}), timed("none")])
    frame = results_frame([run])
    assert cells(frame["from_last_s"]) == [5.0, 4.5, None, None]  # lower quartiles of the samples
    assert cells(cases_frame(frame)["from_last_s", "c10d"]) == [5.0, 4.5, None]
    print_runs([run])
    assert [
        (row["since last arrival [s]"], row["c10d [s]"])
        for row in table_of(capsys.readouterr().out, "collectives")
    ] == [
        ("5.000", "7.500"),
        ("4.500", "7.500"),
        ("-", "7.500"),
    ]
