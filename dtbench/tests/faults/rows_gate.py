"""Rows of `dtbench gate`: arms that hang, print or hold what should not be kept."""

from __future__ import annotations

from pathlib import Path

from dtbench.tests.faults.table import Fault

SUITE = """
import time
from dtbench.suite import suite

time.sleep(600)

@suite("late", world="simulated", help="a suite that is never there")
def late(plan):
    return iter(())
"""


def a_suite_that_hangs() -> None:
    Path("late.py").write_text(SUITE)


ROWS = [
    Fault(
        "gate: the suite of an arm hangs while it is imported",
        "gate --base env: --head env: late.py --launch-timeout 20 -o g",
        5,
        r"env: cannot list its benchmarks: its suites, or what they import, hang while they are loaded: no end",
        given=a_suite_that_hangs,
        how="fresh",
        slow=True,
    ),
    Fault(
        "gate: a secret in the text of an arm",
        "gate --base rev:https://x:hunter2@h --head env: dispatch",
        2,
        r"rev:https://\*\*\*@h: git knows no such commit",
    ),
]
