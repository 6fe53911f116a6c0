"""The cost formulas of `torch.distributed.tensor` and the constants built into them.

A collective over the n ranks of a mesh dim is taken for a ring:

    time_us = 6.6 + hops * latency_us_per_hop + size_GiB * hops / n / bandwidth_GiBps * 1e6

with hops = n - 1 for all_gather and reduce_scatter and 2 (n - 1) for all_reduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

GIB = 1024**3  # torch's cost functions divide bytes by 1024^3, whatever "GB/s" their comments say
# The constants below are those of MeshTopoInfo.build_from_mesh and the cost functions beside it, in
# torch/distributed/tensor/_collective_utils.py (2.11 to 2.13).
BASE_LATENCY_US = 6.6  # hard-coded in every cost function, so it is held and not fitted
INTRA_HOST = {"bandwidth_GiBps": 87.7, "latency_us_per_hop": 0.6}
INTER_HOST = {"bandwidth_GiBps": 87.7 * 0.22, "latency_us_per_hop": 2.7}

RING_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")


def hops(collective: str, ranks: int) -> int:
    """Steps of the ring that torch's cost formulas assume."""
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


def predict_us(
    collective: str,
    size_bytes: float,
    ranks: int,
    *,
    bandwidth_GiBps: float,  # noqa: N803 - the unit, as the topology file spells it
    latency_us_per_hop: float,
) -> float:
    """The stock formula's time, microseconds. size_bytes: the whole tensor, as a group holds it."""
    steps = hops(collective, ranks)
    transfer_s = size_bytes / GIB * steps / ranks / bandwidth_GiBps
    return BASE_LATENCY_US + steps * latency_us_per_hop + transfer_s * 1e6


def ring_us(collective: str, size_bytes: float, ranks: int, constants: Mapping[str, float]) -> float:
    """`predict_us` with the two constants out of a mapping that may hold more."""
    return predict_us(
        collective,
        size_bytes,
        ranks,
        bandwidth_GiBps=constants["bandwidth_GiBps"],
        latency_us_per_hop=constants["latency_us_per_hop"],
    )


def guessed_constants(shape: Sequence[int], dim: int, devices_per_host: int) -> dict[str, float]:
    """What torch takes for a mesh dim: it crosses hosts once it and the dims inside it hold more ranks
    than a host has devices. Where the ranks really are it does not ask."""
    inside = math.prod(shape[dim:])
    return dict(INTER_HOST if inside > devices_per_host else INTRA_HOST)
