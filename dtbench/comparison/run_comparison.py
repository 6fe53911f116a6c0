"""Compares two sides of runs, base and head, and shows the verdicts as terminal tables, strict JSON, or HTML.

If plain torch changed as much as the other implementations, the machine has drifted rather than the code. Such a change
gets the verdict "inconclusive". See `compare_launches` for the statistics of one case.
"""

import contextlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, islice
from statistics import median
from typing import Literal

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from dtbench.comparison.compare_launches import (
    BEYOND_LAUNCH_SPREAD,
    MAX_LAUNCHES,
    MIN_LAUNCHES,
    SAME_WITHIN,
    SINGLE_LAUNCH,
    compare_launches,
)
from dtbench.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION, plain
from dtbench.grouping import group_by
from dtbench.records.comparison import Change, ComparedCase, Verdict
from dtbench.records.exports import Point, compared_point
from dtbench.records.result import CaseKey, Header, Result, Run, estimator_of
from dtbench.stats import FLOORS, MAX_P, is_explained_by_drift, suggests_drift, suite_drifts
from dtbench.text.table import TableColumn
from dtbench.text.terminal import (
    MAX_ROWS,
    MAX_TABLES,
    new_console,
    param_text,
    print_json,
    print_line,
    print_rest,
    print_table,
    split_params,
    titled,
)
from dtbench.text.units import (
    NO_INTERVAL,
    format_change,
    format_difference,
    format_interval,
    format_ratio,
    plural,
    time_unit,
)


class Comparison(Struct, frozen=True, kw_only=True):
    """Verdicts of all cases and implementations of two sides of runs.

    Attributes:
        kind: identifies the JSON.
        exit_code: exit code of `dtbench compare`.
        notes: caveats that apply to all cases.
        counts: number of cases per verdict.
        rows: the cases in the order of the base's file.
        nothing_shared: one line that describes both sides if they have no case in common, else "".
        machines_differ: how the machines of the two sides differ, else "". If they differ, no timed case gets a verdict
            other than inconclusive.
    """

    kind: Literal["comparison", "topology comparison"] = "comparison"
    exit_code: int
    notes: tuple[str, ...]
    counts: dict[Verdict, int]
    rows: tuple[ComparedCase, ...]
    nothing_shared: str = ""
    machines_differ: str = ""

    @property
    def has_single_launches(self) -> bool:
        """Whether every comparable case has exactly one launch on each side."""
        comparable = [row for row in self.rows if row.effect is not None]
        return bool(comparable) and all(row.base_launches == row.head_launches == 1 for row in comparable)

    @property
    def has_changes(self) -> bool:
        """Whether any case is slower or faster."""
        return bool(self.counts[Verdict.SLOWER] or self.counts[Verdict.FASTER])

    @property
    def points(self) -> list[Point]:
        """Times of head for other tools. Their bounds are those of the ratio times the time of base."""
        return [*filter(None, (compared_point(row, row.verdict, row.reason) for row in self.rows))]

    @property
    def summary(self) -> str:
        """Number of cases per verdict, in one line."""
        if self.nothing_shared:
            return self.nothing_shared
        counts = [f"{count} {verdict}" for verdict in Verdict if (count := self.counts[verdict])]
        if self.has_single_launches:
            ratios = [row.ratio for row in self.rows if row.ratio is not None]
            counts = [
                f"{plural(len(ratios), 'time')}, {format_difference(min(ratios))} to {format_difference(max(ratios))}",
                *(text for text in counts if self.has_changes or not text.endswith(Verdict.INCONCLUSIVE)),
            ]
        summary = ", ".join(counts) or "nothing to compare"
        if self.machines_differ:
            return f"cannot tell: {self.machines_differ} ({summary})"
        return summary if self.has_changes or not self.has_single_launches else f"{SINGLE_LAUNCH} ({summary})"

    def __repr__(self) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_comparison(self)
        return out.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """The tables for a notebook, with all text escaped."""
        import pandas as pd

        parts = []
        for suite, rows in islice(_rows_by_suite(self).items(), MAX_TABLES):
            title, columns = _table(suite, rows[:MAX_ROWS], self)
            table = pd.DataFrame(
                list(zip(*(map(plain, column.cells) for column in columns), strict=True)),
                columns=[plain(column.title) for column in columns],
            )
            parts.append(f"<p>{escape(plain(title))}</p>{table.to_html(index=False)}")
        return "".join([*parts, *(f"<p>{escape(plain(line))}</p>" for line in _closing_lines(self))])


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """Prints a table per suite with the gravest verdicts first, then notes and the summary; or strict JSON."""
    if as_json:
        print_json(to_builtins(comparison, str_keys=True))
        return
    console, by_suite = new_console(), _rows_by_suite(comparison)
    for suite, rows in islice(by_suite.items(), MAX_TABLES):
        title, columns = _table(suite, rows[:MAX_ROWS], comparison)
        print_line(console, title, style="bold")
        print_table(console, columns)
        print_rest(console, len(rows), "cases", "--json gives all")
        print_line(console, "")
    print_rest(console, len(by_suite), "suites", "--json gives all", MAX_TABLES)
    for line in _closing_lines(comparison):
        print_line(console, line)


