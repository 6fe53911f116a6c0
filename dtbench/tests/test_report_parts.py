"""The figures of each part of the page, the files that it is made of, and the command."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.cost import calibration
from dtbench.engine.findings import findings as findings_of
from dtbench.errors import UnreadableRunError
from dtbench.records.result import Result, Run
from dtbench.reporting.html import Sources, figures, gather, render
from dtbench.reporting.html.parts import bucketer, changes, collectives, redistribution
from dtbench.reporting.html.section import Material
from dtbench.reporting.html.sources import split_systems
from dtbench.tests import made_up, made_up_findings
from dtbench.tests.html_page import HOSTILE, Page, cells, harmless, hostile, section, sources
from dtbench.tests.test_findings import OTHERS, single_ops

# ------------------------------------------------------------------------------------ verdict and changes


def launches(factor: dict[str, float], run_id: str) -> Run:
    """Six launches of one case per name, each times a factor, with a spread of 1 %."""
    rng = np.random.default_rng(len(run_id))
    params = {"mesh": "8", "placements": "S(0)"}
    results = []
    for name, launch in itertools.product(factor, range(6)):
        samples = 50e-6 * factor[name] * np.exp(rng.normal(0, 0.01)) * np.linspace(1, 1.1, 9)
        results.append(made_up.result("dispatch", name, "core", params, samples.tolist(), launch=launch))
    return made_up.run(results, run_id=run_id)


def test_a_comparison_is_the_verdict_and_its_rows() -> None:
    base = launches({"same": 1.0, "slow": 1.0, "fast": 1.0, "gone": 1.0}, "base")
    head = launches({"same": 1.0, "slow": 1.5, "fast": 0.6, "fresh": 1.0}, "new-run")
    text = render(Sources(runs=(head,), baseline=(base,)))
    assert text.index('id="verdict"') < text.index('id="changes"') < text.index('id="provenance"')
    shown = Page(text)
    verdict = shown.section_text["verdict"]
    counts = ["▲ 1 slower", "∅ 1 missing", "▼ 1 faster", "+ 1 new", "= 1 same"]
    thresholds = ["at least 5 launches", "p < 0.01", "more than 2% and 200 ns", "within ±5%"]
    words = " ".join(verdict.split())
    assert [part for part in ("▲ Slower", *counts, *thresholds) if part not in words] == []
    (row,) = [cells for cells in shown.rows if cells[:1] == ["▲ slower"]]
    slow, usual = (
        [result.time_s.min for result in run.results if result.name == "slow" and result.time_s]
        for run in (head, base)
    )
    # Hodges-Lehmann: the median of 36 differences.
    ratio = math.exp(statistics.median(math.log(a / b) for a in slow for b in usual))
    assert row[1] == "slow" and "In every case: mesh=8, placements=S(0)." in shown.text
    assert float(row[4].rstrip("×")) == pytest.approx(ratio, abs=0.006)
    low, high = map(float, row[5].split(" – "))
    assert low < ratio < high and float(row[6]) == 2.0
    assert any(cell.startswith("6 + 6 launches, interval of 9") for cell in row)
    alone = Material(Sources(runs=(base,)))
    omitted = changes.CHANGES.section(alone)
    assert alone.changes is None and omitted is not None and "--base" in omitted.missing


@pytest.fixture(scope="module")
def findings_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of everything but runs."""
    return render(gather(made_up_findings.write_all(tmp_path_factory.mktemp("findings"))))


@pytest.fixture(scope="module")
def shown(findings_text: str) -> Page:
    return Page(findings_text)


def test_page_shows_the_gates_verdicts(shown: Page) -> None:
    words = (
        "▲ Slower",
        "a note of the gate",
        "control (operations that are the same in both arms)",
        "base/base (base against a second launch of itself)",
    )
    assert [part for part in words if part not in shown.section_text["verdict"]] == []
    assert "main → change: 2 slower, 1 failed, 1 missing, 1 inconclusive, 1 faster, 1 new of 8" in shown.text
    verdicts = ("slower", "failed", "missing", "inconclusive", "faster", "same", "new")
    rows = {row[1].split()[0]: row for row in shown.rows if row[0][2:] in verdicts}
    assert list(rows) == ["add", "matmul", "mm", "relu", "sum", "cat", "gelu", "view"]
    assert [*rows["add"][4:6], rows["add"][-1]] == ["1.50×", "1.47 – 1.53", "collectives 1 → 2"]
    assert rows["sum"][4:6] == ["–", "–"]  # no ratio, no bound: a gap, not a zero
    assert not {"nan", "NaN", "inf", "None", "Infinity"} & set(re.findall(r"[A-Za-z]+", shown.text))


