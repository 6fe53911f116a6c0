"""torch's DebugMode and CommDebugMode over DTensors: the op, and what it runs and sends on the shards.

Of a class that it does not know a mode runs the op with itself switched off, so that nothing within is seen. Both
modes know torch's DTensor, note its op, and let it run under them; ours are shown to them as such.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Call
from dtbench_core.torch_compat import when_imported

_MODES = {"torch.utils._debug_mode": "DebugMode", "torch.distributed.tensor.debug": "CommDebugMode"}


def _seen_as_torchs(dispatch: Call) -> Call:
    def torch_dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = any(issubclass(kind, Wrapper) for kind in types)
        theirs = (torch.distributed.tensor.DTensor,)
        return dispatch(self, func, theirs if ours else types, args, kwargs or {})

    return torch_dispatch


def _teach(module: ModuleType) -> None:
    mode = getattr(module, _MODES[module.__name__])
    mode.__torch_dispatch__ = _seen_as_torchs(mode.__torch_dispatch__)
    if module.__name__ == "torch.distributed.tensor.debug":
        _teach_sharding_info(module._comm_mode)


def _teach_sharding_info(module: ModuleType) -> None:
    """CommDebugMode.get_sharding_info lists parameters that are DTensors of either library."""

    class Either(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (torch.distributed.tensor.DTensor, Wrapper))

        def __eq__(cls, other: object) -> bool:  # asked of the types of an op
            return other is cls or other is torch.distributed.tensor.DTensor

        __hash__ = type.__hash__

    vars(module)["DTensor"] = Either("DTensor", (), {})


for _name in _MODES:
    when_imported(_name, _teach)
