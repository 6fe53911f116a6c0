"""The page in a real browser: it loads nothing but itself, complains of nothing and fits the window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtbench import calibration, reporting
from dtbench.tests import made_up

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
    whole = made_up.everything()
    topology = calibration.calibrate([whole])
    long = made_up.result("mine", "n" * 300, "a", {"p": "q" * 300}, [1e-3] * 3)
    run = made_up.run([*whole.results, *made_up.NOT_OK, long], complete=False)
    path = tmp_path_factory.mktemp("page") / "page.html"
    reporting.write_report(reporting.Sources(runs=(run,), topology=topology), path)
    return path


class Visit:
    """A page opened, with what it requested and said."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1200, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.goto(path.as_uri(), wait_until="load")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_is_quiet_alone_and_fits(browser: Any, path: Path, scheme: str, width: int) -> None:
    with Visit(browser, path, width=width, color_scheme=scheme) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        for fold in visit.page.query_selector_all("details > summary"):
            fold.click()
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        twice = "(() => { const ids = [...document.querySelectorAll('[id]')].map(e => e.id);"
        twice += " return ids.filter((id, i) => ids.indexOf(id) !== i) })()"
        assert visit.page.evaluate(twice) == []
        assert visit.requests == [path.as_uri()]
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


def test_the_policy_stops_what_does_not_belong(browser: Any, path: Path, tmp_path: Path) -> None:
    """The checks above can fail: a page with a script and a picture from elsewhere breaks them."""
    tampered = tmp_path / "tampered.html"
    extra = "<script>document.title='run'</script><img src='http://127.0.0.1:9/x.png'></body>"
    tampered.write_text(path.read_text("utf-8").replace("</body>", extra), "utf-8")
    with Visit(browser, tampered) as visit:
        assert visit.page.title() != "run"
        assert any("Content Security Policy" in message for message in visit.messages)


def test_colours_follow_the_scheme(browser: Any, path: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        with Visit(browser, path, color_scheme=scheme) as visit:
            ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            text = visit.page.evaluate("getComputedStyle(document.querySelector('svg.plot text')).fill")
            seen[scheme] = (ground, text)
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


def test_print_unfolds_the_tables(browser: Any, path: Path) -> None:
    with Visit(browser, path) as visit:
        table = visit.page.locator("details.table table").first
        height = "e => e.getBoundingClientRect().height"
        assert not table.is_visible()
        visit.page.emulate_media(media="print")
        assert table.is_visible()
        assert table.evaluate(height) > 0
        assert not visit.page.locator("nav").is_visible()
        assert visit.page.pdf(format="A4").startswith(b"%PDF")


def test_the_keyboard_reaches_links_folds_and_wide_tables(browser: Any, path: Path) -> None:
    with Visit(browser, path, width=400) as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        reached = set()
        for _ in range(60):
            visit.page.keyboard.press("Tab")
            reached.add(
                visit.page.evaluate("document.activeElement.tagName + document.activeElement.className")
            )
        assert {"A", "SUMMARY", "DIVscroll"} <= reached
