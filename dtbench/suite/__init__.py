"""The public interface for writing suites. Importing it does not import torch.

A suite imports from here: `from dtbench.suite import Case, RunOptions, Workload, suite`.
"""

from dtbench.suite.case import (
    CHOOSABLE_IMPLS,
    IMPL_WORDS,
    ROUTING,
    STAGES,
    Case,
    ClockKind,
    DeviceType,
    Param,
    RunOptions,
    Skip,
    Workload,
)
from dtbench.suite.registry import Refinement, World, suite, sweep

__all__ = [
    "CHOOSABLE_IMPLS",
    "IMPL_WORDS",
    "ROUTING",
    "STAGES",
    "Case",
    "ClockKind",
    "DeviceType",
    "Param",
    "Refinement",
    "RunOptions",
    "Skip",
    "Workload",
    "World",
    "suite",
    "sweep",
]
