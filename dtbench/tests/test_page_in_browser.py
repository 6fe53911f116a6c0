"""The page in a real browser: it loads nothing but itself, complains of nothing and fits the window."""

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtbench.cost import calibration
from dtbench.records.topology import read_topology
from dtbench.reporting import html as reporting
from dtbench.tests import made_up, made_up_findings, made_up_jobs
from dtbench.traces.analysis import analyze
from dtbench.traces.job import load_job

RESULTS = Path(__file__).parents[2] / "results"
TOPOLOGY = RESULTS / "baseline-cpu-gloo-4ranks.topology.json"

REQUIRED = os.environ.get("DTBENCH_REQUIRE_CHROMIUM") == "1"
if REQUIRED:
    import playwright.sync_api as sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")

ARGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]
UNFOLD = "document.querySelectorAll('details').forEach(d => d.open = true)"
COLOURS = """[
  getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector("svg.plot text")).fill,
]"""
WIDTH = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium")
    if executable is None:
        (pytest.fail if REQUIRED else pytest.skip)(
            "no chromium on the PATH: install Debian's package chromium"
        )
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=ARGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: figures, warnings, failures, long names."""
    folder = tmp_path_factory.mktemp("page")
    results = made_up.everything().results
    long = made_up.result("mine", "n" * 300, "a", {"p": "q" * 300}, [1e-3] * 3)
    sources = dataclasses.replace(
        reporting.gather(made_up_findings.write_all(folder)),
        runs=(made_up.run([*results, *made_up.NOT_OK, long], complete=False),),
        topology=calibration.calibrate([made_up.run(results)]),
    )
    reporting.write_report(sources, folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of many verdicts and no runs."""
    folder = tmp_path_factory.mktemp("gate")
    gate = made_up_findings.gate()
    gate["benchmarks"] += [
        made_up_findings.benchmark("slower", f"add{i}", 2.0 - i / 1000) for i in range(300)
    ]
    reporting.write_report(
        reporting.gather([made_up_findings.write(folder, "gate.json", gate)]), folder / "page.html"
    )
    return folder / "page.html"


class Visit:
    """A page opened, with what it requested and said."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1200, at: str = "", **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.goto(path.as_uri() + at, wait_until="load")

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def pages(self) -> int:
        """Number of printed pages, from the PDF's page tree."""
        return max(map(int, re.findall(rb"/Count (\d+)", self.page.pdf(format="A4"))))

    def cases(self) -> list[str]:
        """Cases that the table of changes shows, in order."""
        rows = "[...document.querySelectorAll('#changes-table tbody tr')].filter(r => !r.hidden)"
        return [text.split()[0] for text in self.page.evaluate(f"{rows}.map(r => r.cells[1].textContent)")]


# Texts of drawings that share more than two pixels, wherever on the page they are.
OVERLAPS = """() => {
  const texts = [...document.querySelectorAll("svg.plot text")];
  const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()])
    .filter(([words, box]) => words.trim() && box.width > 0);
  const found = [];
  boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) found.push([one, other]);
  }));
  return found;
}"""


# Rows of drawings that leave more than two pixels of their figure's width blank; those of a figure stand in one grid.
BLANK = """() => [...document.querySelectorAll("figure .panels")].flatMap((grid) => {
  const rows = new Map();
  grid.querySelectorAll("svg.plot").forEach((plot) => {
    const box = plot.getBoundingClientRect();
    const [left, right] = rows.get(Math.round(box.top)) || [Infinity, -Infinity];
    if (box.width) rows.set(Math.round(box.top), [Math.min(left, box.left), Math.max(right, box.right)]);
  });
  const all = grid.getBoundingClientRect();
  const blank = [...rows.values()].filter(([left, right]) => left > all.left + 2 || right < all.right - 2);
  return rows.size ? blank.map(() => grid.closest("section").id) : [grid.closest("section").id + ": nothing"];
})"""


def test_page_fits_and_logs_nothing_in_light_and_dark(browser: Any, path: Path) -> None:
    seen = []
    for width, scheme in ((400, "light"), (1200, "dark")):
        with Visit(browser, path, width=width, color_scheme=scheme) as visit:
            assert visit.page.evaluate(WIDTH) <= width
            for fold in visit.page.query_selector_all("details > summary"):
                fold.click()
            assert visit.page.evaluate(WIDTH) <= width
            closed = "[...document.querySelectorAll('details:not([open])')]"
            assert [visit.page.evaluate(script) for script in (closed, OVERLAPS, BLANK)] == [[], [], []]
            assert (visit.requests, visit.messages) == ([path.as_uri()], [])
            seen.append(visit.page.evaluate(COLOURS))
    assert all(light != dark for light, dark in zip(*seen, strict=True))


@pytest.mark.parametrize("name", ["example", "example-gate"])
def test_the_committed_examples_are_short_and_legible(browser: Any, name: str) -> None:
    with Visit(browser, (Path(__file__).parents[2] / "reports") / f"{name}.html", width=1280) as visit:
        assert visit.page.evaluate("document.documentElement.scrollHeight") <= 6000
        if name == "example-gate":
            assert visit.page.locator(".filter + .scroll").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert visit.pages() <= 8
        visit.page.evaluate(UNFOLD)
        assert visit.page.evaluate(OVERLAPS) == [] and visit.messages == []


