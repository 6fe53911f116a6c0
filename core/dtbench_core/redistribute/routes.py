"""Routes from one placement to another: `cheapest_route(spec, placements)` finds one, `run_route` executes it.

A route is the cheapest chain of steps according to the cost model in use. cost/redistribution.py searches for the
chain, movers.py executes a step, and autograd.py applies routes to DTensors. A route depends on specs alone, so every
rank computes the same one. It is cached and can be printed: `print(plan_of(tensor, placements))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtbench_core.cost.mesh_topology import topology_of
from dtbench_core.cost.redistribution import ChainSearch, Transition
from dtbench_core.cost.ring import LOCAL_COPY_US
from dtbench_core.errors import PlacementError
from dtbench_core.layout.local_shards import plain_part
from dtbench_core.layout.placement import (
    BITWISE,
    REPLICATE,
    Partial,
    Placement,
    Placements,
    describe,
    local_extents,
    permuted,
)
from dtbench_core.layout.shard_layout import with_local_stride
from dtbench_core.layout.spec import DTensorSpec, memory_order, normalize
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.redistribute.movers import Exchange, Mover, make_mover
from dtbench_core.runtime import cache_put, on_clear


class RedistributeStep(NamedTuple):
    """One step of a route: a change of placement on one mesh dim, or on several at once.

    Attributes:
        mesh_dims: the mesh dims that change.
        src, dst: placements of these mesh dims before and after the step.
        shape: shape of the tensor that the ranks along these mesh dims hold together.
        collective: the function of comm.py, or "" if nothing is sent.
        nbytes: bytes of the larger side of the collective.
        us: estimated microseconds.
    """

    mesh_dims: tuple[int, ...]
    src: Placements
    dst: Placements
    shape: tuple[int, ...]
    collective: str
    nbytes: int
    us: float

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.mesh_dims))
        return (
            f"mesh dim{'s' if len(self.mesh_dims) > 1 else ''} {dims}: {describe(self.src)} -> "
            f"{describe(self.dst)} of {list(self.shape)}"
        )


class Route(tuple[RedistributeStep, ...]):
    """The steps from one spec to another, ready to run. Printing it shows the estimated cost of each step.

    Attributes:
        source, result: specs before the first and after the last step.
        gradient: placements that a gradient of the result is redistributed to in the backward.
        movers: functions that execute the steps on this rank's shard, in order.
    """

    source: DTensorSpec
    result: DTensorSpec
    gradient: Placements
    movers: tuple[Mover, ...]

    @staticmethod
    def of(source: DTensorSpec, dst: Placements, steps: Sequence[RedistributeStep]) -> Route:
        route = Route(steps)
        route.source = source
        route.result = source.with_placements(dst) if steps else source
        route.gradient = placements_of_gradient(source.placements)
        in_mesh = source.info.coordinate is not None  # a rank outside the mesh has nothing to move
        route.movers = _movers(steps, source, route.result) if in_mesh and steps else ()
        return route

    @property
    def us(self) -> float:
        """Estimated microseconds of all steps."""
        return sum(step.us for step in self)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side of all collectives, as `count_collectives` counts them."""
        return sum(step.nbytes for step in self)

    def __str__(self) -> str:
        source, result = self.source, self.result
        kind = f"{str(source.dtype).removeprefix('torch.')}{list(source.shape)}"
        head = f"{kind} {describe(source.placements)} -> {describe(result.placements)} on {source.info}"
        if not self:
            return f"{head}: nothing to do"
        rows = [
            (f"{number}.", str(step), step.collective or "local", _bytes(step.nbytes), f"{step.us:.1f} us")
            for number, step in enumerate(self, 1)
        ]
        rows.append(("", "total", "", _bytes(self.nbytes), f"{self.us:.1f} us"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([*map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])])
            for row in rows
        ]
        return "\n".join([head, *lines])


