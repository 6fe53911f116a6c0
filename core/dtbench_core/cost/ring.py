"""The ring formula and torch's constants for it: what a collective takes where nothing was measured. No torch.

A collective over the n ranks of a mesh dim is taken for a ring:

    us = base_us + hops * latency_us + size_GiB * hops / n / bandwidth_GiBps * 1e6

with hops = n - 1 for all-gather, reduce-scatter and all-to-all, and 2 (n - 1) for all-reduce. Sizes are those
of the whole tensor as the ranks hold it together: gathered, or not yet scattered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

GIB = 1024**3  # torch's cost functions divide bytes by 1024^3, whatever "GB/s" their comments say


class RingLink(NamedTuple):
    """What joins two neighbours of a ring. bandwidth: GiB/s. latency_us: per hop."""

    bandwidth: float
    latency_us: float


# The constants of MeshTopoInfo.build_from_mesh and of the cost functions beside it in
# torch/distributed/tensor/_collective_utils.py (unchanged from 2.0 to 2.13): the Ring/LL entries for Ampere of
# NCCL's src/graph/tuning.cc. 0.22 is PyTorch's ratio of network to NVLink bandwidth.
BASE_LATENCY_US = 6.6  # hard-coded in each of torch's cost functions
INTRA_HOST = RingLink(87.7, 0.6)
INTER_HOST = RingLink(INTRA_HOST.bandwidth * 0.22, 2.7)
# torch's surcharge on Shard -> Shard; here it is the price of the copies around the exchange.
ALL_TO_ALL_PENALTY_US = 1.0
# Cutting a replica sends nothing but copies, as the reshuffle of an all-to-all does: priced the same, so that
# gathering and cutting is never cheaper than exchanging.
LOCAL_COPY_US = ALL_TO_ALL_PENALTY_US

RING_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")  # those that torch has a formula for
ONE_WAY = ("broadcast", "reduce", "sendrecv")  # all of the size passes every link, once


def hops(collective: str, ranks: int) -> int:
    """Steps of the ring."""
    return trips(collective) * (ranks - 1)


def trips(collective: str) -> int:
    """How often the data goes around: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if collective == "all_reduce" else 1


def busbw_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md): the share of the size that
    passes each link. 0 for one rank, which uses no link, but for what goes one way."""
    return 1.0 if collective in ONE_WAY else hops(collective, ranks) / ranks


def guessed_links(shape: Sequence[int], devices_per_host: int) -> list[RingLink]:
    """By mesh dim, as torch guesses: a dim crosses hosts once it and the dims inside it hold more ranks than a
    host has devices. Where the ranks really are it does not ask."""
    inside = [math.prod(shape[dim:]) for dim in range(len(shape))]
    return [INTER_HOST if ranks > devices_per_host else INTRA_HOST for ranks in inside]


class Ring(NamedTuple):
    """The ranks that take part, and what joins neighbours. bandwidth: GiB/s. latency_us: per hop."""

    ranks: int
    bandwidth: float
    latency_us: float
    base_us: float = BASE_LATENCY_US

    def us(self, gib: float, trips: int = 1) -> float:
        """Microseconds for `gib` GiB."""
        hops = trips * (self.ranks - 1)
        seconds = (gib * hops / self.ranks) / self.bandwidth
        return self.base_us + hops * self.latency_us + seconds * 1e6

    def collective_us(self, collective: str, size_bytes: float) -> float:
        """Microseconds of a collective by name."""
        return self.us(size_bytes / GIB, trips(collective))

    def change_us(self, src: str, dst: str, held_gib: float) -> float:
        """us of the collective between two letters, when each rank holds `held_gib` GiB before."""
        if src == "P":
            return self.us(held_gib, trips=2 if dst == "R" else 1)
        gathered = self.us(held_gib * self.ranks)
        return gathered if dst == "R" else min(self.us(held_gib) + ALL_TO_ALL_PENALTY_US, gathered)
