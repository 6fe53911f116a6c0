"""SequenceParallel: norms and dropout computed on a part of the sequence by each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import Replicate, Shard
from dtbench_core.parallel.convert import handed_out, lengths_read_by, placed, read_part
from dtbench_core.parallel.parameters import check_parameters, place_parameter
from dtbench_core.parallel.style import ParallelStyle
from dtbench_core.tensor.distribute import distribute_module
from dtbench_core.tensor.dtensor import DTensor


class SequenceParallel(ParallelStyle):
    """Runs a module (LayerNorm, RMSNorm, Dropout, or one of one's own) on activations cut along the sequence.

    Its parameters are the same on every rank. Their gradients are sums over the ranks, which are added up
    when they are used.

    Args:
        sequence_dim: the dim of the input, such as [batch, sequence, width], that is cut.
        use_local_output: give out this rank's plain part of the output, not a DTensor. A plain part says nothing of
            the whole: where the ranks cannot share a sequence evenly, modules that read plain parts ask all ranks for
            their lengths (parallel/convert.py). DTensors know theirs.
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
        """The first input along the sequence; others as they are."""
        first = inputs[0] if inputs else None
        if not isinstance(first, torch.Tensor):
            got = type(first).__name__ if inputs else "no positional argument"
            raise ArgumentError(
                f"a {type(module).__name__} under SequenceParallel got {got}, expected a tensor first: pass it by "
                "position"
            )
        if isinstance(first, DTensor):
            return (placed(first, self.sequence_sharding), *inputs[1:])
        (layout,) = self.sequence_sharding
        return (read_part(first, mesh, layout, lengths_read_by(module, mesh, layout)), *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if not self.use_local_output or not isinstance(output, DTensor):
            return output
        return handed_out(placed(output, self.sequence_sharding)).to_local()

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"
