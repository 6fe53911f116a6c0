"""Which ops are right on which placements: a matrix of letters, core beside torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dtbench.comparison.op_verdicts import MODES, merged
from dtbench.records.verdicts import NOT_JUDGED, NOTHING, VERDICTS, Baseline
from dtbench.reporting.html import tables as t
from dtbench.reporting.html.figures import Bar, Figure, Shade, bars, stacked
from dtbench.reporting.html.section import Material, Part, Section
from dtbench.suite import Run
from dtbench.suite.grouping import known_first

# How a verdict is written and drawn, the good at the left of a bar, the worst at its right.
LOOKS: Mapping[str, tuple[str, Shade]] = {
    "pass": ("✓", ("s0", 0.25)),
    "refused": ("R", ("s2", 0.15)),
    "random differs": ("D", ("s3", 0.42)),
    "no rule": ("N", ("s4", 0.42)),
    "error": ("E", ("s5", 0.42)),
    "hang": ("H", ("muted", 0.3)),
    "wrong": ("W", ("s1", 0.42)),
}
BY_FALLBACK = "*"

Verdicts = dict[tuple[str, str, str], tuple[str, bool]]  # op, mode, impl -> verdict, whether by replicating


def fill(section: Section, of: Material) -> None:
    found = _verdicts(of.sources.verdict_runs, of.sources.verdict_tables)
    if not found:
        return
    impls = sorted({impl for *_, impl in found}, key=lambda i: (i not in ("core", "torch"), i))
    modes = known_first({mode for _, mode, _ in found}, MODES)
    section.lead = (
        "Every op of torch’s database, run on distributed tensors and compared with plain torch. A mode is a way to "
        "cut the inputs: evenly, unevenly, as pending sums, over a 2x2 mesh, in place, with out=. An op passes in a "
        "mode if all its cases do; else it bears the worst of their verdicts."
    )
    sources = (of.sources.verdict_runs, of.sources.verdict_tables)
    section.add(_figure(found, impls, modes), _matrix(found, impls, modes), _not_judged(*sources))


def _verdicts(runs: Sequence[Run], tables: Sequence[Baseline]) -> Verdicts:
    found: Verdicts = {}
    for table in tables:
        for op, modes in table.verdicts.items():
            for mode, verdict in modes.items():
                found[op, mode, "core"] = (verdict, False)
    for of in merged(runs) if runs else ():
        found[of.op, of.mode, of.impl] = (of.verdict, of.by_fallback)
    return found


def _not_judged(runs: Sequence[Run], tables: Sequence[Baseline]) -> t.Table | None:
    """Op, mode and impl -> samples that gave nothing to judge by."""
    rows = [
        (op, f"{mode}, core", str(count))
        for table in tables
        for op, modes in (table.not_judged or {}).items()
        for mode, count in modes.items()
    ]
    of_runs = merged(runs) if runs else []
    rows += [(v.op, f"{v.mode}, {v.impl}", str(v.not_judged)) for v in of_runs if v.not_judged]
    if not rows:
        return None
    samples = sum(v.samples for v in of_runs) + sum(table.samples or 0 for table in tables)
    count = sum(int(row[2]) for row in rows)
    return t.Table(
        f"Samples {NOT_JUDGED}: {count} of {samples}",
        [
            t.text(head, column)
            for head, column in zip(("Op", "Mode", "Samples"), zip(*rows, strict=True), strict=True)
        ],
        folded=True,
        note="The plain op, or its gradient, raised: there was nothing to compare these samples with.",
    )


def _figure(found: Verdicts, impls: Sequence[str], modes: Sequence[str]) -> Figure | None:
    counts = {
        (mode, impl): Counter(
            v for (_, *key), (v, _) in found.items() if key == [mode, impl] and v != NOTHING
        )
        for mode in modes
        for impl in impls
    }
    present = {verdict for of in counts.values() for verdict in of}
    shades = {v: shade for v, (_, shade) in LOOKS.items() if v in present}
    shades |= dict.fromkeys(sorted(present - set(LOOKS)), ("s2", 0.2))
    rows = [
        Bar(
            f"{mode}, {impl}",
            stacked((verdict, float(of[verdict])) for verdict in shades),
            # Rounded down: 100 % is said only of all.
            f"{int(1000 * of['pass'] / of.total()) / 10:.1f} % of {of.total()} pass",
        )
        for (mode, impl), of in counts.items()
        if of
    ]
    return bars(
        "coverage",
        {"Ops by verdict": rows},
        shades,
        "Ops by their verdict, per mode. What is not “pass” stands at the right end of a bar; the matrix names them.",
        lambda v: f"{v:.0f} ops",
    )


def _matrix(found: Verdicts, impls: Sequence[str], modes: Sequence[str]) -> t.Table:
    grave = {verdict: place for place, verdict in enumerate(VERDICTS)}
    of_op: dict[str, list[int]] = {}
    for (op, *_), (verdict, _) in found.items():
        of_op.setdefault(op, [])
        if verdict != NOTHING:
            of_op[op].append(grave.get(verdict, 0))
    ops = sorted(
        of_op,
        key=lambda op: (min(of_op[op], default=len(grave)), -sum(v < grave["pass"] for v in of_op[op]), op),
    )
    columns = [
        t.text(f"{mode}, {impl}", [_cell(found.get((op, mode, impl))) for op in ops])
        for mode in modes
        for impl in impls
        if any((op, mode, impl) in found for op in ops)
    ]
    key = ", ".join(f"{letter} {verdict}" for verdict, (letter, _) in LOOKS.items())
    return t.Table(
        "Every op: what became of it, the worst first",
        [t.text("Op", ops), *columns],
        folded=True,
        note=f"{key}; · nothing to compare; – not measured; {BY_FALLBACK} the core ran (also) on replicated inputs.",
    )


def _cell(verdict: tuple[str, bool] | None) -> str:
    if verdict is None:
        return t.MISSING
    word, fell = verdict
    letter = "·" if word == NOTHING else LOOKS[word][0] if word in LOOKS else word[:1].upper() or "?"
    return letter + (BY_FALLBACK if fell else "")


COVERAGE = Part("coverage", "Ops and placements", fill, (), "dtbench run coverage --quick -o OPS.jsonl")