def test_page_of_undecided_gate_shows_why(tmp_path: Path) -> None:
    def sources_of(**changes: Any) -> Sources:
        return gather([made_up_findings.write(tmp_path, "gate.json", made_up_findings.gate(**changes))])

    def verdict_of(**changes: Any) -> str:
        return Page(render(sources_of(**changes))).section_text["verdict"]

    doubted = verdict_of(trust={"control": 1.2, "null": None, "reasons": ["the control moved"]}, exit_code=3)
    assert "? Untrusted" in doubted and "Untrusted: the control moved" in doubted
    few = made_up_findings.benchmark("inconclusive", "sum", 1.03, impl="wrapped")
    for bounds, interval in (
        ((None, None), "no interval"),
        ((None, 1.1), "open – 1.10"),
        ((1.03, 1.03), "no interval"),
    ):
        few["effect"] |= dict(zip(("low", "high"), bounds, strict=True))
        gate = sources_of(benchmarks=[few], exit_code=3).gate
        assert cells(section("changes", gate=gate), "? inconclusive")[6:8] == ["1.03×", interval]
    assert gate and gate.notes[-1] == "wrapped: a minimal tensor subclass in Python"
    assert "Incomplete" in verdict_of(benchmarks=[], exit_code=4)


# ------------------------------------------------------------------------------------ suites


def test_dispatch_has_the_minima_and_their_ratios() -> None:
    results = list(made_up.dispatch())
    shown = section("dispatch", results)
    minima_us = {
        (result.impl, result.params["call"]): result.time_s.min * 1e6
        for result in results
        if (result.name, result.params["mesh"], result.params["pass"]) == ("matmul", "2x4", "forward")
        and result.time_s
    }
    core, torch, floor, ratio, *first = cells(shown, "matmul", "S(0),R", "2x4", "forward")[4:]
    calls = [
        ("core", "cached"),
        ("torch", "cached"),
        ("local", "cached"),
        ("core", "first"),
        ("torch", "first"),
    ]
    assert list(map(float, (core, torch, floor, *first))) == pytest.approx(
        [minima_us[call] for call in calls], rel=0.01
    )
    assert float(ratio.removesuffix("× faster")) == pytest.approx(
        minima_us["torch", "cached"] / minima_us["core", "cached"], abs=0.006
    )
    # Where the core is slower.
    assert {row[0] for table in shown.tables for *_, row in table.rows if "▲" in "".join(row)} == {
        "layer_norm"
    }
    kinds = {
        "forward": "single ops",
        "forward+requires_grad": "single ops on tensors that require gradients",
        "forward+backward": "single ops with their backward",
    }
    for at, (pass_, kind) in enumerate(kinds.items()):
        minima: dict[Any, dict[str, float]] = {}
        for r in results:
            if (r.params["call"], r.params["pass"]) == ("cached", pass_) and r.time_s:
                minima.setdefault((r.name, *r.params.items()), {})[r.impl] = r.time_s.min
        mean = statistics.geometric_mean(times["torch"] / times["core"] for times in minima.values())
        words = f"For cached {kind}, the core is {mean:.2f}× faster than torch"
        assert f"{words} (geometric mean of {len(minima)} cases)" in shown.lead
        assert f"cached call ({kind}): geometric mean of {len(minima)} cases" in shown.headlines[at - 3][1]
    busy = [msgspec.structs.replace(r, params={**r.params, "call": "busy"}) for r in results[:6]]
    both = section("dispatch", [*results, *busy])
    assert (both.lead, both.headlines) == (shown.lead, shown.headlines)
    assert "executes earlier kernels" in both.tables[-1].caption


