"""A complete distributed-tensor library in pure Python on `torch.distributed`.

Names and signatures are those of torch.distributed.tensor: code written for it runs here by
changing the import. `dtbench_core.parallel` holds tensor parallelism.

The rooms, top to bottom; each imports only rooms below it:

    simulate      all ranks of a world in one process
    parallel      parallelize_module, styles, loss parallel, sharded parameters
    bucketer      many small reduce-scatters as few large ones
    comm_tensor   a tensor that waits for its collective at first use, in eager mode and in traced graphs
    interop       where torch's tools meet us: compile, debug modes, state dicts, local_map, torch's names
    tensor        DTensor: wrapping local tensors, leaving, moving, spreading global ones, factories
    dispatch      op -> cached plan -> local op -> wrapped result
    rules         which placements an op can run with, a file per family of ops
    redistribute  from one placement to another, by cost
    cost          what a collective costs, from constants or measurements; the cheapest chain of them
    layout        placement, spec and mesh: how ranks hold a tensor, and the arithmetic of shards
    comm          the only file that calls collectives

The public names and the rooms are loaded when they are first used, so that `dtbench_core.cost`, whose prices
need no torch, is read without it.
"""

# ruff: noqa: F403, F405 (the names are for type checkers; `__getattr__` loads them)

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtbench_core._public import *

__all__ = [
    "ArgumentError",
    "BucketError",
    "CommCount",
    "CommTensor",
    "CoreError",
    "DTensor",
    "DTensorSpec",
    "ExplicitRedistributionContext",
    "FallbackWarning",
    "ImplicitRedistributionWarning",
    "LayoutError",
    "LocalShardsWrapper",
    "MeshError",
    "MixedTensorError",
    "NoRuleError",
    "Partial",
    "Placement",
    "PlacementError",
    "RaggedShard",
    "RedistributionError",
    "ReduceScatterBucketer",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorMeta",
    "cache_info",
    "clear_caches",
    "clear_fallbacks",
    "count_collectives",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "fallbacks",
    "from_torch",
    "full",
    "full_state_dict",
    "implicit_replication",
    "local_map",
    "ones",
    "plan_of",
    "rand",
    "randn",
    "register_sharding",
    "sharded_state_dict",
    "sharding_svg",
    "sharding_text",
    "to_torch",
    "visualize_sharding",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module("dtbench_core._public"), name)
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"dtbench_core.{name}") is None:
        raise AttributeError(f"module 'dtbench_core' has no attribute {name!r}")
    return importlib.import_module(f"dtbench_core.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
