"""What one mesh dim charges for a change of placement: by measured curves, or by the ring formula.

A change is named as it is measured: "S(0)->R", "P->S(1)". Tensor dims beyond the first are all called
1: what counts is whether shards lie in one stretch of memory. Between two Shards the lower dim is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import GIB, Ring
from dtbench_core.cost.topology import SENDING, MeshConstants


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


def ring_of(topo: MeshConstants, mesh_dims: Sequence[int]) -> Ring:
    """One ring through the ranks of the mesh dims: every hop is taken for the slowest of theirs."""
    return Ring(
        math.prod(map(topo.mesh_dim_devices.__getitem__, mesh_dims)),
        min(map(topo.mesh_dim_bandwidth.__getitem__, mesh_dims)),
        max(map(topo.mesh_dim_latency.__getitem__, mesh_dims)),
        topo.base_latency_us,
    )


class DimPrices(NamedTuple):
    """The prices of one mesh dim.

    Attributes:
        ring: prices the mesh dim by the formula.
        curves: time by change of placement over the bytes of the whole tensor; empty where the formula prices it.
    """

    ring: Ring
    curves: Mapping[str, Curve]

    @staticmethod
    def of(topo: MeshConstants, mesh_dim: int) -> DimPrices:
        curves = topo.mesh_dim_curves[mesh_dim] if topo.mesh_dim_curves else {}
        return DimPrices(ring_of(topo, [mesh_dim]), curves)

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


def joint_prices(topo: MeshConstants, mesh_dims: Sequence[int]) -> DimPrices | None:
    """The prices of one collective over all ranks of several mesh dims.

    None where the mesh dims were measured one by one but not together: a formula beside measured times
    would win or lose for being a formula.
    """
    measured = any(topo.mesh_dim_curves[d] for d in mesh_dims) if topo.mesh_dim_curves else False
    if measured and not topo.joint_curves:
        return None
    return DimPrices(ring_of(topo, mesh_dims), topo.joint_curves)
