"""Cases with their impls side by side: what tells them apart, their times, how they are drawn and summed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dtbench.reporting.html.axes import seconds_tick, value_axis
from dtbench.reporting.html.cases import ReportCase, distinct, geometric_mean
from dtbench.reporting.html.figures import MAX_ROWS, DotRow, Style, dots
from dtbench.reporting.html.section import ReportSection
from dtbench.suite.grouping import known_first
from dtbench.text import table as t
from dtbench.text.units import format_seconds, format_size, plural

CORE, TORCH, FLOOR = Style("s0", "o"), Style("s1", "s", (5, 2), hollow=True), Style("s2", "|", (1.5, 1.5))
IMPL_STYLES = {
    "core": replace(CORE, words="core: dtbench core"),
    "torch": replace(TORCH, words="torch: torch.distributed.tensor"),
    "local": replace(FLOOR, words="local: plain torch, no distribution"),
    "wrapped": Style("s4", "D", hollow=True, words="wrapped: the least that a tensor class in Python takes"),
}
# Of impls that are not known here, in turn.
_MORE_STYLES = (Style("s3", "^", hollow=True), Style("s4", "D", hollow=True), Style("s5", "v", hollow=True))


def impls_of(cases: Sequence[ReportCase]) -> list[str]:
    """Those that are there, the core and torch first."""
    return known_first({impl for case in cases for impl in case.impls}, list(IMPL_STYLES))


def named(
    cases: Sequence[ReportCase], of_name: str, params: Mapping[str, str], *drop: str
) -> list[t.TableColumn]:
    """What tells the cases of a table apart: the params under their headers, their name under `of_name` before the
    first that is no mesh dim, sizes last; all others but `drop` in one column, for no two rows may look the same."""
    sizes = [p for p in params if p == "size" or p.endswith("_bytes")]
    words = {title: [c.get(p) for c in cases] for p, title in params.items() if p not in sizes}
    known = {*params, *drop}
    rest = [", ".join(f"{k}={v}" for k, v in sorted(c.params.items()) if k not in known) for c in cases]
    return [
        *(t.text(title, column) for title, column in words.items() if title == "Mesh dim"),
        t.text(of_name, [c.name for c in cases]),
        *(t.text(title, column) for title, column in words.items() if title != "Mesh dim"),
        *([t.text("Other parameters", rest)] if any(rest) else []),
        *(t.sizes(params[p], [format_size(c.number(p)) for c in cases]) for p in sizes),
    ]


def times(cases: Sequence[ReportCase]) -> list[t.TableColumn]:
    """The time of each impl, and of the core over torch."""
    columns = [(impl, [c.seconds(impl) for c in cases]) for impl in impls_of(cases)]
    ratios = [c.ratio("core", "torch") for c in cases]
    marked = [t.speeds("core beside torch", ratios)] if any(ratios) else []
    return [*t.times([("floor" if impl == "local" else impl, column) for impl, column in columns]), *marked]


def bandwidths(cases: Sequence[ReportCase]) -> list[t.TableColumn]:
    """The bandwidth of each impl that moves bytes."""
    of = {i: [c.impls[i].algbw_Bps if i in c.impls else None for c in cases] for i in impls_of(cases)}
    return t.bandwidths([(impl, column) for impl, column in of.items() if any(column)])


def add_dots(
    section: ReportSection,
    panels: Mapping[str, Sequence[ReportCase]],
    label: Callable[[ReportCase], str],
    caption: str,
    *,
    sort: bool = False,
    each_axis: bool = False,
    shown: int = 2,
    folded: str = "",
) -> None:
    """A row per case with a mark per impl, a line to the upper quartile, and at its end how much faster the core is.

    sort: by torch's time, the longest first. each_axis: every panel has a range of its own. shown, folded: as of
    `Figure`.
    """
    drawn = dict(section.capped(list(panels.items()), "groups"))
    if sort:
        drawn = {title: sorted(cases, key=_longest, reverse=True) for title, cases in drawn.items()}
    if any(len(cases) > MAX_ROWS for cases in drawn.values()):
        which = "slowest" if sort else "first"
        section.cuts.append(f"Of each group the {which} {MAX_ROWS} cases are drawn; the table has them all.")
    rows = {title: [_row(case, label(case)) for case in cases[:MAX_ROWS]] for title, cases in drawn.items()}
    found = distinct(impl for of in rows.values() for row in of for impl in row.values)
    styles = {impl: style for impl, style in IMPL_STYLES.items() if impl in found}
    more = sorted(set(found) - set(IMPL_STYLES))
    styles |= {impl: _MORE_STYLES[i % len(_MORE_STYLES)] for i, impl in enumerate(more)}

    def desc(of: Sequence[DotRow]) -> str:
        ends = [v for row in of for v in row.values.values()]
        return f"{len(of)} rows; times from {format_seconds(min(ends))} to {format_seconds(max(ends))}."

    axis = partial(value_axis, format_tick=seconds_tick, title="time per call")
    figure = dots(
        section.id, rows, styles, caption, axis, each_axis=each_axis, desc=desc, shown=shown, folded=folded
    )
    section.add(figure)


def _longest(case: ReportCase) -> float:
    return case.seconds("torch") or case.seconds("core") or 0.0


def _row(case: ReportCase, label: str) -> DotRow:
    ratio = case.ratio("core", "torch")
    values = {impl: m.estimate_s for impl, m in case.impls.items()}
    spans = {impl: (m.estimate_s, m.p75_s) for impl, m in case.impls.items()}
    return DotRow(label, values, "" if ratio is None else t.faster(ratio), spans)


def core_beside_torch(section: ReportSection, cases: Sequence[ReportCase], what: str, where: str) -> str:
    """A headline and a sentence on the geometric mean; "" where no case has both.

    what: one of that which is timed. where: how the sentence begins.
    """
    ratios = [r for c in cases if (r := c.ratio("core", "torch")) is not None]
    mean = geometric_mean(ratios)
    if mean is None:
        return ""
    words = (
        f"the core than torch, time per {what}: geometric mean of {plural(len(ratios), 'case')}, from "
        f"{t.faster(max(ratios))} to {t.faster(min(ratios))}"
    )
    section.headlines.append((t.faster(mean), words))
    section.outcome = section.outcome or f"the core is {t.faster(mean, 'torch')} per {what}"
    return f"{where} core is {t.faster(mean, 'torch')} (geometric mean)."
