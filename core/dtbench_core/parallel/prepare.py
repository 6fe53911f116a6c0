"""Styles that shard nothing: they place what goes into a module and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import Placement
from dtbench_core.parallel.convert import handed_out, lengths_read_by, placed, read_part
from dtbench_core.parallel.parameters import LayoutsError
from dtbench_core.parallel.style import ParallelStyle, one_placement, shown
from dtbench_core.tensor.dtensor import DTensor

Layouts = Placement | Sequence[Placement | None] | None
Listed = tuple[Placement | None, ...] | None


class PrepareModuleInput(ParallelStyle):
    """Makes a module's inputs DTensors, placed as the module wants them.

    Args:
        input_layouts: how each plain positional input is to be read, in their order; None for one to be left
            as it is. A single placement is that of a single input.
        desired_input_layouts: where each is to go; None keeps it where it is.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword inputs, by name. One that is
            not named is left as it is.
        use_local_output: hand the module this rank's plain parts, not DTensors.

    Raises:
        LayoutsError: layouts without, or not as many as, the desired ones.
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
        self.input_layouts = _listed(input_layouts, "input_layouts")
        self.desired_input_layouts = _listed(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = _named(input_kwarg_layouts, "input_kwarg_layouts")
        self.desired_input_kwarg_layouts = _named(desired_input_kwarg_layouts, "desired_input_kwarg_layouts")
        self.use_local_output = use_local_output
        _check_pairs("input", self.input_layouts, self.desired_input_layouts)
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise LayoutsError(
                f"got input_kwarg_layouts for {sorted(self.input_kwarg_layouts)} and desired_input_kwarg_layouts for "
                f"{sorted(self.desired_input_kwarg_layouts)}, expected the same names: name each in both"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._prepare, device_mesh), with_kwargs=True)
        return module

    def _prepare(
        self, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        convert = partial(_converted, module, mesh, self.use_local_output)
        here, there = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        named = {
            name: convert(one, here.get(name), there.get(name), f"input {name}")
            for name, one in kwargs.items()
        }
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs, named
        if len(inputs) != len(self.input_layouts):
            raise LayoutsError(
                f"a {type(module).__name__} got {len(inputs)} positional inputs for {len(self.input_layouts)} "
                "input_layouts, expected one each: give None for those to be left alone, and name keyword inputs "
                "in input_kwarg_layouts"
            )
        triples = zip(inputs, self.input_layouts, self.desired_input_layouts, strict=True)
        converted = [convert(one, own, wanted, f"input {i}") for i, (one, own, wanted) in enumerate(triples)]
        return tuple(converted), named


class PrepareModuleOutput(ParallelStyle):
    """Makes a module's outputs DTensors, placed as what follows wants them.

    Args:
        output_layouts: how each plain output is to be read, in their order; None for one to be left as it
            is. A single placement is that of a single output.
        desired_output_layouts: where each is to go; None keeps it where it is.
        use_local_output: give out this rank's plain parts, not DTensors.

    Raises:
        LayoutsError: not as many layouts as desired ones.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _listed(output_layouts, "output_layouts") or ()
        self.desired_output_layouts = _listed(desired_output_layouts, "desired_output_layouts") or ()
        self.use_local_output = use_local_output
        _check_pairs("output", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(self._prepare, device_mesh))
        return module

    def _prepare(self, mesh: DeviceMesh, module: nn.Module, _: object, outputs: Any) -> Any:
        several = isinstance(outputs, tuple | list)
        listed = outputs if several else (outputs,)
        if len(listed) != len(self.output_layouts):
            raise LayoutsError(
                f"a {type(module).__name__} gave {len(listed)} outputs for {len(self.output_layouts)} output_layouts, "
                "expected one each: give None for those to be left alone"
            )
        convert = partial(_converted, module, mesh, self.use_local_output)
        triples = zip(listed, self.output_layouts, self.desired_output_layouts, strict=True)
        converted = [convert(one, own, wanted, f"output {i}") for i, (one, own, wanted) in enumerate(triples)]
        if not several:
            return converted[0]
        if hasattr(outputs, "_fields"):  # a named tuple
            return type(outputs)(*converted)
        return type(outputs)(converted)


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one; see there for the arguments.

    `use_local_input` is PrepareModuleInput's `use_local_output`.
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


def _converted(
    module: nn.Module,
    mesh: DeviceMesh,
    local: bool,
    one: Any,
    layout: Placement | None,
    desired: Placement | None,
    what: str,
) -> Any:
    """`one` as a DTensor where it is wanted. One that is a DTensor already is moved from where it really is."""
    if layout is None:
        return one
    if not isinstance(one, torch.Tensor):
        raise ArgumentError(
            f"{what} is {type(one).__name__}, expected a tensor, as it has the layout {layout}: give None for it"
        )
    known = lengths_read_by(module, mesh, layout)
    tensor = one if isinstance(one, DTensor) else read_part(one, mesh, layout, known, what)
    if desired is not None:
        tensor = placed(tensor, (desired,))
    return handed_out(tensor).to_local() if local else tensor


def _listed(layouts: Layouts, argument: str) -> Listed:
    if layouts is None:
        return None
    listed = tuple(layouts) if isinstance(layouts, Sequence) else (layouts,)
    return tuple(None if one is None else one_placement(one, argument) for one in listed)


def _named(layouts: Mapping[str, Placement] | None, argument: str) -> dict[str, Placement]:
    return {name: one_placement(one, f"{argument}[{name!r}]") for name, one in (layouts or {}).items()}


def _check_pairs(side: str, layouts: Listed, desired: Listed) -> None:
    if (layouts is None) != (desired is None) or len(layouts or ()) != len(desired or ()):
        raise LayoutsError(
            f"got {side}_layouts={shown(layouts)} and desired_{side}_layouts={shown(desired)}, expected as many of "
            f"the one as of the other: give both, with None for {side}s to be left alone"
        )