def test_the_chart_of_ops_has_common_ones_first_and_then_the_slowest() -> None:
    params = {"mesh": "8", "pass": "forward", "call": "cached"}
    times = {f"slow_{i}": ("S(0)", 1e-3 * (i + 1)) for i in range(30)}
    times |= {"relu": ("S(0)", 1e-6), "mm": ("R,S(1)", 9e-6), "add": ("S(0),S(0)", 2e-6)}
    results = [
        made_up.result("dispatch", name, "torch", {**params, "placements": placements}, [time_s] * 3)
        for name, (placements, time_s) in times.items()
    ]
    (panel,) = section("dispatch", results).figures[0].panels
    slowest = [f"slow_{i}" for i in range(29, 14, -1)]
    drawn = [words.split()[0] for words in panel.desc.split("; ")]
    assert drawn == ["add", "relu", "mm", *slowest][: figures.MAX_DOT_ROWS]


def test_the_page_says_what_a_single_op_adds_in_the_words_of_the_run() -> None:
    shown = section("dispatch", [*OTHERS, *single_ops(12)])
    figure, words = shown.headlines[0]
    assert figure == "+19.0 µs" and f"dispatch: {words}" == findings_of(made_up.run(single_ops(12)))[0]
    assert shown.outcome == words.partition(":")[0]
    assert "The floor is the same op" in shown.lead and "8 and 2x4" in shown.lead
    bare = section("dispatch", [r for r in single_ops(4) if r.impl == "core"])
    assert bare.headlines == [] and "floor" not in bare.lead and "2x4" not in bare.lead
    assert "vs torch" not in bare.figures[0].caption and "▲" not in bare.tables[0].note


def test_captions_describe_the_present_results() -> None:
    quiet = section("collectives", [collective({}, {})])
    assert "“Together”" in quiet.lead and "“Alone”" not in quiet.lead
    assert "“alone”" not in quiet.figures[0].caption and "last column" not in quiet.tables[-1].note
    both = section("collectives", [collective({}, {}), collective({"groups": "alone"}, {})])
    assert "“Alone”" in both.lead and "“alone”" in both.figures[0].caption
    buckets = section("bucketer", [r for r in made_up.bucketer() if r.impl == "core"])
    assert "fairscale" not in buckets.lead and "limit" not in buckets.lead + buckets.figures[0].caption
    whole = [msgspec.structs.replace(r, impl="whole") for r in made_up.tensor_parallel() if r.impl == "local"]
    shown = section("tensor_parallel", whole)
    assert "not a floor" in shown.lead and "one rank, whole" in [c.header for c in shown.tables[0].columns]
    assert "attention" in shown.lead and "block" not in shown.lead


def collective(params: dict[str, Any], own: dict[str, list[float]]) -> Result:
    params = {
        "mesh_dim": "dp",
        "ranks": 2,
        "groups": "together",
        "mode": "isolated",
        "dtype": "float32",
    } | params
    return made_up.result(
        "collectives",
        "all_reduce",
        "c10d",
        params,
        [4e-3] * 8,
        rank_samples=own,
        size_bytes=10**6,
        factor=1.0,
    )


def test_ranks_part_finds_late_ranks_and_slow_groups() -> None:
    # Ranks 0, 2 and 1, 3 are the groups of dp. Rank 2 comes 3 ms after 0, rank 3 with 1; they need 1 and 2 ms.
    result = collective(
        {}, {rank: [time] * 8 for rank, time in {"0": 4e-3, "2": 1e-3, "1": 2e-3, "3": 2e-3}.items()}
    )
    (skew,) = collectives.ranks_of([made_up.run([result])])
    assert {rank: middle for rank, (_, middle, _) in skew.late_s.items()} == pytest.approx(
        {0: 0.0, 1: 0.0, 2: 3e-3, 3: 0.0}
    )
    assert (skew.last[2], skew.last[0]) == (1.0, 0.0)
    assert skew.busbw_Bps == pytest.approx({0: 1e9, 2: 1e9, 1: 0.5e9, 3: 0.5e9})
    assert cells(section("collectives", [result]), "dp", "all_reduce", "1000000 B", "2")[5:8] == [
        "3.00",
        "3.00",
        "3.00",
    ]
    # With unequally many samples there is no bandwidth from the last arrival on.
    uneven = collective({}, {str(rank): [1e-3 * (rank + 1)] * (8 + rank) for rank in range(4)})
    (skew,) = collectives.ranks_of([made_up.run([uneven])])
    assert skew.busbw_Bps == {} and skew.late_s.keys() == set(range(4))