def _rows_by_suite(comparison: Comparison) -> dict[str, list[ComparedCase]]:
    """Groups the rows by suite. Their order is that of the base's file or, if verdicts are shown, gravest first."""
    by_suite = group_by(() if comparison.nothing_shared else comparison.rows, lambda row: row.suite)
    if comparison.has_single_launches and not comparison.has_changes:
        return by_suite
    return {
        suite: sorted(rows, key=lambda row: (row.verdict.gravity, -(row.ratio or 0)))
        for suite, rows in by_suite.items()
    }


def _closing_lines(comparison: Comparison) -> list[str]:
    return [
        *(f"note: {note}" for note in comparison.notes if not comparison.nothing_shared),
        comparison.summary,
    ]


def _table(suite: str, rows: Sequence[ComparedCase], comparison: Comparison) -> tuple[str, list[TableColumn]]:
    """Returns title and columns of a suite's table.

    With one launch on each side the table shows differences; it shows verdicts only if any case is slower or faster.
    """
    varying, shared = split_params([row.params for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.head_s) if t is not None)
    columns = [
        TableColumn("case", [row.name for row in rows]),
        TableColumn("impl", [row.impl for row in rows]),
        *(TableColumn(name, [param_text(name, row.params.get(name)) for row in rows]) for name in varying),
        TableColumn("base", [unit.format(row.base_s) for row in rows], True, unit.name),
        TableColumn("head", [unit.format(row.head_s) for row in rows], True, unit.name),
    ]
    title, single = suite, comparison.has_single_launches
    reasons = ["" if row.reason == comparison.machines_differ else row.reason for row in rows]
    if not single or comparison.has_changes:
        verdicts = [row.verdict for row in rows]
        columns.insert(0, TableColumn("verdict", [*map(str, verdicts)], styles=[v.colour for v in verdicts]))
    if single:
        if not comparison.has_changes:
            reasons = [
                f"{row.verdict}: {row.reason}".rstrip(": ") if row.ratio is None else "" for row in rows
            ]
        columns.append(
            TableColumn(
                "difference",
                ["-" if row.ratio is None else format_difference(row.ratio) for row in rows],
                True,
            )
        )
    else:
        title += (
            f"; base, head: median over launches of each launch's {rows[0].estimator}; "
            "head/base: median over all pairs of launches"
        )
        columns += [
            TableColumn("head/base", [format_ratio(row.ratio) for row in rows], True),
            TableColumn("interval", [_interval(row) for row in rows], True),
            TableColumn("p", [_p(row.effect) for row in rows], True),
            TableColumn("launches", [f"{row.base_launches}/{row.head_launches}" for row in rows], True),
        ]
    if any(reasons):
        columns.append(TableColumn("reason", reasons))
    return titled(title, shared), columns


def _interval(row: ComparedCase) -> str:
    interval = format_interval((row.low, row.high), "..")
    if row.effect is None or row.effect.confidence is None or interval == NO_INTERVAL:
        return "-" if row.effect is None else interval
    return f"{interval} ({100 * row.effect.confidence:.0f}%)"


def _p(effect: Change | None) -> str:
    """Formats the smaller of the two one-sided p values."""
    if effect is None or effect.p_slower is None or effect.p_faster is None:
        return "-"
    return f"{min(effect.p_slower, effect.p_faster):.2g}"


