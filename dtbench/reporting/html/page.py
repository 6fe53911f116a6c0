"""Assembles the page from its parts, and cuts it to a maximum size."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from dtbench.cost.calibration import check_same_setup
from dtbench.errors import UsageError, plain
from dtbench.records.atomic import write_atomically
from dtbench.records.result import Run
from dtbench.reporting.html.changes import ROW
from dtbench.reporting.html.parts import PARTS, front
from dtbench.reporting.html.parts.front import provenance
from dtbench.reporting.html.section import Material, ReportSection
from dtbench.reporting.html.sources import KINDS, Sources
from dtbench.reporting.html.svg import settings
from dtbench.stats.frame import results_frame
from dtbench.text.csv import to_csv
from dtbench.text.table import MAX_ROWS, compact
from dtbench.text.units import plural

GENERATOR = "dtbench report"
BUDGET_BYTES = 2_000_000
# Lower bound, in bytes, on a row of the CSV. Its suite, case, impl, status, clock and eight six-digit times always need
# more.
LEAST_RESULT_BYTES = 80
# Reserved characters that need no escaping in the path of a URL (RFC 3986, 2.2).
_UNESCAPED = "/:@!$*+,;=()"
FEW_FACTS = 4  # facts of the provenance that are not folded
TEMPLATES = Path(__file__).parent
SCRIPT = (TEMPLATES / "page.js").read_text("utf-8")


@dataclass(frozen=True)
class Economy:
    """Limits on the content of the page.

    Attributes:
        data: whether it includes the raw data.
        rows: rows per table.
        panels: panels per figure.
    """

    data: bool
    rows: int
    panels: int


# Limits that are tried in this order until the page is within `BUDGET_BYTES`.
ECONOMIES = (
    Economy(True, MAX_ROWS, 24),
    Economy(False, MAX_ROWS, 24),
    Economy(False, 200, 12),
    Economy(False, 50, 4),
    Economy(False, 10, 1),
)


def write_report(sources: Sources, path: str | Path) -> None:
    """Writes the report of these sources to a file.

    Raises:
        UsageError: there is nothing to report, or the runs have different machines, meshes or backends.
        OutputError: the file cannot be written, or exists and is not a report.
    """
    write_atomically(Path(path), render(sources), is_report, "report of dtbench")


def render(sources: Sources) -> str:
    """Returns the HTML of the report. It is reproducible: equal sources give equal bytes.

    Raises:
        UsageError: see `write_report`.
    """
    if sources.is_empty:
        raise UsageError(f"nothing to report: name at least one file, {KINDS}")
    if sources.runs:
        check_same_setup(sources.runs)
    with settings():
        return _render(Material(sources))


def _render(material: Material) -> str:
    sources = material.sources
    sections = [section for part in PARTS if (section := part.section(material)) is not None]
    context = {
        "summary": front.summary(material),
        "warnings": front.warnings(material),
        "provenance": provenance(sources),
        "failures": front.failures(sources.runs),
        "generator": GENERATOR,
    }
    # Data that cannot fit is not formatted: formatting a hundred thousand results takes longer than all other work.
    results = sum(len(run.results) for run in (*sources.runs, *sources.baseline))
    fits = results * LEAST_RESULT_BYTES <= BUDGET_BYTES
    raw = csv_link(sources.runs) if sources.runs and fits else None
    page = ""
    for economy in ECONOMIES if fits else ECONOMIES[1:]:
        fitted, cuts = _fit(sections, economy)
        if sources.runs and not economy.data:
            cuts.append(
                f"The raw data are left out to keep the page below {BUDGET_BYTES // 1_000_000} MB; the run files have "
                "them."
            )
        page = render_template(
            "page.html.j2",
            **context,
            csv=raw if economy.data else None,
            changes=material.changes,
            title=front.title(material, fitted),
            sections=[section for section in fitted if not section.missing],
            missing=[section for section in fitted if section.missing],
            cuts=cuts,
            script=Markup(SCRIPT),
            script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
            few_facts=FEW_FACTS,
            most_reasons=min(economy.rows, 200),
        )
        page = _redirect_links(page, fitted)
        if len(page.encode()) <= BUDGET_BYTES:
            break
    return page


def _redirect_links(page: str, sections: Sequence[ReportSection]) -> str:
    """Redirects links to rows that were cut to the section of their table."""
    present = {id_ for section in sections for table in section.tables for id_, *_ in table.rows}
    return re.sub(
        rf'href="#({ROW}\d+)"', lambda link: link[0] if link[1] in present else 'href="#changes"', page
    )


def is_report(head: str) -> bool:
    """Whether a file that begins with `head` is a report."""
    return f'<meta name="generator" content="{GENERATOR}">' in head


def _fit(sections: Sequence[ReportSection], economy: Economy) -> tuple[list[ReportSection], list[str]]:
    """Returns the sections within the limits, and notes on what was cut."""
    panels = [len(figure.panels) for section in sections for figure in section.figures]
    rows = [table.total_rows for section in sections for table in section.tables]
    fitted = [
        replace(
            section,
            figures=[replace(figure, panels=figure.panels[: economy.panels]) for figure in section.figures],
            tables=[replace(compact(table), max_rows=economy.rows) for table in section.tables],
        )
        for section in sections
    ]
    cuts = []
    if max(panels, default=0) > economy.panels:
        cuts.append(f"Each figure shows at most {plural(economy.panels, 'drawing')}.")
    if max(rows, default=0) > economy.rows:
        cuts.append(
            f"Tables are cut after {economy.rows} rows each; the longest has {max(rows)}. The run files have them all."
        )
    return fitted, cuts


def csv_link(runs: Sequence[Run]) -> str:
    """Returns the results as CSV with six digits, as a data URL, which needs neither script nor request."""
    frame = results_frame(runs).drop(columns="case").dropna(axis="columns", how="all")
    return f"data:text/csv;charset=utf-8,{quote(to_csv(frame, '%.6g'), safe=_UNESCAPED)}"


def render_template(name: str, **context: object) -> str:
    """Renders a template of this folder. All text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    return environment.get_template(name).render(
        **context, css=Markup((TEMPLATES / "page.css").read_text("utf-8"))
    )


def _visible(value: object) -> object:
    """Makes control characters and marks that change the reading direction visible."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