def test_the_limit_is_the_links_of_a_gpu_or_as_given() -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "nvlink": {"links": 18, "active_links": 18, "version": 6}}
    header = made_up.header(hosts=["a"] * 4, machine={"cpu": {}, "gpus": [gpu] * 4})
    for rank in header["ranks"]:
        rank |= {
            "nvlink": {"neighbours": {}, "switch_links": 18},
            "pci_bus_id": f"{rank['rank']}",
            "boot_id": "1",
        }
    limits = [collectives.limit_of(made_up.read(header), "tp")]
    header["ranks"][3] |= {"nvlink": {"neighbours": {}, "switch_links": 0}}
    limits += [
        collectives.limit_of(made_up.read(described), "tp") for described in (header, made_up.header())
    ]
    # NVLink 4 has 18 links of 25 GB/s each way; a pair without a link and a CPU have no limit.
    assert limits == [450e9, None, None]
    shown = section("collectives", made_up.collectives(), peaks={"tp": 5e9})
    assert "Limits: tp 5.00 GB/s, as given." in shown.lead
    assert "limit of tp" in [words for figure in shown.figures for words, _ in figure.legend]


def test_curves_are_labelled_by_hosts_and_ranks_per_host() -> None:
    shown = section("collectives", made_up.collectives())  # two hosts of two ranks
    labels = {words.rpartition(", ")[0] for figure in shown.figures[:1] for words, _ in figure.legend}
    assert labels == {"dp, 2 hosts x 1 rank", "tp, 1 host x 2 ranks"}


def test_systems_are_drawn_beside_each_other() -> None:
    """Collectives of other meshes and machines: a line each, and the rest of the page is the first's."""
    first = made_up.run(list(made_up.collectives()), path="first.jsonl")
    other = made_up.run(
        list(made_up.collectives(mesh={"dp": 8}, truth={"dp": (2.0, 50.0)})),
        path="other.jsonl",
        run_id="20260102-120000-abcd",
        mesh={"dp": 8},
        hosts=[f"other-{i}" for i in range(8)],
    )
    together = split_systems(sources([first, other]))
    assert (together.runs, together.systems) == ((first,), ((first,), (other,)))
    figure = section("systems", systems=together.systems).figures[0]
    assert [panel.title for panel in figure.panels[:2]] == ["all_gather", "all_reduce"]
    assert {words for words, _ in figure.legend} == {"first", "other"}
    dispatch = made_up.run(
        list(made_up.dispatch()), path="ops.jsonl", machine={"cpu": {"model": "other"}, "gpus": []}
    )
    assert split_systems(sources([first, dispatch])).systems == ()


def test_constants_stand_beside_the_builtin_ones_and_residuals_are_their_ratios() -> None:
    run = made_up.run(list(made_up.collectives(noise=0.0)))
    topology = calibration.calibrate([run])
    dim = next(d for d in topology.dims if d.name == "dp")
    shown = section("redistribute", run.results, topology=topology)
    row = cells(shown, "dp", "2", "inter-host")
    assert (float(row[3]), float(row[6])) == pytest.approx(
        (dim.bandwidth_GiBps, dim.latency_us_per_hop), rel=0.01
    )
    assert (row[5], row[8]) == ("19.3", "2.70")
    assert any("from a single launch: too narrow" in table.note for table in shown.tables)
    # The made-up times follow the formula, so the fitted constants are right everywhere ...
    residuals = {series.label: series.y for series in redistribution.residuals_of(dim)}
    assert residuals["fitted"] == pytest.approx([1.0] * len(residuals["fitted"]), abs=0.02)
    # ... and the built-in ones are as far off as the two formulas are.
    point = dim.residuals.points[0]
    builtin_us, true_us = (
        made_up.ring_us(point.collective, point.size_bytes, 2, *constants)
        for constants in ((19.3, 2.7), made_up.TRUTH["dp"])
    )
    assert residuals["builtin"][0] == pytest.approx(builtin_us / true_us, rel=0.05)
    assert [redistribution.percent_off(ratio) for ratio in (0.5, 1.0, 2.0, 0.01, 0.001)] == [
        "−50 %",
        "0 %",
        "+100 %",
        "−99 %",
        "−99.90 %",
    ]


