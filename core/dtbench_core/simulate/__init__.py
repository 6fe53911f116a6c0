"""Simulates all ranks of a world inside one process, for tests, debugging and measurements without launchers.

`ThreadWorld` runs an unchanged program once per rank. `LocalTensorMode` runs it once for all ranks, and shows every
rank's tensors side by side.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from dtbench_core.simulate.group import declare_group
from dtbench_core.simulate.local_int import LocalIntNode, local_int
from dtbench_core.simulate.local_mode import (
    LocalTensorMode,
    local_tensor_mode,
    maybe_run_for_local_tensor,
    per_rank,
    rank_map,
    tensor_map,
)
from dtbench_core.simulate.local_tensor import LocalTensor
from dtbench_core.simulate.threads import RankResult, ThreadWorld, run_ranks

__all__ = sorted(name for name, value in vars().items() if callable(value))
