"""The page in a real browser: it loads nothing but itself, complains of nothing and fits the window."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtbench.cost import calibration
from dtbench.reporting import html as reporting
from dtbench.tests import made_up, made_up_findings

REQUIRED = os.environ.get("DTBENCH_REQUIRE_CHROMIUM") == "1"
if REQUIRED:
    import playwright.sync_api as sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")

ARGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium")
    if executable is None:
        reason = "no chromium on the PATH: install Debian's package chromium"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=ARGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: figures, warnings, failures, long names."""
    folder = tmp_path_factory.mktemp("page")
    whole = made_up.everything()
    topology = calibration.calibrate([whole])
    long = made_up.result("mine", "n" * 300, "a", {"p": "q" * 300}, [1e-3] * 3)
    run = made_up.run([*whole.results, *made_up.NOT_OK, long], complete=False)
    found = reporting.gather(
        [
            made_up_findings.write(folder, "gate.json", made_up_findings.gate()),
            made_up_findings.write(folder, "calls.json", made_up_findings.calls()),
            made_up_findings.write_profile(folder / "profile"),
            made_up_findings.write_lines(folder, "history.jsonl", made_up_findings.history()),
        ]
    )
    path = folder / "page.html"
    reporting.write_report(dataclasses.replace(found, runs=(run,), topology=topology), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page without runs, for what takes its time on a large one."""
    folder = tmp_path_factory.mktemp("small")
    findings = [made_up_findings.gate(), made_up_findings.calls()]
    files = [made_up_findings.write(folder, f"{i}.json", finding) for i, finding in enumerate(findings)]
    files.append(made_up_findings.write_profile(folder / "profile"))
    path = folder / "page.html"
    reporting.write_report(reporting.gather(files), path)
    return path


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

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_is_quiet_alone_and_fits(browser: Any, path: Path, scheme: str, width: int) -> None:
    with Visit(browser, path, width=width, color_scheme=scheme) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        for fold in visit.page.query_selector_all("details > summary"):
            fold.click()
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        assert visit.page.evaluate(OVERLAPS) == []
        twice = "(() => { const ids = [...document.querySelectorAll('[id]')].map(e => e.id);"
        twice += " return ids.filter((id, i) => ids.indexOf(id) !== i) })()"
        assert visit.page.evaluate(twice) == []
        assert visit.requests == [path.as_uri()]
        assert visit.messages == []


@pytest.mark.parametrize("name", ["example", "example-gate"])
def test_the_committed_examples_are_short_and_legible(browser: Any, name: str) -> None:
    reports = Path(__file__).parents[2] / "reports"
    with Visit(browser, reports / f"{name}.html", width=1280) as visit:
        assert visit.page.evaluate("document.documentElement.scrollHeight") <= 6000
        assert pages(visit.page.pdf(format="A4")) <= 8
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert visit.page.evaluate(OVERLAPS) == []
        addresses = visit.page.evaluate(
            "[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"
        )
        assert all((reports / one).is_file() for one in addresses if not one.startswith(("#", "data:")))
        assert visit.messages == []


def test_it_needs_no_script(browser: Any, path: Path) -> None:
    with Visit(browser, path, java_script_enabled=False) as visit:
        assert visit.page.locator("svg.plot").count() >= 15
        table = visit.page.locator("details.table table").first
        assert not table.is_visible()
        visit.page.locator("details.table summary", has_text="Every op").click()
        assert visit.page.locator("td", has_text="linear_3d").first.is_visible()
        assert visit.requests == [path.as_uri()]
        assert visit.messages == []


def test_colours_follow_the_scheme(browser: Any, path: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        with Visit(browser, path, color_scheme=scheme) as visit:
            ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            text = visit.page.evaluate("getComputedStyle(document.querySelector('svg.plot text')).fill")
            seen[scheme] = (ground, text)
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


def test_print_has_what_is_open_and_headings_stay_with_what_they_head(browser: Any, path: Path) -> None:
    with Visit(browser, path) as visit:
        fold = visit.page.locator("details.table").first
        visit.page.emulate_media(media="print")
        assert not fold.locator("table").is_visible()
        assert not visit.page.locator("nav").is_visible()
        assert pages(visit.page.pdf(format="A4")) <= 8
        fold.evaluate("e => { e.open = true }")
        assert fold.locator("table").evaluate("e => e.getBoundingClientRect().height") > 0
        # A heading, a lead and a legend are kept with what follows them.
        kept = "[...document.querySelectorAll('main h2, main h3, .lead, .legend, .panel-title')]"
        assert set(visit.page.evaluate(f"{kept}.map(e => getComputedStyle(e).breakAfter)")) == {"avoid"}


def test_print_has_the_whole_table_or_says_how_much_it_lacks(browser: Any, tmp_path: Path) -> None:
    many = [made_up_findings.benchmark("REGRESSION", f"add{i}", 2.0 - i / 1000) for i in range(300)]
    file = made_up_findings.write(tmp_path, "gate.json", made_up_findings.gate(benchmarks=many))
    path = tmp_path / "page.html"
    reporting.write_report(reporting.gather([file]), path)
    with Visit(browser, path) as visit:
        visit.page.emulate_media(media="print")
        scroll = visit.page.locator(".filter + .scroll")
        # All that is laid out is seen, to the right and below.
        inside = "e => [e.scrollHeight <= e.clientHeight + 1, getComputedStyle(e).overflowY]"
        assert scroll.evaluate(inside) == [True, "visible"]
        assert visit.page.locator("#changes-table tbody tr").locator("visible=true").count() == 100
        assert visit.page.locator(".on-paper.cut").inner_text() == "Printed are the first 100 of 300 cases."
        visit.page.set_viewport_size({"width": 688, "height": 1000})  # of A4, without its margins
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 688
        assert pages(visit.page.pdf(format="A4")) <= 8
        visit.page.emulate_media(media="screen")
        assert visit.page.locator(".on-paper").locator("visible=true").count() == 0
        visit.page.get_by_label("Cases that hold").fill("add29")
        visit.page.emulate_media(media="print")
        assert visit.page.locator("#changes-table tbody tr").locator("visible=true").count() == 11
        assert not visit.page.locator(".on-paper.cut").is_visible()
        assert visit.messages == []


def pages(pdf: bytes) -> int:
    """How many a PDF has, by its tree of pages."""
    return max(map(int, re.findall(rb"/Count (\d+)", pdf)))


def test_the_keyboard_reaches_links_folds_and_wide_tables(browser: Any, path: Path) -> None:
    with Visit(browser, path, width=400) as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        reached = set()
        for _ in range(120):
            visit.page.keyboard.press("Tab")
            reached.add(
                visit.page.evaluate("document.activeElement.tagName + document.activeElement.className")
            )
        assert {"A", "SUMMARY", "DIVscroll"} <= reached


ROWS = (
    "[...document.querySelectorAll('#changes-table tbody tr')]"
    ".filter(r => !r.hidden).map(r => r.cells[1].textContent)"
)


def names(visit: Visit) -> list[str]:
    """The cases that the table of changes shows, in its order."""
    return [text.split()[0] for text in visit.page.evaluate(ROWS)]


def test_changes_are_filtered_and_sorted_and_the_address_says_how(browser: Any, small: Path) -> None:
    with Visit(browser, small) as visit:
        assert names(visit) == ["add", "matmul", "mm", "relu", "sum", "cat", "gelu", "view"]
        visit.page.get_by_label("Verdict").select_option("slower")
        assert names(visit) == ["add", "matmul"]
        assert visit.page.locator("form.filter output").inner_text() == "2 of 8 cases"
        visit.page.get_by_label("Cases that hold").fill("mat S(0)")
        assert names(visit) == ["matmul"]
        visit.page.get_by_label("Cases that hold").fill("")
        visit.page.get_by_role("button", name="ratio").click()
        assert names(visit) == ["matmul", "add"]
        address = visit.page.url.partition("#")[2]
        assert address == "changes?verdict=slower&sort=4"
        visit.page.get_by_role("button", name="ratio").click()
        assert visit.page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
        assert visit.page.url.endswith("sort=-4")
        assert visit.messages == []
    with Visit(browser, small, at=f"#{address}") as again:
        assert names(again) == ["matmul", "add"]
        assert again.page.evaluate("scrollY") > 100
        assert again.messages == []


def test_an_address_of_nonsense_shows_everything(browser: Any, small: Path) -> None:
    for at in ("#changes?verdict=%3Cscript%3E&sort=99&q=", "#changes?sort=x", "#changes?%E0%A4%A"):
        with Visit(browser, small, at=at) as visit:
            assert len(names(visit)) == 8, at
            assert visit.messages == []


def test_without_script_there_are_no_dead_controls(browser: Any, small: Path) -> None:
    with Visit(browser, small, java_script_enabled=False) as visit:
        assert visit.page.locator("form, button, select, input").locator("visible=true").count() == 0
        assert visit.page.locator("#changes-table tbody tr").count() == 8
        visit.page.locator(".tallies a").first.click()
        assert visit.page.url.endswith("#case-0")


def test_controls_are_large_enough_and_named(browser: Any, small: Path) -> None:
    """WCAG 2.2: 24 px for what is not in a sentence; every control has a name."""
    with Visit(browser, small, width=400) as visit:
        found = visit.page.evaluate(
            "[...document.querySelectorAll('button, input, select, summary, nav a, .tallies a')]"
            ".map(e => [e.tagName, (e.labels?.[0] || e).textContent.trim(), e.getBoundingClientRect().height])"
        )
        assert {tag for tag, *_ in found} == {"BUTTON", "INPUT", "SELECT", "SUMMARY", "A"}
        assert [one for one in found if not one[1] or one[2] < 24] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_axe_finds_nothing(browser: Any, small: Path, tmp_path: Path, scheme: str, width: int) -> None:
    """WCAG 2.2 A and AA, with everything unfolded. The control: a page made worse is not let through."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    rules = {
        "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
        "resultTypes": ["violations"],
    }

    def violations(page_path: Path) -> set[str]:
        with Visit(browser, page_path, width=width, color_scheme=scheme, bypass_csp=True) as visit:
            visit.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            return {v["id"] for v in axe.Axe().run(visit.page, options=rules).response["violations"]}

    assert violations(small) == set()
    worse = tmp_path / "worse.html"
    text = (
        small.read_text("utf-8").replace('<html lang="en">', "<html>").replace("<label>Verdict ", "<label>")
    )
    worse.write_text(text.replace("--muted: #", "--muted: #888888; --old: #"), "utf-8")
    assert {"html-has-lang", "select-name"} <= violations(worse)


def test_values_are_told_under_the_pointer_and_by_keys(browser: Any, path: Path) -> None:
    with Visit(browser, path) as visit:
        panel = visit.page.locator("#collectives [data-points]").first
        points = json.loads(panel.get_attribute("data-points"))
        panel.focus()
        visit.page.keyboard.press("ArrowRight")
        assert panel.locator(".tip").inner_text() == points[0][2]
        visit.page.keyboard.press("ArrowLeft")
        assert panel.locator(".tip").inner_text() == points[-1][2]
        visit.page.keyboard.press("Escape")
        assert panel.locator(".tip").is_hidden()
        box, width = panel.locator("svg").bounding_box(), "p => p.querySelector('svg').viewBox.baseVal.width"
        scale = box["width"] / panel.evaluate(width)
        x, y, words = max(
            points, key=lambda one: min(math.dist(one[:2], o[:2]) for o in points if o is not one)
        )
        visit.page.mouse.move(box["x"] + x * scale, box["y"] + y * scale)
        assert panel.locator(".tip").inner_text() == words
        assert visit.messages == []
