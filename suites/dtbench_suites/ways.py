"""The ways from one placement to another, and of multiplying two sharded matrices: which to measure.

All is worked out without ranks, from the mesh's shape alone, so that every rank lists the same ways.
A way is written as its steps, which is also how `dtbench calibrate --regret` prices it:

    dp:S(0)->R:4194304 tp:R->S(1):4194304 dp+tp:P+P->S(0)+S(1):8388608

mesh dims, change of placement of each, bytes of the tensor as the ranks of these mesh dims share it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as torch_planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

import dtbench_core
from dtbench_core.cost import search as cost
from dtbench_core.cost.ring import INTER_HOST, INTRA_HOST, Link
from dtbench_core.cost.search import Transition
from dtbench_core.cost.topology import MeshConstants, Topology
from dtbench_suites.data import placement

Placed = tuple[str, ...]  # a placement per mesh dim: ("S(0)", "P")
Dims = Sequence[tuple[str, int]]  # mesh dims: name, ranks
# Longer chains exist, none that a sensible model picks: each transition more is a collective more.
LONGEST = 3
# The best so many by each model are measured.
BEST_OF_EACH = 2
# Slow enough that bytes alone decide, and no hop counts.
BYTES_ALONE = Link(1e-6, 0.0)


@dataclass(frozen=True)
class Leg:
    """What happens to one tensor: from its placements through others. joint: a step of several mesh dims.

    tensor: "x" of a redistribution; "a", "b" or "out" of a product.
    """

    tensor: str
    shape: tuple[int, ...]
    placed: tuple[Placed, ...]  # at the start and after every step
    steps: tuple[Transition, ...]

    def words(self, dims: Dims, itemsize: int) -> list[str]:
        """Its steps as they are written."""
        return [
            ("" if self.tensor == "x" else f"{self.tensor}.")
            + "+".join(dims[d][0] for d in step.mesh_dims)
            + ":"
            + "->".join("+".join(text_of(p) for p in placements) for placements in (step.src, step.dst))
            + f":{shared_bytes(self.shape, itemsize, before, step.mesh_dims, dims)}"
            for step, before in zip(self.steps, self.placed, strict=False)
        ]


@dataclass(frozen=True)
class Way:
    """One candidate: its legs, in order; after "a" and "b" of a product comes the product itself."""

    legs: tuple[Leg, ...]

    def words(self, dims: Dims, itemsize: int) -> str:
        """The way as one line, or "nothing to send"."""
        return " ".join(word for leg in self.legs for word in leg.words(dims, itemsize)) or "nothing to send"


def text_of(placement: Any) -> str:
    """`S(0)`, `R` or `P`."""
    if placement.is_shard():
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P"


def shared_bytes(
    shape: Sequence[int], itemsize: int, before: Placed, mesh_dims: Sequence[int], dims: Dims
) -> int:
    """Bytes of what the ranks of some mesh dims share: the tensor less what the other mesh dims shard away."""
    others = [n for d, (_, n) in enumerate(dims) if d not in mesh_dims and before[d].startswith("S")]
    return itemsize * math.prod(shape) // math.prod(others)


# ------------------------------------------------------------------------------- the models that propose


def best_by_each(
    dims: Dims, topology: Topology | None, priced: Callable[[MeshConstants], Iterable[tuple[float, Way]]]
) -> list[Way]:
    """The best few by every model, in the order of their first proposal: by every guess of which mesh dims cross
    hosts, by bytes alone, and by the measured topology where there is one."""
    ranks = tuple(n for _, n in dims)
    guesses = [*itertools.product((INTRA_HOST, INTER_HOST), repeat=len(dims)), (BYTES_ALONE,) * len(dims)]
    infos = [MeshConstants.of_links(ranks, guess) for guess in guesses]
    if topology is not None:
        infos.append(topology.constants(dims))
    best = (heapq.nsmallest(BEST_OF_EACH, priced(info), key=lambda one: one[0]) for info in infos)
    return list(dict.fromkeys(way for of_one in best for _, way in of_one))


def offline_mesh(dims: Dims) -> DeviceMesh:
    """A CPU mesh of this shape without ranks behind it: enough for planners, not for collectives."""
    names, sizes = zip(*dims, strict=True)
    ranks = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


# ------------------------------------------------------------------------------- redistributions


def ways_between(
    shape: tuple[int, int],
    itemsize: int,
    src: Placed,
    dst: Placed,
    dims: Dims,
    topology: Topology | None,
    *,
    together: bool,
) -> list[Way]:
    """Of a redistribution. together: with collectives over several mesh dims at once."""

    def priced(info: MeshConstants) -> Iterator[tuple[float, Way]]:
        search = cost.Search(shape, itemsize, ours(src), ours(dst), info, together=together)
        for chain in search.every(LONGEST):
            yield sum(step.us for step in chain), Way((leg_of("x", shape, src, chain),))

    return best_by_each(dims, topology, priced)


def leg_of(tensor: str, shape: tuple[int, ...], src: Placed, chain: Iterable[Transition]) -> Leg:
    placed = [src]
    steps = []
    for step in chain:
        after = list(placed[-1])
        for mesh_dim, wanted in zip(step.mesh_dims, step.dst, strict=True):
            after[mesh_dim] = text_of(wanted)
        placed.append(tuple(after))
        # Without its price, so that two models' equal proposals are one.
        steps.append(step._replace(us=0.0))
    return Leg(tensor, shape, tuple(placed), tuple(steps))


def ours(placed: Placed) -> tuple[Any, ...]:
    return tuple(placement(dtbench_core, text) for text in placed)


def torch_spec(shape: Sequence[int], placed: Placed, mesh: DeviceMesh, dtype: torch.dtype) -> DTensorSpec:
    stride = torch.empty(tuple(shape), device="meta").stride()
    placements = tuple(placement(torch.distributed.tensor, text) for text in placed)
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), stride, dtype))


def torch_leg(
    tensor: str,
    shape: tuple[int, ...],
    src: Placed,
    dst: Placed,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    by_cost: bool,
) -> Leg:
    """What torch.distributed.tensor does: its default (greedy) planner, or the one that looks at costs."""
    moves = torch_planner._gen_transform_infos_non_cached(
        torch_spec(shape, src, mesh, dtype), torch_spec(shape, dst, mesh, dtype), by_cost
    )
    info = MeshConstants.of_links(mesh.shape, [Link(1.0, 1.0)] * mesh.ndim)
    state, chain = src, []
    for move in moves:
        d = move.mesh_dim
        after = (*state[:d], text_of(move.src_dst_placements[1]), *state[d + 1 :])
        # As the core's planner writes the step, so that equal steps are equal.
        steps = cost.Search(shape, dtype.itemsize, ours(state), ours(after), info).every(1)
        chain.append(next(step for (step,) in steps if step.mesh_dims == (d,)))
        state = after
    return leg_of(tensor, shape, src, chain)


# ------------------------------------------------------------------------------- products

# (a, b) -> out, along one mesh dim: the ways of sharing a @ b that need nothing sent in between.
STRATEGIES: Mapping[tuple[str, str], str] = {
    ("R", "R"): "R",
    ("S(0)", "R"): "S(0)",
    ("R", "S(1)"): "S(1)",
    ("S(1)", "S(0)"): "P",
}


@dataclass(frozen=True)
class Product:
    """a (m, k) @ b (k, n) -> out (m, n): where the inputs are and where the result is wanted."""

    m: int
    k: int
    n: int
    a: Placed
    b: Placed
    out: Placed

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {"a": (self.m, self.k), "b": (self.k, self.n), "out": (self.m, self.n)}


def ways_of_product(
    product: Product, itemsize: int, dims: Dims, topology: Topology | None, *, together: bool
) -> list[Way]:
    """Each strategy with the chains that a model finds cheapest."""

    def priced(info: MeshConstants) -> Iterator[tuple[float, Way]]:
        for strategy in itertools.product(STRATEGIES, repeat=len(dims)):
            ends = {
                "a": (product.a, tuple(a for a, _ in strategy)),
                "b": (product.b, tuple(b for _, b in strategy)),
                "out": (tuple(STRATEGIES[pair] for pair in strategy), product.out),
            }
            us, legs = 0.0, []
            for tensor, (src, dst) in ends.items():
                shape = product.shapes[tensor]
                search = cost.Search(shape, itemsize, ours(src), ours(dst), info, together=together)
                chain = search.cheapest()
                if chain is None:
                    break
                us += sum(step.us for step in chain)
                legs.append(leg_of(tensor, shape, src, chain))
            else:
                yield us, Way(tuple(legs))

    return best_by_each(dims, topology, priced)


def torch_product(product: Product, mesh: DeviceMesh, dtype: torch.dtype) -> Way:
    """The strategy that torch.distributed.tensor picks for a @ b, moved there by its default planner."""
    shapes = product.shapes
    specs: list[Any] = [torch_spec(shapes[t], getattr(product, t), mesh, dtype) for t in ("a", "b")]
    schema = OpSchema(torch.ops.aten.mm.default, tuple(specs), {})
    found: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    moved = found.redistribute_schema
    wanted: Sequence[Any] = specs if moved is None else moved.args_schema
    a, b, result = (tuple(map(text_of, spec.placements)) for spec in (*wanted[:2], found.output_spec))
    ends = {"a": (product.a, a), "b": (product.b, b), "out": (result, product.out)}
    return Way(
        tuple(torch_leg(t, shapes[t], src, dst, mesh, dtype, by_cost=False) for t, (src, dst) in ends.items())
    )
