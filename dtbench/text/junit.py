"""JUnit's XML: a suite of testcases, as CI systems read it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Outcome = Literal["passed", "failure", "error", "skipped"]


@dataclass(frozen=True)
class Testcase:
    """message: why, in one line; of one that passed its output."""

    __test__ = False  # pytest collects no class of this name

    classname: str
    name: str
    outcome: Outcome = "passed"
    message: str = ""


def document(suite: str, cases: Sequence[Testcase]) -> str:
    """The XML of one suite, of any text at all."""
    tally = Counter(case.outcome for case in cases)
    root = ET.Element("testsuites")
    of = ET.SubElement(
        root,
        "testsuite",
        name=_xml(suite),
        tests=str(len(cases)),
        failures=str(tally["failure"]),
        errors=str(tally["error"]),
        skipped=str(tally["skipped"]),
    )
    for case in cases:
        element = ET.SubElement(of, "testcase", classname=_xml(case.classname), name=_xml(case.name))
        text = _xml(case.message)
        if case.outcome != "passed":  # twice, as some readers show the one and some the other
            ET.SubElement(element, case.outcome, message=text).text = text
        elif text:
            ET.SubElement(element, "system-out").text = text
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Characters that XML 1.0 cannot hold, not even escaped, are spelled out; the library escapes the others."""
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)