def compare_runs(base: Sequence[Run], head: Sequence[Run]) -> Comparison:
    """Compares every case and implementation of either side.

    A side may have several runs. The launches of all of them count as launches of that side.
    """
    base_cases, head_cases = map(_results_by_case, (base, head))
    cases = {key: (base_cases.get(key, []), head_cases.get(key, [])) for key in base_cases | head_cases}
    repeated = sum(len(run.results) for run in (*base, *head)) - sum(map(len, chain(*cases.values())))
    skipped = {
        key for key, sides in cases.items() if all(result.status == "skipped" for result in chain(*sides))
    }
    compared = tuple(_compare_case(key, *sides) for key, sides in cases.items() if key not in skipped)
    notes = _notes(base, head, compared)
    if repeated:
        notes.append(f"{plural(repeated, 'result')} ignored: the same run is given twice on one side")
    if skipped:
        notes.append(f"{plural(len(skipped), 'case')} left out: skipped on each side that has them")
    ratios = _ratios_for_drift(compared)
    drifts = suite_drifts((suite, impl, ratio) for (suite, _, impl, _), ratio in ratios.items())
    machines_differ = format_machine_differences(
        [
            f"{name} {sides}"
            for name, sides, is_recorded in _differing_facts(base, head, _machine_facts)
            if is_recorded
        ]
    )
    suites_with_floor = {suite for suite, _, impl, _ in ratios if impl in FLOORS}
    rows = tuple(_discount_drift(row, ratios, drifts, row.suite in suites_with_floor) for row in compared)
    if machines_differ:
        rows = tuple(
            replace(row, verdict=Verdict.INCONCLUSIVE, reason=machines_differ) if row.effect else row
            for row in rows
        )
    if drifts:
        factors = ", ".join(f"{format_change(factor)} in {suite}" for suite, factor in drifts.items())
        notes.insert(
            0,
            f"the machine drifted: plain torch and all other implementations became {factors}; a change that plain "
            "torch shares is no change of the code; `dtbench gate` avoids drift by measuring both sides alternately",
        )
    return Comparison(
        exit_code=exit_code_of(rows),
        notes=tuple(dict.fromkeys(notes)),
        counts={verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict},
        rows=rows,
        machines_differ=machines_differ,
        nothing_shared=""
        if base_cases.keys() & head_cases.keys()
        else _nothing_shared(base_cases, head_cases),
    )


def _results_by_case(side: Sequence[Run]) -> dict[CaseKey, list[Result]]:
    """Groups the results of one side by case. A run that is given twice counts once."""
    results = {(run.header.run_id, result.key): result for run in side for result in run.results}
    return group_by(results.values(), lambda result: result.case_key)


def _nothing_shared(base: Collection[CaseKey], head: Collection[CaseKey]) -> str:
    """Describes two sides without a common case in one line."""
    sides = [
        f"{name} has {plural(len(keys), 'case')}"
        + (f" of {', '.join(sorted({suite for suite, *_ in keys}))}" if keys else "")
        for name, keys in (("base", base), ("head", head))
    ]
    return (
        f"nothing to compare: the two sides have no case in common ({'; '.join(sides)}); "
        "a case is matched by its suite, name, implementation and params"
    )


def exit_code_of(rows: Sequence[ComparedCase]) -> int:
    """Returns 1 for a regression, 4 if nothing is comparable, 3 if a case is undecided, else 0."""
    verdicts = {row.verdict for row in rows}
    if any(row.verdict is Verdict.FAILED and row.base_launches for row in rows) or Verdict.SLOWER in verdicts:
        return EXIT_REGRESSION
    if not verdicts & {Verdict.FASTER, Verdict.SAME, Verdict.INCONCLUSIVE}:
        return EXIT_NOTHING
    return (
        EXIT_INCONCLUSIVE if verdicts & {Verdict.INCONCLUSIVE, Verdict.MISSING, Verdict.FAILED} else EXIT_OK
    )


def _compare_case(key: CaseKey, base: list[Result], head: list[Result]) -> ComparedCase:
    base_times, head_times = _launch_times(base), _launch_times(head)
    result = [*head, *base][0]
    verdict, reason, effect = (
        compare_launches(base_times, head_times)
        if base_times and head_times and _first_reason(head, "failed", "wrong") is None
        else (*_verdict_without_times(base, head), None)
    )
    suite, name, impl, params = key
    return ComparedCase(
        suite=suite,
        name=name,
        impl=impl,
        params=dict(params),
        verdict=verdict,
        reason=reason,
        size_bytes=result.size_bytes,
        estimator=estimator_of(result),
        base_launches=len(base_times),
        head_launches=len(head_times),
        base_s=median(base_times) if base_times else None,
        head_s=median(head_times) if head_times else None,
        effect=effect,
        tolerance=SAME_WITHIN,
    )


