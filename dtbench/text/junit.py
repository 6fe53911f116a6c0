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
    """message: why, in one line; of one that passed its output. details: more of it, else the message stands again,
    as some readers show the one and some the other."""

    __test__ = False  # pytest collects no class of this name

    classname: str
    name: str
    outcome: Outcome = "passed"
    message: str = ""
    details: str = ""


def document(suite: str, cases: Sequence[Testcase], seconds: float | None = None) -> str:
    """The XML of one suite, of any text at all. seconds: what all of it took."""
    tally = Counter(case.outcome for case in cases)
    root = ET.Element("testsuites")
    counts = {"failures": tally["failure"], "errors": tally["error"], "skipped": tally["skipped"]}
    of = ET.SubElement(root, "testsuite", name=_xml(suite), tests=str(len(cases)))
    of.attrib |= {name: str(count) for name, count in counts.items()}
    if seconds is not None:
        of.set("time", f"{seconds:.3f}")
    for case in cases:
        element = ET.SubElement(of, "testcase", classname=_xml(case.classname), name=_xml(case.name))
        text = _xml(case.details or case.message)
        if case.outcome != "passed":
            ET.SubElement(element, case.outcome, message=_xml(case.message)).text = text
        elif text:
            ET.SubElement(element, "system-out").text = text
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Characters that XML 1.0 cannot hold, not even escaped, are spelled out; the library escapes the others."""
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)
