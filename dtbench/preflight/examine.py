"""What a preflight measures next and what it names: a generator that yields commands and is sent what the ranks
measured. Rank 0 runs it; the others do what it asks for.

First everything is measured shortly: pairs in rounds, the collectives of each mesh dim, computation and copies.
What lies below `SUSPECT` of its peers is a suspect, and no more than that. Each suspect is measured again, in turns
with peers of the same kind; it is named where the new measurements alone say so: below `NAMED` of its peers, and so by
chance (the rank sum test, Mann & Whitney 1947) at most once in 1 / `LEVEL` preflights of equal ranks, shared among the
suspects.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from msgspec import Struct

from dtbench.grouping import group_by
from dtbench.stats import hodges_lehmann_ratio, order_statistic, rank_test
from dtbench.suite.mesh import Mesh, groups_by_dim

Pair = tuple[int, int]
PairRound = tuple[Pair, ...]

INSIDE, BETWEEN = "inside hosts", "between hosts"
# Up to so many everybody meets everybody; beyond, twice the logarithm of their number meets.
ALL_PAIRS_UP_TO = 16
# Shares of the peers' speed. A link at 80 % is to be found, and 10 % is what operators act on (Megatron-LM#4662).
SUSPECT, NAMED = 0.93, 0.90
LEVEL = 0.005
SCREEN_REPS, CONFIRM_REPS = 5, 16
PEERS = 3  # beside which a slow rank has to be slow
# Of work, which takes longer each time.
WORK_REPS, WORK_CONFIRM_REPS = 5, 12
# The worst of a kind are looked at again; where more lie off, the kind has no common speed.
MAX_SUSPECTS = 8
# One exchange or collective takes about so long: well above the clock's and a barrier's noise, so short that
# thousands of ranks are through within a minute.
TARGET_S = 0.04
# A piece of work takes longer than the 100 ms by which kernels share out a CPU's quota (cpu.max): a rank that has
# used up its own is stopped in each piece.
WORK_S = 0.12
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
MATMUL, COPY = "matrix products", "memory copies"


# What the ranks are to do, as JSON: `do` is pairs, all_reduce, work or place; see `pairs`, `work` and `_collective`.
ProbeCommand = dict[str, Any]
# By rank what it measured, in seconds; the shape is the command's, see `part.Probe`.
Answers = Sequence[Any]
# By rank its kernel, the CPUs that it may use (none: it works on a device of its own) and its threads.
Places = Sequence[tuple[str | None, Sequence[int], int]]
_Exchanges = dict[Pair, list[float]]  # of a pair: seconds of each exchange


@dataclass(frozen=True)
class ExaminedWorld:
    """hosts: by rank."""

    hosts: tuple[str, ...]
    mesh: Mesh

    @property
    def size(self) -> int:
        return len(self.hosts)

    def words(self, ranks: Sequence[int]) -> str:
        """`rank 3 (node-1)`."""
        return " and ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks)


class DimTimes(Struct, frozen=True, kw_only=True):
    """The all_reduce of a mesh dim, per group with all at work."""

    dim: str
    groups: tuple[tuple[int, ...], ...]
    size_bytes: int
    times_s: tuple[float, ...]


class SlowFinding(Struct, frozen=True, kw_only=True):
    """share: of its peers' speed. p: by chance alone, at most."""

    what: str
    kind: str
    ranks: tuple[int, ...]
    share: float
    p: float

    def words(self) -> str:
        """`host node-3: 79% of its peers (between hosts)`."""
        return f"{self.what}: {self.share:.0%} of its peers ({self.kind})"


class Recheck(Struct, frozen=True, kw_only=True):
    """A suspect that was measured again, in turns with sound peers.

    Attributes:
        finding: the suspect and its share of its peers' speed, by these new measurements alone.
        time_s: the median of them, seconds.
        peers_s: time_s times that share: what the peers take, by the same estimate.
        size_bytes: of a link, the bytes of an exchange each way; None of work.
        slow: whether it is named.
    """

    finding: SlowFinding
    time_s: float
    peers_s: float
    size_bytes: int | None
    slow: bool


