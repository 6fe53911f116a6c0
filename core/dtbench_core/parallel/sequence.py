"""SequenceParallel computes norms and dropout on a part of the sequence on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import Replicate, Shard
from dtbench_core.parallel.convert import (
    dtensor_from_parts,
    known_lengths_of,
    redistributed,
    with_recorded_length,
)
from dtbench_core.parallel.parameters import check_parameters, place_parameter
from dtbench_core.parallel.style import ParallelStyle
from dtbench_core.tensor.distribute import distribute_module
from dtbench_core.tensor.dtensor import DTensor


class SequenceParallel(ParallelStyle):
    """Runs a module (LayerNorm, RMSNorm, Dropout or a user-defined one) on activations sharded along the sequence.

    Its parameters are replicated. Their gradients are pending sums over the ranks, which are reduced when they are
    used.

    Args:
        sequence_dim: the sharded dim of the input; 1 for [batch, sequence, width].
        use_local_output: whether to return this rank's plain part of the output instead of a DTensor. A plain part
            does not determine the length of the whole sequence. If the sequence is not evenly divisible by the ranks,
            modules that read plain parts exchange their lengths (parallel/convert.py). DTensors need no exchange.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        if not isinstance(sequence_dim, int):
            raise ArgumentError(
                f"got sequence_dim={sequence_dim!r}, expected the index of a dim of the input"
            )
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            check_parameters(type(self).__name__, part, part._parameters)

        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name in list(part._parameters):
                place_parameter(part, name, mesh, Replicate(), self.src_data_rank)

        return distribute_module(module, device_mesh, partition, self._prepare_input, self._prepare_output)

    def _prepare_input(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        """Shards the first input along the sequence and leaves the others unchanged."""
        first = inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            got = type(first).__name__ if inputs else "no positional argument"
            raise ArgumentError(
                f"a {type(module).__name__} under SequenceParallel got {got}, expected a tensor first: pass it by "
                "position"
            )
        if isinstance(first, DTensor):
            return (redistributed(first, self.sequence_sharding), *inputs[1:])
        (layout,) = self.sequence_sharding
        return (dtensor_from_parts(first, mesh, layout, known_lengths_of(module, mesh, layout)), *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if not self.use_local_output or not isinstance(output, DTensor):
            return output
        return with_recorded_length(redistributed(output, self.sequence_sharding)).to_local()

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"
