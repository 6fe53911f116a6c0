"""The page: its parts put together, and what is cut to keep it small."""

from __future__ import annotations

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
from dtbench.reporting.html.parts.provenance import provenance
from dtbench.reporting.html.section import Material, ReportSection
from dtbench.reporting.html.sources import KINDS, Sources
from dtbench.reporting.html.svg import settings
from dtbench.stats.frame import results_frame
from dtbench.text.csv import to_csv
from dtbench.text.table import MAX_ROWS, compact
from dtbench.text.units import plural

GENERATOR = "dtbench report"
BUDGET_BYTES = 2_000_000
# Of a result as CSV: suite, case, impl, status, clock and eight times of six digits are more.
LEAST_RESULT_BYTES = 80
# RFC 3986, 2.2: reserved characters that stand for themselves in the path of an address.
_PLAIN_IN_ADDRESS = "/:@!$*+,;=()"
FEW_FACTS = 4  # of the provenance that are not folded
TEMPLATES = Path(__file__).parent
SCRIPT = (TEMPLATES / "page.js").read_text("utf-8")


@dataclass(frozen=True)
class Economy:
    """How much the page may hold: the raw data, rows of each table, drawings of each figure."""

    data: bool
    rows: int
    panels: int


# What is given up, in this order, until the page is within its budget.
ECONOMIES = (
    Economy(True, MAX_ROWS, 24),
    Economy(False, MAX_ROWS, 24),
    Economy(False, 200, 12),
    Economy(False, 50, 4),
    Economy(False, 10, 1),
)


def write_report(sources: Sources, path: str | Path) -> None:
    """Writes the report of these sources.

    Raises:
        UsageError: nothing to report, or runs of different machines, meshes or backends.
        OutputError: the place cannot be written, or holds a file that is no report.
    """
    write_atomically(Path(path), render(sources), is_report, "report of dtbench")


def render(sources: Sources) -> str:
    """The page as text, of which `write_report` says the errors; the same sources give the same bytes."""
    if sources.is_empty:
        raise UsageError(f"nothing to report: name at least one file, {KINDS}")
    if sources.runs:
        check_same_setup(sources.runs)
    with settings():
        return _render(Material(sources))


def _render(of: Material) -> str:
    sources = of.sources
    sections = [section for part in PARTS if (section := part.section(of)) is not None]
    context = {
        "summary": front.summary(of),
        "warnings": front.warnings(of),
        "provenance": provenance(sources),
        "failures": front.failures(sources.runs),
        "generator": GENERATOR,
    }
    # What cannot fit is not made to be thrown away: of a hundred thousand results that takes longer than all else.
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
            changes=of.changes,
            title=front.title(of, fitted),
            sections=[section for section in fitted if not section.missing],
            missing=[section for section in fitted if section.missing],
            cuts=cuts,
            script=Markup(SCRIPT),
            script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
            few_facts=FEW_FACTS,
            most_reasons=min(economy.rows, 200),
        )
        page = _reaching(page, fitted)
        if len(page.encode()) <= BUDGET_BYTES:
            break
    return page


def _reaching(page: str, sections: Sequence[ReportSection]) -> str:
    """Links to rows that were cut lead to their table's section."""
    there = {id_ for section in sections for table in section.tables for id_, *_ in table.rows}
    return re.sub(
        rf'href="#({ROW}\d+)"', lambda link: link[0] if link[1] in there else 'href="#changes"', page
    )


def is_report(head: str) -> bool:
    """Whether a file that begins so is a report."""
    return f'<meta name="generator" content="{GENERATOR}">' in head


def _fit(sections: Sequence[ReportSection], economy: Economy) -> tuple[list[ReportSection], list[str]]:
    """The sections with so many drawings and rows, and what was cut, in words."""
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
        cuts.append(f"At most {plural(economy.panels, 'drawing')} of each figure can be shown.")
    if max(rows, default=0) > economy.rows:
        cuts.append(
            f"Tables are cut after {economy.rows} rows each; the longest has {max(rows)}. The run files have them all."
        )
    return fitted, cuts


def csv_link(runs: Sequence[Run]) -> str:
    """A head, then a line per result with six digits of every figure, as an address that holds all of it: it works
    without script and without a request."""
    frame = results_frame(runs).drop(columns="case").dropna(axis="columns", how="all")
    return f"data:text/csv;charset=utf-8,{quote(to_csv(frame, '%.6g'), safe=_PLAIN_IN_ADDRESS)}"


def render_template(name: str, **context: object) -> str:
    """A template of this folder, everything escaped but what was made here."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    css = Markup((TEMPLATES / "page.css").read_text("utf-8"))
    return environment.get_template(name).render(**context, css=css)


def _visible(value: object) -> object:
    """Control characters and marks that turn the reading direction become visible."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
