"""What one mesh dim charges for a change of placement: by measured curves, or by the ring formula.

A change is named as it is measured: "S(0)->R", "P->S(1)". Tensor dims beyond the first are all called
1: what counts is whether shards lie in one stretch of memory. Between two Shards the lower dim is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dtbench_core.cost.curve import GIB, Curve
from dtbench_core.cost.topology import SENDING, MeshTopoInfo

# PyTorch's surcharge on Shard -> Shard; here it stands for the copies around the exchange.
ALL_TO_ALL_PENALTY_US = 1.0


class PlacementLike(Protocol):
    """A placement, PyTorch's or ours."""

    def is_shard(self) -> bool: ...
    def is_partial(self) -> bool: ...
    def is_replicate(self) -> bool: ...


class Kind(NamedTuple):
    """What of a placement matters to its price. letter: S, R or P. dim: the tensor dim of a Shard."""

    letter: str
    dim: int = 0

    @staticmethod
    def of(placement: PlacementLike) -> Kind:
        if placement.is_shard():
            return Kind("S", placement.dim)  # type: ignore[attr-defined]
        return Kind("R" if placement.is_replicate() else "P")


def name_of(src: Kind, dst: Kind) -> str:
    """The change as a topology file calls it."""
    if src.letter == dst.letter == "S":
        return "S(0)->S(1)" if src.dim < dst.dim else "S(1)->S(0)"
    return f"{_called(src)}->{_called(dst)}"


def _called(kind: Kind) -> str:
    return f"S({min(kind.dim, 1)})" if kind.letter == "S" else kind.letter


class Ring(NamedTuple):
    """The ranks that take part, and the constants between neighbours."""

    ranks: int
    bandwidth: float  # GiB/s
    latency_us: float  # per hop
    base_us: float

    @staticmethod
    def of(topo: MeshTopoInfo, mesh_dim: int) -> Ring:
        return Ring(
            topo.mesh_dim_devices[mesh_dim],
            topo.mesh_dim_bandwidth[mesh_dim],
            topo.mesh_dim_latency[mesh_dim],
            topo.base_latency_us,
        )

    @staticmethod
    def through(topo: MeshTopoInfo, mesh_dims: Sequence[int]) -> Ring:
        """One ring through the ranks of several mesh dims: every hop is taken for the slowest of theirs."""
        return Ring(
            math.prod(topo.mesh_dim_devices[d] for d in mesh_dims),
            min(topo.mesh_dim_bandwidth[d] for d in mesh_dims),
            max(topo.mesh_dim_latency[d] for d in mesh_dims),
            topo.base_latency_us,
        )

    def us(self, gib: float, trips: int = 1) -> float:
        hops = trips * (self.ranks - 1)
        seconds = (gib * hops / self.ranks) / self.bandwidth
        return self.base_us + hops * self.latency_us + seconds * 1e6

    def change_us(self, src: str, dst: str, held_gib: float) -> float:
        """us of the collective between two letters, when each rank holds `held_gib` GiB before."""
        if src == "P":
            return self.us(held_gib, trips=2 if dst == "R" else 1)
        gathered = self.us(held_gib * self.ranks)
        return gathered if dst == "R" else min(self.us(held_gib) + ALL_TO_ALL_PENALTY_US, gathered)


class DimPrices(NamedTuple):
    """The prices of one mesh dim. curves: by name, empty where the formula prices it."""

    ring: Ring
    curves: Mapping[str, Curve]

    @staticmethod
    def of(topo: MeshTopoInfo, mesh_dim: int) -> DimPrices:
        curves = topo.mesh_dim_curves[mesh_dim] if topo.mesh_dim_curves else {}
        return DimPrices(Ring.of(topo, mesh_dim), curves)

    def us(self, src: Kind, dst: Kind, held_gib: float) -> float:
        """us of a change that sends something, when each rank holds `held_gib` GiB before."""
        if not self.curves:
            return self.ring.change_us(src.letter, dst.letter, held_gib)
        whole = held_gib * GIB * (self.ring.ranks if src.letter == "S" else 1)
        straight = self.curves[name_of(src, dst)].us(whole)
        if src.letter != "S" or dst.letter != "S":
            return straight
        gathered = self.curves[name_of(src, Kind("R"))].us(whole)
        return min(straight, gathered + self.cut_us(dst, whole / GIB, 0.0))

    def cut_us(self, dst: Kind, held_gib: float, otherwise: float) -> float:
        """us to cut a replica, which sends nothing: `otherwise` where that was not measured."""
        curve = self.curves.get(name_of(Kind("R"), dst)) if dst.letter == "S" else None
        return otherwise if curve is None else curve.us(held_gib * GIB)

    def least(self) -> float:
        """us that no change which sends something undercuts."""
        if not self.curves:
            return self.ring.us(0.0)
        return min(self.curves[name].us(0.0) for name in SENDING)


def joint_prices(topo: MeshTopoInfo, mesh_dims: Sequence[int]) -> DimPrices | None:
    """The prices of one collective over all ranks of several mesh dims.

    None where the mesh dims were measured one by one but not together: a formula beside measured times
    would win or lose for being a formula.
    """
    measured = any(topo.mesh_dim_curves[d] for d in mesh_dims) if topo.mesh_dim_curves else False
    if measured and not topo.joint_curves:
        return None
    return DimPrices(Ring.through(topo, mesh_dims), topo.joint_curves)
