"""The page as text: what it says, that it is safe, and that it is the same every time."""

import base64
import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from dtbench.cost import calibration
from dtbench.errors import OutputError
from dtbench.records.result import Result, Run
from dtbench.records.topology import CalibratedTopology, FromRun
from dtbench.reporting.html import axes, figures, page
from dtbench.reporting.html.parts import front, history
from dtbench.reporting.html.section import Material
from dtbench.reporting.html.svg import STAND_IN, settings
from dtbench.tests import made_up
from dtbench.tests.html_page import HOSTILE, Page, harmless, hostile, render, section, sources

SECTIONS = ["dispatch", "collectives", "redistribute", "bucketer", "tensor_parallel"]
FIGURES = {"collectives": 3, "redistribute": 2}  # of each suite measured alone; the others have one


@pytest.fixture(scope="module")
def run() -> Run:
    return made_up.everything()


@pytest.fixture(scope="module")
def topology(run: Run) -> CalibratedTopology:
    return calibration.calibrate([run])


@pytest.fixture(scope="module")
def text(run: Run, topology: CalibratedTopology) -> str:
    return render([run], topology)


@pytest.fixture(scope="module")
def whole(text: str) -> Page:
    return Page(text)


# ------------------------------------------------------------------------------------- what it says


def test_every_section_has_its_figure_and_table(whole: Page, text: str) -> None:
    sections = [attrs["id"] for tag, attrs in whole.tags if tag == "section" and attrs.get("id")]
    assert sections == [*SECTIONS, "method", "provenance"]
    suites = (
        "bandwidth",
        "times",
        "skew",
        "redistribute",
        "residual",
        "dispatch",
        "bucket",
        "tensor_parallel",
    )
    assert {f"{name}0-t" for name in suites} <= set(whole.ids())
    assert sum(tag == "figure" for tag, _ in whole.tags) == 8
    assert len(text.encode()) < 0.7 * page.BUDGET_BYTES and 'class="warnings"' not in text
    plots = [attrs for tag, attrs in whole.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(plots) >= 15 and all(attrs.get("aria-labelledby") for attrs in plots)


def test_ratios_of_times_are_called_by_their_terms(text: str) -> None:
    assert "core vs torch" in text and "beside torch" not in text
    crowd = {"cpu": {"model": "M", "usable_cores": 1}, "gpus": []}
    (warning,) = front.warnings(Material(sources([made_up.run(list(made_up.collectives()), machine=crowd)])))
    assert warning.brief == "2 ranks share 1 core" and "none of them" not in warning.text


def test_warnings_are_folded_behind_their_number_and_the_severe_ones_in_few_words(
    topology: CalibratedTopology,
) -> None:
    elsewhere = msgspec.structs.replace(topology, runs=(FromRun(run_id="another-run"),))
    warned = render([made_up.run(list(made_up.NOT_OK), complete=False)], elsewhere)
    ((summary, items),) = re.findall(
        r'<details class="warnings">\n<summary>(.*?)</summary>(.*?)</details>.*<main', warned, re.DOTALL
    )
    texts = re.findall(r"<li>(.*?)</li>", items)
    assert summary == f"{len(texts)} warnings: run incomplete; 1 wrong result; 1 failed result"
    assert len(texts) > 3
    parts = ("made-up.jsonl", "1 wrong result: see", "another run (another-run)")
    assert [part for part in parts if part not in "\n".join(texts)] == []
    reasons = ("got 3, expected 4", "out of memory", "no rule for it")
    case = "bucketer reduce_scatter, core (mesh_dim=tp), rank 3, launch 0"
    assert [part for part in (*reasons, case) if part not in Page(warned).section_text["failures"]] == []


def test_sections_with_one_row_are_folded() -> None:
    """A section of one row whole, in a section of more the table or the figure of one; nothing is folded twice."""
    results = list(made_up.tensor_parallel())
    of_one_case = [r for r in results if (r.name, r.params) == (results[0].name, results[0].params)]
    shown = [section("tensor_parallel", part) for part in (of_one_case, results)]
    assert [part.has_single_rows for part in shown] == [True, False]
    text = render([made_up.run([*of_one_case, *made_up.bucketer()])])
    inside = text.partition('<section id="tensor_parallel">')[2].partition("</section>")[0]
    assert inside.index("<details") < min(inside.index("<p"), inside.index("<figure"), inside.index("<table"))
    assert inside.count("<details") == 1 and "<summary>1 case" in inside
    params = {"mesh_dim": "dp", "dtype": "float32", "size": 65536}
    overlap = [
        made_up.result("overlap", "all_reduce", impl, params, [1e-3] * 3) for impl in ("core", "torch")
    ]
    buckets = section("bucketer", [*made_up.bucketer(), *overlap])
    assert [bool(figure.folded) for figure in buckets.figures] == [
        False,
        True,
    ] and not buckets.has_single_rows
    assert section("others", [made_up.result("mine", "a", "b", {}, [1.0])]).tables[0].is_collapsed


def test_without_results_each_section_names_its_command() -> None:
    machine = {"cpu": {"model": "M", "usable_cores": 2}, "gpus": [], "memory_bytes": 49 * 2**29}
    git = {"commit": "abc", "dirty": True, "dtbench": {"commit": "def", "dirty": False}}
    shown = Page(render([made_up.run([], machine=machine, git=git, argv=["run", "--mesh", "a b=2"])]))
    provenance, method = shown.section_text["provenance"], shown.section_text["method"]
    facts = (
        "24.50 GiB",
        "usable cores 2",
        "abc, with uncommitted changes",
        "def, clean",
        "dtbench run --mesh 'a b=2'",
    )
    assert [fact for fact in facts if fact not in provenance] == []
    assert [suite for suite in SECTIONS if f"dtbench run {suite}" not in method] == []
    assert not set(SECTIONS) & set(shown.section_text)
    assert not {"nan", "NaN", "inf", "None"} & set(re.findall(r"[A-Za-z]+", shown.text))


def test_page_of_one_process_shows_no_mesh() -> None:
    results = [msgspec.structs.replace(r, rank_samples_s={}) for r in list(made_up.dispatch())[:8]]
    shown = Page(render([made_up.run(results)]))
    assert "One process measured" in shown.text
    assert "Ranks" not in shown.section_text["provenance"] and "dp = 2" not in shown.text


def test_failures_group_cases_by_reason(run: Run) -> None:
    failed = [
        msgspec.structs.replace(r, status="failed", reason="why", time_s=None) for r in run.results[:30]
    ]
    (((_, ((reason, cases),)),)) = front.failures([made_up.run(failed)])
    assert reason == "why" and len(cases) == 30 and all(case.endswith(", launch 0") for case in cases)


@pytest.mark.parametrize("suite", SECTIONS)
def test_each_suite_alone_makes_a_section(suite: str) -> None:
    results = list(getattr(made_up, suite)())
    shown = section(suite, results)
    assert not shown.missing and len(shown.figures) == FIGURES.get(suite, 1) and shown.tables
    # And so does a single result of it, of either impl, or without the usual params.
    bare = msgspec.structs.replace(results[0], params={})
    for result in (results[0], results[-1], bare):
        alone = section(suite, [result])
        assert any(result.name in row for table in alone.tables for *_, row in table.rows)
        with settings():
            assert result is bare or [
                drawing
                for figure in alone.figures
                for panel in figure.panels
                for drawing in panel.drawings(1)
            ]


# ------------------------------------------------------------------------------------- safe


CHOOSING = ("call", "mode", "groups")  # params that choose a branch


def hostile_results() -> Iterator[Result]:
    for suite in SECTIONS:
        for result in list(getattr(made_up, suite)())[:12]:
            params = {
                k: HOSTILE if isinstance(v, str) and k not in CHOOSING else v
                for k, v in result.params.items()
            }
            yield msgspec.structs.replace(result, name=HOSTILE, params={**params, HOSTILE: HOSTILE})
    yield made_up.result(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [1.0])
    for status in ("failed", "wrong", "skipped"):
        yield Result(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, status, HOSTILE)  # type: ignore[arg-type]


def hostile_topology(topology: CalibratedTopology) -> CalibratedTopology:
    plain = json.loads(msgspec.json.encode(topology))
    fitted = hostile(plain, ()) | {"kind": "topology", "mesh": plain["mesh"]}
    fitted["dims"][0]["collectives"] = {HOSTILE: next(iter(fitted["dims"][0]["collectives"].values()))}
    for at, (dim, original) in enumerate(zip(fitted["dims"], plain["dims"], strict=True)):
        # Fields with a fixed set of values stay valid, and names stay unique.
        dim |= {name: original[name] for name in ("groups_sharing", "layout", "builtin", "residuals")}
        dim |= {"name": HOSTILE + str(at), "warnings": [HOSTILE]}
    return msgspec.convert(fitted, CalibratedTopology)


def test_hostile_text_stays_text(topology: CalibratedTopology) -> None:
    header = hostile({k: v for k, v in made_up.header().items() if k not in ("kind", "schema")}, ())
    cpu = {"governor": HOSTILE, "model": HOSTILE}
    header |= {"machine": {"cpu": cpu, "gpus": [{"name": HOSTILE}], "system": HOSTILE}}
    # dim names of a mesh differ from each other, whatever else they are
    header |= {"env": {HOSTILE: HOSTILE}, "mesh": header["mesh"] | {"dim_names": [HOSTILE, HOSTILE + "2"]}}
    path, results = Path(f"{HOSTILE.replace('/', '')}.jsonl"), tuple(hostile_results())
    text = render(
        [Run(path, made_up.read(made_up.header() | header), results, False)], hostile_topology(topology)
    )
    harmless(text)
    assert text.count(page.SCRIPT) == 1


def test_page_loads_nothing_external_and_has_no_dead_links(whole: Page, text: str) -> None:
    own = ("#", "data:,", "data:text/csv;charset=utf-8,")
    for tag, attrs in whole.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(own), (tag, value)
    assert "@import" not in text and "url(http" not in text
    (policy,) = [a["content"] for _, a in whole.tags if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.SCRIPT.encode()).digest()).decode()
    assert {"default-src 'none'", f"script-src 'sha256-{digest}'"} <= set(str(policy).split("; "))
    ids = whole.ids()
    wanted = {attrs["href"][1:] for _, attrs in whole.tags if (attrs.get("href") or "").startswith("#")}  # type: ignore[index]
    wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
    wanted |= {i for _, attrs in whole.tags for i in (attrs.get("aria-labelledby") or "").split()}
    assert len(ids) == len(set(ids)) and wanted and wanted <= set(ids)


