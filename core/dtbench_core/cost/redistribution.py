"""What a collective, and a redistribution made of collectives, is expected to cost.

A step on one mesh dim is priced by what was measured on it (`prices.py`, `curve.py`), else by the formula of a
ring (`ring.py`), with the constants of the mesh (`topology.py`, `mesh_topology.py`).

Units. Times are microseconds. Sizes and bandwidths are in **GiB** (1024^3 bytes) and GiB/s. The
arguments are called `bytes_gb` and PyTorch writes "GB/s", but it too divides by 1024^3; taking the
numbers for 10^9 bytes (the unit of nccl-tests) is a silent error of 7.4 %.

Note [Prices are distances]: a redistribution costs what its cheapest chain of transitions does, so
going through a third placement never costs less than going straight, and a chain never less than a
part of it. Both hold because `ChainSearch` goes through all chains, not because of the formulas: added up
dim by dim, those would let Shard -> Replicate -> Shard undercut Shard -> Shard. It holds for steps of
one mesh dim; several go at once only to the placements at the end, never to some on the way.

Note [Nested shards]: where two mesh dims shard the same tensor dim, the inner one (the higher index)
cuts what the outer one left. So the outer one may be gathered, or made, only while no inner one
shards that dim.
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
    """us to all-gather over `mesh_dim` into an output of `bytes_gb` GiB on each rank; or to reduce-scatter an input of
    that size, or to exchange that much of each rank, of which 1/n stays where it is."""
    return ring_of(mesh_topo, [mesh_dim]).us(bytes_gb)


reduce_scatter_cost = all_to_all_cost = allgather_cost


def allreduce_cost(bytes_gb: float, mesh_topo: MeshConstants, mesh_dim: int) -> float:
    """us to all-reduce `bytes_gb` GiB on each rank of `mesh_dim`: a reduce-scatter and an all-gather."""
    return ring_of(mesh_topo, [mesh_dim]).us(bytes_gb, trips=2)


def transition_cost(
    src: PlacementLike, dst: PlacementLike, local_bytes_gib: float, topo: MeshConstants, mesh_dim: int
) -> float:
    """us to go from `src` to `dst` on one mesh dim, when each rank holds `local_bytes_gib` GiB before.

    0 where nothing is sent (equal placements, or from Replicate); infinite where there is no way
    (Shard -> Partial, one kind of Partial -> another). Shard -> Shard is PyTorch's all-gather of the
    shards plus a surcharge, but never more than gathering all and cutting.
    """
    if src == dst or src.is_replicate():
        return 0.0
    if dst.is_partial():
        return math.inf
    return DimPrices.of(topo, mesh_dim).us(Kind.of(src), Kind.of(dst), local_bytes_gib)


_COLLECTIVE = {"SR": "all_gather", "SS": "all_to_all", "PR": "all_reduce", "PS": "reduce_scatter"}


def spec_to_bytes(spec: DTensorSpec) -> int:
    """Bytes of the whole tensor, as if on one device.

    Raises:
        CoreError: the spec has no dtype yet.
    """
    itemsize: int = _tensor_meta(spec).dtype.itemsize
    return itemsize * math.prod(spec.shape)


def _tensor_meta(spec: DTensorSpec) -> Any:
    if spec.tensor_meta is None:
        raise CoreError(
            f"got a spec without tensor_meta (placements {tuple(spec.placements)}), expected shape, stride "
            "and dtype to count its bytes: take the spec of a DTensor"
        )
    return spec.tensor_meta


def local_gib(
    shape: Sequence[int], itemsize: int, placements: Sequence[Any], mesh_sizes: Sequence[int]
) -> float:
    """GiB of the largest shard of a tensor so placed: the same on every rank, so that all compute the same price."""
    lengths = list(shape)
    for placement, ranks in zip(placements, mesh_sizes, strict=True):
        if placement.is_shard():
            dim = placement.dim
            if isinstance(placement, Shard) and type(placement) is not Shard:
                lengths[dim] = max(placement.lengths(lengths[dim], ranks))
            else:
                lengths[dim] = -(-lengths[dim] // ranks)
    return math.prod(lengths) * itemsize / GIB


# --- the cheapest chain of transitions -------------------------------------------------------------


class Transition(NamedTuple):
    """What one step of a redistribution does to some mesh dims (one, unless they go together).

    collective: a function of comm.py, or "" when nothing is sent. nbytes: what comm.py will count for it.
    """

    mesh_dims: tuple[int, ...]
    src: tuple[Any, ...]
    dst: tuple[Any, ...]
    collective: str
    nbytes: int
    us: float


State = tuple[int, ...]  # per mesh dim an index into `ChainSearch.kinds`


class ChainSearch:
    """Chains of transitions from the placements `src` to `dst`; A* over the placements of all mesh dims.

    Each transition goes from any placement of one mesh dim to Replicate, a Shard, or the Partial that `dst`
    has there (see Note [Nested shards]).

    Args:
        copy_us: of a transition from Replicate, which sends nothing.
        together: the ranks of all mesh dims make one process group, so that all dims may go at once.
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
        together: bool = False,
    ) -> None:
        self.shape, self.itemsize, self.copy_us = shape, itemsize, copy_us
        self.sizes = topo.mesh_dim_devices
        self.prices = [DimPrices.of(topo, d) for d in range(len(self.sizes))]
        self.wide = [d for d, ranks in enumerate(self.sizes) if ranks > 1]
        self.all = joint_prices(topo, self.wide) if together and len(self.wide) > 1 else None
        # Placements by number: those at hand, then the Shards that could be on the way.
        self.kinds: list[Any] = [REPLICATE]
        self.src, self.dst = self._number(src), self._number(dst)
        self._number(self._detours())
        self.priced = [Kind.of(kind) for kind in self.kinds]
        self.classes = [kind.letter for kind in self.priced]
        self.dims = [kind.dim if kind.is_shard() else None for kind in self.kinds]
        self.odd = [isinstance(kind, Shard) and type(kind) is not Shard for kind in self.kinds]
        self.least = [prices.least() for prices in self.prices]  # of any collective on the mesh dim

    def _number(self, placements: Sequence[Any]) -> State:
        """Equal placements get one number, PyTorch's and ours."""
        numbers = []
        for placement in placements:
            number = next((i for i, kind in enumerate(self.kinds) if _same(kind, placement)), len(self.kinds))
            if number == len(self.kinds):
                self.kinds.append(placement)
            numbers.append(number)
        return tuple(numbers)

    def _detours(self) -> list[Shard]:
        """Shards of tensor dims that neither end shards. By the formula all cost the same, the larger ones the
        least uneven, and no chain needs more of them than there are mesh dims; measured, those of the first
        tensor dim have prices of their own."""
        taken = {kind.dim for kind in self.kinds if kind.is_shard()}
        measured = any(prices.curves for prices in self.prices)
        if len(self.wide) < 2 and not measured:
            # Of use where gathering pads: a dim shorter than its ranks, say; and where the shard of an inner mesh dim
            # is in the way of an outer one of a single rank.
            ranks = math.prod(self.sizes)
            ends = ([self.kinds[kind] for kind in end] for end in (self.src, self.dst))
            cuts = [[kind.dim for kind in end if kind.is_shard()] for end in ends]
            nested = any(len(set(dims)) < len(dims) for dims in cuts)
            if not nested and all(self.shape[dim] % ranks == 0 for dim in taken):
                return []
        fresh = [dim for dim in range(len(self.shape)) if dim not in taken]
        fresh.sort(key=lambda dim: -self.shape[dim])
        if not measured:
            return [Shard(dim) for dim in fresh[: len(self.wide)]]
        later = [dim for dim in fresh if dim > 0]
        return [Shard(dim) for dim in (*later[: len(self.wide)], *(dim for dim in fresh if dim == 0))]

    def cheapest(self) -> list[Transition] | None:
        """None when there is no way. Ties go to fewer steps, and are the same on every rank."""
        order = itertools.count()
        queue: list[tuple[float, int, int, float, State, Any]] = [
            (self._at_least(self.src), 0, next(order), 0.0, self.src, None)
        ]
        settled: set[State] = set()
        while queue:
            _, steps, _, spent, state, chain = heapq.heappop(queue)
            if state == self.dst:
                return self._transitions(chain)
            if state in settled:
                continue
            settled.add(state)
            for mesh_dims, after, us in self._edges(state):
                if after not in settled:
                    total = spent + us
                    link = (chain, mesh_dims, state, after, us)
                    entry = (total + self._at_least(after), steps + 1, next(order), total, after, link)
                    heapq.heappush(queue, entry)
        return None

    def _at_least(self, state: State) -> float:
        """A bound below what is left: a collective for each mesh dim that differs and is not Replicate."""
        pairs = zip(state, self.dst, self.least, strict=True)
        left = sum([least for now, then, least in pairs if now not in (then, 0)])
        return left if self.all is None else min(left, self.all.least())

    def _edges(self, state: State) -> Iterator[tuple[tuple[int, ...], State, float]]:
        """(mesh dims, state after, us) of every transition from `state`."""
        held = self._local_gib(state)
        for mesh_dim, now in enumerate(state):
            inner = {self.dims[kind] for kind in state[mesh_dim + 1 :]} - {None}
            if self.dims[now] in inner:
                continue
            for kind in self._targets(now, self.dst[mesh_dim]):
                if self.dims[kind] in inner or (self.odd[kind] and not self._fits(kind, mesh_dim, state)):
                    continue
                prices = self.prices[mesh_dim]
                if now:
                    us = prices.us(self.priced[now], self.priced[kind], held)
                else:
                    us = prices.cut_us(self.priced[kind], held, self.copy_us)
                yield (mesh_dim,), (*state[:mesh_dim], kind, *state[mesh_dim + 1 :]), us
        if self.all is not None:
            for after in self._together(state):
                us = max(self.all.us(self.priced[state[d]], self.priced[after[d]], held) for d in self.wide)
                yield tuple(self.wide), after, us

    def _fits(self, odd: int, mesh_dim: int, state: State) -> bool:
        """Whether the mesh dim may be placed in a way that only some lengths allow (RaggedShard and its like):
        if an end places it so, and the outer mesh dims cut the tensor dim as they do there."""

        def cuts(placed: State) -> list[int | None]:
            return [kind if self.dims[kind] == self.dims[odd] else None for kind in placed[:mesh_dim]]

        return any(end[mesh_dim] == odd and cuts(end) == cuts(state) for end in (self.src, self.dst))

    def _targets(self, now: int, wanted: int) -> Iterator[int]:
        """Where one mesh dim may go next."""
        extremum = self.classes[now] == "P" and getattr(self.kinds[now], "reduce_op", "") in ("max", "min")
        for kind, letter in enumerate(self.classes):
            if kind == now or (letter == "S" and extremum):  # NaN has to be looked for in between
                continue
            if letter == "P":
                if now or kind != wanted:  # Replicate can serve as the terms of any reduction
                    continue
            elif self.dims[kind] is not None and self.dims[kind] == self.dims[now]:
                continue  # between two ways of sharding one dim: through Replicate or another dim
            yield kind

    def _together(self, state: State) -> Iterator[State]:
        """States that one collective over all mesh dims leads to: every rank has equally much for every
        other, which needs even shards, of other tensor dims than before."""
        now = self._wide(state)
        letters = {self.classes[kind] for kind in now}
        if letters == {"P"}:
            if len(set(now)) > 1:
                return
        elif letters != {"S"} or not self._even(now):
            return
        yield tuple(0 if d in self.wide else kind for d, kind in enumerate(state))
        then = self._wide(self.dst)
        if (
            {self.classes[kind] for kind in then} == {"S"}
            and self._even(then)
            and not {self.dims[kind] for kind in now} & {self.dims[kind] for kind in then}
            and all(t in self._targets(k, t) for k, t in zip(now, then, strict=True))
        ):
            yield tuple(self.dst[d] if d in self.wide else kind for d, kind in enumerate(state))

    def _wide(self, state: State) -> list[int]:
        return [state[d] for d in self.wide]

    def _even(self, kinds: Sequence[int]) -> bool:
        parts = dict.fromkeys(range(len(self.shape)), 1)
        for kind, mesh_dim in zip(kinds, self.wide, strict=True):
            if self.odd[kind]:
                return False
            parts[self.kinds[kind].dim] *= self.sizes[mesh_dim]
        return all(self.shape[dim] % n == 0 for dim, n in parts.items())

    def _local_gib(self, state: State) -> float:
        return local_gib(self.shape, self.itemsize, [self.kinds[kind] for kind in state], self.sizes)

    def _transitions(self, chain: Any) -> list[Transition]:
        transitions = []
        while chain is not None:
            chain, mesh_dims, state, after, us = chain
            move = self.classes[state[mesh_dims[0]]] + self.classes[after[mesh_dims[0]]]
            collective = _COLLECTIVE.get(move, "")
            ranks = math.prod(self.sizes[d] for d in mesh_dims)
            sent = self._local_gib(state) * GIB * (ranks if collective == "all_gather" else 1)
            transitions.append(
                Transition(
                    mesh_dims,
                    tuple(self.kinds[state[d]] for d in mesh_dims),
                    tuple(self.kinds[after[d]] for d in mesh_dims),
                    collective if ranks > 1 else "",
                    round(sent) if collective and ranks > 1 else 0,
                    us,
                )
            )
        return transitions[::-1]


