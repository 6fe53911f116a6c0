"""Random numbers that are those of one device, however the tensor is placed.

Every rank draws the whole tensor with its default generator, by the same kernel and with the same
global shape and strides as one device would, and keeps its part: the numbers are the same, and so is
how far the generator advances. That costs each rank the memory and time of the whole tensor for a
moment, and sends nothing.

A rank cannot draw its part alone. A CPU's generator is one sequence, and torch has no call that skips numbers. On CUDA
a number follows from the thread that draws it, and the kernel's grid from the size of the whole tensor.

It holds while the generators of the ranks are in one state. Seed them with one seed, with `manual_seed` or with
`torch.manual_seed(seed)` on every rank. For those who did neither, every rank takes over the generator
state of the mesh's first rank before the first random op on a mesh. A rank may afterwards seed or draw by
itself: where replicas are drawn, their ranks then compare, and take over the first's state where they differ, or take
back the others' where these stayed in step (in_step.py); shards are still random, and may not be those of one device.
A generator passed as `generator=` is the caller's: it must be in the same state on all ranks.
Ranks outside the mesh draw too, and keep nothing, to stay in step with the members.

A graph has no part in the states of generators: there, what replicas drew is sent by the first of their ranks.

Where a mesh has a region, that draws instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm
from dtbench_core.errors import ArgumentError
from dtbench_core.layout.in_step import agreed, drawn, generators
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import Partial
from dtbench_core.layout.shard_layout import part_of, window_of
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, stored_local, wrap
from dtbench_core.op_types import Ctx
from dtbench_core.runtime import PerRank, simulation
from dtbench_core.torch_compat import (
    AutogradFunction,
    any_requires_grad,
    dispatch_modes_active,
    is_fake_mode_active,
    is_grad_enabled,
    is_traced,
)


class Region(Protocol):
    """What draws for the DTensors of a mesh in another way (parallel/region.py)."""

    def draw(self, spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor: ...


# What draws for the DTensors of a mesh, where it is not the default generator.
regions: PerRank[dict[DeviceMesh, Region]] = PerRank("layout.regions", dict)
# Meshes whose ranks' generators were brought into one state.
in_step: PerRank[weakref.WeakSet[MeshInfo]] = PerRank("layout.in_step", weakref.WeakSet)


def draw(spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
    """This rank's part of `make(spec.shape)`, where `make` draws a tensor of the shape it is given."""
    entered = regions.get()
    region = entered.get(spec.info.mesh) if entered else None
    if region is not None:
        return region.draw(spec, make)
    return _kept(drawn(spec.info, spec.replica_dims, lambda: make(spec.shape)), spec)