def test_the_csv_in_the_page_holds_the_results() -> None:
    first = made_up.result("=1+1", "name, with comma", "core", {"n": 3}, [1e-3, 2e-3, 3e-3])
    results = [first, *made_up.tensor_parallel()]
    start, _, data = page.csv_link([made_up.run(results)]).partition(",")
    assert start == "data:text/csv;charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(unquote(data))))
    assert len(rows) == len(results) and rows[0]["suite"] == "'=1+1"  # no formula
    assert (rows[0]["name"], rows[0]["param.n"], float(rows[0]["median_s"])) == (
        "name, with comma",
        "3",
        2e-3,
    )


# ------------------------------------------------------------------------------------- the same, and small


def test_the_same_inputs_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    run = made_up.run(list(made_up.collectives(sizes=made_up.SIZES[:3], names=("all_reduce",))))
    text = render([run])
    # Neither the user's matplotlib settings nor the time of day are inputs.
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert render([run]) == text and matplotlib.rcParams["font.size"] == 30


def test_a_page_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up.run(
        [
            r
            for r in made_up.dispatch()
            if (r.params["mesh"], r.params["call"]) == ("8", "cached")
            and r.params["pass"] != "forward+backward"
        ]
    )
    text = render([run])
    monkeypatch.setattr(page, "BUDGET_BYTES", len(text.encode()) - 1)
    without_data = render([run])
    assert 'download="results.csv"' in text
    assert "The raw data are left out" in without_data and 'download="results.csv"' not in without_data
    monkeypatch.setattr(page, "BUDGET_BYTES", len(without_data.encode()) - 1)
    monkeypatch.setattr(page, "ECONOMIES", (*page.ECONOMIES[:2], page.Economy(False, 20, 1)))
    short = render([run])
    assert "Tables are cut after 20 rows each" in short and "Each figure shows at most 1 drawing." in short
    assert len(short) < len(without_data)


