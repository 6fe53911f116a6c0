"""Random numbers that are the same as on one device, for any placements.

Every rank draws the global tensor with its default generator and keeps its part. The kernel, the global shape and the
strides are the same as on one device. So the numbers are the same, and so is the generator's state afterwards. Nothing
is sent, but each rank needs the memory and time to draw the global tensor.

A rank cannot draw only its part. A CPU generator is one sequence, and torch has no call that skips numbers. On CUDA, a
number depends on the thread that draws it. Which thread that is depends on the kernel's grid, and the grid depends on
the size of the global tensor.

The generators of all ranks must be in the same state. Seed them with the same seed, by `manual_seed`, or by
`torch.manual_seed(seed)` on every rank. Otherwise every rank takes the generator state of the mesh's first rank before
the first random op on the mesh. If a rank later seeds or draws alone, in_step.py restores a common state where replicas
are drawn. Shards are still random then, but may differ from those of one device.

A generator passed as `generator=` must be in the same state on all ranks. Ranks outside the mesh also draw, and drop
the numbers, so that their generators stay in the same state.

A graph does not contain generator states. In a graph, one rank sends its replica to the others.

If a mesh has a region (parallel/region.py), the region draws instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm
from dtbench_core.errors import ArgumentError
from dtbench_core.layout.in_step import draw_in_step, generators, note_equal_states
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
    """Draws for the DTensors of a mesh instead of the default generator (parallel/region.py)."""

    def draw(self, spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor: ...


# Regions that draw for the DTensors of a mesh instead of the default generator.
regions: PerRank[dict[DeviceMesh, Region]] = PerRank("layout.regions", dict)
# Meshes whose ranks' generators were set to one state.
in_step: PerRank[weakref.WeakSet[MeshInfo]] = PerRank("layout.in_step", weakref.WeakSet)


def draw(spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
    """Returns this rank's part of `make(spec.shape)`. `make` draws a tensor of the given shape."""
    entered = regions.get()
    region = entered.get(spec.info.mesh) if entered else None
    if region is not None:
        return region.draw(spec, make)
    return _local_part(draw_in_step(spec.info, spec.replica_dims, lambda: make(spec.shape)), spec)


def draw_like(
    spec: DTensorSpec,
    device: torch.device,
    op: Callable[[torch.Tensor], torch.Tensor],
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Returns this rank's part of `op(full)`, where `full` has the global shape, strides and dtype of `spec`.

    Args:
        op: draws a number for every element of its argument, in place or not. The argument's values are undefined.
        generator: the generator that `op` uses, if not the default one. It has precedence over a region.
    """
    entered = regions.get() if generator is None else None
    region = entered.get(spec.info.mesh) if entered else None
    if region is not None:
        return region.draw(spec, lambda shape: op(torch.empty(shape, dtype=spec.dtype, device=device)))
    full = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    if generator is not None:
        return _local_part(op(full), spec)
    return _local_part(draw_in_step(spec.info, spec.replica_dims, lambda: op(full)), spec)


def dropout(input: Any, p: float = 0.5, train: bool = True, inplace: bool = False, **options: object) -> Any:
    """Runs F.dropout like torch on a CPU; returns NotImplemented in all other cases.

    The mask has the input's strides, since the strides determine which number each element gets.
    """
    training = options.pop("training", train)
    if options or inplace or not training or not 0 < p < 1 or not isinstance(input, Wrapper):
        return NotImplemented
    spec = input._spec
    if spec.info.device_type != "cpu" or not spec.dtype.is_floating_point or 0 in spec.shape:
        return NotImplemented
    pending = any(isinstance(p, Partial) for p in spec.placements)
    if spec.row_major and not (pending or simulation.active or dispatch_modes_active() or regions.get()):
        # Computes the same as the ops below, without dispatch.
        keep_in_step(spec.info)
        local = stored_local(input)
        full = torch.empty(spec.shape, dtype=spec.dtype, device=local.device)
        draw_in_step(spec.info, spec.replica_dims, lambda: full.bernoulli_(1 - p))
        part = window_of(full, spec)
        part = part.div_(1 - p) if part is full else part / (1 - p)
        if is_grad_enabled() and any_requires_grad(input):
            return Dropout.apply(input, wrap(type(input).viewed, part, spec))
        return wrap(type(input).viewed, local * part, spec)
    with torch.no_grad():
        run = type(input).__torch_dispatch__
        if spec.row_major:  # bernoulli.p always returns a row-major tensor
            keep = run(torch.ops.aten.bernoulli.p, (), (input, 1 - p))  # type: ignore[call-arg]
        else:
            keep = run(torch.ops.aten.zeros_like.default, (), (input,))  # type: ignore[call-arg]
            run(torch.ops.aten.bernoulli_.float, (), (keep, 1 - p))  # type: ignore[call-arg]
        stored_local(keep).div_(1 - p)
    return input * keep


class Dropout(AutogradFunction):
    """Autograd function: (input, scaled mask) -> product. Both arguments have the same placements."""

    @staticmethod
    def forward(ctx: Ctx, input: Wrapper, keep: Wrapper) -> Wrapper:
        ctx.save_for_backward(keep)
        return wrap(type(input).viewed, stored_local(input) * stored_local(keep), input._spec)

    @staticmethod
    def backward(ctx: Ctx, grad: Wrapper) -> tuple[Any, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep, None


def keep_in_step(mesh: MeshInfo) -> None:
    """Sets every rank's generator to the state of the mesh's first rank, before the first random op on `mesh`."""
    if mesh in in_step.get() or is_fake_mode_active():  # a generator has no fake state
        return
    in_step.get().add(mesh)
    module = generators(mesh)
    state = module.get_rng_state().to(mesh.device_type)
    for group in mesh.groups:
        comm.broadcast(state, group)
    module.set_rng_state(state.cpu())
    note_equal_states(mesh)


def _local_part(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's part of a drawn global tensor."""
    part = part_of(full, spec)
    if dispatch_modes_active() and is_traced():
        for dim in () if simulation.active else sorted(spec.replica_dims):
            part = part.contiguous()
            comm.broadcast(part, spec.info.groups[dim])
    return part


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seeds the default generators of the mesh's device type and of the CPU.

    Every rank of the mesh must call it with the same seed. DTensors of the mesh then get the numbers that one device
    would draw after `torch.manual_seed(seed)`.

    Raises:
        ArgumentError: the seed is not an int; or, on every rank, the seeds differ.
    """
    if not isinstance(seed, int):
        raise ArgumentError(f"manual_seed got {seed!r}, expected an int: the seed of torch.manual_seed")
    mesh = mesh_info(device_mesh)
    halves = divmod(seed % 2**64, 2**32)  # int64 is too small for some seeds
    highest = torch.tensor([*halves, *(-h for h in halves)], device=mesh.device_type)
    for group in mesh.groups:
        comm.all_reduce(highest, group, "max")
    largest, smallest = highest[:2].tolist(), (-highest[2:]).tolist()
    if largest != smallest:
        raise ArgumentError(
            f"manual_seed got {seed} on this rank, but seeds differ over the {mesh} (the largest is "
            f"{largest[0] * 2**32 + largest[1]}): pass the same seed on every rank"
        )
    in_step.get().add(mesh)
    torch.default_generator.manual_seed(seed)  # host ops draw from it, whatever the mesh's devices are
    if mesh.device_type != "cpu":
        generators(mesh).manual_seed(seed)
    note_equal_states(mesh)