@dataclass
class PairsOf:
    """A kind of link. exchanges: of so many bytes both ways."""

    size_bytes: int
    exchanges: _Exchanges

    def seconds(self, pair: Pair) -> float:
        return median(self.exchanges[pair])

    def rate(self, pair: Pair) -> float:
        """Bytes per second each way, of the median exchange."""
        return self.size_bytes / self.seconds(pair)


@dataclass
class Examination:
    """Everything that was measured, what is slow, notes; rechecks: all suspects; unjudged: what could not be told, for
    want of peers or of agreement."""

    world: ExaminedWorld
    pairs: dict[str, PairsOf] = field(default_factory=dict)
    dims: dict[str, DimTimes] = field(default_factory=dict)
    work_s: dict[str, list[float]] = field(default_factory=dict)
    findings: list[SlowFinding] = field(default_factory=list)
    rechecks: list[Recheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Suspect:
    """A rank (one) or a link (two). pairs, controls: what to measure in turns."""

    ranks: tuple[int, ...]
    kind: str
    pairs: tuple[Pair, ...] = ()
    controls: tuple[Pair, ...] = ()


# Under way: it yields what the ranks are to do, and is sent what they measured.
_T = TypeVar("_T")
Measuring = Generator[ProbeCommand, Answers, _T]
Examining = Measuring[Examination]


def examine(world: ExaminedWorld) -> Examining:
    """All of it, from the screen to what is named."""
    examination = Examination(world)
    suspects: list[_Suspect] = []
    for kind, rounds in rounds_of(world.hosts).items():
        examination.pairs[kind] = yield from _screen_pairs(rounds)
        suspects += _suspect_links(kind, examination.pairs[kind], examination)
    if world.size < 3:
        examination.unjudged.append("2 ranks have one link and no peers; start 3 or more, or give --expect")
    places = yield {"do": "place"}
    slow_work: dict[str, list[int]] = {}
    for kind in (MATMUL, COPY):
        answers = yield work(kind, turns_of(range(world.size), places), WORK_REPS)
        examination.work_s[kind] = [median(of) for of in answers]
        slow_work[kind] = list(_below(dict(enumerate(examination.work_s[kind])), examination.notes, kind))
    for dim, groups in groups_by_dim(*zip(*world.mesh, strict=True)).items():
        if len(groups[0]) > 1:
            examination.dims[dim] = yield from _screen_dim(dim, groups)
    level = LEVEL / max(1, len(suspects) + sum(map(len, slow_work.values())))
    for suspect in suspects:
        examination.rechecks += yield from _confirm_link(suspect, examination, level)
    for kind, ranks in slow_work.items():
        examination.rechecks += yield from _confirm_work(kind, ranks, places, examination, level)
    examination.findings = _by_host([one.finding for one in examination.rechecks if one.slow], world)
    examination.unjudged += (
        f"{one.finding.words()}, but so unsteady that it may be chance"
        for one in examination.rechecks
        if one.finding.share <= NAMED and not one.slow
    )
    return examination


def rounds_of(hosts: Sequence[str]) -> dict[str, list[PairRound]]:
    """Kind of link -> rounds; in a round no rank is in two pairs.

    hosts: by rank. Ranks of one host meet inside it, on all hosts at once; between hosts ranks meet those of the
    same place on another host. The number of rounds grows with the logarithm of hosts and of ranks per host.
    """
    groups = list(group_by(range(len(hosts)), lambda rank: hosts[rank]).values())
    rounds = {
        INSIDE: [
            tuple((group[a], group[b]) for group in groups for a, b in turn if max(a, b) < len(group))
            for turn in matchings(max(map(len, groups)))
        ],
        BETWEEN: [
            tuple(pair for a, b in turn for pair in zip(groups[a], groups[b], strict=False))
            for turn in matchings(len(groups))
        ],
    }
    return {kind: [*filter(None, of_kind)] for kind, of_kind in rounds.items() if any(of_kind)}


def matchings(n: int) -> list[PairRound]:
    """Rounds of pairs of 0 .. n - 1: a tournament of all (the circle method), or random ones of a fixed seed."""
    if n <= ALL_PAIRS_UP_TO:
        even = n + n % 2
        ring = list(range(even))
        rounds = []
        for _ in range(even - 1 if n > 1 else 0):
            halves = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
            rounds.append(tuple((min(pair), max(pair)) for pair in halves if max(pair) < n))
            ring = [ring[0], ring[-1], *ring[1:-1]]
        return rounds
    order, drawn = list(range(n)), random.Random(n)
    rounds = []
    for _ in range(2 * math.ceil(math.log2(n))):
        drawn.shuffle(order)
        rounds.append(tuple((min(order[i : i + 2]), max(order[i : i + 2])) for i in range(0, n - 1, 2)))
    return rounds


def _screen_pairs(rounds: Sequence[PairRound]) -> Measuring[PairsOf]:
    times = yield from _exchange(rounds[:1], 2, FIRST_BYTES)
    size = fitting_bytes(FIRST_BYTES, median(map(min, times.values())))
    return PairsOf(size, (yield from _exchange(rounds, SCREEN_REPS, size)))


def fitting_bytes(size_bytes: int, seconds: float) -> int:
    """A power of two that takes about `TARGET_S`, where `size_bytes` took so long."""
    wanted = size_bytes * TARGET_S / max(seconds, 1e-9)
    return int(min(max(2 ** round(math.log2(wanted)), FIRST_BYTES), MOST_BYTES))


def _exchange(rounds: Sequence[PairRound], reps: int, size_bytes: int) -> Measuring[_Exchanges]:
    answers = yield pairs(rounds, reps, size_bytes)
    exchanges: _Exchanges = {}
    for at, one in enumerate(rounds):
        for a, b in one:
            exchanges.setdefault((a, b), []).extend(worse(answers, at, a, b))
    return exchanges


def pairs(rounds: Sequence[Sequence[Sequence[int]]], reps: int, size_bytes: int) -> ProbeCommand:
    """Exchanges of pairs, those of a round at once."""
    return {
        "do": "pairs",
        "rounds": [[list(pair) for pair in pairs_at_once] for pairs_at_once in rounds],
        "reps": reps,
        "bytes": size_bytes,
    }


def worse(answers: Answers, at: int, a: int, b: int) -> list[float]:
    """Of each exchange of a round the slower rank's time."""
    return list(map(max, zip(answers[a][at], answers[b][at], strict=True)))


def work(kind: str, turns: Sequence[Sequence[int]], reps: int) -> ProbeCommand:
    """Pieces of work, by the ranks of a turn at once."""
    return {"do": "work", "kind": kind, "turns": turns, "reps": reps}


def turns_of(ranks: Iterable[int], places: Places) -> list[list[int]]:
    """Ranks that work at once: no more on a machine than have a CPU each; ranks that share CPUs hide who is stopped."""
    turns: list[list[int]] = []
    for mine in group_by(ranks, lambda rank: places[rank][0]).values():
        cpus = {cpu for rank in mine for cpu in places[rank][1]}
        at_once = max(1, len(cpus) // max(places[rank][2] for rank in mine)) if cpus else len(mine)
        for turn, first in enumerate(range(0, len(mine), at_once)):
            turns += [[]] if turn == len(turns) else []
            turns[turn] += mine[first : first + at_once]
    return turns


def _screen_dim(dim: str, groups: Sequence[Sequence[int]]) -> Measuring[DimTimes]:
    first = yield _collective(dim, groups, 2, FIRST_BYTES)
    size = fitting_bytes(FIRST_BYTES, median(min(of) for of in first))
    together = yield _collective(dim, groups, SCREEN_REPS, size)
    return DimTimes(
        dim=dim,
        groups=tuple(map(tuple, groups)),
        size_bytes=size,
        times_s=tuple(_of_group(together, of) for of in groups),
    )


def _collective(dim: str, groups: Sequence[Sequence[int]], reps: int, size_bytes: int) -> ProbeCommand:
    return {
        "do": "all_reduce",
        "dim": dim,
        "ranks": [rank for group in groups for rank in group],
        "reps": reps,
        "bytes": size_bytes,
    }


def _of_group(answers: Answers, group: Iterable[int]) -> float:
    """Of the median call the slowest rank's time."""
    return float(median(max(turn) for turn in zip(*(answers[rank] for rank in group), strict=True)))


def _suspect_links(kind: str, of: PairsOf, examination: Examination) -> list[_Suspect]:
    """Ranks that are slow with nearly all partners, then links that are slow between two ranks which are not."""
    times = {pair: of.seconds(pair) for pair in of.exchanges}
    if len(times) < 2:
        if examination.world.size > 2:
            examination.unjudged.append(f"links {kind}: a single pair has no peers")
        return []
    usual = median(times.values())
    best = _by_rank(times)
    slow = _below(best, examination.notes, kind)
    others = [pair for pair in times if not slow.keys() & set(pair)]
    shares = {
        pair: min(max(best.get(rank, usual) for rank in pair) / SUSPECT, usual / NAMED) / times[pair]
        for pair in others
    }
    links = sorted((pair for pair in others if shares[pair] < 1), key=shares.__getitem__)
    sound = [pair for pair in others if shares[pair] >= 1]
    ranks = [_Suspect((rank,), kind, _of_rank(rank, times, slow), tuple(sound)) for rank in slow]
    # beside sound links of the same two ranks, else any
    for pair in _worst(links, len(times), "links", examination.notes, kind):
        beside = [other for other in sound if set(other) & set(pair)] or sound
        ranks.append(_Suspect(pair, kind, (pair,), tuple(beside)))
    return ranks


def _by_rank(of_pairs: Mapping[Pair, float]) -> dict[int, float]:
    """Its lower quartile over partners: one exchange may be fast by luck, and partners may be slow themselves. Nothing
    tells a rank with one partner from its link."""
    met: dict[int, list[float]] = {}
    for pair, value in of_pairs.items():
        for rank in pair:
            met.setdefault(rank, []).append(value)
    return {rank: order_statistic(values, 0.25) for rank, values in met.items() if len(values) > 1}


def _of_rank(rank: int, pairs: Iterable[Pair], slow: Mapping[int, float]) -> tuple[Pair, ...]:
    """The pairs of a rank with partners that are not suspects, else all of its pairs."""
    mine = [pair for pair in pairs if rank in pair]
    return tuple([pair for pair in mine if not (slow.keys() - {rank}) & set(pair)] or mine)


def _below(times: Mapping[int, float], notes: list[str], kind: str) -> dict[int, float]:
    """Rank -> its share of the usual speed, of those that lie below `SUSPECT`, the worst first."""
    if len(times) < 3:  # of two, either may be the slow one
        return {}
    usual = median(times.values())
    slow = {rank: usual / seconds for rank, seconds in times.items() if usual / seconds < SUSPECT}
    ranks = sorted(slow, key=slow.__getitem__)
    return {rank: slow[rank] for rank in _worst(ranks, len(times), "ranks", notes, kind)}


def _worst(slow: Sequence[Any], count: int, noun: str, notes: list[str], kind: str) -> Sequence[Any]:
    """Returns the suspects to measure again. slow: the worst first; count: of all, suspects or not."""
    if len(slow) > MAX_SUSPECTS:
        notes.append(
            f"{kind}: {len(slow)} of {count} {noun} are slow; the worst {MAX_SUSPECTS} were examined"
        )
    return slow[:MAX_SUSPECTS]


def _confirm_link(suspect: _Suspect, examination: Examination, level: float) -> Measuring[list[Recheck]]:
    """Pair by pair with nobody else at work, in turns with sound ones."""
    if not suspect.controls:
        examination.unjudged.append(
            f"{examination.world.words(suspect.ranks)}: no sound peers ({suspect.kind})"
        )
        return []
    turns = zip(itertools.cycle(suspect.pairs), itertools.cycle(suspect.controls), strict=False)
    rounds: list[PairRound] = [(pair,) for turn in itertools.islice(turns, CONFIRM_REPS) for pair in turn]
    answers = yield pairs(rounds, 1, examination.pairs[suspect.kind].size_bytes)
    seconds = [worse(answers, at, a, b)[0] for at, ((a, b),) in enumerate(rounds)]
    return [_judge(suspect, seconds[1::2], seconds[::2], level, examination)]


def _confirm_work(
    kind: str, ranks: Sequence[int], places: Places, examination: Examination, level: float
) -> Measuring[list[Recheck]]:
    """The suspects beside some peers of usual speed, one after another: what else a machine does for a moment slows
    whoever is there. Named is who is slow beside each."""
    times = examination.work_s[kind]
    usual = median(times)
    peers = [rank for rank in range(len(times)) if rank not in ranks and usual / times[rank] >= SUSPECT]
    if ranks and not peers:
        examination.unjudged.append(f"{examination.world.words(ranks)}: no sound peers ({kind})")
        return []
    judged: dict[int, Recheck] = {}
    for peer in peers[:PEERS]:
        left = [rank for rank in ranks if rank not in judged or judged[rank].slow]
        if left:
            answers = yield work(kind, turns_of([*left, peer], places), WORK_CONFIRM_REPS)
        for rank in left:
            again = _judge(_Suspect((rank,), kind), answers[peer], answers[rank], level, examination)
            judged[rank] = max(
                judged.get(rank, again), again, key=lambda one: (not one.slow, one.finding.share)
            )
    return list(judged.values())


def _judge(
    suspect: _Suspect,
    controls: Sequence[float],
    again: Sequence[float],
    level: float,
    examination: Examination,
) -> Recheck:
    """controls, again: seconds of sound peers and of the suspect."""
    share = 1 / hodges_lehmann_ratio(controls, again).ratio
    p = rank_test(controls, again).p_slower
    words = examination.world.words(suspect.ranks)
    return Recheck(
        finding=SlowFinding(
            what=f"the link of {words}" if len(suspect.ranks) > 1 else words,
            kind=suspect.kind,
            ranks=suspect.ranks,
            share=share,
            p=p,
        ),
        time_s=median(again),
        peers_s=median(again) * share,
        size_bytes=examination.pairs[suspect.kind].size_bytes if suspect.kind in examination.pairs else None,
        slow=share <= NAMED and p <= level,
    )


def _by_host(findings: Sequence[SlowFinding], world: ExaminedWorld) -> list[SlowFinding]:
    """All ranks of a host that are slow in the same are one finding: the host."""
    merged: list[SlowFinding] = []
    for kind, of_kind in group_by(findings, lambda one: one.kind).items():
        single = {one.ranks[0]: one for one in of_kind if len(one.ranks) == 1}
        for host, on_host in group_by(range(world.size), lambda rank: world.hosts[rank]).items():
            if set(on_host) <= single.keys() and len(set(world.hosts)) > 1:
                parts = [single.pop(rank) for rank in on_host]
                merged.append(
                    SlowFinding(
                        what=f"host {host}",
                        kind=kind,
                        ranks=tuple(on_host),
                        share=median(finding.share for finding in parts),
                        p=max(finding.p for finding in parts),
                    )
                )
        merged += [*single.values(), *(one for one in of_kind if len(one.ranks) > 1)]
    return merged
