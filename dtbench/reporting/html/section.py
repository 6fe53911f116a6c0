"""What a part of the report is: what it claims, and how it fills its section from all that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from dtbench.comparison.compare_runs import compare_runs
from dtbench.records.topology import BandwidthDrop
from dtbench.reporting.html.cases import ReportCase, collect
from dtbench.reporting.html.changes import Changes, of_comparison
from dtbench.reporting.html.figures import MAX_PANELS, Figure
from dtbench.reporting.html.sources import Sources
from dtbench.stats.drops import drops_of
from dtbench.stats.layout import shared_cores
from dtbench.text.table import Table

_T = TypeVar("_T")


@dataclass(frozen=True)
class Material:
    """Everything that a page is made of."""

    sources: Sources

    @cached_property
    def suites(self) -> Mapping[str, Sequence[ReportCase]]:
        """The cases of the runs, by suite."""
        return collect(self.sources.runs)

    @cached_property
    def drops(self) -> Sequence[BandwidthDrop]:
        """Where the collectives' bandwidth drops as sizes grow, the first dozen."""
        return drops_of(result for run in self.sources.runs for result in run.results)[:12]

    @cached_property
    def shared_cores(self) -> str:
        """Why times of collectives are not those of the links: more ranks than cores on a host; else ""."""
        return shared_cores(self.sources.runs[0].header) if self.sources.runs else ""

    @cached_property
    def changes(self) -> Changes | None:
        """Base against new, by the gate, else by comparing the runs with a baseline."""
        if self.sources.gate is None and self.sources.baseline and self.sources.runs:
            ends = tuple(of[0].path.stem for of in (self.sources.baseline, self.sources.runs))
            return of_comparison(compare_runs(self.sources.baseline, self.sources.runs), ends)
        return self.sources.gate

    def cases(self, *suites: str) -> Sequence[ReportCase]:
        return [case for suite in suites for case in self.suites.get(suite, ())]


@dataclass
class ReportSection:
    """outcome: the section in a few words, for the title. headlines: (figure, what it says), the most telling ones.
    doubt: why its figures do not mean what they say. cuts: what the figures leave out, and warnings. missing: the
    command that would fill it, where there is nothing to show."""

    id: str
    title: str
    lead: str = ""
    outcome: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    headlines: list[tuple[str, str]] = field(default_factory=list)
    doubt: str = ""
    cuts: list[str] = field(default_factory=list)
    missing: str = ""

    @property
    def of_one_row(self) -> bool:
        """Whether each of its tables has a single row: the section is then folded."""
        return bool(self.tables) and all(table.total_rows == 1 and not table.filter for table in self.tables)

    def add(self, *shown: Figure | Table | None) -> None:
        """Appends them; None and a table without rows are nothing to show."""
        self.figures += [one for one in shown if isinstance(one, Figure)]
        self.tables += [one for one in shown if isinstance(one, Table) and one.total_rows]

    def capped(self, items: Sequence[_T], what: str, most: int = MAX_PANELS) -> Sequence[_T]:
        """The first so many of them, for a figure; a cut is said."""
        if len(items) > most:
            self.cuts.append(
                f"The figure shows the first {most} of {len(items)} {what}; the table has them all."
            )
        return items[:most]


@dataclass(frozen=True)
class Part:
    """A part of the page. suites: those it claims, which are drawn nowhere else. fill: adds figures, tables and words.
    missing: the command that makes what it shows, named where there is none of it; "": then it is left out. of_links:
    whether its figures are those of links; where ranks share cores, no headline is taken from it."""

    id: str
    title: str
    fill: Callable[[ReportSection, Material], None]
    suites: tuple[str, ...] = ()
    missing: str = ""
    of_links: bool = False

    def section(self, material: Material) -> ReportSection | None:
        section = ReportSection(self.id, self.title)
        self.fill(section, material)
        if self.of_links and material.shared_cores:
            section.outcome, section.headlines = "", []
            section.doubt = f"{material.shared_cores}: these times include waiting for a core."
        is_filled = section.figures or section.tables
        section.missing = "" if is_filled else section.missing or self.missing
        return section if is_filled or section.missing else None
