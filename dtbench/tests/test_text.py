"""Markdown, JUnit and the terminal take any text at all."""

import io
import sys
import xml.etree.ElementTree as ET

import click
import pytest

from dtbench.text import junit, markdown
from dtbench.text.clean import clean_output

HOSTILE = '<b>&"x" |`*_~[a](b)\x1b[2J\x00\ud800\ufffe\nnew'


def test_a_testcase_per_outcome_with_its_reason() -> None:
    outcomes: list[junit.Outcome] = ["passed", "failure", "error", "skipped", "failure"]
    cases = [junit.Testcase("of", f"case {i}", outcome, "why") for i, outcome in enumerate(outcomes)]
    (suite,) = ET.fromstring(junit.document("a suite", cases))
    assert suite.attrib == {
        "name": "a suite", "tests": "5", "failures": "2", "errors": "1", "skipped": "1"
    }  # fmt: skip
    assert [(case.get("classname"), case.get("name")) for case in suite] == [
        ("of", f"case {i}") for i in range(5)
    ]
    assert [[(one.tag, one.get("message"), one.text) for one in case] for case in suite] == [
        [("system-out", None, "why")],
        *([(outcome, "why", "why")] for outcome in outcomes[1:]),
    ]


def test_junit_holds_any_text() -> None:
    case = junit.Testcase(HOSTILE, HOSTILE, "failure", HOSTILE)
    (suite,) = ET.fromstring(junit.document(HOSTILE, [case]).encode())
    seen = '<b>&"x" |`*_~[a](b)\\x1b[2J\\x00\\ud800\\ufffe\nnew'
    assert (suite.get("name"), suite[0].get("classname"), suite[0].get("name")) == (seen,) * 3
    assert suite[0][0].get("message") == suite[0][0].text == seen


@pytest.mark.parametrize("mark", "\\`*_[]|~<&")
def test_foreign_text_has_no_mark_of_markdown_and_no_html(mark: str) -> None:
    assert mark not in markdown.escaped(f"a{mark}b").replace("&#", "").replace("&lt;", "").replace(
        "&amp;", ""
    )


def test_a_table_aligns_its_figures() -> None:
    assert markdown.table(["case", "time"], [["a", "1"], ["b", "2"]], numeric=["time"]) == [
        "| case | time |", "|---|---:|", "| a | 1 |", "| b | 2 |"
    ]  # fmt: skip


@pytest.mark.parametrize("tty", [False, True])
def test_what_is_printed_obeys_no_foreign_text(monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    """Terminals keep what tables and bars of our own say to them; pipes get text alone."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(stream, "isatty", lambda: tty)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with clean_output():
        sys.stdout.write("a\tb \x1b[1mbold\x1b[0m \x1b[2J \x1b]0;t\x07 \x9b \u202e é\n")
        click.echo("\x1b[2J\x9b é", color=True)  # which opens a stream of its own where it can
    assert sys.stdout is stream
    bold = b"\x1b[1mbold\x1b[0m" if tty else rb"\x1b[1mbold\x1b[0m"
    lines = (b"a\tb " + bold + rb" \x1b[2J \x1b]0;t\x07 \x9b \u202e", rb"\x1b[2J\x9b")
    assert written.getvalue() == b"".join(line + " é\n".encode() for line in lines)
