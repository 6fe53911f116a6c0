"""All ranks of a world inside one process, for tests, debugging and measurements without launchers."""

from dtbench_core.simulate.threads import Outcome, ThreadWorld, run_ranks

__all__ = ["Outcome", "ThreadWorld", "run_ranks"]
