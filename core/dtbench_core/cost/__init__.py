"""Cost model: the time of a collective on a mesh dim, and the cheapest chain of collectives.

Prices come from constants or from measurements:

    ring            ring formula, torch's constants for it, bus bandwidth
    curve           measured time over size
    topology        file of `dtbench calibrate`: the measurements of each mesh dim
    prices          price of a change of placement on one mesh dim
    mesh_topology   constants in use for a DeviceMesh: `use_topology`
    redistribution  price of a redistribution, and the cheapest chain of changes

The first four modules do not need torch.
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