def _bytes(count: int) -> str:
    """Formats a size: "0 B", "512 B", "1.5 KiB"."""
    power = min((max(count, 1).bit_length() - 1) // 10, 3)  # of 1024
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB" if power else f"{count} B"


def placements_of_gradient(placements: Placements) -> Placements:
    """Returns the placements of the gradient: Replicate for Partial, as each term receives the whole gradient."""
    return tuple(REPLICATE if p.is_partial() else p for p in placements)


# ---- finding routes ----

_routes: dict[tuple[DTensorSpec, Placements], Route] = {}
# Keyed by the placements as the user wrote them; None means Replicate on all mesh dims.
requested_routes: dict[tuple[DTensorSpec, Placements | None], Route] = {}
on_clear(_routes.clear)
on_clear(requested_routes.clear)


def cheapest_route(src: DTensorSpec, dst: Placements) -> Route:
    """Returns the cheapest route from `src` to the placements `dst`, from the cache if possible.

    Raises:
        PlacementError: no route exists, as from a Shard or another kind of Partial to a Partial.
    """
    key = (src, dst)
    if (route := _routes.get(key)) is None:
        route = _find(src, dst)
        cache_put(_routes, key, route)
    return route


def requested_route(spec: DTensorSpec, placements: Sequence[Placement] | None) -> Route:
    """Checks placements given by the user and returns the route to them, from the cache if possible.

    Raises:
        PlacementError: the placements do not suit the tensor, or contain a Partial that the tensor does not have yet.
    """
    try:
        return requested_routes[spec, None if placements is None else tuple(placements)]
    except (
        KeyError,
        TypeError,
    ):
        # TypeError: not a sequence or not placements; `normalize` raises a clear error
        pass
    placed = normalize(placements, spec.ndim, spec.info, spec.shape)
    for current, target in zip(spec.placements, placed, strict=True):
        if target.is_partial() and target != current:
            raise PlacementError(
                f"redistribute got {describe(placed)} for {spec}, expected Shard, Replicate, or the "
                "Partial that the tensor already has: the terms of another Partial are not defined"
            )
    route = cheapest_route(spec, placed)
    cache_put(requested_routes, (spec, None if placements is None else tuple(placements)), route)
    return route


def plan_of(tensor: Wrapper | DTensorSpec, placements: Sequence[Placement] | None = None) -> Route:
    """Returns the route that `redistribute(placements=placements)` would take, without sending anything.

    Printing the route shows one line per step with its bytes and estimated microseconds. By default the estimates use
    built-in constants; `dtbench_core.cost.use_topology` switches to measurements of your machine.

    Args:
        tensor: a DTensor, or the spec of one.

    Raises:
        PlacementError: in the same cases as `redistribute`.
    """
    return requested_route(tensor if isinstance(tensor, DTensorSpec) else tensor._spec, placements)


def explain(tensor: Wrapper | DTensorSpec, placements: Sequence[Placement] | None = None) -> str:
    """Returns the text of `plan_of(tensor, placements)`."""
    return str(plan_of(tensor, placements))


def _find(src: DTensorSpec, dst: Placements) -> Route:
    if src.placements == dst:
        return Route.of(src, dst, ())
    info = src.info
    for placement, target in zip(src.placements, dst, strict=True):
        if placement == target or not isinstance(placement, Partial):
            continue
        if placement.reduce_op == "avg" and not is_inexact(src.dtype):
            raise PlacementError(
                f"cannot redistribute {src} to {describe(dst)}: Partial('avg') is not defined for integers: use "
                "floating point, or Partial() and divide"
            )
        if placement.reduce_op in BITWISE and is_inexact(src.dtype):
            raise PlacementError(
                f"cannot redistribute {src} to {describe(dst)}: {placement} is only defined for integers and booleans: "
                "view or convert the terms to one of these types"
            )
    transitions = ChainSearch(
        src.shape,
        src.dtype.itemsize,
        src.placements,
        dst,
        topology_of(info.mesh),
        copy_us=LOCAL_COPY_US,
        joint=info.world_group is not None,
    ).cheapest()
    if transitions is None:
        raise PlacementError(
            f"cannot redistribute {src} to {describe(dst)}: a Partial can only come from Replicate or from the same "
            "Partial; redistribute to Replicate or Shard instead"
        )
    return route_along(src, transitions)


def route_along(src: DTensorSpec, transitions: Sequence[Transition]) -> Route:
    """Returns the route that consists of these transitions."""
    info = src.info
    coordinate = info.coordinate or (0,) * info.ndim
    steps, state = [], list(src.placements)
    for mesh_dims, step_src, step_dst, collective, nbytes, us in transitions:
        shape, _ = local_extents(
            src.shape,
            tuple([REPLICATE if d in mesh_dims else placement for d, placement in enumerate(state)]),
            info.sizes,
            coordinate,
        )
        steps.append(RedistributeStep(mesh_dims, step_src, step_dst, shape, collective, nbytes, us))
        for mesh_dim, placement in zip(mesh_dims, step_dst, strict=True):
            state[mesh_dim] = placement
    return Route.of(src, tuple(state), steps)


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _movers(steps: Sequence[RedistributeStep], source: DTensorSpec, result: DTensorSpec) -> tuple[Mover, ...]:
    """Returns the functions that execute the steps.

    Shards are sent with their dims in the memory order of the spec, which usually is their own memory order. They then
    keep it, and no step has to copy them to change it.
    """
    order = result.order
    places = [order.index(dim) for dim in range(len(order))]
    movers: list[Mover] = []
    for step in steps:
        src, dst = permuted(step.src, places), permuted(step.dst, places)
        shape = tuple(step.shape[dim] for dim in order)
        movers.append(_mover(step._replace(src=src, dst=dst, shape=shape), source))
    if places != sorted(places):
        movers = [lambda local: local.permute(order), *movers, lambda local: local.permute(places)]
    if memory_order(result.shape, result.stride) != list(order):
        movers.append(lambda local: with_local_stride(local, result))
    return tuple(movers)


def _mover(step: RedistributeStep, spec: DTensorSpec) -> Mover:
    info, dims = spec.info, step.mesh_dims
    my_coordinate = info.my_coordinate()
    group = info.groups[dims[0]] if len(dims) == 1 else info.world_group
    assert group is not None  # without a joint group, the search changes one mesh dim at a time
    sizes, coordinate = zip(*((info.sizes[d], my_coordinate[d]) for d in dims), strict=True)
    return make_mover(Exchange(step.src, step.dst, sizes, step.shape, spec.dtype, group, coordinate))


def run_route(local: torch.Tensor, route: Route) -> torch.Tensor:
    """Runs the route on this rank's shard. Every rank of the mesh must call it.

    The result shares no memory with `local`, unless the route has no steps.
    """
    if local.__class__ is not torch.Tensor and route:
        local = plain_part(local, route.source)
    if local.is_meta and route:  # nothing to send
        return local.new_empty_strided(route.result.local_shape, route.result.local_stride)
    for move in route.movers:
        local = move(local)
    return local
