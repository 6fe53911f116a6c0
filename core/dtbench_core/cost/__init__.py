"""What a collective costs on a mesh dim, from constants or measurements, and the cheapest chain of them.

    ring           the formula of a ring, torch's constants for it, bus bandwidth
    curve          measured time over size
    topology       the file of `dtbench calibrate`: what was measured on each mesh dim
    prices         what one mesh dim charges for a change of placement
    mesh_topology  which constants price a DeviceMesh: `use_topology`
    redistribution         the cheapest chain of changes

The first four need no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtbench_core.cost.mesh_topology import use_topology

__all__ = ["use_topology"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("dtbench_core.cost.mesh_topology"), name)
    raise AttributeError(f"module 'dtbench_core.cost' has no attribute {name!r}")
