"""Estimated times of collectives and redistributions, and the search for the cheapest redistribution.

A step on one mesh dim is priced by its measured curve (`prices.py`, `curve.py`) if there is one, otherwise by the ring
formula (`ring.py`). The constants of the mesh come from `topology.py` and `mesh_topology.py`.

Units: times are microseconds. Sizes and bandwidths are in **GiB** (1024^3 bytes) and GiB/s. The arguments are called
`bytes_gb` and PyTorch's comments say "GB/s", but PyTorch also divides by 1024^3. Passing units of 10^9 bytes, as
nccl-tests prints them, gives a silent error of 7.4 %.

Note [Prices are distances]: the price of a redistribution is the price of its cheapest chain of transitions. Therefore
a detour over a third placement never costs less than the direct way, and a chain never costs less than a part of it.
This holds because `ChainSearch` considers all chains. The formulas alone do not ensure it: added up mesh dim by mesh
dim, they would make Shard -> Replicate -> Shard cheaper than Shard -> Shard. It holds for steps on one mesh dim. A
joint step on several mesh dims goes only to Replicate or to the final placements, never to other placements between.

Note [Nested shards]: if two mesh dims shard the same tensor dim, the inner one (with the higher index) splits the part
that the outer one assigned. So an outer mesh dim may gather or shard a tensor dim only while no inner mesh dim shards
that tensor dim.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dtbench_core.cost.mesh_topology import topology_of
from dtbench_core.cost.prices import DimPrices, Kind, PlacementLike, joint_prices, ring_of
from dtbench_core.cost.ring import GIB
from dtbench_core.cost.topology import MeshConstants
from dtbench_core.errors import CoreError, PlacementError
from dtbench_core.layout.placement import REPLICATE, Shard
from dtbench_core.layout.spec import DTensorSpec


def allgather_cost(bytes_gb: float, mesh_topo: MeshConstants, mesh_dim: int) -> float:
    """Returns the microseconds of an all-gather over `mesh_dim`.

    A reduce-scatter and an all-to-all take the same time.

    Args:
        bytes_gb: GiB per rank: the output of an all-gather, the input of a reduce-scatter, the buffer of an all-to-all.
    """
    return ring_of(mesh_topo, [mesh_dim]).us(bytes_gb)


reduce_scatter_cost = all_to_all_cost = allgather_cost


def allreduce_cost(bytes_gb: float, mesh_topo: MeshConstants, mesh_dim: int) -> float:
    """Returns the microseconds of an all-reduce of `bytes_gb` GiB per rank: a reduce-scatter and an all-gather."""
    return ring_of(mesh_topo, [mesh_dim]).us(bytes_gb, trips=2)


def transition_cost(
    src: PlacementLike, dst: PlacementLike, local_bytes_gib: float, topo: MeshConstants, mesh_dim: int
) -> float:
    """Returns the microseconds of a change from `src` to `dst` on one mesh dim.

    0 if nothing is sent (equal placements, or from Replicate). Infinite if one step cannot do it (Shard -> Partial, or
    one kind of Partial -> another). Shard -> Shard costs PyTorch's all-gather of the shards plus a surcharge, but never
    more than gathering the tensor and keeping a part.

    Args:
        local_bytes_gib: GiB per rank before the change.
    """
    if src == dst or src.is_replicate():
        return 0.0
    if dst.is_partial():
        return math.inf
    return DimPrices.of(topo, mesh_dim).us(Kind.of(src), Kind.of(dst), local_bytes_gib)


_COLLECTIVE_BY_LETTERS = {"SR": "all_gather", "SS": "all_to_all", "PR": "all_reduce", "PS": "reduce_scatter"}


def spec_to_bytes(spec: DTensorSpec) -> int:
    """Returns the bytes of the global tensor.

    Raises:
        CoreError: the spec has no dtype yet.
    """
    itemsize: int = _tensor_meta(spec).dtype.itemsize
    return itemsize * math.prod(spec.shape)


def _tensor_meta(spec: DTensorSpec) -> Any:
    if spec.tensor_meta is None:
        raise CoreError(
            f"got a spec without tensor_meta (placements {tuple(spec.placements)}), expected shape, stride "
            "and dtype to count its bytes: pass the spec of a DTensor"
        )
    return spec.tensor_meta


def local_gib(
    shape: Sequence[int], itemsize: int, placements: Sequence[Any], mesh_sizes: Sequence[int]
) -> float:
    """Returns the GiB of the largest shard. It is the same on every rank, so that all ranks compute the same price."""
    lengths = list(shape)
    for placement, ranks in zip(placements, mesh_sizes, strict=True):
        if placement.is_shard():
            dim = placement.dim
            if isinstance(placement, Shard) and type(placement) is not Shard:
                lengths[dim] = max(placement.lengths(lengths[dim], ranks))
            else:
                lengths[dim] = -(-lengths[dim] // ranks)
    return math.prod(lengths) * itemsize / GIB


# ---- the cheapest chain of transitions ----


class Transition(NamedTuple):
    """One step of a redistribution.

    Attributes:
        mesh_dims: the mesh dims whose placement changes: one, or several at once.
        src, dst: placements of these mesh dims before and after the step.
        collective: the function of comm.py, or "" if nothing is sent.
        nbytes: bytes that comm.py will count for the step.
        us: estimated microseconds.
    """

    mesh_dims: tuple[int, ...]
    src: tuple[Any, ...]
    dst: tuple[Any, ...]
    collective: str
    nbytes: int
    us: float


State = tuple[int, ...]  # per mesh dim, an index into `ChainSearch.placements`
REPLICATED = 0  # index of Replicate


class ChainSearch:
    """A* search for the cheapest chain of transitions from the placements `src` to `dst`.

    A transition changes one mesh dim to Replicate, to a Shard, or to the Partial that `dst` has there. See
    Note [Nested shards] for the order of mesh dims.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes per element.
        copy_us: price of a transition from Replicate, which sends nothing.
        joint: whether one process group contains the ranks of all mesh dims, so that all dims may change at once.
    """

    def __init__(
        self,
        shape: Sequence[int],
        itemsize: int,
        src: Sequence[Any],
        dst: Sequence[Any],
        topo: MeshConstants,
        *,
        copy_us: float = 0.0,
        joint: bool = False,
    ) -> None:
        self.shape, self.itemsize, self.copy_us = shape, itemsize, copy_us
        self.sizes = topo.mesh_dim_devices
        self.prices = [DimPrices.of(topo, d) for d in range(len(self.sizes))]
        self.active_dims = [d for d, ranks in enumerate(self.sizes) if ranks > 1]
        self.joint_prices = (
            joint_prices(topo, self.active_dims) if joint and len(self.active_dims) > 1 else None
        )
        # States hold indices into this list: Replicate, the placements of both ends, then possible detours.
        self.placements: list[Any] = [REPLICATE]
        self.src, self.dst = self._indices_of(src), self._indices_of(dst)
        self._indices_of(self._detour_shards())
        self.kinds = [Kind.of(placement) for placement in self.placements]
        self.letters = [kind.letter for kind in self.kinds]
        self.tensor_dims = [placement.dim if placement.is_shard() else None for placement in self.placements]
        self.is_uneven_kind = [isinstance(p, Shard) and type(p) is not Shard for p in self.placements]
        self.minimum_us = [prices.minimum_us() for prices in self.prices]

    def _indices_of(self, placements: Sequence[Any]) -> State:
        """Returns the index of each placement, and appends new ones.

        Equal placements of PyTorch and ours have the same index.
        """
        indices = []
        for placement in placements:
            index = next(
                (i for i, p in enumerate(self.placements) if _same_placement(p, placement)),
                len(self.placements),
            )
            if index == len(self.placements):
                self.placements.append(placement)
            indices.append(index)
        return tuple(indices)

    def _detour_shards(self) -> list[Shard]:
        """Shards of tensor dims that neither `src` nor `dst` shards, as possible intermediate placements.

        By the formula they all cost the same, so the largest dims, which split most evenly, suffice. A chain needs at
        most one per mesh dim. With measured curves, Shard(0) has a price of its own and is added.
        """
        end_dims = {placement.dim for placement in self.placements if placement.is_shard()}
        measured = any(prices.curves for prices in self.prices)
        if len(self.active_dims) < 2 and not measured:
            # On one mesh dim a detour helps in two cases: a direct step would pad, for example because a dim has fewer
            # elements than ranks; or an inner mesh dim shards the same tensor dim as an outer one of a single rank.
            ranks = math.prod(self.sizes)
            ends = ([self.placements[index] for index in end] for end in (self.src, self.dst))
            sharded_dims = [[placement.dim for placement in end if placement.is_shard()] for end in ends]
            nested = any(len(set(dims)) < len(dims) for dims in sharded_dims)
            if not nested and all(self.shape[dim] % ranks == 0 for dim in end_dims):
                return []
        free_dims = [dim for dim in range(len(self.shape)) if dim not in end_dims]
        free_dims.sort(key=lambda dim: -self.shape[dim])
        # With measured curves, dim 0 is added, in addition to those chosen among the other dims.
        added = [dim for dim in free_dims if measured and dim == 0]
        chosen = [dim for dim in free_dims if dim not in added][: len(self.active_dims)]
        return [Shard(dim) for dim in (*chosen, *added)]

    def cheapest(self) -> list[Transition] | None:
        """Returns the cheapest chain, or None if no chain exists.

        Among equally cheap chains the one with the fewest steps wins. The result is the same on every rank.
        """
        order = itertools.count()
        queue: list[tuple[float, int, int, float, State, Any]] = [
            (self._lower_bound_us(self.src), 0, next(order), 0.0, self.src, None)
        ]
        settled: set[State] = set()
        while queue:
            _, steps, _, price, state, chain = heapq.heappop(queue)
            if state == self.dst:
                return self._transitions_of(chain)
            if state in settled:
                continue
            settled.add(state)
            for mesh_dims, next_state, us in self._next_states(state):
                if next_state not in settled:
                    total = price + us
                    link = (chain, mesh_dims, state, next_state, us)
                    bound = total + self._lower_bound_us(next_state)
                    heapq.heappush(queue, (bound, steps + 1, next(order), total, next_state, link))
        return None

    def _lower_bound_us(self, state: State) -> float:
        """Lower bound of the remaining price: one collective per mesh dim that must change from Shard or Partial."""
        bound = sum(
            [
                us
                for current, final, us in zip(state, self.dst, self.minimum_us, strict=True)
                if current not in (final, REPLICATED)
            ]
        )
        return bound if self.joint_prices is None else min(bound, self.joint_prices.minimum_us())

    def _next_states(self, state: State) -> Iterator[tuple[tuple[int, ...], State, float]]:
        """Yields (mesh dims, next state, us) of every transition from `state`."""
        gib = self._local_gib(state)
        for mesh_dim, current in enumerate(state):
            inner_dims = {self.tensor_dims[index] for index in state[mesh_dim + 1 :]} - {None}
            if self.tensor_dims[current] in inner_dims:
                continue
            for target in self._targets(current, self.dst[mesh_dim]):
                if self.tensor_dims[target] in inner_dims:
                    continue
                if self.is_uneven_kind[target] and not self._fits(target, mesh_dim, state):
                    continue
                prices = self.prices[mesh_dim]
                if current != REPLICATED:
                    us = prices.us(self.kinds[current], self.kinds[target], gib)
                else:
                    us = prices.local_us(self.kinds[target], gib, self.copy_us)
                yield (mesh_dim,), (*state[:mesh_dim], target, *state[mesh_dim + 1 :]), us
        if self.joint_prices is not None:
            for target_state in self._joint_targets(state):
                us = max(
                    self.joint_prices.us(self.kinds[state[d]], self.kinds[target_state[d]], gib)
                    for d in self.active_dims
                )
                yield tuple(self.active_dims), target_state, us

    def _fits(self, target: int, mesh_dim: int, state: State) -> bool:
        """Whether `mesh_dim` may get a StridedShard or RaggedShard, which suit only some lengths.

        They fit if `src` or `dst` has this placement there, and the outer mesh dims shard the tensor dim as it does.
        """

        def outer_shards(placed: State) -> list[int | None]:
            tensor_dim = self.tensor_dims[target]
            return [index if self.tensor_dims[index] == tensor_dim else None for index in placed[:mesh_dim]]

        return any(
            end[mesh_dim] == target and outer_shards(end) == outer_shards(state)
            for end in (self.src, self.dst)
        )

    def _targets(self, current: int, final: int) -> Iterator[int]:
        """Yields the placements that one mesh dim can change to in one step."""
        is_extremum = self.letters[current] == "P" and getattr(self.placements[current], "reduce_op", "") in (
            "max",
            "min",
        )
        for index, letter in enumerate(self.letters):
            # An extremum goes to Shard by way of Replicate, where NaN is handled.
            if index == current or (letter == "S" and is_extremum):
                continue
            if letter == "P":
                # Only Replicate becomes Partial: it supplies the terms of any reduction.
                if current != REPLICATED or index != final:
                    continue
            elif self.tensor_dims[index] is not None and self.tensor_dims[index] == self.tensor_dims[current]:
                continue  # a change between two ways to shard one dim goes through Replicate or another dim
            yield index

    def _joint_targets(self, state: State) -> Iterator[State]:
        """Yields the states that one collective over all mesh dims leads to.

        All ranks exchange equally much, so shards must be even, and the shards before and after must be of different
        tensor dims.
        """
        current = self._on_active_dims(state)
        letters = {self.letters[index] for index in current}
        if letters == {"P"}:
            if len(set(current)) > 1:
                return
        elif letters != {"S"} or not self._splits_evenly(current):
            return
        yield tuple(REPLICATED if d in self.active_dims else index for d, index in enumerate(state))
        final = self._on_active_dims(self.dst)
        if (
            {self.letters[index] for index in final} == {"S"}
            and self._splits_evenly(final)
            and not {self.tensor_dims[i] for i in current} & {self.tensor_dims[i] for i in final}
            and all(dst in self._targets(src, dst) for src, dst in zip(current, final, strict=True))
        ):
            yield tuple(self.dst[d] if d in self.active_dims else index for d, index in enumerate(state))

    def _on_active_dims(self, state: State) -> list[int]:
        return [state[d] for d in self.active_dims]

    def _splits_evenly(self, indices: Sequence[int]) -> bool:
        parts = dict.fromkeys(range(len(self.shape)), 1)
        for index, mesh_dim in zip(indices, self.active_dims, strict=True):
            if self.is_uneven_kind[index]:
                return False
            parts[self.placements[index].dim] *= self.sizes[mesh_dim]
        return all(self.shape[dim] % n == 0 for dim, n in parts.items())

    def _local_gib(self, state: State) -> float:
        return local_gib(self.shape, self.itemsize, [self.placements[index] for index in state], self.sizes)

    def _transitions_of(self, chain: Any) -> list[Transition]:
        transitions = []
        while chain is not None:
            chain, mesh_dims, state, next_state, us = chain
            collective = _COLLECTIVE_BY_LETTERS.get(
                self.letters[state[mesh_dims[0]]] + self.letters[next_state[mesh_dims[0]]], ""
            )
            ranks = math.prod(self.sizes[d] for d in mesh_dims)
            sent = self._local_gib(state) * GIB * (ranks if collective == "all_gather" else 1)
            transitions.append(
                Transition(
                    mesh_dims,
                    tuple(self.placements[state[d]] for d in mesh_dims),
                    tuple(self.placements[next_state[d]] for d in mesh_dims),
                    collective if ranks > 1 else "",
                    round(sent) if collective and ranks > 1 else 0,
                    us,
                )
            )
        return transitions[::-1]


def _same_placement(first: Any, second: Any) -> bool:
    """Whether two placements mean the same; each may be PyTorch's or ours."""
    if first.is_replicate() or second.is_replicate():
        return bool(first.is_replicate() and second.is_replicate())
    if type(first).__name__ == type(second).__name__ == "Shard":
        return bool(first.dim == second.dim)
    return bool(first == second)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Returns the microseconds of communication of the cheapest redistribution between two specs of one tensor.

    0 if nothing is sent. Infinite across meshes, from Shard to Partial, and from one kind of Partial to another. Each
    step is priced by `transition_cost` with the size that the steps before it left. It is an estimate for comparing
    placements: it ignores local copies and joint steps on several mesh dims. See Note [Prices are distances].
    """
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    src, dst = current_spec.placements, target_spec.placements
    if all(placement.is_replicate() for placement in src):
        return 0.0
    for current, target in zip(src, dst, strict=True):
        if target.is_partial() and not current.is_replicate() and current != target:
            return math.inf
    chain = ChainSearch(
        current_spec.shape,
        _tensor_meta(current_spec).dtype.itemsize,
        src,
        dst,
        topology_of(current_spec.mesh),
    ).cheapest()
    return math.inf if chain is None else sum(step.us for step in chain)


def one_step_redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Returns the microseconds of the single transition between specs that differ on one mesh dim.

    0 if they are equal. Infinite if one transition cannot do it (see `transition_cost` and Note [Nested shards]).

    Raises:
        PlacementError: the specs differ on several mesh dims.
    """
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    src: Sequence[Any] = current_spec.placements  # placements may be ours or PyTorch's
    dst: Sequence[Any] = target_spec.placements
    changed = [d for d, (current, target) in enumerate(zip(src, dst, strict=True)) if current != target]
    if not changed:
        return 0.0
    if len(changed) > 1:
        raise PlacementError(
            f"got specs that differ on the mesh dims {changed}, expected one: use redistribute_cost, which prices "
            "chains of steps"
        )
    mesh_dim = changed[0]
    sharded_dims = {p.dim for p in (src[mesh_dim], dst[mesh_dim]) if p.is_shard()}
    if any(p.is_shard() and p.dim in sharded_dims for p in src[mesh_dim + 1 :]):
        return math.inf
    topo = topology_of(current_spec.mesh)
    return transition_cost(
        src[mesh_dim],
        dst[mesh_dim],
        local_gib(current_spec.shape, _tensor_meta(current_spec).dtype.itemsize, src, topo.mesh_dim_devices),
        topo,
        mesh_dim,
    )
