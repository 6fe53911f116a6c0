"""Which ops are right on which placements: a matrix of letters, core beside torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dtbench.judge.op_verdicts import (
    FALLBACKS,
    MODES,
    NOTHING,
    VERDICTS,
    Baseline,
    merged,
    mode_of,
    verdict_of,
)
from dtbench.model import Run
from dtbench.show.report import tables as t
from dtbench.show.report.figures import Axis, value_axis
from dtbench.show.report.section import Figure, Section
from dtbench.show.report.shapes import Bar, Shade, bar_legend, bars_panel

LETTERS: Mapping[str, str] = {
    "pass": "✓",
    "wrong": "W",
    "hang": "H",
    "error": "E",
    "no rule": "N",
    "random differs": "D",
    "refused": "R",
    NOTHING: "·",
}
# How the verdicts are drawn: the good at the left, the worst at the right.
ORDER = ("pass", "refused", "random differs", "no rule", "error", "hang", "wrong")
SHADES: Mapping[str, Shade] = {
    "pass": ("s0", 0.25),
    "refused": ("s2", 0.15),
    "random differs": ("s3", 0.42),
    "no rule": ("s4", 0.42),
    "error": ("s5", 0.42),
    "hang": ("muted", 0.3),
    "wrong": ("s1", 0.42),
}
BY_FALLBACK = "*"

Verdicts = dict[tuple[str, str, str], tuple[str, bool]]  # op, mode, impl -> verdict, whether by replicating


def coverage(runs: Sequence[Run], tables: Sequence[Baseline]) -> Section:
    section = Section("coverage", "Ops and placements")
    found = _verdicts(runs, tables)
    if not found:
        section.missing = "dtbench run coverage --quick -o OPS.jsonl"
        return section
    impls = sorted({impl for *_, impl in found}, key=lambda i: (i not in ("core", "torch"), i))
    modes = [m for m in MODES if any(mode == m for _, mode, _ in found)]
    modes += sorted({mode for _, mode, _ in found} - set(modes))
    section.lead = (
        "Every op of torch’s database, run on distributed tensors and compared with plain torch. A mode is a way to "
        "cut the inputs: evenly, unevenly, as pending sums, over a 2x2 mesh, in place, with out=. An op passes in a "
        "mode if all its cases do; else it bears the worst of their verdicts."
    )
    section.figures = [_figure(found, impls, modes)]
    section.tables = [_matrix(found, impls, modes)]
    return section


def _verdicts(runs: Sequence[Run], tables: Sequence[Baseline]) -> Verdicts:
    found: Verdicts = {}
    for table in tables:
        for op, modes in table.verdicts.items():
            for mode, verdict in modes.items():
                found[op, mode, "core"] = (verdict, False)
    for result in merged(runs) if runs else ():
        fell = result.impl == "core" and bool(result.counters.get(FALLBACKS))
        found[result.name, mode_of(result), result.impl] = (verdict_of(result), fell)
    return found


def _figure(found: Verdicts, impls: Sequence[str], modes: Sequence[str]) -> Figure:
    bars = []
    for mode in modes:
        for impl in impls:
            counts = Counter(
                v for (_, m, i), (v, _) in found.items() if (m, i) == (mode, impl) and v != NOTHING
            )
            tested = counts.total()
            if tested:
                share = 100 * counts["pass"] / tested
                others = sorted(set(counts) - set(ORDER))
                parts = [(v, float(counts[v])) for v in (*ORDER, *others) if counts[v]]
                # Rounded down: 100 % is said only of all.
                bars.append(Bar(f"{mode}, {impl}", parts, f"{int(share * 10) / 10:.1f} % of {tested} pass"))
    top = max((sum(n for _, n in bar.parts) for bar in bars), default=1.0)
    ticks = value_axis([top], lambda v: f"{v:.0f} ops", log=False)
    axis = Axis(0, top * 1.01, False, ticks.format, ticks.ticks)
    present = {name for bar in bars for name, _ in bar.parts}
    colours = {v: SHADES.get(v, ("s2", 0.2)) for v in (*ORDER, *sorted(present - set(ORDER))) if v in present}
    desc = "; ".join(f"{bar.label}: {bar.note}" for bar in bars)
    return Figure(
        "Ops by their verdict, per mode. What is not “pass” stands at the right end of a bar; the matrix names them.",
        bar_legend(colours, prefix="coverageL"),
        [bars_panel("Ops by verdict", bars, colours, axis, prefix="coverage0", desc=desc)] if bars else [],
        1,
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
    key = ", ".join(f"{letter} {verdict}" for verdict, letter in LETTERS.items() if verdict != NOTHING)
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
    return LETTERS.get(word, word[:1].upper() or "?") + (BY_FALLBACK if fell else "")
