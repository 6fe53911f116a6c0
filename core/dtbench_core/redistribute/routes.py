"""Moving a tensor from one placement to another: cheapest_route(src, dst) -> a route, and run_route(route).

A route is the cheapest chain of steps under the cost model in use (cost/redistribution.py searches it, movers.py does
a step, autograd.py brings DTensors along). It depends on specs alone, so that every rank computes the same
one and it can be cached and printed: `print(plan_of(tensor, placements))`.
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
from dtbench_core.layout.shard_layout import laid_out
from dtbench_core.layout.spec import DTensorSpec, memory_order, normalize
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.redistribute.movers import Exchange, Mover, make_mover
from dtbench_core.runtime import cache_put, on_clear


class RedistributeStep(NamedTuple):
    """One transition, of one mesh dim or of several at once.

    src, dst: per mesh dim of `mesh_dims`. shape: of the tensor that the ranks of these mesh dims share.
    collective: a function of comm.py, or "" when nothing is sent. nbytes, us: what the cost model
    expects: bytes of the larger side, and microseconds.
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
    """The steps from one spec to another, ready to run; printed, what they are expected to cost.

    source, result: the specs at its ends. gradient: the placements that a gradient goes back to.
    """

    source: DTensorSpec
    result: DTensorSpec
    gradient: Placements
    movers: tuple[Mover, ...]

    @staticmethod
    def of(source: DTensorSpec, dst: Placements, steps: Sequence[RedistributeStep]) -> Route:
        route = Route(steps)
        route.source = route.result = source
        if steps:
            route.result = source.with_placements(dst)
        route.gradient = placements_of_gradient(source.placements)
        member = source.info.coordinate is not None  # a rank outside the mesh has nothing to move
        route.movers = _movers(steps, source, route.result) if member and steps else ()
        return route

    @property
    def us(self) -> float:
        """Microseconds that the cost model expects."""
        return sum(step.us for step in self)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side of every collective, as `count_collectives` counts them."""
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
    """`0 B`, `512 B`, `1.5 KiB`."""
    power = min((max(count, 1).bit_length() - 1) // 10, 3)  # of 1024
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB" if power else f"{count} B"


def placements_of_gradient(placements: Placements) -> Placements:
    """Where the gradient of a tensor so placed belongs: each term of a Partial has the whole gradient."""
    return tuple(REPLICATE if p.is_partial() else p for p in placements)


# ---- planning (pure) ----

_routes: dict[tuple[DTensorSpec, Placements], Route] = {}
# By placements as the user writes them; None: all Replicate.
requested_routes: dict[tuple[DTensorSpec, Placements | None], Route] = {}
on_clear(_routes.clear)
on_clear(requested_routes.clear)


def cheapest_route(src: DTensorSpec, dst: Placements) -> Route:
    """The cheapest route from `src` to the placements `dst`; cached.

    Raises:
        PlacementError: there is no way (a Shard or another reduction to Partial).
    """
    key = (src, dst)
    route = _routes.get(key)
    if route is None:
        route = _find(src, dst)
        cache_put(_routes, key, route)
    return route


def requested_route(spec: DTensorSpec, placements: Sequence[Placement] | None) -> Route:
    """The route to placements that a user wrote, checked; cached.

    Raises:
        PlacementError: not placements of this tensor, or a Partial that it is not already.
    """
    try:
        return requested_routes[spec, None if placements is None else tuple(placements)]
    except (KeyError, TypeError):  # TypeError: no sequence, or no placements, which `normalize` tells
        pass
    placed = normalize(placements, spec.ndim, spec.info, spec.shape)
    for current, wanted in zip(spec.placements, placed, strict=True):
        if wanted.is_partial() and wanted != current:
            raise PlacementError(
                f"redistribute got {describe(placed)} for {spec}, expected Shard or Replicate where the tensor is "
                "not already that Partial: nothing says which terms the ranks should hold"
            )
    route = cheapest_route(spec, placed)
    cache_put(requested_routes, (spec, None if placements is None else tuple(placements)), route)
    return route


def plan_of(tensor: Wrapper | DTensorSpec, placements: Sequence[Placement] | None = None) -> Route:
    """How `redistribute(placements=placements)` would move `tensor` (or a tensor of that spec).

    Nothing is sent. Printed, the route shows a line per step with the bytes and microseconds that the
    cost model expects; `dtbench_core.cost.use_topology` makes these your machine's.

    Raises:
        PlacementError: as redistribute would.
    """
    return requested_route(tensor if isinstance(tensor, DTensorSpec) else tensor._spec, placements)


def explain(tensor: Wrapper | DTensorSpec, placements: Sequence[Placement] | None = None) -> str:
    """`plan_of` as text."""
    return str(plan_of(tensor, placements))


def _find(src: DTensorSpec, dst: Placements) -> Route:
    if src.placements == dst:
        return Route.of(src, dst, ())
    info = src.info
    for placement, wanted in zip(src.placements, dst, strict=True):
        if placement == wanted or not isinstance(placement, Partial):
            continue
        if placement.reduce_op == "avg" and not is_inexact(src.dtype):
            raise PlacementError(
                f"cannot redistribute {src} to {describe(dst)}: Partial('avg') is not defined for integers: use "
                "floating point, or Partial() and divide"
            )
        if placement.reduce_op in BITWISE and is_inexact(src.dtype):
            raise PlacementError(
                f"cannot redistribute {src} to {describe(dst)}: bits are those of whole numbers and booleans; view or "
                "convert the terms to one of these types"
            )
    transitions = ChainSearch(
        src.shape,
        src.dtype.itemsize,
        src.placements,
        dst,
        topology_of(info.mesh),
        copy_us=LOCAL_COPY_US,
        together=info.whole is not None,
    ).cheapest()
    if transitions is None:
        raise PlacementError(
            f"cannot redistribute {src} to {describe(dst)}: a Partial can only come from Replicate or from the same "
            "Partial; redistribute to Replicate or Shard instead"
        )
    return route_along(src, transitions)


def route_along(src: DTensorSpec, transitions: Sequence[Transition]) -> Route:
    """The route that takes these transitions, be they the cheapest or not."""
    info = src.info
    coordinate = info.coordinate or (0,) * info.ndim
    steps, state = [], list(src.placements)
    for mesh_dims, before, after, collective, nbytes, us in transitions:
        shared = [REPLICATE if d in mesh_dims else placement for d, placement in enumerate(state)]
        shape, _ = local_extents(src.shape, tuple(shared), info.sizes, coordinate)
        steps.append(RedistributeStep(mesh_dims, before, after, shape, collective, nbytes, us))
        for mesh_dim, placement in zip(mesh_dims, after, strict=True):
            state[mesh_dim] = placement
    return Route.of(src, tuple(state), steps)


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _movers(steps: Sequence[RedistributeStep], source: DTensorSpec, result: DTensorSpec) -> tuple[Mover, ...]:
    """What runs the steps. Shards travel with their dims in the spec's order: mostly that of memory, which they then
    keep, and no step copies them for it."""
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
        movers.append(lambda local: laid_out(local, result))
    return tuple(movers)


def _mover(step: RedistributeStep, spec: DTensorSpec) -> Mover:
    info, dims = spec.info, step.mesh_dims
    mine = info.my_coordinate()
    group = info.groups[dims[0]] if len(dims) == 1 else info.whole
    assert group is not None  # without it the planner moves one mesh dim at a time
    sizes, coordinate = zip(*((info.sizes[d], mine[d]) for d in dims), strict=True)
    return make_mover(Exchange(step.src, step.dst, sizes, step.shape, spec.dtype, group, coordinate))


def run_route(local: torch.Tensor, route: Route) -> torch.Tensor:
    """Runs the route on this rank's shard; every rank of the mesh must call it. Never aliases `local`
    when there is a step."""
    if local.__class__ is not torch.Tensor and route:
        local = plain_part(local, route.source)
    if local.is_meta and route:  # nothing to send
        return local.new_empty_strided(route.result.local_shape, route.result.local_stride)
    for move in route.movers:
        local = move(local)
    return local