def test_bandwidth_lower_bound_is_marked() -> None:
    run = made_up.run(
        list(made_up.collectives(truth={"dp": (1e6, 250.0), "tp": (1e6, 90.0)}, sizes=made_up.SIZES[:4]))
    )
    shown = section("redistribute", run.results, topology=calibration.calibrate([run]))
    assert cells(shown, "dp", "2", "inter-host")[3].startswith("≥ ")
    assert any("only a lower bound" in note for note in shown.notes)


def test_covered_share_is_that_of_the_collectives_time() -> None:
    params = {"mesh_dim": "dp", "dtype": "float32", "size": 65536, "late_ms": 0}
    results = [
        made_up.result("overlap", "all_reduce", impl, params, [seconds] * 3)
        for impl, seconds in (("core", 7e-3), ("wait_at_once", 10e-3), ("local", 4e-3), ("torch", 8e-3))
    ]
    assert cells(section("bucketer", results), "dp", "64 KiB")[-1] == "50"
    assert bucketer.covered_text(-0.25) == "−25% covered"


def test_stages_add_up_in_the_table(shown: Page) -> None:
    assert [shown.row(made_up_findings.LABEL, "core", stage)[3:6] for stage in ("local op", "entry")] == [
        ["2.50", "0.02", "62"],
        ["1.50", "0.02", "38"],
    ]


def test_other_suites_show_times_over_launches() -> None:
    results = [
        made_up.result(
            "mine", "mean", "one", {"size": size, "bucket_bytes": size}, [t * time_s] * 5, launch=i
        )
        for size, time_s in ((2**14, 2e-4), (2**18, 1e-3))
        for i, t in enumerate((0.5, 2.5, 1.0))
    ]
    assert [row[3] for table in section("others", results).tables for *_, row in table.rows] == [
        "200",
        "1000",
    ]
    text = Page(
        render(Sources(runs=(made_up.run(results, mesh={}, ranks=made_up.header()["ranks"][:1]),)))
    ).text
    assert "mine: 2 cases from 200 µs to 1.00 ms" in text and "mean 16 KiB 16 KiB" in text
    assert "One process measured" in text and "unknown" not in text


# ------------------------------------------------------------------------------------ history


def test_history_puts_first_what_moved_most(shown: Page, tmp_path: Path) -> None:
    first, second = [row for row in shown.rows if row[0] in ("add", "view") and len(row) == 7]
    assert (first[:6], second[0]) == (["add", "6", "10.00", "12.00", "+20.0", "5" * 40], "view")
    assert "Made-up CPU, 2, Linux" in shown.section_text["history"]
    # Titles leave out what all benchmarks share; a line cut short is no revision.
    times_s = {f"dispatch add mesh=8 pass={way} [core]": 1e-6 for way in ("forward", "backward")}
    lines = [line | {"times_s": times_s} for line in made_up_findings.history(3)]
    path = made_up_findings.write_lines(tmp_path, "h.jsonl", lines)
    path.write_text(path.read_text()[:-5])
    short = gather([path])
    assert len(short.histories[0].points) == 2
    assert "add pass=forward [core]" in Page(render(short)).section_text["history"]


