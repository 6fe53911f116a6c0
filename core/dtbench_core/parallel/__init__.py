"""Tensor parallelism: a module's parameters sharded by a plan, its inputs and outputs to match.

Names and signatures are those of torch.distributed.tensor.parallel, with the mesh dim, PairwiseParallel and
the conversion functions of its first version.

Reading order:

    api         parallelize_module: which submodule gets which style
    style       ColwiseParallel, RowwiseParallel: what is sharded how, and what goes in and out
    sequence    SequenceParallel: norms and dropout on parts of the sequence
    pairwise    PairwiseParallel: the Linears of an MLP in pairs
    prepare     PrepareModuleInput and its like: inputs and outputs alone
    convert     make_input_..., make_output_...: the conversions by themselves
    parameters  parameters in their places, and ties between them; one dim of a mesh; what is refused
    embedding   an Embedding by rows, whose gradient is of its own rows
    shard       shard_parameters: what tensor parallelism left, spread over another mesh dim
    loss        loss_parallel: cross entropy of logits sharded by class
    region      tensor_parallel_rng: random numbers that differ by shard
"""

# mypy: implicit-reexport
# ruff: noqa: F401

import dtbench_core.interop.state_dicts  # torch's functions for state dicts learn of what is made here
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
from dtbench_core.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from dtbench_core.parallel.region import TensorParallelRNG, tensor_parallel_rng
from dtbench_core.parallel.sequence import SequenceParallel
from dtbench_core.parallel.shard import shard_parameters
from dtbench_core.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = sorted(name for name, value in vars().items() if callable(value))
