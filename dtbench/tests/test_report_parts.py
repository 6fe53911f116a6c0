"""The report's parts beyond the runs: verdict, changes, provenance, ranks, stages, history, ops, limits."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import pytest

from dtbench.cost import calibration
from dtbench.records.run import RunWriter
from dtbench.reporting.html import Sources, gather, page, render
from dtbench.reporting.html.parts import bucketer, changes, collectives, cost_model, ranks
from dtbench.reporting.html.section import Material
from dtbench.suite import Run
from dtbench.suite.errors import UnreadableRunError, UsageError
from dtbench.tests import made_up, made_up_findings
from dtbench.tests.html_page import HOSTILE, Page, cells, harmless, hostile, section


def launches(factor: dict[str, float], run_id: str, count: int = 6, **changes: Any) -> Run:
    """Launches of one case per name, each times a factor, with a spread of 1 %."""
    rng = np.random.default_rng(len(run_id))
    results = [
        made_up.result(
            "dispatch",
            name,
            "core",
            {"mesh": "8", "placements": "S(0)"},
            (50e-6 * times * np.exp(rng.normal(0, 0.01)) * np.linspace(1, 1.1, 9)).tolist(),
            launch=launch,
        )
        for name, times in factor.items()
        for launch in range(count)
    ]
    return made_up.run(results, run_id=run_id, **changes)


BASE = {"same": 1.0, "slow": 1.0, "fast": 1.0, "gone": 1.0}
NEW = {"same": 1.0, "slow": 1.5, "fast": 0.6, "fresh": 1.0}


@pytest.fixture(scope="module")
def compared() -> Sources:
    base = launches(BASE, "base", versions={"torch": "2.12.0", "backend": "gloo"}, env={"A": "1", "B": "2"})
    new = launches(NEW, "new-run", env={"A": "1", "C": "3"})
    return Sources(runs=(new,), baseline=(base,))


@pytest.fixture(scope="module")
def compared_text(compared: Sources) -> str:
    return render(compared)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Everything but runs."""
    return gather(finding_files(tmp_path_factory.mktemp("findings")))


def finding_files(folder: Path) -> list[Path]:
    return [
        made_up_findings.write(folder, "gate.json", made_up_findings.gate()),
        made_up_findings.write(folder, "calls.json", made_up_findings.calls()),
        made_up_findings.write_profile(folder / "profile"),
        made_up_findings.write_lines(folder, "history.jsonl", made_up_findings.history()),
    ]


@pytest.fixture(scope="module")
def findings_text(findings: Sources) -> str:
    return render(findings)


@pytest.fixture(scope="module")
def shown(findings_text: str) -> Page:
    return Page(findings_text)


# ------------------------------------------------------------------------------------ verdict and changes


def test_the_verdict_comes_first_in_words_and_shape(compared_text: str) -> None:
    text = compared_text
    assert text.index('id="verdict"') < text.index('id="changes"') < text.index('id="provenance"')
    said = Page(text).section_text["verdict"]
    assert "▲ Slower" in said
    for shape, word in (("▲", "slower"), ("∅", "missing"), ("▼", "faster"), ("+", "new"), ("=", "same")):
        assert re.search(rf"{re.escape(shape)}\s+1\s+{word}", said), word
    for threshold in ("at least 5 launches", "p < 0.01", "more than 2% and 200 ns", "within ±5%"):
        assert threshold in said


def test_a_row_of_the_changes_is_the_comparison(compared: Sources, compared_text: str) -> None:
    (row,) = [r for r in Page(compared_text).rows if r[:1] == ["▲ slower"]]
    slow = [r.time_s.min for r in compared.runs[0].results if r.name == "slow" and r.time_s]
    was = [r.time_s.min for r in compared.baseline[0].results if r.name == "slow" and r.time_s]
    ratios = sorted(math.log(a / b) for a in slow for b in was)
    middle = math.exp((ratios[17] + ratios[18]) / 2)  # Hodges-Lehmann: the median of 36 differences
    assert row[1] == "slow (mesh=8, placements=S(0))"
    assert float(row[4].rstrip("×")) == pytest.approx(middle, abs=0.006)
    assert float(row[5].rstrip("×")) < middle < float(row[6].rstrip("×"))
    assert float(row[7]) == 2.0
    assert float(row[8]) == pytest.approx((middle - 1) / 0.02, abs=0.1)
    assert any(cell.startswith("6 + 6 launches, interval of 9") for cell in row)


