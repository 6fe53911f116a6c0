"""The name by which suites of earlier revisions import `dtbench.suite`: a gate runs them in this harness."""

from dtbench.suite import Refinement, World, suite

__all__ = ["Refinement", "World", "suite"]
