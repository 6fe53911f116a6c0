"""The page as text: what it says, that it is safe, and that it is the same every time."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dtbench.cost import calibration
from dtbench.records.topology import CalibratedTopology, FromRun
from dtbench.reporting.html import axes, figures, page
from dtbench.reporting.html import sources as of_sources
from dtbench.reporting.html.parts import front
from dtbench.reporting.html.parts.provenance import provenance
from dtbench.reporting.html.section import Material
from dtbench.reporting.html.svg import STAND_IN, settings
from dtbench.suite import Result, Run
from dtbench.suite.errors import OutputError, UsageError
from dtbench.tests import made_up
from dtbench.tests.html_page import (
    HOSTILE,
    Page,
    cells,
    harmless,
    hostile,
    render,
    section,
    sources,
    write_report,
)
from dtbench.text import table

SECTIONS = ["dispatch", "collectives", "redistribute", "bucketer", "tensor_parallel"]
FIGURES = {"collectives": 3, "redistribute": 2}  # of each suite measured alone; the others have one


@pytest.fixture(scope="module")
def run() -> Run:
    return made_up.everything()


@pytest.fixture
def drawing() -> Iterator[None]:
    with settings():
        yield


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


def test_every_section_has_its_figure_and_table(whole: Page) -> None:
    order = [attrs["id"] for tag, attrs in whole.tags if tag == "section" and attrs.get("id")]
    assert order == [*SECTIONS, "method", "provenance"]
    assert "dtbench run" not in whole.section_text["dispatch"]
    drawn = ("bandwidth0", "times0", "skew0", "redistribute0", "residual0", "dispatch0", "bucket0")
    for prefix in (*drawn, "tensor_parallel0"):
        assert f"{prefix}-t" in whole.ids(), prefix
    assert sum(tag == "figure" for tag, _ in whole.tags) == 8


def test_figures_stated_in_words_are_those_of_the_results(run: Run, whole: Page) -> None:
    # Computed here from the results themselves, apart from the page's own way.
    medians = {
        (r.impl, tuple(r.params.items()), r.name): r.time_s.median
        for r in run.results
        if r.suite == "dispatch" and r.params["call"] == "cached" and r.time_s
    }
    product, count = 1.0, 0
    for (impl, params, name), time in medians.items():
        if impl == "core":
            product *= time / medians["torch", params, name]
            count += 1
    mean = product ** (1 / count)
    assert f"geometric mean of {count} cases" in whole.text
    assert f"Over all cached calls the core is {1 / mean:.2f}× faster than torch" in whole.text


def test_a_table_row_holds_the_estimates_of_its_results(run: Run, whole: Page) -> None:
    def minimum(impl: str, call: str) -> float:
        (found,) = [
            r.time_s.min
            for r in run.results
            if (r.suite, r.name, r.impl) == ("dispatch", "matmul", impl)
            and (r.params["mesh"], r.params["pass"], r.params["call"]) == ("2x4", "forward", call)
            and r.time_s
        ]
        return found

    row = whole.row("matmul", "S(0),R", "2x4", "forward")
    core, torch, floor, ratio, first_core, first_torch = row[4:]
    for cell, value in ((core, minimum("core", "cached")), (torch, minimum("torch", "cached"))):
        assert float(cell) == pytest.approx(value * 1e6, rel=0.01)
    assert float(floor) == pytest.approx(minimum("local", "cached") * 1e6, rel=0.01)
    faster, words = ratio.split("× ")
    assert words == "faster"
    assert float(faster) == pytest.approx(minimum("torch", "cached") / minimum("core", "cached"), abs=0.006)
    for cell, value in ((first_core, minimum("core", "first")), (first_torch, minimum("torch", "first"))):
        assert float(cell) == pytest.approx(value * 1e6, rel=0.01)


def test_cases_where_the_core_is_slower_bear_a_mark(whole: Page) -> None:
    marked = {row[0] for row in whole.rows if any(cell.startswith("▲") for cell in row)}
    assert marked == {"layer_norm"}


def test_the_constants_stand_beside_the_builtin_ones(topology: CalibratedTopology, whole: Page) -> None:
    dim = next(d for d in topology.dims if d.name == "dp")
    row = whole.row("dp", "2", "inter-host")
    assert float(row[3]) == pytest.approx(dim.bandwidth_GiBps, rel=0.01)
    assert row[5] == "19.3"
    assert float(row[6]) == pytest.approx(dim.latency_us_per_hop, rel=0.01)
    assert row[8] == "2.70"
    assert "within one launch only: too narrow" in whole.section_text["redistribute"]


def test_a_lower_bound_is_shown_as_one() -> None:
    flat = {"dp": (1e6, 250.0), "tp": (1e6, 90.0)}
    run = made_up.run(list(made_up.collectives(truth=flat, sizes=made_up.SIZES[:4])))
    shown = Page(render([run], calibration.calibrate([run])))
    assert shown.row("dp", "2", "inter-host")[3].startswith("≥ ")
    assert "lower bound only" in shown.text


def test_warnings_come_first(text: str) -> None:
    warned = render([made_up.run(list(made_up.NOT_OK), complete=False)])
    shown = Page(warned)
    assert warned.index("Read first") < warned.index('id="provenance"')
    warnings = shown.section_text[""]
    assert "Incomplete: made-up.jsonl" in warnings
    assert "1 result held wrong data" in warnings
    assert "1 result failed" in warnings
    for reason in ("got 3, expected 4", "out of memory", "no rule for it"):
        assert reason in shown.section_text["failures"]
    assert "bucketer reduce_scatter, core (mesh_dim=tp), rank 3, launch 0" in shown.section_text["failures"]
    assert "Read first" not in text


def test_a_topology_of_another_run_is_said(run: Run, topology: CalibratedTopology) -> None:
    elsewhere = msgspec.structs.replace(topology, runs=(FromRun(run_id="another-run"),), warnings=())
    (other,) = front.warnings(Material(sources([run], elsewhere)))
    assert "fitted to another run (another-run)" in other


def test_without_results_each_section_names_its_command() -> None:
    machine = {"cpu": {"model": "M", "usable_cores": 2}, "gpus": [], "memory_bytes": 49 * 2**29}
    git = {"commit": "abc", "dirty": True, "dtbench": {"commit": "def", "dirty": False}}
    shown = Page(render([made_up.run([], machine=machine, git=git, argv=["run", "--mesh", "a b=2"])]))
    for words in ("24.50 GiB", "usable cores 2", "abc, with uncommitted changes", "def, clean"):
        assert words in shown.section_text["provenance"]
    assert "dtbench run --mesh 'a b=2'" in shown.section_text["provenance"]
    for suite in ("dispatch", "collectives", "redistribute", "bucketer", "tensor_parallel"):
        assert f"dtbench run {suite}" in shown.section_text["method"] and suite not in shown.section_text
    assert "dtbench calibrate" in shown.section_text["method"]


def test_nodes_of_one_name_are_several() -> None:
    """Nodes that are all called localhost differ in the kernel that runs."""
    machine = {"cpu": {"model": "M", "usable_cores": 2}, "gpus": []}
    header = made_up.header(hosts=["localhost"] * 4, machine=machine)
    for rank in header["ranks"]:
        rank["boot_id"] = "one" if rank["rank"] < 2 else "another"
    run = made_up.run([], machine=machine, ranks=header["ranks"])
    of = Material(sources([run]))
    assert "4 ranks on 2 hosts" in front.summary(of)[0]
    assert front.warnings(of) == []  # two ranks share two cores, not four
    (placed,) = [value for name, value in provenance(of.sources).facts if name == "Ranks"]
    assert placed == "localhost: 0–1 (cpu); localhost: 2–3 (cpu)"


def test_one_cause_of_many_failures_is_told_once(run: Run) -> None:
    failed = [
        msgspec.structs.replace(r, status="failed", reason="the same cause", time_s=None)
        for r in run.results[:30]
    ]
    ((_, faults),) = front.failures([made_up.run(failed)])
    ((reason, cases),) = faults
    assert reason == "the same cause"
    assert len(cases) == 30 and all(case.endswith(", launch 0") for case in cases)


@pytest.mark.parametrize("suite", ["dispatch", "redistribute", "collectives", "bucketer", "tensor_parallel"])
@pytest.mark.usefixtures("drawing")
def test_one_suite_alone_makes_a_section(suite: str) -> None:
    results = list(getattr(made_up, suite)())
    shown = section(suite, results)
    assert not shown.missing
    assert len(shown.figures) == FIGURES.get(suite, 1)
    assert len(shown.tables) >= 1
    # And so does a single result of it, of either impl.
    for result in (results[0], results[-1]):
        alone = section(suite, [result])
        assert [figure for figure in alone.figures for panel in figure.panels if panel.svg]
        assert any(result.name in row for table in alone.tables for *_, row in table.rows)


def test_results_without_the_usual_params_are_shown_all_the_same() -> None:
    for make in MAKERS:
        bare = msgspec.structs.replace(next(iter(make())), params={})
        shown = section(bare.suite, [bare])
        assert any(bare.name in row for table in shown.tables for *_, row in table.rows)


def test_launches_are_put_together_by_their_median() -> None:
    times = (1.0, 5.0, 2.0)
    results = [
        made_up.result("mine", "fancy", "a", {"n": 3}, [t * 1e-3] * 3, launch=i) for i, t in enumerate(times)
    ]
    assert cells(section("others", results), "fancy", "3")[2:] == ["2.00"] * 3


def test_runs_of_different_setups_are_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="differ in mesh"):
        render([run, made_up.everything(mesh={"dp": 4, "tp": 1}, run_id="other")])
    with pytest.raises(UsageError, match="nothing to report"):
        render([])


# ------------------------------------------------------------------------------------- safe


MAKERS = (
    made_up.dispatch,
    made_up.redistribute,
    made_up.collectives,
    made_up.bucketer,
    made_up.tensor_parallel,
)
CHOOSING = ("call", "mode", "groups")  # params that choose a branch


def hostile_results() -> Iterator[Result]:
    for make in MAKERS:
        for result in list(make())[:40]:
            params = {
                k: HOSTILE if isinstance(v, str) and k not in CHOOSING else v
                for k, v in result.params.items()
            }
            yield msgspec.structs.replace(result, name=HOSTILE, params={**params, HOSTILE: HOSTILE})
    yield made_up.result(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [1.0])
    for status in ("failed", "wrong", "skipped"):
        yield Result(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, status, HOSTILE)  # type: ignore[arg-type]


def test_systems_are_drawn_beside_each_other() -> None:
    """Collectives of other meshes and machines: a line each, and the rest of the page is the first's."""
    first = made_up.run(list(made_up.collectives()), path="first.jsonl")
    mesh, hosts = {"dp": 8}, [f"other-{i}" for i in range(8)]
    other = made_up.run(
        list(made_up.collectives(mesh=mesh, truth={"dp": (2.0, 50.0)})),
        path="other.jsonl",
        run_id="20260102-120000-abcd",
        mesh=mesh,
        hosts=hosts,
    )
    together = of_sources._apart(sources([first, other]))
    assert together.runs == (first,)
    assert together.systems == ((first,), (other,))
    shown = section("systems", systems=together.systems)
    assert [panel.title for panel in shown.figures[0].panels][:2] == ["all_gather", "all_reduce"]
    assert {item.label for item in shown.figures[0].legend} == {"first", "other"}
    dispatch = made_up.run(
        list(made_up.dispatch()), path="ops.jsonl", machine={"cpu": {"model": "other"}, "gpus": []}
    )
    assert of_sources._apart(sources([first, dispatch])).systems == ()