def test_without_a_baseline_nothing_is_called_slower() -> None:
    of = Material(Sources(runs=(launches(BASE, "base"),)))
    left_out = changes.CHANGES.section(of)
    assert of.changes is None and left_out is not None and "--base" in left_out.missing


def test_the_gates_verdicts_are_the_pages(shown: Page) -> None:
    said = shown.section_text["verdict"]
    assert "▲ Slower" in said
    assert "main → change: 2 slower, 1 failed, 1 missing, 1 inconclusive, 1 faster, 1 new of 8" in shown.text
    assert "a note of the gate" in said
    assert "the control moved by +0.10%" in said
    rows = [
        r
        for r in shown.rows
        if r[0][2:] in ("slower", "failed", "missing", "inconclusive", "faster", "same", "new")
    ]
    assert [r[1].split()[0] for r in rows] == ["add", "matmul", "mm", "relu", "sum", "cat", "gelu", "view"]
    assert rows[0][4:7] == ["1.50×", "1.47×", "1.53×"]
    assert rows[0][-1] == "collectives 1 → 2"
    assert rows[4][4:7] == ["–", "–", "–"]  # no ratio, no bound: a gap, not a zero


def test_a_gate_that_cannot_be_trusted_says_so(tmp_path: Path) -> None:
    trust = {"control": 1.2, "null": None, "reasons": ["the control moved"]}
    data = made_up_findings.gate(
        trust=trust, exit_code=3, benchmarks=[made_up_findings.benchmark("PASS", "a", 1.0)]
    )
    said = gather([made_up_findings.write(tmp_path, "gate.json", data)]).gate
    assert said is not None
    assert (said.shape, said.headline) == ("?", "Not to be trusted")
    assert "Not to be trusted: the control moved" in said.notes


def test_bounds_that_are_open_are_said_to_be(tmp_path: Path) -> None:
    few = made_up_findings.benchmark("INCONCLUSIVE", "sum", 1.03)
    few["effect"] |= {"low": 0.0, "high": None}
    data = made_up_findings.gate(benchmarks=[few], exit_code=3)
    shown = section("changes", gate=gather([made_up_findings.write(tmp_path, "gate.json", data)]).gate)
    assert cells(shown, "? inconclusive")[6:9] == ["1.03×", "open", "open"]


# ------------------------------------------------------------------------------------ provenance


# ------------------------------------------------------------------------------------ ranks


def test_who_is_late_and_which_group_is_slow() -> None:
    # Ranks 0, 2 and 1, 3 are the groups of dp. Rank 2 comes 3 ms after 0, rank 3 with 1; both groups need 1 ms.
    late_s = {0: 0.0, 1: 0.0, 2: 3e-3, 3: 0.0}
    work_s = {0: 1e-3, 2: 1e-3, 1: 2e-3, 3: 2e-3}
    own = {
        str(r): [work_s[r] + max(late_s.values() if r in (0, 2) else [0.0]) - late_s[r]] * 8 for r in range(4)
    }
    params = {"mesh_dim": "dp", "ranks": 2, "groups": "together", "mode": "isolated", "dtype": "float32"}
    result = made_up.result(
        "collectives",
        "all_reduce",
        "c10d",
        params,
        [4e-3] * 8,
        rank_samples=own,
        size_bytes=10**6,
        factor=1.0,
    )
    (found,) = ranks.ranks_of([made_up.run([result])])
    assert {rank: found.late_s[rank][1] for rank in range(4)} == pytest.approx(late_s)
    assert found.last[2] == 1.0
    assert found.last[0] == 0.0
    assert found.busbw_Bps == pytest.approx({0: 1e9, 2: 1e9, 1: 0.5e9, 3: 0.5e9})
    shown = section("collectives", [result])
    assert cells(shown, "dp", "all_reduce", "1000000 B", "2")[5:8] == ["3.00", "3.00", "3.00"]


def test_ranks_with_unequally_many_samples_are_late_and_have_no_bandwidth() -> None:
    params = {"mesh_dim": "dp", "ranks": 2, "groups": "together", "mode": "isolated", "dtype": "float32"}
    own = {str(r): [1e-3 * (r + 1)] * (8 + r) for r in range(4)}
    result = made_up.result(
        *("collectives", "all_reduce", "c10d", params, [4e-3] * 8),
        rank_samples=own,
        size_bytes=10**6,
        factor=1.0,
    )
    (found,) = ranks.ranks_of([made_up.run([result])])
    assert found.busbw_Bps == {} and found.late_s.keys() == set(range(4))


