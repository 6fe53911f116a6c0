"""Tensor parallelism: shards a module's parameters by a plan, and places its inputs and outputs accordingly.

Names and signatures are those of torch.distributed.tensor.parallel, with the mesh dim, PairwiseParallel and the
conversion functions of its first version.

Reading order:

    api         parallelize_module: applies the styles of a plan to submodules
    style       ColwiseParallel, RowwiseParallel: shard parameters and place inputs and outputs
    pairwise    PairwiseParallel: the Linears of an MLP in pairs
    prepare     PrepareModuleInput, PrepareModuleOutput, SequenceParallel: only place inputs and outputs
    convert     make_input_..., make_output_...: the conversions as functions
    parameters  errors, one dim of a mesh, sharding of parameters and ties between them
    shard       shard_parameters: shards parameters over another mesh dim too
    loss        loss_parallel: cross entropy of logits sharded by class
    region      tensor_parallel_rng: random numbers that differ between shards
"""

# mypy: implicit-reexport
# ruff: noqa: F401

import dtbench_core.interop.state_dicts  # registers these parameters with torch's functions for state dicts
from dtbench_core.parallel.api import parallelize_module
from dtbench_core.parallel.convert import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_output_replicate_1d,
    make_output_reshard_tensor,
    make_output_shard_1d,
    make_output_tensor,
    make_sharded_output_tensor,
)
from dtbench_core.parallel.loss import cross_entropy, loss_parallel
from dtbench_core.parallel.pairwise import PairwiseParallel, parallelize_linear, parallelize_mlp
from dtbench_core.parallel.parameters import (
    LayoutsError,
    PlanError,
    UnsupportedModuleError,
    UnsupportedStyleError,
)
from dtbench_core.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)
from dtbench_core.parallel.region import TensorParallelRNG, tensor_parallel_rng
from dtbench_core.parallel.shard import shard_parameters
from dtbench_core.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = sorted(name for name, value in vars().items() if callable(value))
