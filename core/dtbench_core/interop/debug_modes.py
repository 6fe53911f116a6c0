"""Support for DTensors in torch's DebugMode and CommDebugMode: the op, and the ops and collectives on the shards.

For a tensor class that it does not know, a mode switches itself off while the op runs, so nothing within the op is
recorded. Both modes know torch's DTensor: they record its op, and stay active within it. So our DTensor is presented
to them as torch's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Call
from dtbench_core.torch_compat import when_imported

_MODES = {"torch.utils._debug_mode": "DebugMode", "torch.distributed.tensor.debug": "CommDebugMode"}


def _with_torch_types(dispatch: Call) -> Call:
    def torch_dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Wrapper) for kind in types):
            types = (torch.distributed.tensor.DTensor,)
        return dispatch(self, func, types, args, kwargs or {})

    return torch_dispatch


def _support_dtensor(module: ModuleType) -> None:
    mode = getattr(module, _MODES[module.__name__])
    mode.__torch_dispatch__ = _with_torch_types(mode.__torch_dispatch__)
    if module.__name__ == "torch.distributed.tensor.debug":
        _support_sharding_info(module._comm_mode)


def _support_sharding_info(module: ModuleType) -> None:
    """Makes CommDebugMode.get_sharding_info list parameters that are DTensors of either library."""

    class AnyDTensor(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (torch.distributed.tensor.DTensor, Wrapper))

        def __eq__(cls, kind: object) -> bool:  # the mode compares it with the types of an op
            return kind is cls or kind is torch.distributed.tensor.DTensor

        __hash__ = type.__hash__

    vars(module)["DTensor"] = AnyDTensor("DTensor", (), {})


for _name in _MODES:
    when_imported(_name, _support_dtensor)