def hostile_topology(topology: CalibratedTopology) -> CalibratedTopology:
    plain = json.loads(msgspec.json.encode(topology))
    fitted = hostile(plain, ()) | {"kind": "topology", "mesh": plain["mesh"]}
    fitted["dims"][0]["collectives"] = {HOSTILE: next(iter(fitted["dims"][0]["collectives"].values()))}
    for at, (dim, original) in enumerate(zip(fitted["dims"], plain["dims"], strict=True)):
        # What is one of a few words stays one; names differ, whatever else they are.
        dim |= {name: original[name] for name in ("groups_sharing", "layout", "builtin", "residuals")}
        dim |= {"name": HOSTILE + str(at), "warnings": [HOSTILE]}
    return msgspec.convert(fitted, CalibratedTopology)


def test_hostile_text_stays_text(topology: CalibratedTopology) -> None:
    header = {k: v for k, v in made_up.header().items() if k not in ("kind", "schema")}
    changes = hostile(header, ())
    changes["machine"] = {
        "cpu": {"governor": HOSTILE, "model": HOSTILE},
        "gpus": [{"name": HOSTILE}],
        "system": HOSTILE,
    }
    changes["env"] = {HOSTILE: HOSTILE}
    # dim names of a mesh differ from each other, whatever else they are
    mesh = changes.pop("mesh") | {"dim_names": [HOSTILE, HOSTILE + "2"]}
    run = Run(
        Path(f"{HOSTILE.replace('/', '')}.jsonl"),
        made_up.read(made_up.header() | changes | {"mesh": mesh}),
        tuple(hostile_results()),
        False,
    )
    text = render([run], hostile_topology(topology))
    harmless(text)
    assert text.count((page.TEMPLATES / "page.js").read_text()) == 1


