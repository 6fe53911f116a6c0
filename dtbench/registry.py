"""The name by which suites written for earlier versions import `dtbench.suite`."""

from dtbench.suite import Refinement, World, suite

__all__ = ["Refinement", "World", "suite"]