def test_a_folder_of_runs_shows_the_last_and_how_each_case_moved(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRunError, match=r"contains no runs, no table\.json"):
        gather([tmp_path])
    ops = [r for r in made_up.dispatch() if r.name in ("add", "view", "sum")]
    for day, factor in enumerate((1.0, 1.0, 1.5), 1):
        results = [
            made_up.result(r.suite, r.name, r.impl, r.params, [factor * s for s in r.samples_s])
            if (r.name, r.impl) == ("add", "core")
            else r
            for r in ops
        ]
        run = made_up.run(results, started=f"2026-01-0{day}T00:00:00+00:00", run_id=f"run{day}")
        made_up.write(tmp_path / f"{9 - day}.jsonl", run)
    sources = gather([tmp_path])
    assert [run.header.run_id for run in sources.runs] == ["run3"]
    (moved,) = sources.histories
    assert [point.revision for point in moved.points] == ["01-01 00:00", "01-02 00:00", "01-03 00:00"]
    assert moved.machine == "Made-up CPU @ 2.00GHz, mesh dp=2 x tp=2, 2 hosts, gloo"
    cases = [
        row for row in Page(render(sources)).rows if row and row[0].startswith("dispatch ") and "[" in row[0]
    ]
    assert cases[0][0].startswith("dispatch add ") and "+50.0" in cases[0]


# ------------------------------------------------------------------------------------ files and the command

GATE: dict[str, Any] = {"kind": "gate", "schema": 1, "trust": {}, "benchmarks": []}
HISTORY_LINE = {"kind": "history", "schema": 1, "machine": {}, "revision": "a", "times_s": {"a": 0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ([1], "[1], expected a JSON object"),
        ({"kind": "other"}, "of the kind 'other', and a report cannot show it"),
        ({}, "names no kind of file, and a report cannot show it"),
        ('{"kind": "gate", "schema": 1', "not JSON"),
        (GATE | {"schema": 2}, "schema: invalid enum value 2"),
        (GATE | {"benchmarks": [3]}, "benchmarks[0]: expected object, got int"),
        (GATE | {"exit_code": math.nan}, "not JSON"),
        (
            {"kind": "profile of calls", "cases": [{"label": "a"}]},
            "cases[0]: object missing required field impl",
        ),
        ({"kind": "profile of ranks", "sections": {}}, "sections: expected array, got object"),
        (HISTORY_LINE, "times_s"),
        ({"kind": "topology", "schema": 99}, "schema 99"),
        ({"kind": "run", "schema": 1}, "damaged"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    with pytest.raises(UnreadableRunError, match=re.escape(message)) as refused:
        gather([path])
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_hostile_text_of_findings_stays_text(tmp_path: Path) -> None:
    kept = ("kind", "verdict")
    gate = hostile(made_up_findings.gate(), kept)
    for benchmark in gate["benchmarks"]:
        benchmark |= {"params": {HOSTILE: HOSTILE}, "counters": {HOSTILE: {"base": 1, "head": 2}}}
    history = [
        hostile(line, kept) | {"times_s": {HOSTILE: 1e-6 * (k + 1)}}
        for k, line in enumerate(made_up_findings.history(3))
    ]
    calls, ranks = (
        hostile(profile, kept) for profile in (made_up_findings.calls(), made_up_findings.ranks())
    )
    files = made_up_findings.write_all(tmp_path, gate=gate, calls=calls, ranks=ranks, history=history)
    parts = ("lanes00", "stages0", "history0p0", "forest0")
    assert {f"{part}-t" for part in parts} <= set(harmless(render(gather(files))).ids())


def test_the_command_takes_any_of_the_files(dtbench: made_up.Cli, tmp_path: Path, findings_text: str) -> None:
    code, out, err = dtbench("report", *map(str, made_up_findings.write_all(tmp_path)), "-o", "page.html")
    assert (code, err) == (0, "") and "the report is in page.html" in out
    assert (tmp_path / "page.html").read_text("utf-8") == findings_text  # the same files, the same bytes
    for words, message in (
        ("", "nothing to report"),
        ("missing.jsonl", "cannot read missing.jsonl"),
        ("gate.json gate.json", "2 results of gates were given: a report shows one"),
    ):
        code, _, err = dtbench("report", *words.split(), "-o", "page.html")
        assert code == 2 and message in err


def test_base_of_a_report_is_read_without_samples(tmp_path: Path) -> None:
    path = made_up.write(tmp_path / "x.jsonl", made_up.run(list(made_up.tensor_parallel())))
    sources = gather([path], [path])
    assert all(result.samples_s for run in sources.runs for result in run.results)
    assert not any(result.samples_s for run in sources.baseline for result in run.results)
