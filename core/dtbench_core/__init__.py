"""A complete distributed-tensor library in pure Python on `torch.distributed`.

Names and signatures are those of torch.distributed.tensor: code written for it runs here by
changing the import. `dtbench_core.parallel` holds tensor parallelism, `dtbench_core.cost.search` the cost
model.

Reading order, from the idea to the machine:

    placement     how one mesh dim holds a tensor, and the arithmetic of shards
    spec          mesh + placements + global metadata, interned
    tensor        DTensor: wrapping local tensors, leaving, moving
    distribute    spreading global tensors and modules
    factories     ones, zeros, rand, ...
    layout        local tensors and global ones: cutting, and what shards say of their whole
    random        the numbers of one device on every mesh
    comm_tensor   a tensor that waits for its collective at first use, in eager mode and in traced graphs
    shards        the shards of an embedding table that a rank holds, as a local tensor
    state         pickling, and checkpoints that reshard
    outside       what a rank outside the mesh does
    contexts      implicit replication, and a watch over implicit redistribution
    local_map     functions of plain tensors, on the shards
    visualize     pictures of shardings
    dispatch      op -> cached plan -> local op -> wrapped result
    plan          making a plan
    variants      whether every rank could run it
    fallback      ops without a rule: on replicated inputs
    writes        out=, and new shapes in place
    rules         which placements an op can run with, a file per family of ops
    cross_entropy losses of logits whose classes are sharded
    redistribute  from one placement to another, by cost
    moves         doing one step of it
    cost          what a collective costs, and the cheapest chain of them
    prices        what one mesh dim charges: a formula, or what was measured
    topology      the constants of a mesh, built in or calibrated
    curve         measured time over size
    comm          the only file that calls collectives
    collective_utils  collectives over one mesh dim, padding, prices: by torch's names
    bucketer      many small reduce-scatters as few large ones
"""

from dtbench_core.bucketer import BucketError, ReduceScatterBucketer
from dtbench_core.comm import CommCount, count_collectives
from dtbench_core.comm_tensor import CommTensor
from dtbench_core.dispatch.contexts import (
    ExplicitRedistributionContext,
    ImplicitRedistributionWarning,
    implicit_replication,
)
from dtbench_core.dispatch.entry import cache_info, clear_caches
from dtbench_core.dispatch.fallback import FallbackWarning, clear_fallbacks, fallbacks
from dtbench_core.errors import (
    ArgumentError,
    CoreError,
    LayoutError,
    MeshError,
    MixedTensorError,
    NoRuleError,
    PlacementError,
    RedistributionError,
)
from dtbench_core.interop.local_map import local_map
from dtbench_core.interop.visualize import sharding_svg, sharding_text, visualize_sharding
from dtbench_core.layout.local_shards import LocalShardsWrapper
from dtbench_core.layout.placement import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.redistribute.route import explain, plan_of
from dtbench_core.rules.register import register_sharding
from dtbench_core.tensor.distribute import distribute_module, distribute_tensor
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.tensor.factories import empty, full, ones, rand, randn, zeros

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
    "full",
    "implicit_replication",
    "local_map",
    "ones",
    "plan_of",
    "rand",
    "randn",
    "register_sharding",
    "sharding_svg",
    "sharding_text",
    "visualize_sharding",
    "zeros",
]
