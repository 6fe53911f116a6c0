"""Parameters in their places: the checks before, the cutting, and ties between modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import Placement
from dtbench_core.parallel.errors import UnsupportedModuleError
from dtbench_core.tensor.distribute import distribute_tensor
from dtbench_core.tensor.dtensor import DTensor

# Original parameter -> what it became, so that tied parameters stay tied. It lives while any module
# still holds the original.
_became: Any = WeakIdKeyDictionary()


def left_behind(module: nn.Module) -> list[str]:
    """Names of parameters that were tied to one now sharded, and that no style has reached."""
    return [name for name, parameter in module.named_parameters() if parameter in _became]


def check_parameters(style: str, module: nn.Module, names: Iterable[str]) -> None:
    """Refuses parameters that are computed, not made yet, or DTensors already."""
    kind = type(module).__name__
    for name in names:
        parameter = module._parameters.get(name)
        if name not in module._parameters or isinstance(parameter, UninitializedParameter):
            raise UnsupportedModuleError(
                f"{style} got a {kind} whose {name} is computed or not made yet, expected a parameter: "
                "initialise lazy modules, and remove parametrizations, before parallelizing"
            )
        if isinstance(parameter, DTensor):
            raise ArgumentError(
                f"{style} got a {kind} whose {name} is a DTensor already ({parameter._spec}), expected a plain "
                "parameter: parallelize a module once; two keys of the plan may match it"
            )


def place_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Puts the DTensor of a module's own parameter, if it has one, in its place."""
    original = module._parameters.get(name)
    if original is None:
        return
    info: MeshInfo = mesh_info(mesh)
    placed: nn.Parameter | None = _became.get(original)
    if placed is None:
        spread = distribute_tensor(original.detach(), mesh, [placement], src_data_rank=src_data_rank)
        placed = _became[original] = nn.Parameter(spread, requires_grad=original.requires_grad)
    elif (
        not isinstance(placed, DTensor) or placed._spec.info is not info or placed.placements != (placement,)
    ):
        raise ArgumentError(
            f"the {name} of a {type(module).__name__} is tied to one already placed as "
            f"{getattr(placed, '_spec', placed)}, expected {placement} on {info}: give both modules styles that shard "
            "it alike, or untie them"
        )
    module.register_parameter(name, placed)
