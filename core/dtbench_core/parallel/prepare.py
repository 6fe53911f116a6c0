"""Styles that shard no parameters: they place the inputs and outputs of a module.

SequenceParallel computes norms and dropout on a part of the sequence on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import Placement, Replicate, Shard
from dtbench_core.parallel.convert import (
    dtensor_from_parts,
    known_lengths_of,
    redistributed,
    with_recorded_length,
)
from dtbench_core.parallel.parameters import LayoutsError, check_parameters, place_parameter
from dtbench_core.parallel.style import ParallelStyle, format_option, single_placement
from dtbench_core.tensor.distribute import distribute_module
from dtbench_core.tensor.dtensor import DTensor

Layouts = Placement | Sequence[Placement | None] | None
LayoutTuple = tuple[Placement | None, ...] | None


class PrepareModuleInput(ParallelStyle):
    """Makes a module's inputs DTensors with the placements that the module needs.

    Args:
        input_layouts: the placement of each plain positional input, in order; None leaves an input unchanged. A
            single placement is for a single input.
        desired_input_layouts: the placement that each input is redistributed to; None does not redistribute it.
        input_kwarg_layouts: the same as `input_layouts` for keyword inputs, by name. Inputs that are not named stay
            unchanged.
        desired_input_kwarg_layouts: the same as `desired_input_layouts` for keyword inputs.
        use_local_output: whether to pass this rank's plain parts to the module instead of DTensors.

    Raises:
        LayoutsError: layouts without desired layouts, or different numbers of both.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts, "input_layouts")
        self.desired_input_layouts = _as_tuple(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = _checked_by_name(input_kwarg_layouts, "input_kwarg_layouts")
        self.desired_input_kwarg_layouts = _checked_by_name(
            desired_input_kwarg_layouts, "desired_input_kwarg_layouts"
        )
        self.use_local_output = use_local_output
        _check_pairs("input", self.input_layouts, self.desired_input_layouts)
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise LayoutsError(
                f"got input_kwarg_layouts for {sorted(self.input_kwarg_layouts)} and desired_input_kwarg_layouts for "
                f"{sorted(self.desired_input_kwarg_layouts)}, expected the same names: name each input in both"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._prepare, device_mesh), with_kwargs=True)
        return module

    def _prepare(
        self, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        convert = partial(_convert, module, mesh, self.use_local_output)
        layouts, desired_layouts = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        converted_kwargs = {
            name: convert(value, layouts.get(name), desired_layouts.get(name), f"input {name}")
            for name, value in kwargs.items()
        }
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs, converted_kwargs
        if len(inputs) != len(self.input_layouts):
            raise LayoutsError(
                f"a {type(module).__name__} got {len(inputs)} positional inputs for {len(self.input_layouts)} "
                "input_layouts, expected one layout per input: pass None for inputs to leave unchanged, and name "
                "keyword inputs in input_kwarg_layouts"
            )
        converted = [
            convert(value, layout, desired, f"input {i}")
            for i, (value, layout, desired) in enumerate(
                zip(inputs, self.input_layouts, self.desired_input_layouts, strict=True)
            )
        ]
        return tuple(converted), converted_kwargs


class PrepareModuleOutput(ParallelStyle):
    """Makes a module's outputs DTensors with the placements that the following modules need.

    Args:
        output_layouts: the placement of each plain output, in order; None leaves an output unchanged. A single
            placement is for a single output.
        desired_output_layouts: the placement that each output is redistributed to; None does not redistribute it.
        use_local_output: whether to return this rank's plain parts instead of DTensors.

    Raises:
        LayoutsError: different numbers of layouts and desired layouts.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts, "output_layouts") or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts, "desired_output_layouts") or ()
        self.use_local_output = use_local_output
        _check_pairs("output", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(self._prepare, device_mesh))
        return module

    def _prepare(self, mesh: DeviceMesh, module: nn.Module, _: object, outputs: Any) -> Any:
        is_sequence = isinstance(outputs, tuple | list)
        values = outputs if is_sequence else (outputs,)
        if len(values) != len(self.output_layouts):
            raise LayoutsError(
                f"a {type(module).__name__} returned {len(values)} outputs for {len(self.output_layouts)} "
                "output_layouts, expected one layout per output: pass None for outputs to leave unchanged"
            )
        convert = partial(_convert, module, mesh, self.use_local_output)
        converted = [
            convert(value, layout, desired, f"output {i}")
            for i, (value, layout, desired) in enumerate(
                zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
            )
        ]
        if not is_sequence:
            return converted[0]
        if hasattr(outputs, "_fields"):  # a named tuple
            return type(outputs)(*converted)
        return type(outputs)(converted)


class PrepareModuleInputOutput(ParallelStyle):
    """Combines PrepareModuleInput and PrepareModuleOutput; their arguments are described there.

    `use_local_input` is the `use_local_output` of PrepareModuleInput.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module


def _convert(
    module: nn.Module,
    mesh: DeviceMesh,
    use_local: bool,
    value: Any,
    layout: Placement | None,
    desired: Placement | None,
    name: str,
) -> Any:
    """Returns an input or output as a DTensor, redistributed if desired, or its plain part.

    A value that is a DTensor already keeps its own placement instead of `layout`.

    Args:
        name: names the value in messages.
    """
    if layout is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{name} is {type(value).__name__}, expected a tensor, since its layout is {layout}: pass None as "
            "its layout"
        )
    tensor = (
        value
        if isinstance(value, DTensor)
        else dtensor_from_parts(value, mesh, layout, known_lengths_of(module, mesh, layout), name)
    )
    if desired is not None:
        tensor = redistributed(tensor, (desired,))
    return with_recorded_length(tensor).to_local() if use_local else tensor


def _as_tuple(layouts: Layouts, argument: str) -> LayoutTuple:
    if layouts is None:
        return None
    return tuple(
        None if layout is None else single_placement(layout, argument)
        for layout in (tuple(layouts) if isinstance(layouts, Sequence) else (layouts,))
    )


def _checked_by_name(layouts: Mapping[str, Placement] | None, argument: str) -> dict[str, Placement]:
    return {
        name: single_placement(layout, f"{argument}[{name!r}]") for name, layout in (layouts or {}).items()
    }


def _check_pairs(side: str, layouts: LayoutTuple, desired: LayoutTuple) -> None:
    if (layouts is None) != (desired is None) or len(layouts or ()) != len(desired or ()):
        raise LayoutsError(
            f"got {side}_layouts={format_option(layouts)} and desired_{side}_layouts={format_option(desired)}, "
            f"expected the same number of both: pass both, with None for {side}s to leave unchanged"
        )


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
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, "
            f"use_local_output={self.use_local_output})"
        )
