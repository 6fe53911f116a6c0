"""JUnit XML: a suite of testcases in the format that CI systems read."""

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
    """A testcase of a JUnit file.

    Attributes:
        classname: class of the testcase.
        name: name of the testcase.
        outcome: outcome of the testcase.
        message: one line with the reason of the outcome; the output of a testcase that passed.
    """

    __test__ = False  # keeps pytest from collecting a class of this name

    classname: str
    name: str
    outcome: Outcome = "passed"
    message: str = ""


def document(suite: str, cases: Sequence[Testcase]) -> str:
    """Returns the XML of one suite. Names and messages may be any text."""
    tally = Counter(case.outcome for case in cases)
    root = ET.Element("testsuites")
    testsuite = ET.SubElement(
        root,
        "testsuite",
        name=_xml(suite),
        tests=str(len(cases)),
        failures=str(tally["failure"]),
        errors=str(tally["error"]),
        skipped=str(tally["skipped"]),
    )
    for case in cases:
        element = ET.SubElement(testsuite, "testcase", classname=_xml(case.classname), name=_xml(case.name))
        text = _xml(case.message)
        if (
            case.outcome != "passed"
        ):  # both as attribute and as text, since some readers show only one of them
            ET.SubElement(element, case.outcome, message=text).text = text
        elif text:
            ET.SubElement(element, "system-out").text = text
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Spells out characters that XML 1.0 does not allow even when escaped; the library escapes all others."""
    return _NOT_XML.sub(lambda match: ascii(match[0])[1:-1], text)