def test_the_limit_is_the_links_of_a_gpu() -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "nvlink": {"links": 18, "active_links": 18, "version": 6}}
    link = {"neighbours": {}, "switch_links": 18}
    header = made_up.header(hosts=["a"] * 4, machine={"cpu": {}, "gpus": [gpu] * 4})
    for rank in header["ranks"]:
        rank |= {"nvlink": link, "pci_bus_id": f"{rank['rank']}", "boot_id": "1"}
    limit = collectives.limit_of(made_up.read(header), "tp")
    assert limit == 450e9  # NVLink 4: 18 links of 25 GB/s in each direction
    header["ranks"][3] |= {"nvlink": {"neighbours": {}, "switch_links": 0}}
    assert collectives.limit_of(made_up.read(header), "tp") is None  # a pair without a link
    assert collectives.limit_of(made_up.read(made_up.header()), "tp") is None  # no GPU


# ------------------------------------------------------------------------------------ model, stages, overlap


def test_residuals_are_percent_of_the_measured() -> None:
    assert [cost_model.percent_off(r) for r in (0.5, 1.0, 2.0, 0.01, 0.001)] == [
        "−50 %", "0 %", "+100 %", "−99 %", "−99.90 %",
    ]  # fmt: skip
    truth = made_up.TRUTH["dp"]
    topology = calibration.calibrate([made_up.run(list(made_up.collectives(noise=0.0)))])
    (dim,) = [d for d in topology.dims if d.name == "dp"]
    series = {one.label: one for one in cost_model.residuals_of(dim)}
    # The made-up times follow the formula, so the fitted constants are right everywhere ...
    assert series["fitted"].y == pytest.approx([1.0] * len(series["fitted"].y), abs=0.02)
    # ... and the built-in ones are as far off as the two formulas are.
    point = dim.residuals.points[0]
    built = made_up.ring_us(point.collective, point.size_bytes, 2, 19.3, 2.7)
    true = made_up.ring_us(point.collective, point.size_bytes, 2, *truth)
    assert series["builtin"].y[0] == pytest.approx(built / true, rel=0.05)


def test_stages_add_up_in_the_table(shown: Page) -> None:
    assert shown.row(made_up_findings.LABEL, "core", "local op")[3:6] == ["2.50", "0.02", "62"]
    assert shown.row(made_up_findings.LABEL, "core", "entry")[3:6] == ["1.50", "0.02", "38"]


def test_what_is_hidden_is_the_share_of_the_collectives_time() -> None:
    times = {"core": 7.0, "wait_at_once": 10.0, "local": 4.0, "torch": 8.0}
    params = {"mesh_dim": "dp", "dtype": "float32", "size": 65536, "late_ms": 0}
    results = [made_up.result("overlap", "all_reduce", i, params, [t * 1e-3] * 3) for i, t in times.items()]
    assert cells(section("bucketer", results), "dp", "64 KiB")[-1] == "50"
    assert bucketer.hidden_words(-0.25) == "−25% hidden"


# ------------------------------------------------------------------------------------ a suite of a user's


def test_the_title_of_an_unknown_suite_is_its_times_and_sizes_have_units() -> None:
    results = [
        made_up.result("mine", "mean", "one", {"size": size, "bucket_bytes": size}, [time_s] * 5)
        for size, time_s in ((2**14, 2e-4), (2**18, 1e-3))
    ]
    alone = made_up.run(results, mesh={}, ranks=made_up.header()["ranks"][:1])
    shown = Page(render(Sources(runs=(alone,))))
    assert "mine: 2 cases from 200 µs to 1.00 ms" in shown.text
    assert "One process measured" in shown.text and "unknown" not in shown.text
    assert "mean 16 KiB 16 KiB" in shown.text


# ------------------------------------------------------------------------------------ history, ops


def test_titles_of_a_history_leave_out_what_all_benchmarks_share(tmp_path: Path) -> None:
    line = made_up_findings.history(2)[0]
    times = {f"dispatch add mesh=8 pass={way} [core]": 1e-6 for way in ("forward", "backward")}
    lines = [line | {"revision": revision * 40, "times_s": times} for revision in "ab"]
    shown = Page(render(gather([made_up_findings.write_lines(tmp_path, "h.jsonl", lines)])))
    assert "add pass=forward [core]" in shown.section_text["history"]


def test_history_puts_first_what_moved_most(shown: Page) -> None:
    rows = [r for r in shown.rows if r[0] in ("add", "view") and len(r) == 7]
    assert [r[0] for r in rows] == ["add", "view"]
    assert rows[0][1:5] == ["6", "10.00", "12.00", "+20.0"]
    assert rows[0][5] == "5" * 40
    assert "Made-up CPU, 2, Linux" in shown.section_text["history"]


