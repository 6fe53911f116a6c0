"""The examination of a preflight, as a generator: it yields commands, and is sent the times that the ranks measured.

Rank 0 runs the generator, and all ranks carry out its commands. First, a short screening measures pairs of ranks, the
collectives of each mesh dim, computation and copies. Any rank or link below the share `SUSPECT` of its peers' speed
becomes a suspect. Suspects are measured again, alternating with peers of the same kind. Only the new times decide.

A suspect is reported if its speed is below the share `NAMED` of its peers' speed, and if the rank sum test (Mann &
Whitney 1947) excludes chance. The test's significance level is `LEVEL` per preflight, divided among the suspects.
"""

import itertools
import math
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any, TypeVar

from msgspec import Struct

from dtbench.grouping import group_by
from dtbench.stats import hodges_lehmann_ratio, order_statistic, rank_test
from dtbench.suite.mesh import Mesh, groups_by_dim

Pair = tuple[int, int]
PairRound = tuple[Pair, ...]

INSIDE, BETWEEN = "inside hosts", "between hosts"
# Up to this number of hosts, or of ranks per host, all pairs are measured; beyond it, 2 * log2(n) random rounds.
ALL_PAIRS_UP_TO = 16
# Shares of the peers' speed. A link at 80 % of its peers' speed must be found, and operators act on a
# loss of 10 % (Megatron-LM#4662).
SUSPECT, NAMED = 0.93, 0.90
LEVEL = 0.005
SCREEN_REPS, CONFIRM_REPS = 5, 16
PEERS = 3  # a rank is reported only if it is slow in comparison with each of this many peers
# Repetitions of computation and copies; fewer, since these take longer.
WORK_REPS, WORK_CONFIRM_REPS = 5, 12
# At most this many suspects per kind are measured again. With more, the peers have no common speed to compare with.
MAX_SUSPECTS = 8
# Duration of one exchange or collective, seconds: well above the noise of clocks and barriers, and short enough for
# thousands of ranks within a minute.
TARGET_S = 0.04
# Duration of computation, seconds: longer than the 100 ms period of a CPU quota (cpu.max), so that a throttled rank is
# stopped in each repetition.
WORK_S = 0.12
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
MATMUL, COPY = "matrix products", "memory copies"


# A command to the ranks, as JSON: `do` is pairs, all_reduce, work or place; see `pairs`, `work` and `_collective`.
ProbeCommand = dict[str, Any]
# Rank -> its times in seconds. The shape depends on the command, see `part.Probe`.
Answers = Sequence[Any]
# Rank -> the boot id of its host, its usable CPUs (none if it computes on a GPU) and its number of threads.
Places = Sequence[tuple[str | None, Sequence[int], int]]
_Exchanges = dict[Pair, list[float]]  # pair -> seconds of each exchange


@dataclass(frozen=True)
class ExaminedWorld:
    """The ranks of a preflight.

    Attributes:
        hosts: host of each rank.
        mesh: device mesh of the ranks.
    """

    hosts: tuple[str, ...]
    mesh: Mesh

    @property
    def size(self) -> int:
        return len(self.hosts)

    def words(self, ranks: Sequence[int]) -> str:
        """Formats ranks with their hosts, e.g. `rank 3 (node-1)`."""
        return " and ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks)


class DimTimes(Struct, frozen=True, kw_only=True):
    """Times of the all_reduce of a mesh dim, which all groups run at the same time.

    Attributes:
        dim: mesh dim.
        groups: ranks of each group.
        size_bytes: size of the all_reduce.
        times_s: time per group, seconds.
    """

    dim: str
    groups: tuple[tuple[int, ...], ...]
    size_bytes: int
    times_s: tuple[float, ...]


class SlowFinding(Struct, frozen=True, kw_only=True):
    """A link, rank, host or mesh dim that is slower than its peers.

    Attributes:
        what: name of the link, rank, host or mesh dim.
        kind: kind of link or work.
        ranks: affected ranks.
        share: speed as a share of its peers' speed.
        p: p-value of the comparison.
    """

    what: str
    kind: str
    ranks: tuple[int, ...]
    share: float
    p: float

    def words(self) -> str:
        """Formats the finding, e.g. `host node-3: 79% of its peers (between hosts)`."""
        return f"{self.what}: {self.share:.0%} of its peers ({self.kind})"


class Recheck(Struct, frozen=True, kw_only=True):
    """A suspect that was measured again, alternating with healthy peers.

    Attributes:
        finding: the suspect, with its share of its peers' speed in the new measurements.
        time_s: median time of the suspect, seconds.
        peers_s: estimated time of its peers, time_s * share, seconds.
        size_bytes: bytes of an exchange in each direction, for a link; None for work.
        slow: whether it is reported.
    """

    finding: SlowFinding
    time_s: float
    peers_s: float
    size_bytes: int | None
    slow: bool


