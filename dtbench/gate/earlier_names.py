"""What suites of earlier revisions import of the harness, under the names of then: a gate runs them in this one."""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from typing import Any

import dtbench.suite
from dtbench.model.suites import suite

MODULES = {
    "dtbench.coverage": "dtbench.judge.op_verdicts",
    "dtbench.errors": "dtbench.model.errors",
    "dtbench.files": "dtbench.records",
    "dtbench.files.run": "dtbench.records.run",
    "dtbench.layout": "dtbench.records.layout",
    "dtbench.mesh": "dtbench.model.mesh",
    "dtbench.refine": "dtbench.bench.refine",
    "dtbench.registry": "dtbench.suite",
    "dtbench.scratch": "dtbench.world.scratch",
}
# An argument of `suite` that had another name.
TELLING, NOW = "telling", "budget_priority"
NAMES = {
    ("dtbench.records.layout", "joint_dim"): "dtbench.model.mesh",
    ("dtbench.judge.op_verdicts", "FALLBACKS"): "dtbench.records.verdicts",
}


def install() -> None:
    """In this process only."""
    for earlier, now in MODULES.items():
        sys.modules.setdefault(earlier, importlib.import_module(now))
    for (earlier, name), now in NAMES.items():
        setattr(importlib.import_module(earlier), name, getattr(importlib.import_module(now), name))
    dtbench.suite.suite = _suite


@wraps(suite)
def _suite(name: str, **given: Any) -> Any:
    if TELLING in given:
        given[NOW] = given.pop(TELLING)
    return suite(name, **given)
