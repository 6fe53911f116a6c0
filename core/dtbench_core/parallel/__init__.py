"""Tensor parallelism: a module's parameters sharded by a plan, its inputs and outputs to match.

Names and signatures are those of torch.distributed.tensor.parallel.

Reading order:

    api      parallelize_module: which submodule gets which style
    style    the styles: what is sharded how, and what goes in and out
"""

from dtbench_core.parallel.api import PlanError, parallelize_module
from dtbench_core.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    UnsupportedModuleError,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "RowwiseParallel",
    "UnsupportedModuleError",
    "parallelize_module",
]