def _verdict_without_times(base: list[Result], head: list[Result]) -> tuple[Verdict, str]:
    """Returns verdict and reason of a case that lacks times on a side or failed in head."""
    if (failure := _first_reason(head, "failed", "wrong")) is not None:
        return Verdict.FAILED, failure
    if not base:
        return Verdict.NEW, ""
    if _launch_times(base):
        return Verdict.MISSING, _first_reason(head, "skipped") or "not measured in head"
    if not _launch_times(head):
        return Verdict.MISSING, "timed neither in base nor in head"
    failure = _first_reason(base, "failed", "wrong")
    return Verdict.NEW, "skipped in base" if failure is None else f"no valid time in base: {failure}"


def _launch_times(results: list[Result]) -> list[float]:
    return [
        result.estimate_s for result in results if result.status == "ok" and result.estimate_s is not None
    ]


def _first_reason(results: list[Result], *statuses: str) -> str | None:
    """Returns status and reason of the first result with one of the statuses, else None."""
    if (first := next((result for result in results if result.status in statuses), None)) is None:
        return None
    return f"{first.status}: {first.reason}" if first.reason else first.status


def _ratios_for_drift(rows: Sequence[ComparedCase]) -> dict[CaseKey, float]:
    """Returns head / base of each case. The ratio of plain torch is 1 unless its launches show or suggest a change."""
    ratios = {row.key: row.effect.ratio for row in rows if row.effect is not None}
    for row in rows:
        if row.effect is not None and row.impl in FLOORS:
            p = min(row.effect.p_slower or 1.0, row.effect.p_faster or 1.0)
            has_enough = min(row.base_launches, row.head_launches) >= MIN_LAUNCHES
            if not (p < MAX_P if has_enough else suggests_drift(row.effect.ratio)):
                ratios[row.key] = 1.0
    return ratios


def _discount_drift(
    row: ComparedCase, ratios: Mapping[CaseKey, float], drifts: Mapping[str, float], suite_has_floor: bool
) -> ComparedCase:
    """Turns slower and faster into inconclusive if plain torch changed by as much.

    The change of plain torch is taken from the same case and from the suite. For a suite without plain torch, the
    drifts of the other suites of the run are used.
    """
    if row.verdict not in (Verdict.SLOWER, Verdict.FASTER):
        return row
    suite, name, impl, params = row.key
    floor_ratios = [
        ratios[key] for floor in FLOORS if floor != impl and (key := (suite, name, floor, params)) in ratios
    ]
    if not floor_ratios and not suite_has_floor:
        floor_ratios = list(drifts.values())
    floor_ratios.append(drifts.get(suite, 1.0))
    drift = next((floor for floor in floor_ratios if is_explained_by_drift(row.ratio or 1.0, floor)), None)
    if drift is None:
        return row
    return replace(
        row,
        verdict=Verdict.INCONCLUSIVE,
        reason=f"the machine drifted: plain torch became {format_change(drift)}, too",
    )


def _notes(base: Sequence[Run], head: Sequence[Run], rows: Sequence[ComparedCase]) -> list[str]:
    notes = [f"{run.path} is incomplete: it has no end line" for run in [*base, *head] if not run.complete]
    launch_counts = [min(row.base_launches, row.head_launches) for row in rows if row.effect is not None]
    if launch_counts and min(launch_counts) < MIN_LAUNCHES:
        notes.append(
            f"some cases have as few as {plural(min(launch_counts), 'launch')} per side; almost all variance lies "
            f"between launches. With fewer than {MIN_LAUNCHES} on each side, only a change {BEYOND_LAUNCH_SPREAD} is "
            f"called slower or faster: measure with --launches {MIN_LAUNCHES}, better 10"
        )
    if any(max(row.base_launches, row.head_launches) > MAX_LAUNCHES for row in rows):
        notes.append(
            f"cases with more than {MAX_LAUNCHES} launches on a side: only the first {MAX_LAUNCHES} compared"
        )
    if {run.header.run_id for run in base} & {run.header.run_id for run in head}:
        notes.append("the same run is on both sides")
    if doubtful := sum(r.status == "ok" and bool(r.reason) for run in [*base, *head] for r in run.results):
        notes.append(f"{plural(doubtful, 'result')} with a caveat, e.g. a throttled GPU: see dtbench show")
    variables = sorted({name for run in [*base, *head] for name in run.header.env})
    return notes + [
        f"{title}: {sides}"
        for title, sides, _ in _differing_facts(base, head, lambda header: _setup_facts(header, variables))
    ]


