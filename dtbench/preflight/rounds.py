"""Rounds of disjoint pairs of ranks, inside hosts and between them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from dtbench.suite.grouping import group_by

Pair = tuple[int, int]
PairRound = tuple[Pair, ...]

INSIDE, BETWEEN = "inside hosts", "between hosts"
# Up to so many everybody meets everybody; beyond, twice the logarithm of their number meets.
ALL_PAIRS_UP_TO = 16


def rounds_of(hosts: Sequence[str]) -> dict[str, list[PairRound]]:
    """Kind of link -> rounds; in a round no rank is in two pairs.

    hosts: by rank. Ranks of one host meet inside it, on all hosts at once; between hosts ranks meet those of the
    same place on another host. The number of rounds grows with the logarithm of hosts and of ranks per host.
    """
    groups = list(group_by(range(len(hosts)), lambda rank: hosts[rank]).values())
    inside = [
        tuple(pair for group in groups for pair in _among(group, turn))
        for turn in matchings(max(map(len, groups)))
    ]
    between = [
        tuple(pair for a, b in turn for pair in zip(groups[a], groups[b], strict=False))
        for turn in matchings(len(groups))
    ]
    rounds = {INSIDE: [one for one in inside if one], BETWEEN: [one for one in between if one]}
    return {kind: several for kind, several in rounds.items() if several}


def _among(group: Sequence[int], turn: Iterable[Pair]) -> list[Pair]:
    return [(group[a], group[b]) for a, b in turn if max(a, b) < len(group)]


def matchings(n: int) -> list[PairRound]:
    """Rounds of pairs of 0 .. n - 1: a tournament of all (the circle method), or random ones of a fixed seed."""
    if n <= ALL_PAIRS_UP_TO:
        even = n + n % 2
        ring = list(range(even))
        rounds = []
        for _ in range(even - 1 if n > 1 else 0):
            halves = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
            rounds.append(tuple(_sorted(a, b) for a, b in halves if max(a, b) < n))
            ring = [ring[0], ring[-1], *ring[1:-1]]
        return rounds
    order, drawn = list(range(n)), random.Random(n)
    rounds = []
    for _ in range(2 * math.ceil(math.log2(n))):
        drawn.shuffle(order)
        rounds.append(tuple(_sorted(*order[i : i + 2]) for i in range(0, n - 1, 2)))
    return rounds


def _sorted(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