def draw_like(
    spec: DTensorSpec,
    device: torch.device,
    op: Callable[[torch.Tensor], torch.Tensor],
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """This rank's part of `op(whole)`, where `whole` has the global shape, strides and dtype of `spec`.

    `op` draws for every element of `whole`, whose values are undefined, in place or not. generator: the one
    that it draws from, if not the default one.
    """
    # A generator that the caller brings goes before a region.
    entered = regions.get() if generator is None else None
    region = entered.get(spec.info.mesh) if entered else None
    if region is not None:
        return region.draw(spec, lambda shape: op(torch.empty(shape, dtype=spec.dtype, device=device)))
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    if generator is not None:
        return _kept(op(whole), spec)
    return _kept(drawn(spec.info, spec.replica_dims, lambda: op(whole)), spec)


def dropout(input: Any, p: float = 0.5, train: bool = True, inplace: bool = False, **others: object) -> Any:
    """F.dropout as torch does it on a CPU; NotImplemented where it is not for it. The mask lies in memory as the input
    does, which decides where the numbers go."""
    training = others.pop("training", train)
    if others or inplace or not training or not 0 < p < 1 or not isinstance(input, Wrapper):
        return NotImplemented
    spec = input._spec
    if spec.info.device_type != "cpu" or not spec.dtype.is_floating_point or 0 in spec.shape:
        return NotImplemented
    pending = any(isinstance(p, Partial) for p in spec.placements)
    if spec.row_major and not (pending or simulation.active or dispatch_modes_active() or regions.get()):
        # Nothing is to be decided, and nobody looks on: what the ops below would draw and compute.
        keep_in_step(spec.info)
        local = stored_local(input)
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=local.device)
        drawn(spec.info, spec.replica_dims, lambda: whole.bernoulli_(1 - p))
        part = window_of(whole, spec)
        part = part.div_(1 - p) if part is whole else part / (1 - p)
        if is_grad_enabled() and any_requires_grad(input):
            return Dropout.apply(input, wrap(type(input).viewed, part, spec))
        return wrap(type(input).viewed, local * part, spec)
    with torch.no_grad():
        run = type(input).__torch_dispatch__
        if spec.row_major:  # as which this op alone leaves its result
            keep = run(torch.ops.aten.bernoulli.p, (), (input, 1 - p))  # type: ignore[call-arg]
        else:
            keep = run(torch.ops.aten.zeros_like.default, (), (input,))  # type: ignore[call-arg]
            run(torch.ops.aten.bernoulli_.float, (), (keep, 1 - p))  # type: ignore[call-arg]
        stored_local(keep).div_(1 - p)
    return input * keep


class Dropout(AutogradFunction):
    """(input, what its elements are multiplied by) -> their product, both placed alike."""

    @staticmethod
    def forward(ctx: Ctx, input: Wrapper, keep: Wrapper) -> Wrapper:
        ctx.save_for_backward(keep)
        return wrap(type(input).viewed, stored_local(input) * stored_local(keep), input._spec)

    @staticmethod
    def backward(ctx: Ctx, grad: Wrapper) -> tuple[Any, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep, None


def keep_in_step(mesh: MeshInfo) -> None:
    """Before the first random op on `mesh`: every rank takes the generator state of the mesh's first."""
    if mesh in in_step.get() or is_fake_mode_active():  # a generator has no fake state
        return
    in_step.get().add(mesh)
    module = generators(mesh)
    state = module.get_rng_state().to(mesh.device_type)
    for group in mesh.groups:
        comm.broadcast(state, group)
    module.set_rng_state(state.cpu())
    agreed(mesh)


def _kept(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of what was drawn."""
    part = part_of(whole, spec)
    if dispatch_modes_active() and is_traced():
        for dim in () if simulation.active else sorted(spec.replica_dims):
            part = part.contiguous()
            comm.broadcast(part, spec.info.groups[dim])
    return part


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seeds the default generators of the mesh's device type and of the CPU; every rank of the mesh calls it with the
    same seed.

    What DTensors of the mesh draw from then on is what one device would draw after
    `torch.manual_seed(seed)`.

    Raises:
        ArgumentError: the ranks gave different seeds, on every rank; or not an int.
    """
    if not isinstance(seed, int):
        raise ArgumentError(f"manual_seed got {seed!r}, expected an int: the seed of torch.manual_seed")
    mesh = mesh_info(device_mesh)
    halves = divmod(seed % 2**64, 2**32)  # as int64 cannot hold every seed
    highest = torch.tensor([*halves, *(-h for h in halves)], device=mesh.device_type)
    for group in mesh.groups:
        comm.all_reduce(highest, group, "max")
    most, least = highest[:2].tolist(), (-highest[2:]).tolist()
    if most != least:
        raise ArgumentError(
            f"manual_seed got {seed} on this rank, but seeds differ over the {mesh} (the largest is "
            f"{most[0] * 2**32 + most[1]}): pass the same seed on every rank"
        )
    in_step.get().add(mesh)
    torch.default_generator.manual_seed(seed)  # which draws on the host whatever the mesh's devices are
    if mesh.device_type != "cpu":
        generators(mesh).manual_seed(seed)
    agreed(mesh)