def format_machine_differences(differences: Sequence[str]) -> str:
    """Describes how the machines of the two sides differ; "" if they do not differ in a recorded fact."""
    return f"the machines differ: {'; '.join(differences)}" if differences else ""


def _differing_facts(
    base: Sequence[Run], head: Sequence[Run], facts_of: Callable[[Header], dict[str, str]]
) -> Iterator[tuple[str, str, bool]]:
    """Yields each fact that differs between any two runs: name, values of both sides, whether all runs record it."""
    sides = [[facts_of(run.header) for run in side] for side in (base, head)]
    for name in dict.fromkeys(name for side in sides for facts in side for name in facts):
        base_values, head_values = (frozenset(facts[name] for facts in side) for side in sides)
        if len(base_values | head_values) > 1:
            yield (
                name,
                f"{_listed(base_values)} in base, {_listed(head_values)} in head",
                "" not in base_values | head_values,
            )


def _listed(facts: frozenset[str]) -> str:
    text = " and ".join(sorted(fact or "unknown" for fact in facts)) or "nothing"
    return text if len(text) <= 200 else text[:197] + "..."


def _machine_facts(header: Header) -> dict[str, str]:
    """Returns name -> value of the facts about a machine that affect times; "" for a fact that is not recorded."""
    cpu, gpus = header.machine.cpu, header.machine.gpus
    facts: dict[str, Iterable[object]] = {
        "CPU": [cpu.model],
        "CPU cores": [cpu.usable_cores],
        "GPU": sorted({str(gpu.name) for gpu in gpus if gpu.name}),
        "GPU power limit": sorted({f"{gpu.power_limit_W:g} W" for gpu in gpus if gpu.power_limit_W}),
        "device type": [header.options.get("device_type")],
        "mesh": [f"{n}={s}" for n, s in zip(header.mesh.dim_names, header.mesh.shape, strict=True)],
        "ranks": [len(header.ranks) or None],
        "hosts": [len({rank.node for rank in header.ranks}) or None],
        "OMP_NUM_THREADS": [header.env.get("OMP_NUM_THREADS", "unset" if header.env else None)],
    }
    return {name: ", ".join(str(p) for p in parts if p is not None) for name, parts in facts.items()}


def _setup_facts(header: Header, variables: Sequence[str]) -> dict[str, str]:
    """Returns title -> value of settings. If they differ between the sides, they may explain a change."""
    cpu, mesh, versions, dtypes = (
        header.machine.cpu,
        header.mesh,
        header.versions,
        header.options.get("dtypes"),
    )
    cores = None if cpu.usable_cores is None else f"{cpu.usable_cores} cores"
    facts: dict[str, Iterable[object]] = {
        "the hosts differ": sorted({str(r.host) for r in header.ranks}),
        "the CPU differs": (cpu.model, cores, cpu.governor),
        "the GPUs differ": sorted(
            {
                f"{gpu.name} at {gpu.power_limit_W} W" if gpu.power_limit_W else str(gpu.name)
                for gpu in header.machine.gpus
            }
        ),
        "the versions differ": (
            f"{name} {versions[name]}"
            for name in ("torch", "python", "backend", "nccl")
            if versions.get(name)
        ),
        "the mesh differs": (f"{n}={s}" for n, s in zip(mesh.dim_names, mesh.shape, strict=True)),
        "the dtypes differ": dtypes if isinstance(dtypes, list) else (),
        "one side is a quick run": ("--quick" if header.options.get("quick") else "full",),
        **{f"{name} differs": (header.env.get(name, "unset"),) for name in variables},
    }
    return {title: ", ".join(str(p) for p in parts if p is not None) for title, parts in facts.items()}