def test_figure_with_many_groups_is_cut_and_says_so() -> None:
    results = [
        msgspec.structs.replace(result, params={**result.params, "mesh": f"{number}"})
        for number, result in itertools.product(range(26), list(made_up.dispatch())[:6])
    ]
    assert (
        "The figure shows the first 24 of 26 groups; the table has them all."
        in section("dispatch", results).notes
    )


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run"}\n')
    with pytest.raises(OutputError, match="is not a report"):
        page.write_report(sources([made_up.run([])]), path)
    assert path.read_text() == '{"kind":"run"}\n'
    with pytest.raises(OutputError, match="cannot write"):
        page.write_report(sources([made_up.run([])]), tmp_path / "no" / "page.html")


# ------------------------------------------------------------------------------------- legible


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb. Source: WCAG 2.2, definition of relative luminance."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: str, second: str) -> float:
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _mixed(colour: str, opacity: float, ground: str) -> str:
    return to_hex(
        [opacity * c + (1 - opacity) * g for c, g in zip(to_rgb(colour), to_rgb(ground), strict=True)]
    )


@pytest.mark.parametrize("index", range(3), ids=["light", "dark", "print"])
def test_words_and_series_can_be_told_from_their_ground(index: int, text: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", (page.TEMPLATES / "page.css").read_text(), re.DOTALL)
    assert len(blocks) == 3
    palette = dict(re.findall(r"--(\w[\w-]*): (#\w{6})", blocks[index]))
    grounds = ("page", "surface")
    words = [
        *itertools.product(("ink", "muted", "accent"), grounds),
        ("warn", "warn-page"),
        ("ink", "warn-page"),
    ]
    for least, pairs in ((4.5, words), (3, list(itertools.product((f"s{n}" for n in range(6)), grounds)))):
        assert [pair for pair in pairs if _contrast(*(palette[name] for name in pair)) < least] == []
    for style in figures.box_styles([str(k) for k in range(12)]).values():
        assert _contrast(palette["ink"], _mixed(palette[style.colour], style.box, palette["page"])) >= 4.5, (
            style
        )
    assert not [name for name, colour in STAND_IN.items() if colour in text or name not in palette]
    assert "#000000" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.0, 2.0), (1e-6, 3e-6), (0.9e-6, 1.1e-3), (1e-9, 10.0), (3e-4, 9.9e-4), (8.3, 9.1), (1.0, 1.0)],
)
def test_axes_hold_their_values_and_have_ticks(low: float, high: float) -> None:
    sizes = axes.size_axis([round(low * 1e9), round(high * 1e9)], "size")
    of_seconds = (axes.value_axis([low, high]), axes.times_axis([low, high]), history.close_axis([low, high]))
    for axis, scale in (*((axis, 1) for axis in of_seconds), (sizes, 1e9)):
        assert axis.low <= scale * low <= scale * high <= axis.high
        for positions in axis.ticks:
            ticks = [axis.format(t) for t in positions if axis.low <= t <= axis.high]
            assert len(ticks) <= 9 and len(set(ticks)) == len(ticks)
        assert low == high or any(
            sum(axis.low <= t <= axis.high for t in positions) >= 3 for positions in axis.ticks
        )


@pytest.mark.parametrize(("width", "ticks"), [(900, 4), (200, 4), (150, 3)])
def test_ticks_are_dropped_down_to_three_as_labels_need_room(width: int, ticks: int) -> None:
    with settings():
        there = axes.times_axis([4e-7, 2e-3]).spaced_ticks(
            Figure(figsize=(width / 72, 1)).add_axes((0, 0, 1, 1)), True
        )
    assert len(there) == ticks and there[0] < there[-1] / 100, (width, there)


@pytest.mark.parametrize(
    ("count", "columns", "rows"),
    [(1, 3, [1]), (3, 3, [3] * 3), (4, 3, [2] * 4), (5, 3, [3, 3, 3, 2, 2]), (3, 2, [2, 2, 1]), (0, 2, [])],
)
def test_rows_of_panels_are_as_equal_as_can_be(count: int, columns: int, rows: list[int]) -> None:
    panels = [
        figures.Panel(str(i), "", f"p{i}", lambda width: width, lambda canvas: None) for i in range(count)
    ]
    assert figures.Figure("", [], panels, columns).abreast(panels) == list(zip(panels, rows, strict=True))
