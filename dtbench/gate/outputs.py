"""What a gate says: lines for people, JUnit, GitHub. Pure; names come from suites and are escaped."""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.errors import plain
from dtbench.gate.verdict import words_of
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.exports import Point, relative
from dtbench.records.gate import Gate
from dtbench.text import junit as xml
from dtbench.text import markdown as md
from dtbench.text.units import NO_INTERVAL, format_seconds

# So many benchmarks are listed whole; of more, those that pass are only counted.
LISTED = 60
SUMMARY_ROWS = 200  # GitHub takes a summary of 1 MiB


def ordered(judged: Sequence[ComparedCase]) -> list[ComparedCase]:
    """The gravest first."""
    return sorted(judged, key=lambda j: j.verdict.gravity)


def change_of(judged: ComparedCase) -> str:
    """`+3.1% (at least +1.2%)`, `-0.2% (+1.0% at most)`, or nothing."""
    effect = judged.effect
    if effect is None:
        return ""
    if judged.verdict is Verdict.SLOWER:
        bound = NO_INTERVAL if judged.low is None else f"at least {judged.low - 1:+.1%}"
    else:
        bound = NO_INTERVAL if judged.high is None else f"{judged.high - 1:+.1%} at most"
    return f"{effect.ratio - 1:+.1%} ({bound})"


def words(judged: ComparedCase) -> str:
    """What a verdict rests on, in words."""
    parts = [words_of(judged.counters)] if judged.counters else []
    if judged.effect is not None:
        parts.append(f"{change_of(judged)}, {judged.effect.pairs} pairs")
    if judged.base_s is not None and judged.head_s is not None:
        parts.append(f"{format_seconds(judged.base_s)} -> {format_seconds(judged.head_s)}")
    if judged.reason:
        parts.append(judged.reason)
    return "; ".join(parts)


def lines(report: Gate) -> list[str]:
    """For a terminal."""
    shown = ordered(report.benchmarks)
    hidden = report.count(Verdict.SAME) if len(shown) > LISTED else 0
    if hidden:
        shown = [j for j in shown if j.verdict is not Verdict.SAME]
    return [
        *(f"{j.verdict:<12}  {plain(j.label)}\n{'':14}{plain(words(j))}" for j in shown),
        *([f"{Verdict.SAME:<12}  {hidden} more"] if hidden else []),
        *report.checks,
        *(f"UNTRUSTED: {plain(reason)}: no verdict by time holds" for reason in report.trust.reasons),
        *(f"note: {plain(note)}" for note in report.notes),
        report.sentence,
    ]


def points_of(report: Gate) -> list[Point]:
    """Head's estimates, for other tools; bounds are those of the change times base's estimate."""
    points = (relative(j, j.verdict, words(j)) for j in report.benchmarks if j.effect is not None)
    return [point for point in points if point is not None]


_JUNIT: dict[Verdict, xml.Outcome] = {
    Verdict.SLOWER: "failure",
    Verdict.FAILED: "error",
    Verdict.MISSING: "error",
    Verdict.NEW: "error",
    Verdict.INCONCLUSIVE: "skipped",
}


def junit(report: Gate) -> str:
    """A testcase per benchmark: regressions fail; what failed, is missing or cannot be trusted is an error;
    what is undecided is skipped."""
    fine = [Verdict.NEW] if report.allow_new else []
    cases = [
        xml.Testcase(
            j.suite,
            j.label,
            "passed" if j.verdict in fine else _JUNIT.get(j.verdict, "passed"),
            f"{j.verdict}: {words(j)}",
        )
        for j in report.benchmarks
    ]
    trust = [
        xml.Testcase("gate", "can the machine be trusted", "error", f"UNTRUSTED: {reason}")
        for reason in report.trust.reasons
    ]
    return xml.document("dtbench gate", [*cases, *trust])


def markdown(report: Gate) -> str:
    """The summary of a job: the sentence, a table of what is not plainly fine, the rest folded away."""
    first = [j for j in ordered(report.benchmarks) if j.verdict is not Verdict.SAME]
    rest = [j for j in report.benchmarks if j.verdict is Verdict.SAME]
    lines = [f"### {md.escaped(report.sentence)}", ""]
    lines += [f"- **UNTRUSTED**: {md.escaped(reason)}" for reason in report.trust.reasons]
    lines += [f"- {md.escaped(note)}" for note in (*report.checks, *report.notes)]
    lines += ["", *_table(first)] if first else []
    if rest:
        lines += [
            "",
            f"<details><summary>{len(rest)} {Verdict.SAME}</summary>",
            "",
            *_table(rest),
            "",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def _table(judged: Sequence[ComparedCase]) -> list[str]:
    rows = []
    for j in judged[:SUMMARY_ROWS]:
        times = ["" if t is None else format_seconds(t) for t in (j.base_s, j.head_s)]
        why = "; ".join(part for part in (words_of(j.counters), j.reason) if part)
        rows.append([j.verdict, j.label, *times, change_of(j), why])
    if len(judged) > SUMMARY_ROWS:
        rows.append(["", f"and {len(judged) - SUMMARY_ROWS} more", "", "", "", ""])
    numeric = ("base", "head", "change")
    head = ("verdict", "benchmark", *numeric, "why")
    return md.table(head, [[md.escaped(cell) for cell in row] for row in rows], numeric)
