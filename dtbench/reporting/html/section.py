"""Sections of the report page, the parts that fill them, and the measured cases that they show.

Launches of a case are merged.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

import pandas as pd

from dtbench.comparison.run_comparison import compare_runs
from dtbench.records.result import Run, integer_param
from dtbench.records.topology import BandwidthDrop
from dtbench.reporting.html.changes import Changes, changes_of_comparison
from dtbench.reporting.html.figures import MAX_PANELS, Figure
from dtbench.reporting.html.sources import Sources
from dtbench.stats.drops import drops_of
from dtbench.stats.frame import COUNTER, cases_frame, cells, impls_of, names_of, params_of, timed_frames
from dtbench.stats.layout import shared_cores
from dtbench.suite import ROUTING, Param
from dtbench.text.table import Table

_K = TypeVar("_K")


@dataclass(frozen=True)
class MeasuredImpl:
    """The results of one implementation of a case, merged over launches by `dtbench.stats.frame.cases_frame`.

    Attributes:
        impl: name of the implementation.
        estimate_s: median over launches of the estimate, seconds per call.
        median_s: median over launches of the samples' median.
        p25_s: median over launches of the samples' lower quartile.
        p75_s: median over launches of the samples' upper quartile.
        size_bytes: message size.
        algbw_Bps: algorithm bandwidth, bytes per second.
        busbw_Bps: bus bandwidth, bytes per second.
        rank_spread: longest over shortest time of the ranks, median over samples.
        counters: counters by name.
    """

    impl: str
    estimate_s: float
    median_s: float
    p25_s: float
    p75_s: float
    size_bytes: int | None
    algbw_Bps: float | None  # noqa: N815 - spelled as in the run file
    busbw_Bps: float | None  # noqa: N815
    rank_spread: float | None
    counters: Mapping[str, float]


@dataclass(frozen=True)
class ReportCase:
    """A case with its measured implementations."""

    name: str
    params: Mapping[str, Param]
    impls: Mapping[str, MeasuredImpl]

    def get(self, param: str) -> Param:
        """Returns the value of a param; "" if the case lacks it."""
        return self.params.get(param, "")

    def number(self, param: str) -> int:
        """Returns a param as an integer; 0 if the case lacks it or its value is not a number."""
        return integer_param(self.params, param)

    @cached_property
    def only(self) -> MeasuredImpl:
        """The implementation, in suites that have only one."""
        return next(iter(self.impls.values()))

    def seconds(self, impl: str) -> float | None:
        return self.impls[impl].estimate_s if impl in self.impls else None

    def ratio(self, impl: str, base: str) -> float | None:
        """Returns time of `impl` / time of `base`; None unless both were measured."""
        has_both = {impl, base} <= self.impls.keys()
        return self.impls[impl].estimate_s / self.impls[base].estimate_s if has_both else None


def collect(runs: Sequence[Run]) -> dict[str, list[ReportCase]]:
    """Returns suite -> cases, in the order in which they were first measured."""
    figures = [f.name for f in fields(MeasuredImpl) if f.name not in ("impl", "counters")]
    return {
        suite: _cases(cases_frame(timed), figures) for suite, timed in timed_frames(runs, figures).items()
    }


def _cases(frame: pd.DataFrame, figures: Sequence[str]) -> list[ReportCase]:
    counters = names_of(frame, COUNTER)
    impls: list[dict[str, MeasuredImpl]] = [{} for _ in range(len(frame))]
    for impl in impls_of(frame):
        columns = {name: cells(frame[name, impl]) for name in (*figures, *counters)}
        for row, measured in enumerate(impls):
            if columns["median_s"][row] is not None:
                case_counters = {
                    c.removeprefix(COUNTER): v for c in counters if (v := columns[c][row]) is not None
                }
                measured[impl] = MeasuredImpl(
                    impl, **{f: columns[f][row] for f in figures}, counters=case_counters
                )
    return [ReportCase(*case) for case in zip(cells(frame["name", ""]), params_of(frame), impls, strict=True)]


def equal_parts(cases: Iterable[ReportCase]) -> list[ReportCase]:
    """Returns the cases in which all ranks send equal parts and that have a time and a size."""
    return [c for c in cases if ROUTING not in c.params and c.impls and c.only.size_bytes]


def distinct(values: Iterable[_K]) -> list[_K]:
    """Returns each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Returns the geometric mean, which is the right one for ratios, of the values that are not None."""
    present = [v for v in values if v]
    return statistics.geometric_mean(present) if present else None


def main_dtype(cases: Sequence[ReportCase]) -> Param:
    dtypes = {c.get("dtype") for c in cases}
    return "float32" if "float32" in dtypes else min(dtypes, key=str)


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
        """A description such as "4 ranks share 2 cores" if shared cores distort the times of collectives, else ""."""
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
        missing: command that the page shows if there is no data. If it is "", the section is left out.
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
