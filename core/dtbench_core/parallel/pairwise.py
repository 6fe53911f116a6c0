"""PairwiseParallel shards the Linears of an MLP in pairs: the first by columns, the second by rows.

A pair needs one all-reduce in the forward pass, after the second Linear, and one in the backward pass, before the
first. Between the two Linears the activations are DTensors sharded along their last dim, so that modules in between
see one whole tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.layout.mesh import mesh_or_current
from dtbench_core.layout.placement import Placement, Replicate, Shard
from dtbench_core.parallel.convert import (
    input_as_dtensor,
    redistribute_output,
    redistributed,
    with_recorded_length,
)
from dtbench_core.parallel.parameters import (
    PlanError,
    UnsupportedModuleError,
    UnsupportedStyleError,
    check_parameters,
    mesh_of_dim,
)
from dtbench_core.parallel.style import (
    ColwiseParallel,
    LayerStyle,
    ParallelStyle,
    RowwiseParallel,
    single_placement,
)
from dtbench_core.tensor.distribute import without_module
from dtbench_core.tensor.dtensor import DTensor

Prepare = Callable[[Any, DeviceMesh], Any]


class PairwiseParallel(ParallelStyle):
    """Shards the Linear children of a module (an MLP) alternately by columns and by rows.

    A last Linear without a partner stays unchanged. If a module has fewer than two Linears, its descendants are
    searched for modules that have them; the children of an MLP are not searched. Linears must be called in their
    order.

    Args:
        prepare_input: (inputs of the first Linear, mesh) -> its input as a DTensor. By default, a plain input is
            taken as placed by `input_layouts`.
        prepare_output: (output of the last Linear of a pair, mesh) -> the output passed to the next module. By
            default, the output is redistributed to `output_layouts`.
        input_layouts: by default Replicate().
        output_layouts: by default Replicate().
        use_local_output: without a `prepare_output`: whether to return this rank's plain part instead of a DTensor.
    """

    def __init__(
        self,
        prepare_input: Prepare | None = None,
        prepare_output: Prepare | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        layout = single_placement(input_layouts or Replicate(), "input_layouts")
        output_placement = single_placement(output_layouts or Replicate(), "output_layouts")
        # A replicated input need not be redistributed.
        self.prepare_input = prepare_input or partial(
            input_as_dtensor, layout=layout, placement=None if layout == Replicate() else Replicate()
        )
        self.prepare_output = prepare_output or partial(
            _default_output, placement=output_placement, local=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mlps = list(dict.fromkeys(_mlps(module)))
        if not mlps:
            warnings.warn(
                f"PairwiseParallel was applied to a {type(module).__name__}, found no module with two nn.Linear "
                "children in it and changes nothing: name single layers in the plan, with ColwiseParallel and "
                "RowwiseParallel",
                stacklevel=3,
            )
        for mlp in mlps:
            for linear in _pairs(mlp):
                check_parameters(type(self).__name__, linear, ("weight", "bias"))
        for mlp in mlps:
            self._shard(mlp, device_mesh)
        return module

    def _shard(self, mlp: nn.Module, mesh: DeviceMesh) -> None:
        linears = _pairs(mlp)
        prepare_input, prepare_output = (
            partial(without_module, prepare) for prepare in (self.prepare_input, self.prepare_output)
        )
        for index, linear in enumerate(linears):
            style: LayerStyle = RowwiseParallel() if index % 2 else ColwiseParallel()
            style.src_data_rank = self.src_data_rank
            style.shard(
                linear,
                mesh,
                partial(_inner_input, Shard(-1) if index % 2 else Replicate()) if index else prepare_input,
                prepare_output if index == len(linears) - 1 else (_inner_output if index % 2 else None),
            )


def parallelize_mlp(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallel_style: ParallelStyle | None = None,
    tp_mesh_dim: int | str = 0,
) -> nn.Module:
    """Calls `parallelize_module(module, mesh, PairwiseParallel())` for a module that is itself an MLP.

    Raises:
        UnsupportedStyleError: another style.
        UnsupportedModuleError: a module with fewer than two Linears.
    """
    style = PairwiseParallel() if parallel_style is None else parallel_style
    if not isinstance(style, PairwiseParallel):
        raise UnsupportedStyleError(
            f"Only support PairwiseParallel for MLP parallelization. Got {type(style)}: give parallelize_module a "
            "dict of the layers' names to their styles"
        )
    if len(_linears(module)) < 2:
        raise UnsupportedModuleError(
            f"More than one nn.Linear needed for a MLP. {type(module)} has {len(_linears(module))} among its "
            "children: pass the module that has them as children, or pass a module around it to parallelize_module"
        )
    return style._apply(module, mesh_of_dim(mesh_or_current(device_mesh), tp_mesh_dim))


def parallelize_linear(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallel_style: ParallelStyle | None = None,
    tp_mesh_dim: int | str = 0,
) -> nn.Module:
    """Calls `parallelize_module` for an nn.Linear; it is sharded by columns by default.

    Raises:
        UnsupportedModuleError: another module.
        PlanError: not a style.
        UnsupportedStyleError: a style other than ColwiseParallel and RowwiseParallel.
    """
    style = ColwiseParallel() if parallel_style is None else parallel_style
    if not isinstance(module, nn.Linear):
        raise UnsupportedModuleError(
            f"Expect a torch.nn.Linear module but received {type(module)}! Use parallelize_module for other modules"
        )
    if not isinstance(style, ParallelStyle):
        raise PlanError(
            f"Expect a ParallelStyle object but received {type(style)}! Pass ColwiseParallel() or RowwiseParallel()"
        )
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise UnsupportedStyleError(
            f"{type(style)} is not supported! Expected ColwiseParallel or RowwiseParallel for a Linear: use "
            "parallelize_module for other styles"
        )
    return style._apply(module, mesh_of_dim(mesh_or_current(device_mesh), tp_mesh_dim))


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module.children() if isinstance(child, nn.Linear)]


def _pairs(mlp: nn.Module) -> list[nn.Linear]:
    """Returns the Linears of an MLP, without a last one that has no partner."""
    linears = _linears(mlp)
    return linears[: len(linears) // 2 * 2]


def _mlps(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules with at least two Linear children."""
    if len(_linears(module)) > 1:
        yield module
        return
    for child in module.children():
        yield from _mlps(child)


def _default_output(output: DTensor, mesh: DeviceMesh, *, placement: Placement, local: bool) -> Any:
    tensor = redistribute_output(output, placement)
    return with_recorded_length(tensor).to_local() if local else tensor


def _inner_input(
    placement: Placement, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
) -> tuple[Any, ...]:
    """Redistributes the input of a layer inside an MLP, which gets the DTensor of the layer before it.

    A plain tensor is passed on unchanged, and the layer refuses it, since its placement is unknown.
    """
    return tuple(
        redistributed(value, (placement,)) if isinstance(value, DTensor) else value for value in inputs
    )


def _inner_output(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
    return redistributed(output, (Replicate(),))
