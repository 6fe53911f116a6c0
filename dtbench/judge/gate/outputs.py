"""What a gate says: lines for people, JUnit, GitHub, and JSON. Pure; names come from suites and are escaped."""

from __future__ import annotations

import html
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench import errors
from dtbench.errors import plain
from dtbench.files.exports import Point, relative
from dtbench.judge.gate.verdict import Judged, Trust, exit_code_of, words_of
from dtbench.judge.verdicts import Verdict
from dtbench.units import format_seconds

SCHEMA = 1
# So many benchmarks are listed whole; of more, those that pass are only counted.
LISTED = 60
# So many whose budget was spent are named; more are counted.
CUT_LISTED = 3
SUMMARY_ROWS = 200  # GitHub takes a summary of 1 MiB
ANNOTATIONS = 10  # GitHub shows ten of a kind per step


@dataclass(frozen=True)
class Report:
    """A gate's end. notes: what a reader has to know beside the verdicts. facts: arms, launches, seconds."""

    judged: tuple[Judged, ...]
    trust: Trust
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    allow_new: bool = False

    @property
    def exit_code(self) -> int:
        """See `verdict.exit_code_of`."""
        return exit_code_of(self.judged, self.trust, allow_new=self.allow_new)

    def count(self, verdict: Verdict) -> int:
        """How many benchmarks have this verdict."""
        return sum(j.verdict == verdict for j in self.judged)

    @property
    def sentence(self) -> str:
        """The end in one line."""
        said = (
            ", ".join(f"{self.count(v)} {v.name}" for v in Verdict if self.count(v)) or "nothing was judged"
        )
        meaning = {
            errors.EXIT_OK: "no regression",
            errors.EXIT_REGRESSION: "a regression",
            errors.EXIT_INCONCLUSIVE: "UNTRUSTED" if self.trust.reasons else "inconclusive",
            errors.EXIT_NOTHING: "a benchmark is missing in one arm",
            errors.EXIT_CASE_FAILED: "a benchmark failed",
        }
        return f"gate: {meaning[self.exit_code]} ({said}); exit code {self.exit_code}"


def ordered(judged: Sequence[Judged]) -> list[Judged]:
    """The gravest first."""
    return sorted(judged, key=lambda j: j.verdict.gravity)


def change_of(judged: Judged) -> str:
    """`+3.1% (at least +1.2%)`, `-0.2% (+1.0% at most)`, or nothing."""
    effect = judged.effect
    if effect is None:
        return ""
    if judged.verdict is Verdict.REGRESSION:
        return f"{effect.ratio - 1:+.1%} (at least {effect.low - 1:+.1%})"
    bound = f"{effect.high - 1:+.1%} at most" if math.isfinite(effect.high) else "no bound yet"
    return f"{effect.ratio - 1:+.1%} ({bound})"


def words(judged: Judged) -> str:
    """What a verdict rests on, in words."""
    parts = []
    if judged.counters:
        parts.append(words_of(judged.counters))
    if judged.effect is not None:
        parts.append(f"{change_of(judged)}, {judged.effect.pairs} pairs")
    if judged.base_s is not None and judged.head_s is not None:
        parts.append(f"{format_seconds(judged.base_s)} -> {format_seconds(judged.head_s)}")
    if judged.reason:
        parts.append(judged.reason)
    return "; ".join(parts)


def lines(report: Report) -> list[str]:
    """For a terminal."""
    shown = ordered(report.judged)
    if len(shown) > LISTED:
        shown = [j for j in shown if j.verdict is not Verdict.PASS]
    cut = [j for j in shown if j.verdict is Verdict.INCONCLUSIVE and j.reason.startswith("the budget of")]
    if len(cut) > CUT_LISTED:  # a note says what budget would do
        shown = [j for j in shown if j not in cut]
    made = [f"{j.verdict.name:<12}  {plain(j.benchmark.label)}\n{'':14}{plain(words(j))}" for j in shown]
    if len(cut) > CUT_LISTED:
        made.append(f"{'INCONCLUSIVE':<12}  {len(cut)} benchmarks, for which the budget was too small")
    left = report.count(Verdict.PASS) if len(report.judged) > LISTED else 0
    made += [f"{'PASS':<12}  {left} more"] if left else []
    for name, effect in (("control", report.trust.control), ("base/base", report.trust.null)):
        if effect is not None:
            made.append(f"{name}: {effect.ratio - 1:+.2%} over {effect.pairs} pairs")
    made += [f"UNTRUSTED: {plain(reason)}: no verdict by time holds" for reason in report.trust.reasons]
    made += [f"note: {plain(note)}" for note in report.notes]
    return [*made, report.sentence]


# --------------------------------------------------------------------------------- JSON


def to_json(report: Report) -> dict[str, Any]:
    """Everything."""
    return {
        "kind": "gate",
        "schema": SCHEMA,
        "exit_code": report.exit_code,
        "counts": {v.name: report.count(v) for v in Verdict},
        "trust": report.trust.to_json(),
        "notes": list(report.notes),
        **report.facts,
        "benchmarks": [j.to_json() for j in report.judged],
    }