def _same(one: Any, other: Any) -> bool:
    """Whether two placements mean the same, be they PyTorch's or ours."""
    if one.is_replicate() or other.is_replicate():
        return bool(one.is_replicate() and other.is_replicate())
    if type(one).__name__ == type(other).__name__ == "Shard":
        return bool(one.dim == other.dim)
    return bool(one == other)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """us of communication from one spec to another of the same tensor, by the cheapest way.

    0 where nothing is sent; infinite across meshes, from Shard to Partial and from one Partial to
    another. Each step is priced by `transition_cost`; a gather makes the next collectives larger, a
    scatter smaller. It is an estimate for comparing placements: local copies are not counted, nor that
    several mesh dims may go at once. See Note [Prices are distances].
    """
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    src, dst = current_spec.placements, target_spec.placements
    if all(placement.is_replicate() for placement in src):
        return 0.0
    for now, then in zip(src, dst, strict=True):
        if then.is_partial() and not now.is_replicate() and now != then:
            return math.inf
    itemsize = _tensor_meta(current_spec).dtype.itemsize
    chain = ChainSearch(current_spec.shape, itemsize, src, dst, topology_of(current_spec.mesh)).cheapest()
    return math.inf if chain is None else sum(step.us for step in chain)


def one_step_redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """us of the one transition between specs that differ in one mesh dim; 0 when they do not differ.

    Infinite where one transition cannot do it (see `transition_cost` and Note [Nested shards]).

    Raises:
        PlacementError: they differ in several mesh dims.
    """
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    src: Sequence[Any] = current_spec.placements  # ours or PyTorch's
    dst: Sequence[Any] = target_spec.placements
    changed = [d for d, (now, then) in enumerate(zip(src, dst, strict=True)) if now != then]
    if not changed:
        return 0.0
    if len(changed) > 1:
        raise PlacementError(
            f"got specs that differ in the mesh dims {changed}, expected one dim: redistribute_cost prices chains of "
            "steps"
        )
    mesh_dim = changed[0]
    cut = {p.dim for p in (src[mesh_dim], dst[mesh_dim]) if p.is_shard()}
    if any(p.is_shard() and p.dim in cut for p in src[mesh_dim + 1 :]):
        return math.inf
    topo = topology_of(current_spec.mesh)
    held = local_gib(
        current_spec.shape, _tensor_meta(current_spec).dtype.itemsize, src, topo.mesh_dim_devices
    )
    return transition_cost(src[mesh_dim], dst[mesh_dim], held, topo, mesh_dim)
