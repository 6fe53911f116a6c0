"""Price of a change of placement on one mesh dim: from measured curves, or from the ring formula.

A change is named as in a topology file: "S(0)->R", "P->S(1)". Tensor dims other than the first are all called 1,
because it only matters whether a shard is contiguous in memory. Between two Shards the lower dim is called 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import GIB, Ring
from dtbench_core.cost.topology import SENDING, MeshConstants


class PlacementLike(Protocol):
    """A placement of PyTorch or ours."""

    def is_shard(self) -> bool: ...
    def is_partial(self) -> bool: ...
    def is_replicate(self) -> bool: ...


class Kind(NamedTuple):
    """The part of a placement that its price depends on.

    Attributes:
        letter: "S" for Shard, "R" for Replicate, "P" for Partial.
        dim: tensor dim of a Shard.
    """

    letter: str
    dim: int = 0

    @staticmethod
    def of(placement: PlacementLike) -> Kind:
        if placement.is_shard():
            return Kind("S", placement.dim)  # type: ignore[attr-defined]
        return Kind("R" if placement.is_replicate() else "P")


def change_name(src: Kind, dst: Kind) -> str:
    """Returns the name of the change in a topology file."""
    if src.letter == dst.letter == "S":
        return "S(0)->S(1)" if src.dim < dst.dim else "S(1)->S(0)"
    return f"{_kind_name(src)}->{_kind_name(dst)}"


def _kind_name(kind: Kind) -> str:
    return f"S({min(kind.dim, 1)})" if kind.letter == "S" else kind.letter


def ring_of(topo: MeshConstants, mesh_dims: Sequence[int]) -> Ring:
    """Returns a ring through the ranks of these mesh dims, in which every hop is as slow as the slowest of them."""
    return Ring(
        math.prod(map(topo.mesh_dim_devices.__getitem__, mesh_dims)),
        min(map(topo.mesh_dim_bandwidth.__getitem__, mesh_dims)),
        max(map(topo.mesh_dim_latency.__getitem__, mesh_dims)),
        topo.base_latency_us,
    )


class DimPrices(NamedTuple):
    """The prices of one mesh dim.

    Attributes:
        ring: the ring formula of the mesh dim.
        curves: measured time of each change, over the bytes of the global tensor; empty if the formula is to be used.
    """

    ring: Ring
    curves: Mapping[str, Curve]

    @staticmethod
    def of(topo: MeshConstants, mesh_dim: int) -> DimPrices:
        return DimPrices(
            ring_of(topo, [mesh_dim]), topo.mesh_dim_curves[mesh_dim] if topo.mesh_dim_curves else {}
        )

    def us(self, src: Kind, dst: Kind, local_gib: float) -> float:
        """Returns the microseconds of a change that sends something.

        Args:
            local_gib: GiB per rank before the change.
        """
        if not self.curves:
            return self.ring.change_us(src.letter, dst.letter, local_gib)
        global_bytes = local_gib * GIB * (self.ring.ranks if src.letter == "S" else 1)
        direct = self.curves[change_name(src, dst)].us(global_bytes)
        if src.letter != "S" or dst.letter != "S":
            return direct
        gather = self.curves[change_name(src, Kind("R"))].us(global_bytes)
        return min(direct, gather + self.local_us(dst, global_bytes / GIB, 0.0))

    def local_us(self, dst: Kind, local_gib: float, default: float) -> float:
        """Returns the microseconds of a change from Replicate, which sends nothing; `default` if not measured."""
        curve = self.curves.get(change_name(Kind("R"), dst)) if dst.letter == "S" else None
        return default if curve is None else curve.us(local_gib * GIB)

    def minimum_us(self) -> float:
        """Returns a lower bound of the microseconds of any change that sends something."""
        return self.ring.us(0.0) if not self.curves else min(self.curves[name].us(0.0) for name in SENDING)


def joint_prices(topo: MeshConstants, mesh_dims: Sequence[int]) -> DimPrices | None:
    """Returns the prices of one collective over all ranks of several mesh dims.

    None if the mesh dims were measured separately but not together. Otherwise a formula would be compared with measured
    times, and would win or lose for that reason alone.
    """
    measured = any(topo.mesh_dim_curves[d] for d in mesh_dims) if topo.mesh_dim_curves else False
    if measured and not topo.joint_curves:
        return None
    return DimPrices(ring_of(topo, mesh_dims), topo.joint_curves)
