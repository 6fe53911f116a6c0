"""All that a suite of benchmarks imports, ours or a user's: `from dtbench.suite import Case, Plan, Workload, suite`."""

from dtbench.model import Case, Param, Plan, Skip, Workload
from dtbench.model.suites import Refinement, World, suite, sweep

__all__ = ["Case", "Param", "Plan", "Refinement", "Skip", "Workload", "World", "suite", "sweep"]
