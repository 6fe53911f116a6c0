"""Random numbers that are those of one device, however the tensor is placed.

Every rank draws the whole tensor with its default generator and keeps its part. So all ranks advance
their generators alike, as one device would: seed them alike (`torch.manual_seed`). Ranks outside the
mesh draw too, and keep nothing, to stay in step with the members.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from dtbench_core import comm
from dtbench_core.layout import part_of
from dtbench_core.mesh import MeshInfo
from dtbench_core.spec import DTensorSpec


def draw(spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
    """This rank's part of `make(spec.shape)`, where `make` draws a tensor of the shape it is given."""
    return part_of(make(spec.shape), spec)


_in_step: weakref.WeakSet[MeshInfo] = weakref.WeakSet()


def keep_in_step(mesh: MeshInfo) -> None:
    """Before the first random op on `mesh`: every rank takes the generator state of the mesh's first."""
    if mesh in _in_step:
        return
    _in_step.add(mesh)
    module = torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
    state = module.get_rng_state().to(mesh.device_type)
    for group in mesh.groups:
        comm.broadcast(state, group)
    module.set_rng_state(state.cpu())