OWN_DATA = ("data:,", "data:text/csv;charset=utf-8,")


def test_nothing_is_loaded_from_elsewhere(whole: Page, text: str) -> None:
    for tag, attrs in whole.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith("#") or value.startswith(OWN_DATA), (tag, value)
    assert "@import" not in text
    assert "url(http" not in text
    policy = next(a["content"] for tag, a in whole.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    digest = hashlib.sha256((page.TEMPLATES / "page.js").read_bytes()).digest()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "script-src": f"'sha256-{base64.b64encode(digest).decode()}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_ids_are_unique_and_what_is_referred_to_exists(whole: Page, text: str) -> None:
    ids = whole.ids()
    assert len(ids) == len(set(ids))
    wanted = {attrs["href"][1:] for _, attrs in whole.tags if (attrs.get("href") or "").startswith("#")}  # type: ignore[index]
    wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
    wanted |= {i for _, attrs in whole.tags for i in (attrs.get("aria-labelledby") or "").split()}
    assert wanted
    assert wanted <= set(ids)


def test_every_figure_can_be_heard(whole: Page) -> None:
    plots = [attrs for tag, attrs in whole.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(plots) >= 15
    assert all(attrs.get("aria-labelledby") for attrs in plots)
    hidden = [attrs for tag, attrs in whole.tags if tag == "svg" and attrs.get("role") != "img"]
    assert all(attrs.get("aria-hidden") == "true" for attrs in hidden)


def test_no_stand_in_colour_is_left(text: str) -> None:
    assert not [name for name, colour in STAND_IN.items() if colour in text]
    assert "#000000" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


# ------------------------------------------------------------------------------------- the same, and small


def test_the_same_inputs_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    run = made_up.run(list(made_up.collectives(sizes=made_up.SIZES[:3])))
    text = render([run])
    # Neither the user's matplotlib settings nor the time of day are inputs.
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert render([run]) == text
    assert matplotlib.rcParams["font.size"] == 30


def test_a_full_page_is_within_its_budget(text: str) -> None:
    assert len(text.encode()) < 0.7 * page.BUDGET_BYTES


def test_a_page_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up.run([r for r in made_up.dispatch() if r.params["mesh"] == "8"])
    text = render([run])
    monkeypatch.setattr(page, "BUDGET_BYTES", len(text.encode()) - 1)
    without_data = render([run])
    assert "The raw data are left out" in without_data and 'download="results.csv"' not in without_data
    monkeypatch.setattr(page, "BUDGET_BYTES", len(without_data.encode()) - 1)
    monkeypatch.setattr(page, "ECONOMIES", (*page.ECONOMIES[:2], page.Economy(False, 20, 1)))
    short = render([run])
    assert "Tables are cut after 20 rows each" in short and "at most 1 drawing can" in short
    assert len(short) < len(without_data)


def test_too_many_panels_are_cut_and_it_is_said() -> None:
    few = list(made_up.dispatch())[:6]
    results = [
        msgspec.structs.replace(r, params={**r.params, "mesh": f"{k}"}) for k in range(26) for r in few
    ]
    shown = section("dispatch", results)
    assert "The figure shows the first 24 of 26 groups; the table has them all." in shown.cuts


# ------------------------------------------------------------------------------------- colours


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb. Source: WCAG 2.2, definition of relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _palettes() -> list[dict[str, str]]:
    css = (page.TEMPLATES / "page.css").read_text()
    return [
        dict(re.findall(r"--(\w[\w-]*): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]


@pytest.mark.parametrize("index", range(3), ids=["light", "dark", "print"])
def test_colours_can_be_told_from_the_page(index: int) -> None:
    assert len(_palettes()) == 3
    palette = _palettes()[index]
    assert set(STAND_IN) <= set(palette)
    for ground in (palette["page"], palette["surface"]):
        for name in ("ink", "muted", "accent"):
            assert _contrast(palette[name], ground) >= 4.5, name
        for name in STAND_IN:
            if name.startswith("s") and name != "surface":
                assert _contrast(palette[name], ground) >= 3, name
    assert _contrast(palette["warn"], palette["warn-page"]) >= 4.5
    assert _contrast(palette["ink"], palette["warn-page"]) >= 4.5


def _mixed(colour: str, opacity: float, ground: str) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(opacity * c + (1 - opacity) * g):02x}" for c, g in pairs)


@pytest.mark.parametrize("index", range(3), ids=["light", "dark", "print"])
def test_words_on_bars_and_maps_can_be_read(index: int) -> None:
    palette = _palettes()[index]
    shades = [*figures.shades_of([str(k) for k in range(12)]).values()]
    for colour, opacity in [*shades, *(("s0", opacity) for opacity in figures.CELL_OPACITY)]:
        assert _contrast(palette["ink"], _mixed(palette[colour], opacity, palette["page"])) >= 4.5, colour


# ------------------------------------------------------------------------------------- small parts


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 2.0), (1e-6, 3e-6), (0.9e-6, 1.1e-3), (1e-9, 10.0), (1.0, 1.0)]
)
def test_axes_hold_their_values_and_have_ticks(low: float, high: float) -> None:
    for log in (True, False):
        axis = axes.value_axis([low, high], axes.seconds_tick, log=log)
        assert axis.low <= low <= high <= axis.high
        ticks = [t for t in axis.ticks if axis.low <= t <= axis.high]
        assert 1 <= len(ticks) <= 7
        assert len({axis.format(t) for t in ticks}) == len(ticks)


def test_ticks_are_written_short() -> None:
    assert [axes.seconds_tick(v) for v in (0, 2e-9, 1e-6, 0.0005, 0.02, 3.0)] == [
        "0 s", "2 ns", "1 µs", "500 µs", "20 ms", "3 s",
    ]  # fmt: skip
    assert [axes.bandwidth_tick(v) for v in (0, 5e3, 1e6, 2.5e9)] == ["0 B/s", "5 kB/s", "1 MB/s", "2.5 GB/s"]


def test_the_points_of_a_column_align() -> None:
    assert table.aligned([1.5, 12.25, None, 130.0]) == ["1.50", "12.25", "–", "130.00"]
    assert table.aligned([None, 0.0]) == ["–", "0"]


# ------------------------------------------------------------------------------------- the file


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run"}\n')
    with pytest.raises(OutputError, match="is not a report"):
        write_report([made_up.run([])], None, path)
    assert path.read_text() == '{"kind":"run"}\n'
    with pytest.raises(OutputError, match="cannot write"):
        write_report([made_up.run([])], None, tmp_path / "no" / "page.html")


def test_a_peak_that_is_given_is_drawn(run: Run) -> None:
    shown = section("collectives", run.ok("collectives"), peaks={"tp": 5e9})
    assert "The limit drawn is over tp as given, 5.00 GB/s" in shown.lead
    assert "limit of tp" in [item.label for figure in shown.figures for item in figure.legend]
