"""PairwiseParallel: the Linears of an MLP in pairs, by columns and then by rows.

A pair needs one all-reduce forward, after the second, and one backward, before the first. Between them the
activations are DTensors sharded along their last dim, so that whatever stands between sees one whole tensor.
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
from dtbench_core.parallel.convert import handed_out, placed, placed_output, read_input
from dtbench_core.parallel.parameters import (
    PlanError,
    UnsupportedModuleError,
    UnsupportedStyleError,
    check_parameters,
    mesh_of_dim,
)
from dtbench_core.parallel.style import (
    ColwiseParallel,
    Convert,
    LayerStyle,
    ParallelStyle,
    RowwiseParallel,
    one_placement,
)
from dtbench_core.tensor.distribute import without_module
from dtbench_core.tensor.dtensor import DTensor

Prepare = Callable[[Any, DeviceMesh], Any]


class PairwiseParallel(ParallelStyle):
    """Shards an MLP: of the Linears among a module's children, each even one by columns, each odd one by rows.

    A last one without a partner stays as it is. A module with fewer than two Linears is searched for
    modules that have them; the children of an MLP are not searched. Linears must be called in their order.

    Args:
        prepare_input: (inputs of the first Linear, mesh) -> its input as a DTensor. Without it a plain
            input is read as `input_layouts` says, Replicate() when not given.
        prepare_output: (output of the last Linear of a pair, mesh) -> what the module goes on with. Without
            it the output is placed as `output_layouts`, Replicate() when not given.
        use_local_output: without a prepare_output: give out this rank's plain part, not a DTensor.
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
        layout = one_placement(input_layouts or Replicate(), "input_layouts")
        wanted = one_placement(output_layouts or Replicate(), "output_layouts")
        # Read as Replicate(), it need not be moved.
        moved_to = None if layout == Replicate() else Replicate()
        self.prepare_input = prepare_input or partial(read_input, layout=layout, wanted=moved_to)
        self.prepare_output = prepare_output or partial(_left, wanted=wanted, local=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mlps = list(dict.fromkeys(_mlps(module)))
        if not mlps:
            warnings.warn(
                f"PairwiseParallel found no module with two nn.Linear children in the {type(module).__name__} it was "
                "applied to and changes nothing: name single layers in the plan, with ColwiseParallel and "
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
        read, give = partial(without_module, self.prepare_input), partial(without_module, self.prepare_output)
        for index, linear in enumerate(linears):
            style: LayerStyle = RowwiseParallel() if index % 2 else ColwiseParallel()
            style.src_data_rank = self.src_data_rank
            moved: Convert = partial(_moved, Shard(-1) if index % 2 else Replicate())
            summed: Convert | None = _summed if index % 2 else None
            last = index == len(linears) - 1
            style.shard(linear, mesh, moved if index else read, give if last else summed)


def parallelize_mlp(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallel_style: ParallelStyle | None = None,
    tp_mesh_dim: int | str = 0,
) -> nn.Module:
    """`parallelize_module(module, mesh, PairwiseParallel())` for a module that is itself an MLP.

    Raises:
        UnsupportedStyleError: another style. UnsupportedModuleError: a module with fewer than two Linears.
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
            "children: pass the module that holds them, or the larger one to parallelize_module"
        )
    return style._apply(module, mesh_of_dim(mesh_or_current(device_mesh), tp_mesh_dim))


def parallelize_linear(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallel_style: ParallelStyle | None = None,
    tp_mesh_dim: int | str = 0,
) -> nn.Module:
    """`parallelize_module` for one nn.Linear; by columns when no style is given.

    Raises:
        UnsupportedModuleError: another module. PlanError: no style.
        UnsupportedStyleError: a style that is neither ColwiseParallel nor RowwiseParallel.
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
    """Its Linears, without a last one that has no partner."""
    linears = _linears(mlp)
    return linears[: len(linears) // 2 * 2]


def _mlps(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of the tree that have two Linears among their children."""
    if len(_linears(module)) > 1:
        yield module
        return
    for child in module.children():
        yield from _mlps(child)


def _left(output: DTensor, mesh: DeviceMesh, *, wanted: Placement, local: bool) -> Any:
    moved = placed_output(output, wanted)
    return handed_out(moved).to_local() if local else moved


def _moved(wanted: Placement, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    """For a layer within a pair, which gets the DTensor of the one before. A plain tensor is left for the
    layer to refuse: nothing says what it would be part of."""
    return tuple(placed(one, (wanted,)) if isinstance(one, DTensor) else one for one in inputs)


def _summed(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
    return placed(output, (Replicate(),))