def test_a_line_cut_short_is_no_revision(tmp_path: Path) -> None:
    path = made_up_findings.write_lines(tmp_path, "h.jsonl", made_up_findings.history(3))
    path.write_text(path.read_text()[:-5])
    assert len(gather([path]).histories[0].points) == 2


# ------------------------------------------------------------------------------------ files


def test_files_are_told_apart_by_what_they_hold(findings: Sources) -> None:
    assert findings.gate is not None
    assert len(findings.calls) == 2
    assert len(findings.ranks) == 1
    assert len(findings.histories) == 1
    assert not findings.runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json", "not JSON"),
        ("[1]", "[1], expected a JSON object"),
        ('{"kind": "other"}', "is none of the files"),
        ('{"kind": "gate", "schema": 1', "not JSON"),
        ('{"kind": "gate", "schema": 2}', "schema is 2, expected 1"),
        ('{"kind": "gate", "schema": 1, "trust": {}, "benchmarks": [3]}', "expected an object"),
        ('{"kind": "gate", "schema": 1, "trust": {}, "benchmarks": [], "exit_code": 9}', "exit_code is 9"),
        ('{"kind": "gate", "schema": 1, "trust": {}, "benchmarks": [], "exit_code": NaN}', "not JSON"),
        ('{"kind": "profile of calls", "cases": [{"label": "a"}]}', "impl is missing"),
        ('{"kind": "profile of ranks", "sections": {}}', "expected a list"),
        ('{"kind": "history", "schema": 7}\n', "schema"),
        ('{"kind": "history", "schema": 1, "machine": {}, "revision": "a", "times_s": {"a": 0}}\n', "a is 0"),
        ('{"kind": "topology", "schema": 99}', "schema 99"),
        ('{"kind": "run", "schema": 1}\n', "damaged"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(UnreadableRunError, match=re.escape(message)) as caught:
        gather([path])
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_two_gates_are_one_too_many(tmp_path: Path) -> None:
    paths = [made_up_findings.write(tmp_path, name, made_up_findings.gate()) for name in "ab"]
    with pytest.raises(UsageError, match="a second result of a gate"):
        gather(paths)
    with pytest.raises(UsageError, match="nothing to report"):
        render(gather([]))


# ------------------------------------------------------------------------------------ safe, small, the same


def test_hostile_text_of_findings_stays_text(tmp_path: Path) -> None:
    kept = ("kind", "verdict")
    gate = hostile(made_up_findings.gate(), kept)
    for benchmark in gate["benchmarks"]:
        benchmark["params"] = {HOSTILE: HOSTILE}
        benchmark["counters"] = {HOSTILE: {"base": 1, "head": 2}}
    history = [
        hostile(line, kept) | {"times_s": {HOSTILE: 1e-6 * (k + 1)}}
        for k, line in enumerate(made_up_findings.history(3))
    ]
    ranks = hostile(made_up_findings.ranks(), kept)
    folder = tmp_path / "p"
    folder.mkdir()
    made_up_findings.write(folder, "table.json", ranks)
    files = [
        made_up_findings.write(tmp_path, "gate.json", gate),
        made_up_findings.write(tmp_path, "calls.json", hostile(made_up_findings.calls(), kept)),
        made_up_findings.write_lines(tmp_path, "h.jsonl", history),
        folder,
    ]
    shown = harmless(render(gather(files)))
    parts = ("parts0", "stages0", "history0p0", "forest0")
    assert {f"{part}-t" for part in parts} <= set(shown.ids())


@pytest.fixture(scope="module")
def large() -> Run:
    """5,000 results of many suites and cases."""
    results = list(made_up.everything().results)
    for k in range(5):
        results += [
            msgspec.structs.replace(r, params={**r.params, "variant": k}) for r in made_up.dispatch(seed=k)
        ]
    results += [made_up.result("mine", "case", "a", {"n": k}, [1e-3] * 3) for k in range(4000)]
    return made_up.run(results[:5000])


def test_a_large_run_is_cut_and_it_is_said(large: Run) -> None:
    assert len(large.results) == 5000
    text = render(Sources(runs=(large,)))
    assert len(text.encode()) <= 2_000_000
    shown = Page(text)
    said = shown.section_text[""]
    assert "The raw data are left out" not in said and 'download="results.csv"' in text
    assert "Tables are cut after" in said


def test_links_to_rows_that_were_cut_lead_to_the_table(
    monkeypatch: pytest.MonkeyPatch, findings: Sources
) -> None:
    monkeypatch.setattr(page, "ECONOMIES", (page.Economy(True, 12, 3),))
    shown = Page(render(findings))
    wanted = {str(attrs["href"])[1:] for tag, attrs in shown.tags if tag == "a" and attrs.get("href")}
    assert "changes" in wanted
    assert wanted <= set(shown.ids())


def test_no_result_of_nothing_is_a_number(shown: Page) -> None:
    words = set(re.findall(r"[A-Za-z]+", shown.text))
    assert not {"nan", "NaN", "inf", "None", "Infinity"} & words
    empty = Page(render(Sources(runs=(made_up.run([]),))))
    assert not {"nan", "NaN", "inf", "None"} & set(re.findall(r"[A-Za-z]+", empty.text))


def test_the_csv_in_the_page_holds_the_results() -> None:
    results = [
        made_up.result("=1+1", "name, with comma", "core", {"n": 3}, [1e-3, 2e-3, 3e-3]),
        *made_up.tensor_parallel(),
    ]
    start, _, held = page.csv_link([made_up.run(results)]).partition(",")
    assert start == "data:text/csv;charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(unquote(held))))
    assert len(rows) == len(results)
    assert rows[0]["suite"] == "'=1+1"  # no formula
    assert rows[0]["name"] == "name, with comma"
    assert float(rows[0]["median_s"]) == 2e-3
    assert rows[0]["param.n"] == "3"


# ------------------------------------------------------------------------------------ index, command


def test_the_command_takes_any_of_the_files(dtbench: made_up.Cli, tmp_path: Path, findings_text: str) -> None:
    files = [str(p) for p in finding_files(tmp_path)]
    code, out, err = dtbench("report", *files, "-o", "page.html")
    assert (code, err) == (0, "")
    assert "the report is in page.html" in out
    assert (tmp_path / "page.html").read_text("utf-8") == findings_text  # the same files, the same bytes
    code, _, err = dtbench("report", "-o", "page.html")
    assert code == 2
    assert "nothing to report" in err
    code, _, err = dtbench("report", "missing.jsonl", "-o", "page.html")
    assert code == 2
    assert "cannot read missing.jsonl" in err


def test_a_folder_of_runs_shows_the_last_and_how_each_case_moved(tmp_path: Path) -> None:
    ops = [r for r in made_up.dispatch() if r.name in ("add", "view", "sum")]
    for day, factor in enumerate((1.0, 1.0, 1.5), 1):
        slower = [
            made_up.result(r.suite, r.name, r.impl, r.params, [factor * s for s in r.samples_s])
            if r.name == "add" and r.impl == "core"
            else r
            for r in ops
        ]
        run = made_up.run(slower, started=f"2026-01-0{day}T00:00:00+00:00", run_id=f"run{day}")
        with RunWriter.create(tmp_path / f"{9 - day}.jsonl", run.header) as writer:
            for result in run.results:
                writer.append(result)
    sources = gather([tmp_path])
    assert [run.header.run_id for run in sources.runs] == ["run3"]
    (moved,) = sources.histories
    assert [point.revision for point in moved.points] == ["01-01 00:00", "01-02 00:00", "01-03 00:00"]
    assert moved.machine == "Made-up CPU @ 2.00GHz, mesh dp=2 x tp=2, 2 hosts, gloo"
    rows = Page(render(sources)).rows
    first = next(row for row in rows if row and row[0].startswith("dispatch ") and "[" in row[0])
    assert first[0].startswith("dispatch add ") and "+50.0" in first


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRunError, match=r"neither runs nor a table\.json"):
        gather([tmp_path])


# ------------------------------------------------------------------------------------ few cases, profiles


def test_what_one_process_measured_claims_no_mesh() -> None:
    results = [msgspec.structs.replace(r, rank_samples_s={}) for r in list(made_up.dispatch())[:8]]
    said = Page(render(Sources(runs=(made_up.run(results),))))
    assert "One process measured" in said.text
    assert "Ranks" not in said.section_text["provenance"] and "dp = 2" not in said.text


def test_calls_behind_a_busy_stream_stand_apart_from_cached_ones():
    cached = [r for r in made_up.dispatch() if r.params["call"] == "cached"]
    busy = [msgspec.structs.replace(r, params={**r.params, "call": "busy"}) for r in cached[:6]]
    plain, both = section("dispatch", cached), section("dispatch", [*cached, *busy])
    assert (both.lead, both.headlines) == (plain.lead, plain.headlines)
    (table,) = (one for one in both.tables if one not in plain.tables)
    assert "at earlier work" in table.caption
