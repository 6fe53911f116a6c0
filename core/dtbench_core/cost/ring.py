"""The ring formula and torch's constants for it: the time of a collective without measurements. Does not need torch.

A collective over the n ranks of a mesh dim is modelled as a ring:

    us = base_us + hops * latency_us + size_GiB * hops / n / bandwidth_GiBps * 1e6

with hops = n - 1 for all-gather, reduce-scatter and all-to-all, and 2 (n - 1) for all-reduce. The size is that of the
tensor which the ranks hold together: gathered, or not yet scattered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

GIB = 1024**3  # torch's cost functions divide bytes by 1024^3, although their comments say "GB/s"


class RingLink(NamedTuple):
    """The link between two neighbours of a ring.

    Attributes:
        bandwidth: GiB/s.
        latency_us: microseconds per hop.
    """

    bandwidth: float
    latency_us: float


# The constants of MeshTopoInfo.build_from_mesh and of the cost functions in
# torch/distributed/tensor/_collective_utils.py (unchanged from 2.0 to 2.13): the Ring/LL entries for Ampere in NCCL's
# src/graph/tuning.cc. 0.22 is PyTorch's ratio of network to NVLink bandwidth.
BASE_LATENCY_US = 6.6  # a literal in each of torch's cost functions
INTRA_HOST = RingLink(87.7, 0.6)
INTER_HOST = RingLink(INTRA_HOST.bandwidth * 0.22, 2.7)
# torch's surcharge on Shard -> Shard. Here it prices the copies around the exchange.
ALL_TO_ALL_PENALTY_US = 1.0
# Keeping a part of a replica sends nothing, but copies like an all-to-all does. The same price ensures that a gather
# followed by a local cut is never cheaper than an all-to-all.
LOCAL_COPY_US = ALL_TO_ALL_PENALTY_US

RING_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")  # collectives that torch has a formula for
ONE_WAY = ("broadcast", "reduce", "sendrecv")  # each link transfers the full size once


def hops(collective: str, ranks: int) -> int:
    """Returns the number of steps of the ring."""
    return trips(collective) * (ranks - 1)


def trips(collective: str) -> int:
    """Returns how many times the data passes around the ring: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if collective == "all_reduce" else 1


def busbw_factor(collective: str, ranks: int) -> float:
    """Returns bus bandwidth divided by algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).

    This is the share of the size that each link transfers. It is 0 for one rank, except for one-way collectives.
    """
    return 1.0 if collective in ONE_WAY else hops(collective, ranks) / ranks


def guessed_links(shape: Sequence[int], devices_per_host: int) -> list[RingLink]:
    """Returns the link of each mesh dim, guessed as torch does.

    A mesh dim crosses hosts if it and the dims inside it have more ranks than a host has devices. The actual hosts of
    the ranks are not considered.
    """
    return [
        INTER_HOST if math.prod(shape[dim:]) > devices_per_host else INTRA_HOST for dim in range(len(shape))
    ]


class Ring(NamedTuple):
    """A ring of ranks.

    Attributes:
        ranks: number of ranks.
        bandwidth: GiB/s of a link.
        latency_us: microseconds per hop.
        base_us: microseconds that every collective takes in addition.
    """

    ranks: int
    bandwidth: float
    latency_us: float
    base_us: float = BASE_LATENCY_US

    def us(self, gib: float, trips: int = 1) -> float:
        """Returns the microseconds for `gib` GiB that pass around the ring `trips` times."""
        hops = trips * (self.ranks - 1)
        return self.base_us + hops * self.latency_us + gib * hops / self.ranks / self.bandwidth * 1e6

    def collective_us(self, collective: str, size_bytes: float) -> float:
        """Returns the microseconds of a collective, given its name and size."""
        return self.us(size_bytes / GIB, trips(collective))

    def change_us(self, src: str, dst: str, local_gib: float) -> float:
        """Returns the microseconds of a change of placement.

        Args:
            src, dst: letters of the placements: "S", "R" or "P".
            local_gib: GiB per rank before the change.
        """
        if src == "P":
            return self.us(local_gib, trips=2 if dst == "R" else 1)
        gather = self.us(local_gib * self.ranks)
        return gather if dst == "R" else min(self.us(local_gib) + ALL_TO_ALL_PENALTY_US, gather)
