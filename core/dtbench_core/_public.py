"""The public names of `dtbench_core`, imported from their modules. `__init__` loads this module at their first use."""

# ruff: noqa: F401
# mypy: implicit-reexport

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtbench_core.bucketer import BucketError, ReduceScatterBucketer
from dtbench_core.comm import CommCount, all_to_all_single_autograd, count_collectives
from dtbench_core.comm_tensor import CommTensor
from dtbench_core.dispatch.agreement import check_ranks
from dtbench_core.dispatch.contexts import (
    ExplicitRedistributionContext,
    ImplicitRedistributionWarning,
    implicit_replication,
)
from dtbench_core.dispatch.entry import cache_info
from dtbench_core.dispatch.fallback import FallbackWarning, clear_fallbacks, fallbacks
from dtbench_core.errors import (
    ArgumentError,
    CoreError,
    LayoutError,
    MeshError,
    MixedTensorError,
    NoRuleError,
    PlacementError,
    RanksDifferError,
    RedistributionError,
)
from dtbench_core.interop import debug_modes  # makes torch's debug modes support our DTensor
from dtbench_core.interop.local_map import local_map
from dtbench_core.interop.state_dicts import full_state_dict, sharded_state_dict
from dtbench_core.interop.torch_dtensor import from_torch, to_torch
from dtbench_core.interop.visualize import sharding_svg, sharding_text, visualize_sharding
from dtbench_core.layout.local_shards import LocalShardsWrapper
from dtbench_core.layout.placement import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset
from dtbench_core.redistribute.routes import explain, plan_of
from dtbench_core.rules.register import register_sharding
from dtbench_core.runtime import clear_caches
from dtbench_core.tensor.distribute import distribute_module, distribute_tensor
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.tensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
