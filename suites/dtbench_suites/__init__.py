"""The built-in benchmark suites: importing them registers them.

Reading order: `data` (what all share), then any suite; each stands alone.
"""

from dtbench_suites import (
    bucketer,
    collectives,
    coverage,
    dispatch,
    embedding,
    overlap,
    packing,
    redistribute,
    regret,
    tensor_parallel,
)

__all__ = [
    "bucketer",
    "collectives",
    "coverage",
    "dispatch",
    "embedding",
    "overlap",
    "packing",
    "redistribute",
    "regret",
    "tensor_parallel",
]
