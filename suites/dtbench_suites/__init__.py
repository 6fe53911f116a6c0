"""The built-in benchmark suites, a module each, imported when it is asked for.

Reading order: `data` (what all share), then any suite; each stands alone.
"""

# In the order in which they are listed and run.
SUITES = (
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
)
