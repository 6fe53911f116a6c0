"""Figures and tables of cases for all parts; the parts for tensor parallelism and for other suites."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from dtbench.engine.findings import describe_slow_floors
from dtbench.grouping import group_by, sort_by_order
from dtbench.reporting.html.axes import value_axis
from dtbench.reporting.html.figures import MAX_DOT_ROWS, DotRow, Style, dots
from dtbench.reporting.html.section import Material, Part, ReportCase, ReportSection, distinct, geometric_mean
from dtbench.reporting.suite_answers import answer_tables
from dtbench.stats.dispatch_headline import FEWEST_CASES
from dtbench.suite import IMPL_WORDS
from dtbench.suite.case import WHOLE
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table, TableColumn
from dtbench.text.terminal import param_text, split_params
from dtbench.text.units import format_size, format_speedup, plural

MOST_ROWS = 8  # tables with more rows are folded
CORE, TORCH, FLOOR = Style("s0", "o"), Style("s1", "s", (5, 2), hollow=True), Style("s2", "|", (1.5, 1.5))
# Also used in turn for implementations without a style of their own.
_MORE_STYLES = (Style("s3", "^", hollow=True), Style("s4", "D", hollow=True), Style("s5", "v", hollow=True))
_STYLES = {"core": CORE, "torch": TORCH, "local": FLOOR, WHOLE: _MORE_STYLES[0], "wrapped": _MORE_STYLES[1]}
IMPL_STYLES = {impl: replace(style, words=f"{impl}: {IMPL_WORDS[impl]}") for impl, style in _STYLES.items()}


def impls_of(cases: Sequence[ReportCase]) -> list[str]:
    """Returns the implementations of the cases, the core and torch first."""
    return sort_by_order({impl for case in cases for impl in case.impls}, list(IMPL_STYLES))


def case_columns(
    cases: Sequence[ReportCase], name_header: str, params: Mapping[str, str], *drop: str
) -> list[TableColumn]:
    """Returns the columns that identify the cases of a table: mesh dim, name, other params, sizes.

    Args:
        name_header: header of the column of names.
        params: param -> header. Params that are not listed share one column, so that no two rows look the same.
        drop: params to leave out.
    """
    sizes = [p for p in params if p == "size" or p.endswith("_bytes")]
    words = {title: [c.get(p) for c in cases] for p, title in params.items() if p not in sizes}
    remaining = [
        ", ".join(f"{k}={v}" for k, v in sorted(c.params.items()) if k not in {*params, *drop}) for c in cases
    ]
    return [
        *(columns.text(title, column) for title, column in words.items() if title == "Mesh dim"),
        columns.text(name_header, [c.name for c in cases]),
        *(columns.text(title, column) for title, column in words.items() if title != "Mesh dim"),
        *([columns.text("Other parameters", remaining)] if any(remaining) else []),
        *(columns.sizes(params[p], [format_size(c.number(p)) for c in cases]) for p in sizes),
    ]


def time_columns(cases: Sequence[ReportCase]) -> list[TableColumn]:
    """Returns the columns of times per implementation, and the speedup of the core over torch."""
    ratios = [c.ratio("core", "torch") for c in cases]
    titles = {"local": "floor", WHOLE: "one rank, whole"}
    return [
        *columns.times(
            [(titles.get(impl, impl), [c.seconds(impl) for c in cases]) for impl in impls_of(cases)]
        ),
        *([columns.speeds("core vs torch", ratios)] if any(ratios) else []),
    ]


def bandwidth_columns(cases: Sequence[ReportCase]) -> list[TableColumn]:
    """Returns the columns of bandwidths of the implementations that have any."""
    rates = {i: [c.impls[i].algbw_Bps if i in c.impls else None for c in cases] for i in impls_of(cases)}
    return columns.bandwidths([(impl, column) for impl, column in rates.items() if any(column)])


def add_dots(
    section: ReportSection,
    panels: Mapping[str, Sequence[ReportCase]],
    label: Callable[[ReportCase], str],
    caption: str,
    *,
    first: Sequence[str] | None = None,
    folded: str = "",
) -> None:
    """Draws a row per case: a mark per implementation, a line to the upper quartile, and the core's speedup.

    Args:
        panels: title -> cases.
        label: returns the label of a case.
        first: labels of the cases that come first; the others follow by torch's time, the longest first. None keeps
            the order of `panels`.
        folded: see `Figure`.
    """
    drawn = dict(section.capped(list(panels.items()), "groups"))
    if first is not None:
        position = {name: i for i, name in enumerate(first)}

        def order(case: ReportCase) -> tuple[int, float]:
            longest = case.seconds("torch") or case.seconds("core") or 0.0
            return position.get(label(case), len(position)), -longest

        drawn = {title: sorted(cases, key=order) for title, cases in drawn.items()}
    if any(len(cases) > MAX_DOT_ROWS for cases in drawn.values()):
        order_text = "" if first is None else ", common ops first, then the slowest"
        section.notes.append(f"{MAX_DOT_ROWS} cases of each group are drawn{order_text}; the table has all.")
    rows = {
        title: [_row(case, label(case)) for case in cases[:MAX_DOT_ROWS]] for title, cases in drawn.items()
    }
    impls = {impl for panel_rows in rows.values() for row in panel_rows for impl in row.values}
    styles = {impl: style for impl, style in IMPL_STYLES.items() if impl in impls}
    styles |= zip(sorted(impls - set(IMPL_STYLES)), cycle(_MORE_STYLES), strict=False)
    section.add(
        dots(
            section.id,
            rows,
            styles,
            caption,
            partial(value_axis, title="time per call"),
            shown=2,
            folded=folded,
        )
    )


def _row(case: ReportCase, label: str) -> DotRow:
    ratio = case.ratio("core", "torch")
    return DotRow(
        label,
        values={impl: m.estimate_s for impl, m in case.impls.items()},
        note="" if ratio is None else format_speedup(ratio),
        spans={impl: (m.estimate_s, m.p75_s) for impl, m in case.impls.items()},
    )


def compare_core_with_torch(
    section: ReportSection, cases: Sequence[ReportCase], unit: str, opening: str
) -> str:
    """Adds a headline, and returns a sentence, about the geometric mean of core / torch.

    It does nothing and returns "" if fewer than `FEWEST_CASES` cases have both.

    Args:
        unit: what is timed, in the singular.
        opening: beginning of the sentence.
    """
    comparable = [c for c in cases if c.ratio("core", "torch") is not None]
    if len(comparable) < FEWEST_CASES:
        return ""
    mean, words = mean_ratio(comparable, "core", "torch")
    section.headlines.append((format_speedup(mean), f"core vs torch, time per {unit}: {words}"))
    section.outcome = section.outcome or f"the core is {format_speedup(mean, 'torch')} per {unit}"
    return f"{opening} core is {format_speedup(mean, 'torch')} (geometric mean of {len(comparable)} cases). "


def mean_ratio(cases: Sequence[ReportCase], impl: str, base: str) -> tuple[float | None, str]:
    """Returns the geometric mean of impl / base, None if no case has both, and a description of it."""
    ratios = [r for c in cases if (r := c.ratio(impl, base)) is not None]
    extremes = (
        f"from {format_speedup(max(ratios, default=None))} to {format_speedup(min(ratios, default=None))}"
    )
    return geometric_mean(ratios), f"geometric mean of {plural(len(ratios), 'case')}, {extremes}"


def ratio_caption(cases: Sequence[ReportCase]) -> str:
    """Returns the part of a caption that explains the speedups at the right of `add_dots`, if there are any."""
    return "; at the right, core vs torch" if any(c.ratio("core", "torch") is not None for c in cases) else ""


def note_slow_floors(section: ReportSection, cases: Sequence[ReportCase], prefix: str = "") -> None:
    """Adds a note for each floor that is slower than the implementation whose time it should bound.

    Args:
        prefix: names the suite if the section has several.
    """
    section.notes += [
        f"{prefix}{words[0].upper()}{words[1:]}."
        for words in describe_slow_floors([{i: m.estimate_s for i, m in c.impls.items()} for c in cases])
    ]


def tensor_parallel(section: ReportSection, material: Material) -> None:
    if not (cases := material.cases("tensor_parallel")):
        return
    has_whole = any(WHOLE in c.impls for c in cases)
    section.lead = (
        f"Parts of a transformer, sharded over the ranks: {', '.join(distinct(c.name for c in cases))}. "
        + (f"“{WHOLE}” is the plain model with all the work on one rank, not a floor. " if has_whole else "")
        + compare_core_with_torch(section, cases, "block", "The")
    )
    add_dots(
        section,
        group_by(cases, lambda c: f"{c.get('pass')}, {c.get('dtype')}"),
        lambda c: f"{c.name}, {c.get('mesh_dim')} of {c.get('ranks')}",
        f"Time per step{ratio_caption(cases)}.",
    )
    params = {"pass": "Pass", "mesh_dim": "Mesh dim", "dtype": "Dtype"}
    section.add(
        Table(
            "Every block and pass",
            [*case_columns(cases, "Block", params, "ranks"), *time_columns(cases)],
            folded=True,
        )
    )


TENSOR_PARALLEL = Part(
    "tensor_parallel",
    "Tensor parallelism",
    tensor_parallel,
    ("tensor_parallel",),
    "dtbench run tensor_parallel",
    measures_links=True,
)


def other_suites(claimed: Collection[str]) -> Part:
    """Returns the part for suites that no other part shows, e.g. a user's own, with generic figures and tables."""

    def fill(section: ReportSection, material: Material) -> None:
        suites = {suite: cases for suite, cases in material.suites.items() if suite not in claimed}
        section.lead = "Suites without a section of their own."
        differing, _ = split_params([case.params for cases in suites.values() for case in cases])
        add_dots(
            section,
            {f"Suite {suite}": cases for suite, cases in suites.items()},
            lambda c: " ".join([c.name, *(param_text(p, c.params[p]) for p in differing if p in c.params)]),
            "Time per call, with a line to the upper quartile.",
            folded="Case by case" if len(suites) < len(material.suites) else "",
        )
        for suite, cases in suites.items():
            note_slow_floors(section, cases, f"Suite {suite}: ")
        section.add(
            *(table for suite in suites for table in answer_tables(material.sources.runs, suite)),
            *(_generic(f"Suite {suite}", cases) for suite, cases in suites.items()),
        )

    return Part("others", "Other suites", fill)


def _generic(caption: str, all_cases: Sequence[ReportCase]) -> Table:
    """Returns a table with a column per param, and time, median, upper quartile and bandwidth per implementation."""
    cases = all_cases[:MAX_ROWS]
    spans = [
        (f"{impl}, {name}", [getattr(c.impls[impl], f"{name}_s") if impl in c.impls else None for c in cases])
        for impl in impls_of(cases)
        for name in ("median", "p75")
    ]
    return Table(
        caption,
        [
            *case_columns(cases, "Case", {param: param for c in cases for param in c.params}),
            *time_columns(cases),
            *columns.times(spans),
            *bandwidth_columns(cases),
        ],
        folded=len(cases) > MOST_ROWS,
        note="The first time of an impl is its estimate: the minimum for host latencies, else the lower quartile.",
        total=len(all_cases),
    )