def points_of(report: Report) -> list[Point]:
    """Head's estimates, for other tools; bounds are those of the change times base's estimate."""
    return [
        relative(j.benchmark.key, j.base_s, j.head_s, j.effect.low, j.effect.high, j.verdict.name, words(j))
        for j in report.judged
        if j.base_s is not None and j.head_s is not None and j.effect is not None
    ]


# --------------------------------------------------------------------------------- JUnit


def junit(report: Report) -> str:
    """A testcase per benchmark: regressions fail; what failed, is missing or cannot be trusted is an error;
    what is undecided is skipped."""
    suite = ET.Element("testsuite", name="dtbench gate")
    tally = {"failure": 0, "error": 0, "skipped": 0}
    for judged in report.judged:
        case = ET.SubElement(suite, "testcase", classname=_xml(judged.benchmark.key[0]))
        case.set("name", _xml(judged.benchmark.label))
        kind = _junit_kind(judged, report)
        text = _xml(f"{judged.verdict.name}: {words(judged)}")
        if kind:
            tally[kind] += 1
            ET.SubElement(case, kind, message=text).text = text
        else:
            ET.SubElement(case, "system-out").text = text
    for reason in report.trust.reasons:
        case = ET.SubElement(suite, "testcase", classname="gate", name="can the machine be trusted")
        tally["error"] += 1
        ET.SubElement(case, "error", message=_xml(f"UNTRUSTED: {reason}"))
    suite.set("tests", str(len(suite)))
    for name, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(plural, str(tally[name]))
    root = ET.Element("testsuites")
    root.append(suite)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_kind(judged: Judged, report: Report) -> str:
    if judged.verdict is Verdict.NEW:
        return "" if report.allow_new else "error"
    kinds = {
        Verdict.REGRESSION: "failure",
        Verdict.FAILED: "error",
        Verdict.MISSING: "error",
        Verdict.INCONCLUSIVE: "skipped",
    }
    return kinds.get(judged.verdict, "")


def _xml(text: str) -> str:
    """Characters that XML 1.0 cannot hold, not even escaped, are spelled out."""
    return "".join(c if _is_xml(ord(c)) else ascii(c)[1:-1] for c in text)


def _is_xml(code: int) -> bool:
    return code in (0x9, 0xA, 0xD) or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000


# --------------------------------------------------------------------------------- GitHub


def annotations_of(report: Report) -> list[str]:
    """Workflow commands, which GitHub shows beside the change."""
    made = []
    for judged in ordered(report.judged):
        if judged.verdict in (Verdict.REGRESSION, Verdict.FAILED, Verdict.MISSING):
            title = f"{judged.verdict.name} {judged.benchmark.label}"
            made.append(f"::error title={_property(title)}::{_data(words(judged))}")
    if len(made) > ANNOTATIONS:
        made = [*made[: ANNOTATIONS - 1], f"::error title=gate::{_data(report.sentence)}"]
    made += [f"::warning title=UNTRUSTED::{_data(reason)}" for reason in report.trust.reasons]
    return made


def _data(text: str) -> str:
    return plain(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def markdown(report: Report) -> str:
    """The summary of a job: the sentence, a table of what is not plainly fine, the rest folded away."""
    first = [j for j in ordered(report.judged) if j.verdict is not Verdict.PASS]
    rest = [j for j in report.judged if j.verdict is Verdict.PASS]
    made = [f"### {_cell(report.sentence)}", ""]
    made += [f"- **UNTRUSTED**: {_cell(reason)}" for reason in report.trust.reasons]
    made += [f"- {_cell(note)}" for note in report.notes]
    made += ["", *_table(first)] if first else []
    if rest:
        made += ["", f"<details><summary>{len(rest)} PASS</summary>", "", *_table(rest), "", "</details>"]
    return "\n".join(made) + "\n"


def _table(judged: Sequence[Judged]) -> list[str]:
    made = ["| verdict | benchmark | base | head | change | why |", "|---|---|---:|---:|---:|---|"]
    for j in judged[:SUMMARY_ROWS]:
        times = ["" if t is None else format_seconds(t) for t in (j.base_s, j.head_s)]
        why = "; ".join(part for part in (words_of(j.counters), j.reason) if part)
        cells = (j.verdict.name, j.benchmark.label, *times, change_of(j), why)
        made.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    if len(judged) > SUMMARY_ROWS:
        made.append(f"| | and {len(judged) - SUMMARY_ROWS} more | | | | |")
    return made


def _cell(text: str) -> str:
    """Text in a cell of Markdown: neither HTML nor marks of its own."""
    escaped = html.escape(plain(text), quote=False)
    return "".join(f"&#{ord(c)};" if c in "\\`*_[]|~" else c for c in escaped)
