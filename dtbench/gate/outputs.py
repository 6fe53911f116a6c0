"""Outputs of a gate: text for the terminal, JUnit and GitHub. Labels come from suites, so they are escaped."""

import html
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence

from dtbench.errors import plain
from dtbench.gate.verdict import describe_counters
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.exports import Point, compared_point
from dtbench.records.gate import Gate
from dtbench.text.units import NO_INTERVAL, format_seconds

# With more benchmarks than this, those with the verdict "same" are only counted.
LISTED = 60
SUMMARY_ROWS = 200  # GitHub accepts summaries of up to 1 MiB


def format_bounded_change(case: ComparedCase) -> str:
    """Formats a change with its bound, e.g. `+3.1% (at least +1.2%)` or `-0.2% (+1.0% at most)`."""
    effect = case.effect
    if effect is None:
        return ""
    if case.verdict is Verdict.SLOWER:
        bound = NO_INTERVAL if case.low is None else f"at least {case.low - 1:+.1%}"
    else:
        bound = NO_INTERVAL if case.high is None else f"{case.high - 1:+.1%} at most"
    return f"{effect.ratio - 1:+.1%} ({bound})"


def describe(case: ComparedCase) -> str:
    """Describes the figures that a verdict is based on."""
    parts = [describe_counters(case.counters)] if case.counters else []
    if case.effect is not None:
        parts.append(f"{format_bounded_change(case)}, {case.effect.pairs} pairs")
    if case.base_s is not None and case.head_s is not None:
        parts.append(f"{format_seconds(case.base_s)} -> {format_seconds(case.head_s)}")
    if case.reason:
        parts.append(case.reason)
    return "; ".join(parts)


def lines(report: Gate) -> list[str]:
    """Returns the text for a terminal."""
    shown = sorted(report.benchmarks, key=lambda j: j.verdict.gravity)
    hidden = report.count(Verdict.SAME) if len(shown) > LISTED else 0
    if hidden:
        shown = [j for j in shown if j.verdict is not Verdict.SAME]
    return [
        *(f"{j.verdict:<12}  {plain(j.label)}\n{'':14}{plain(describe(j))}" for j in shown),
        *([f"{Verdict.SAME:<12}  {hidden} more"] if hidden else []),
        *report.checks,
        *(f"UNTRUSTED: {plain(reason)}: verdicts by time do not hold" for reason in report.trust.reasons),
        *(f"note: {plain(note)}" for note in report.notes),
        report.summary_line,
    ]


def gate_points(report: Gate) -> list[Point]:
    """Returns head's times for other tools, with bounds: those of the change, times base's time."""
    points = (compared_point(j, j.verdict, describe(j)) for j in report.benchmarks if j.effect is not None)
    return [*filter(None, points)]


_JUNIT = {
    Verdict.SLOWER: "failure",
    Verdict.FAILED: "error",
    Verdict.MISSING: "error",
    Verdict.NEW: "error",
    Verdict.INCONCLUSIVE: "skipped",
}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Gate) -> str:
    """Returns JUnit XML with one test case per benchmark.

    Slower benchmarks are failures, failed and missing ones errors, and inconclusive ones skipped. New ones are
    errors unless they are allowed. Each reason not to trust the machine is one more error.
    """
    outcomes = _JUNIT | ({Verdict.NEW: "passed"} if report.allow_new else {})
    cases = [
        (j.suite, j.label, outcomes.get(j.verdict, "passed"), f"{j.verdict}: {describe(j)}")
        for j in report.benchmarks
    ]
    cases += [
        ("gate", "can the machine be trusted", "error", f"UNTRUSTED: {reason}")
        for reason in report.trust.reasons
    ]
    tally = Counter(outcome for _, _, outcome, _ in cases)
    root = ET.Element("testsuites")
    testsuite = ET.SubElement(
        root,
        "testsuite",
        name="dtbench gate",
        tests=str(len(cases)),
        failures=str(tally["failure"]),
        errors=str(tally["error"]),
        skipped=str(tally["skipped"]),
    )
    for suite, label, outcome, message in cases:
        case = ET.SubElement(testsuite, "testcase", classname=_xml(suite), name=_xml(label))
        if outcome == "passed":
            ET.SubElement(case, "system-out").text = _xml(message)
        else:  # both as attribute and as text, since some readers show only one of them
            ET.SubElement(case, outcome, message=_xml(message)).text = _xml(message)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Replaces characters that XML 1.0 does not allow even when escaped. The XML library escapes the others."""
    return _NOT_XML.sub(lambda match: ascii(match[0])[1:-1], text)


_MARKS = frozenset("\\`*_[]|~")


def escaped(text: str) -> str:
    """Returns text on one line that GitHub shows literally: markup and HTML are written as entities."""
    return "".join(
        f"&#{ord(char)};" if char in _MARKS else char for char in html.escape(plain(text), quote=False)
    )


def markdown(report: Gate) -> str:
    """Returns the summary for a CI job: the result, a table of the changes, and the unchanged benchmarks collapsed."""
    by_gravity = sorted(report.benchmarks, key=lambda j: j.verdict.gravity)
    first = [j for j in by_gravity if j.verdict is not Verdict.SAME]
    passed = [j for j in report.benchmarks if j.verdict is Verdict.SAME]
    lines = [f"### {escaped(report.summary_line)}", ""]
    lines += [f"- **UNTRUSTED**: {escaped(reason)}" for reason in report.trust.reasons]
    lines += [f"- {escaped(note)}" for note in (*report.checks, *report.notes)]
    lines += ["", *_table(first)] if first else []
    if passed:
        lines += [
            "",
            f"<details><summary>{len(passed)} {Verdict.SAME}</summary>",
            "",
            *_table(passed),
            "",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def _table(cases: Sequence[ComparedCase]) -> list[str]:
    rows = []
    for j in cases[:SUMMARY_ROWS]:
        times = ["" if t is None else format_seconds(t) for t in (j.base_s, j.head_s)]
        why = "; ".join(part for part in (describe_counters(j.counters), j.reason) if part)
        rows.append([j.verdict, j.label, *times, format_bounded_change(j), why])
    if len(cases) > SUMMARY_ROWS:
        rows.append(["", f"and {len(cases) - SUMMARY_ROWS} more", "", "", "", ""])
    return [
        "| verdict | benchmark | base | head | change | why |",
        "|---|---|---:|---:|---:|---|",
        *(f"| {' | '.join(map(escaped, row))} |" for row in rows),
    ]
