"""What suites of earlier revisions import of the harness, under the names of then: a gate runs them in this one."""

from __future__ import annotations

import importlib
import sys

MODULES = {
    "dtbench.coverage": "dtbench.judge.op_verdicts",
    "dtbench.refine": "dtbench.bench.refine",
}
FUNCTIONS = {("dtbench.layout", "joint_dim"): "dtbench.mesh"}


def install() -> None:
    """In this process only."""
    for earlier, now in MODULES.items():
        sys.modules.setdefault(earlier, importlib.import_module(now))
    for (earlier, name), now in FUNCTIONS.items():
        setattr(importlib.import_module(earlier), name, getattr(importlib.import_module(now), name))