@dataclass
class LinkTimes:
    """Measured exchanges of one kind of link.

    Attributes:
        size_bytes: bytes of an exchange in each direction.
        exchanges: pair -> seconds of each exchange.
    """

    size_bytes: int
    exchanges: _Exchanges

    def seconds(self, pair: Pair) -> float:
        return median(self.exchanges[pair])


@dataclass
class Examination:
    """The measurements and findings of a preflight.

    Attributes:
        world: the ranks.
        pairs: kind of link -> its times.
        dims: mesh dim -> its times.
        work_s: kind of work -> median seconds per rank.
        findings: links, ranks, hosts and mesh dims that are reported as slow.
        rechecks: suspects that were measured again.
        notes: remarks for the user.
        unjudged: comparisons without a verdict, with the reason.
    """

    world: ExaminedWorld
    pairs: dict[str, LinkTimes] = field(default_factory=dict)
    dims: dict[str, DimTimes] = field(default_factory=dict)
    work_s: dict[str, list[float]] = field(default_factory=dict)
    findings: list[SlowFinding] = field(default_factory=list)
    rechecks: list[Recheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Suspect:
    """A rank or a link that was slow in the screening.

    Attributes:
        ranks: one rank, or the two ranks of a link.
        kind: kind of link or work.
        pairs: pairs to measure again.
        controls: healthy pairs that are measured alternately with `pairs`.
    """

    ranks: tuple[int, ...]
    kind: str
    pairs: tuple[Pair, ...] = ()
    controls: tuple[Pair, ...] = ()


_T = TypeVar("_T")
# Yields commands, is sent the answers of all ranks, returns a result.
Measuring = Generator[ProbeCommand, Answers, _T]


def examine(world: ExaminedWorld) -> Measuring[Examination]:
    """Screens the ranks, measures suspects again and returns the findings."""
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
        examination.work_s[kind] = [median(times) for times in answers]
        slow_work[kind] = list(_below(dict(enumerate(examination.work_s[kind])), examination.notes, kind))
    for dim, groups in groups_by_dim(*zip(*world.mesh, strict=True)).items():
        if len(groups[0]) > 1:
            examination.dims[dim] = yield from _screen_dim(dim, groups)
    level = LEVEL / max(1, len(suspects) + sum(map(len, slow_work.values())))
    for suspect in suspects:
        examination.rechecks += yield from _confirm_link(suspect, examination, level)
    for kind, ranks in slow_work.items():
        examination.rechecks += yield from _confirm_work(kind, ranks, places, examination, level)
    examination.findings = _by_host(
        [recheck.finding for recheck in examination.rechecks if recheck.slow], world
    )
    examination.unjudged += (
        f"{recheck.finding.words()}, but too unsteady to exclude chance"
        for recheck in examination.rechecks
        if recheck.finding.share <= NAMED and not recheck.slow
    )
    return examination


def rounds_of(hosts: Sequence[str]) -> dict[str, list[PairRound]]:
    """Returns the rounds of pairs for each kind of link. In a round, each rank is in at most one pair.

    Ranks within a host are paired on all hosts at once. Between hosts, ranks of equal local index are paired. The
    number of rounds grows with the logarithm of the number of hosts and of ranks per host.

    Args:
        hosts: host of each rank.
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
    """Returns rounds of pairs of 0 .. n - 1: all pairs (the circle method), or random rounds with a fixed seed."""
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


def _screen_pairs(rounds: Sequence[PairRound]) -> Measuring[LinkTimes]:
    times = yield from _exchange(rounds[:1], 2, FIRST_BYTES)
    size = fitting_bytes(FIRST_BYTES, median(map(min, times.values())))
    return LinkTimes(size, (yield from _exchange(rounds, SCREEN_REPS, size)))


def fitting_bytes(size_bytes: int, seconds: float) -> int:
    """Returns the power of two that takes about `TARGET_S`, given that `size_bytes` took `seconds`."""
    target_bytes = size_bytes * TARGET_S / max(seconds, 1e-9)
    return int(min(max(2 ** round(math.log2(target_bytes)), FIRST_BYTES), MOST_BYTES))


def _exchange(rounds: Sequence[PairRound], reps: int, size_bytes: int) -> Measuring[_Exchanges]:
    answers = yield pairs(rounds, reps, size_bytes)
    exchanges: _Exchanges = {}
    for round_index, pairs_at_once in enumerate(rounds):
        for a, b in pairs_at_once:
            exchanges.setdefault((a, b), []).extend(slower_times(answers, round_index, a, b))
    return exchanges


def pairs(rounds: Sequence[Sequence[Sequence[int]]], reps: int, size_bytes: int) -> ProbeCommand:
    """Returns the command to exchange data in pairs, all pairs of a round in parallel."""
    return {
        "do": "pairs",
        "rounds": [[list(pair) for pair in pairs_at_once] for pairs_at_once in rounds],
        "reps": reps,
        "bytes": size_bytes,
    }


def slower_times(answers: Answers, round_index: int, a: int, b: int) -> list[float]:
    """Returns the time of the slower rank for each exchange of a round."""
    return list(map(max, zip(answers[a][round_index], answers[b][round_index], strict=True)))


def work(kind: str, turns: Sequence[Sequence[int]], reps: int) -> ProbeCommand:
    """Returns the command to compute or copy, all ranks of a turn in parallel."""
    return {"do": "work", "kind": kind, "turns": turns, "reps": reps}


def turns_of(ranks: Iterable[int], places: Places) -> list[list[int]]:
    """Returns turns of ranks that work in parallel.

    On each host, a turn has only as many ranks as the CPUs allow. If ranks shared CPUs, it would not be visible which
    of them is throttled.
    """
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
    size = fitting_bytes(FIRST_BYTES, median(min(times) for times in first))
    answers = yield _collective(dim, groups, SCREEN_REPS, size)
    return DimTimes(
        dim=dim,
        groups=tuple(map(tuple, groups)),
        size_bytes=size,
        # For each group, the median over calls of the slowest rank's time.
        times_s=tuple(
            float(median(map(max, zip(*(answers[rank] for rank in group), strict=True)))) for group in groups
        ),
    )


def _collective(dim: str, groups: Sequence[Sequence[int]], reps: int, size_bytes: int) -> ProbeCommand:
    return {
        "do": "all_reduce",
        "dim": dim,
        "ranks": [rank for group in groups for rank in group],
        "reps": reps,
        "bytes": size_bytes,
    }


def _suspect_links(kind: str, pairs_of_kind: LinkTimes, examination: Examination) -> list[_Suspect]:
    """Returns the ranks that are slow with nearly all partners, then the slow links between other ranks."""
    times = {pair: pairs_of_kind.seconds(pair) for pair in pairs_of_kind.exchanges}
    if len(times) < 2:
        if examination.world.size > 2:
            examination.unjudged.append(f"links {kind}: a single pair has no peers")
        return []
    usual = median(times.values())
    rank_times = _times_by_rank(times)
    slow = _below(rank_times, examination.notes, kind)
    unsuspected_pairs = [pair for pair in times if not slow.keys() & set(pair)]
    shares = {
        pair: min(max(rank_times.get(rank, usual) for rank in pair) / SUSPECT, usual / NAMED) / times[pair]
        for pair in unsuspected_pairs
    }
    links = sorted((pair for pair in unsuspected_pairs if shares[pair] < 1), key=shares.__getitem__)
    healthy_pairs = [pair for pair in unsuspected_pairs if shares[pair] >= 1]
    ranks = [
        _Suspect((rank,), kind, _pairs_of_rank(rank, times, slow), tuple(healthy_pairs)) for rank in slow
    ]
    return ranks + [
        # Controls share a rank with the link if possible.
        _Suspect(
            link,
            kind,
            (link,),
            tuple([pair for pair in healthy_pairs if set(pair) & set(link)] or healthy_pairs),
        )
        for link in _worst(links, len(times), "links", examination.notes, kind)
    ]


def _times_by_rank(pair_times: Mapping[Pair, float]) -> dict[int, float]:
    """Returns for each rank with several partners the lower quartile of its times over partners.

    The minimum may be fast by chance, and the median may be slow because of slow partners. A rank with a single partner
    cannot be distinguished from its link.
    """
    pairs_of_rank = group_by(((rank, pair) for pair in pair_times for rank in pair), itemgetter(0))
    return {
        rank: order_statistic([pair_times[pair] for _, pair in rank_pairs], 0.25)
        for rank, rank_pairs in pairs_of_rank.items()
        if len(rank_pairs) > 1
    }


def _pairs_of_rank(rank: int, pairs: Iterable[Pair], slow: Mapping[int, float]) -> tuple[Pair, ...]:
    """Returns a rank's pairs with partners that are not suspects. If all are suspects, returns all of its pairs."""
    mine = [pair for pair in pairs if rank in pair]
    return tuple([pair for pair in mine if not (slow.keys() - {rank}) & set(pair)] or mine)


def _below(times: Mapping[int, float], notes: list[str], kind: str) -> dict[int, float]:
    """Returns rank -> share of the median speed for ranks below `SUSPECT`, the slowest first."""
    if len(times) < 3:  # with two ranks, it is unknown which one is the exception
        return {}
    usual = median(times.values())
    slow = {rank: usual / seconds for rank, seconds in times.items() if usual / seconds < SUSPECT}
    return {
        rank: slow[rank]
        for rank in _worst(sorted(slow, key=slow.__getitem__), len(times), "ranks", notes, kind)
    }


def _worst(slow: Sequence[Any], count: int, noun: str, notes: list[str], kind: str) -> Sequence[Any]:
    """Returns the suspects to measure again.

    Args:
        slow: suspects, the slowest first.
        count: number of all ranks or links of the kind, suspects or not.
    """
    if len(slow) > MAX_SUSPECTS:
        notes.append(
            f"{kind}: {len(slow)} of {count} {noun} are slow; the slowest {MAX_SUSPECTS} were measured again"
        )
    return slow[:MAX_SUSPECTS]


def _confirm_link(suspect: _Suspect, examination: Examination, level: float) -> Measuring[list[Recheck]]:
    """Measures a suspect's pairs one by one, alternating with healthy pairs."""
    if not suspect.controls:
        examination.unjudged.append(
            f"{examination.world.words(suspect.ranks)}: no healthy peers ({suspect.kind})"
        )
        return []
    turns = zip(itertools.cycle(suspect.pairs), itertools.cycle(suspect.controls), strict=False)
    rounds: list[PairRound] = [(pair,) for turn in itertools.islice(turns, CONFIRM_REPS) for pair in turn]
    answers = yield pairs(rounds, 1, examination.pairs[suspect.kind].size_bytes)
    seconds = [slower_times(answers, round_index, a, b)[0] for round_index, ((a, b),) in enumerate(rounds)]
    return [_recheck(suspect, seconds[1::2], seconds[::2], level, examination)]


def _confirm_work(
    kind: str, ranks: Sequence[int], places: Places, examination: Examination, level: float
) -> Measuring[list[Recheck]]:
    """Measures the suspects together with a healthy peer, and repeats this with several peers.

    A rank is reported only if it is slow in comparison with each peer, since other load on a machine may slow any rank
    for a moment.
    """
    times = examination.work_s[kind]
    usual = median(times)
    peers = [rank for rank in range(len(times)) if rank not in ranks and usual / times[rank] >= SUSPECT]
    if ranks and not peers:
        examination.unjudged.append(f"{examination.world.words(ranks)}: no healthy peers ({kind})")
        return []
    rechecks: dict[int, Recheck] = {}
    for peer in peers[:PEERS]:
        pending = [rank for rank in ranks if rank not in rechecks or rechecks[rank].slow]
        if pending:
            answers = yield work(kind, turns_of([*pending, peer], places), WORK_CONFIRM_REPS)
        for rank in pending:
            recheck = _recheck(_Suspect((rank,), kind), answers[peer], answers[rank], level, examination)
            rechecks[rank] = max(
                rechecks.get(rank, recheck),
                recheck,
                key=lambda candidate: (not candidate.slow, candidate.finding.share),
            )
    return list(rechecks.values())


def _recheck(
    suspect: _Suspect,
    controls: Sequence[float],
    rechecked_s: Sequence[float],
    level: float,
    examination: Examination,
) -> Recheck:
    """Compares the new times of a suspect with those of its peers.

    Args:
        controls: seconds of healthy peers.
        rechecked_s: seconds of the suspect.
        level: significance level of the rank sum test.
    """
    share = 1 / hodges_lehmann_ratio(controls, rechecked_s).ratio
    p = rank_test(controls, rechecked_s).p_slower
    words = examination.world.words(suspect.ranks)
    return Recheck(
        finding=SlowFinding(
            what=f"the link of {words}" if len(suspect.ranks) > 1 else words,
            kind=suspect.kind,
            ranks=suspect.ranks,
            share=share,
            p=p,
        ),
        time_s=median(rechecked_s),
        peers_s=median(rechecked_s) * share,
        size_bytes=examination.pairs[suspect.kind].size_bytes if suspect.kind in examination.pairs else None,
        slow=share <= NAMED and p <= level,
    )


def _by_host(findings: Sequence[SlowFinding], world: ExaminedWorld) -> list[SlowFinding]:
    """Merges findings of the same kind for all ranks of a host into one finding for the host."""
    merged: list[SlowFinding] = []
    for kind, of_kind in group_by(findings, lambda finding: finding.kind).items():
        single = {finding.ranks[0]: finding for finding in of_kind if len(finding.ranks) == 1}
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
        merged += [*single.values(), *(finding for finding in of_kind if len(finding.ranks) > 1)]
    return merged
