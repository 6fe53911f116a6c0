"""Sections of the report page, and the parts that fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from dtbench.comparison.compare_runs import compare_runs
from dtbench.records.topology import BandwidthDrop
from dtbench.reporting.html.cases import ReportCase, collect
from dtbench.reporting.html.changes import Changes, changes_of_comparison
from dtbench.reporting.html.figures import MAX_PANELS, Figure
from dtbench.reporting.html.sources import Sources
from dtbench.stats.drops import drops_of
from dtbench.stats.layout import shared_cores
from dtbench.text.table import Table

_T = TypeVar("_T")


@dataclass(frozen=True)
class Material:
    """The input of all parts of a page."""

    sources: Sources

    @cached_property
    def suites(self) -> Mapping[str, Sequence[ReportCase]]:
        """The cases of the runs, by suite."""
        return collect(self.sources.runs)

    @cached_property
    def drops(self) -> Sequence[BandwidthDrop]:
        """The first twelve bandwidth drops of collectives."""
        return drops_of(result for run in self.sources.runs for result in run.results)[:12]

    @cached_property
    def shared_cores(self) -> str:
        """A description such as "4 ranks share 2 cores" if times of collectives are not those of the links, else ""."""
        return shared_cores(self.sources.runs[0].header) if self.sources.runs else ""

    @cached_property
    def changes(self) -> Changes | None:
        """The comparison of base and head: the gate's, else that of the runs with the baseline."""
        if self.sources.gate is None and self.sources.baseline and self.sources.runs:
            ends = tuple(runs[0].path.stem for runs in (self.sources.baseline, self.sources.runs))
            return changes_of_comparison(compare_runs(self.sources.baseline, self.sources.runs), ends)
        return self.sources.gate

    def cases(self, *suites: str) -> Sequence[ReportCase]:
        return [case for suite in suites for case in self.suites.get(suite, ())]


@dataclass
class ReportSection:
    """A section of the page.

    Attributes:
        id: anchor of the section.
        title: heading of the section.
        lead: introduction.
        outcome: the section in a few words, for the title of the page.
        figures: figures of the section.
        tables: tables of the section.
        headlines: (number, description) for the top of the page.
        doubt: reason for which the numbers may be misleading.
        notes: what the figures leave out, and warnings.
        missing: command that produces the data, if there is nothing to show.
    """

    id: str
    title: str
    lead: str = ""
    outcome: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    headlines: list[tuple[str, str]] = field(default_factory=list)
    doubt: str = ""
    notes: list[str] = field(default_factory=list)
    missing: str = ""

    @property
    def has_single_rows(self) -> bool:
        """Whether all tables have a single row, in which case the section is folded."""
        return bool(self.tables) and all(table.total_rows == 1 and not table.filter for table in self.tables)

    def add(self, *shown: Figure | Table | None) -> None:
        """Appends figures and tables; None and tables without rows are skipped."""
        self.figures += [item for item in shown if isinstance(item, Figure)]
        self.tables += [item for item in shown if isinstance(item, Table) and item.total_rows]

    def capped(self, items: Sequence[_T], noun: str, limit: int = MAX_PANELS) -> Sequence[_T]:
        """Returns the first `limit` items for a figure, and adds a note if there are more."""
        if len(items) > limit:
            self.notes.append(
                f"The figure shows the first {limit} of {len(items)} {noun}; the table has them all."
            )
        return items[:limit]


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        id: id of its section.
        title: title of its section.
        fill: adds figures, tables and texts to the section.
        suites: suites that only this part shows.
        missing: command to name if there is no data; "": the section is then left out.
        measures_links: whether the times depend on links. If ranks share cores, such a part has no headline.
    """

    id: str
    title: str
    fill: Callable[[ReportSection, Material], None]
    suites: tuple[str, ...] = ()
    missing: str = ""
    measures_links: bool = False

    def section(self, material: Material) -> ReportSection | None:
        section = ReportSection(self.id, self.title)
        self.fill(section, material)
        if self.measures_links and material.shared_cores:
            section.outcome, section.headlines = "", []
            section.doubt = f"{material.shared_cores}: these times include waiting for a core."
        is_filled = section.figures or section.tables
        section.missing = "" if is_filled else section.missing or self.missing
        return section if is_filled or section.missing else None
