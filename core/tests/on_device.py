"""The device of tests that a GPU can run too: `DTBENCH_TEST_DEVICE=cuda pytest core/tests/test_comm.py ...`

`torch`, taken from here, makes tensors on that device where a test does not say which. Not by torch's default device,
which is a mode: under it the core takes other paths.
"""

import functools
import os
from typing import Any

import torch as _torch

DEVICE = os.environ.get("DTBENCH_TEST_DEVICE", "cpu")
# The device type of meshes.
DEVICE_TYPE = DEVICE.partition(":")[0]
_FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
)


class _Torch:
    """torch, whose factories know the device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(_torch, name)
        if name in _FACTORIES:
            found = functools.partial(_made, found)
        setattr(self, name, found)
        return found


def _made(factory: Any, *args: Any, **kwargs: Any) -> Any:
    if "generator" in kwargs or kwargs.get("out") is not None:  # a generator is a device's
        tensor = factory(*args, **kwargs)
        return tensor if "device" in kwargs or "out" in kwargs else tensor.to(DEVICE)
    return factory(*args, **({"device": DEVICE} | kwargs))


torch: Any = _torch if DEVICE == "cpu" else _Torch()