def test_the_tables_of_a_job_fit_a_window_of_1280_pixels(browser: Any, tmp_path: Path) -> None:
    topology = read_topology(TOPOLOGY)
    for place, job in (("made-up", made_up_jobs.job()), ("committed", load_job(RESULTS / "job" / "core"))):
        sources = reporting.Sources(job=job, topology=topology, analysis=analyze(job, topology))
        reporting.write_report(sources, tmp_path / f"{place}.html")
        with Visit(browser, tmp_path / f"{place}.html", width=1280) as visit:
            visit.page.evaluate(UNFOLD)
            excess = "[...document.querySelectorAll('#job .scroll')].map(t => t.scrollWidth - t.clientWidth)"
            excess_px = visit.page.evaluate(excess)
            assert len(excess_px) >= 4 and {*excess_px} == {0}, place


def test_page_works_without_script(browser: Any, path: Path) -> None:
    with Visit(browser, path, java_script_enabled=False) as visit:
        assert visit.page.locator("svg.plot").count() >= 15
        assert not visit.page.locator("details.table table").first.is_visible()
        assert visit.page.locator("#dispatch svg.plot text", has_text="add S(0)").first.is_visible()
        visit.page.locator("details.table summary", has_text="Every op").click()
        assert visit.page.locator("td", has_text="linear_3d").first.is_visible()
        # No dead controls, and links that lead to their rows.
        assert visit.page.locator("form, button, select, input").locator("visible=true").count() == 0
        visit.page.locator(".tallies a").first.click()
        assert visit.page.url.endswith("#case-0")
        assert (visit.requests[0], visit.messages) == (path.as_uri(), [])


def test_print_has_what_is_open_and_says_what_it_lacks(browser: Any, path: Path, gate: Path) -> None:
    with Visit(browser, path) as visit:
        visit.page.emulate_media(media="print")
        assert not visit.page.locator("details.table table").first.is_visible()
        assert not visit.page.locator("nav").is_visible() and visit.pages() <= 8
    with Visit(browser, gate, width=688) as visit:  # of A4, without its margins
        visit.page.emulate_media(media="print")
        inside = "e => [e.scrollHeight <= e.clientHeight + 1, getComputedStyle(e).overflowY]"
        assert visit.page.locator(".filter + .scroll").evaluate(inside) == [True, "visible"]
        assert visit.page.locator("#changes-table tbody tr").locator("visible=true").count() == 100
        assert (
            visit.page.locator(".on-paper.cut").inner_text() == "Only the first 100 of 308 cases are printed."
        )
        assert visit.page.evaluate(WIDTH) <= 688 and visit.pages() <= 8


def test_changes_are_filtered_and_sorted_and_the_address_says_how(browser: Any, gate: Path) -> None:
    with Visit(browser, gate) as visit:
        assert len(visit.cases()) == 308
        visit.page.get_by_label("Verdict").select_option("slower")
        visit.page.get_by_label("Filter cases").fill("add29")
        assert visit.cases() == ["add29", *(f"add{n}" for n in range(290, 300))]
        assert visit.page.locator("form.filter output").inner_text() == "11 of 308 cases"
        visit.page.get_by_role("button", name="ratio").click()
        address = "#changes?q=add29&verdict=slower&sort=4"
        shown = visit.cases()
        assert visit.page.url.endswith(address) and shown[-1] == "add29"
        visit.page.get_by_role("button", name="ratio").click()
        assert visit.cases()[0] == "add29" and visit.page.url.endswith("sort=-4")
    with Visit(browser, gate, at=address) as again:
        assert again.page.evaluate("scrollY") > 100
        assert (again.cases(), again.messages) == (shown, [])
    for at in ("#changes?verdict=%3Cscript%3E&sort=99&q=", "#changes?sort=x", "#changes?%E0%A4%A"):
        with Visit(browser, gate, at=at) as visit:  # nonsense shows everything
            assert (len(visit.cases()), visit.messages) == (308, []), at


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1200, "light")])
def test_axe_finds_nothing(browser: Any, gate: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """WCAG 2.2 A and AA, with everything unfolded. The control: a page made worse is not let through."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

    def violations(page_path: Path) -> set[str]:
        with Visit(browser, page_path, width=width, color_scheme=scheme, bypass_csp=True) as visit:
            visit.page.evaluate(UNFOLD)
            results = axe.Axe().run(visit.page, options={"runOnly": rules, "resultTypes": ["violations"]})
            return {violation["id"] for violation in results.response["violations"]}

    assert violations(gate) == set()
    text = gate.read_text("utf-8").replace('<html lang="en">', "<html>").replace("<label>Verdict ", "<label>")
    worse = tmp_path / "worse.html"
    worse.write_text(text, "utf-8")
    assert {"html-has-lang", "select-name"} <= violations(worse)
