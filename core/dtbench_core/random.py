"""Random numbers that are those of one device, however a tensor is placed.

Every rank draws for the whole tensor with its default generator and keeps its part, so the ranks'
generators must be in step: the first random op on a mesh gives all ranks the state of its first one.
"""

from __future__ import annotations

import weakref

import torch

from dtbench_core import comm
from dtbench_core.mesh import MeshInfo

_in_step: weakref.WeakSet[MeshInfo] = weakref.WeakSet()


def keep_in_step(mesh: MeshInfo) -> None:
    """Before the first random op on `mesh`: every rank takes the generator state of its first rank."""
    if mesh in _in_step:
        return
    _in_step.add(mesh)
    if mesh.device_type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(mesh.device_type).get_rng_state()
    on_device = state.to(mesh.device_type)
    for group in mesh.groups:
        comm.broadcast(on_device, group)
    state = on_device.cpu()
    if mesh.device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(mesh.device_type).set_rng_state(state)
