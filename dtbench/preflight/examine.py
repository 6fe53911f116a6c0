"""What a preflight measures next and what it names: a generator that yields commands and is sent what the ranks
measured. Rank 0 runs it; the others do what it asks for.

First everything is measured shortly: pairs in rounds, the collectives of each mesh dim, computation and copies.
What lies below `SUSPECT` of its peers is a suspect, and no more than that. Each suspect is measured again, in turns
with peers of the same kind; it is named where the new times alone say so: below `NAMED` of its peers, and so by
chance (the rank sum test, Mann & Whitney 1947) at most once in 1 / `LEVEL` preflights of equal ranks, shared among
the suspects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dtbench.mesh import Mesh, groups_by_dim
from dtbench.preflight.rounds import Pair, Round, rounds_of
from dtbench.stats import hodges_lehmann_ratio, rank_test

# Shares of the peers' speed. A link at 80 % is to be found, and 10 % is what operators act on (Megatron-LM#4662).
SUSPECT, NAMED = 0.93, 0.90
LEVEL = 0.005
SCREEN_REPS, CONFIRM_REPS = 5, 16
PEERS = 3  # beside which a slow rank has to be slow
WORK_REPS = 9
# The worst of a kind are looked at again; where more lie off, the kind has no common speed.
MAX_SUSPECTS = 8
# One exchange, one collective and one piece of work take about so long: well above the clock's and a barrier's noise,
# so short that thousands of ranks are through within a minute.
TARGET_S = 0.04
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
MATMUL, COPY = "matrix products", "memory copies"

# A command as JSON: {"do": ..., ...}; what each rank measured, in seconds.
Command = dict[str, Any]
Answers = Sequence[Any]
# Gives the times of sound peers and those of the suspect, in the same turns.
_Comparison = Generator[Command, Answers, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class World:
    """hosts: by rank."""

    hosts: tuple[str, ...]
    mesh: Mesh

    @property
    def size(self) -> int:
        return len(self.hosts)

    def words(self, ranks: Sequence[int]) -> str:
        """`rank 3 (node-1)`."""
        return " and ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks)


@dataclass(frozen=True)
class Finding:
    """Something slow. kind: of link or work; share: of its peers' speed; p: by chance alone, at most."""

    what: str
    kind: str
    ranks: tuple[int, ...]
    share: float
    p: float


@dataclass
class PairsOf:
    """A kind of link. times_s: pair -> seconds of each exchange of so many bytes both ways."""

    size_bytes: int
    times_s: dict[Pair, list[float]] = field(default_factory=dict)

    def rate(self, pair: Pair) -> float:
        """Bytes per second each way, of the median exchange."""
        return self.size_bytes / median(self.times_s[pair])


@dataclass
class GroupsOf:
    """The groups of a mesh dim, all at work at once. alone_s: of the first group, the others idle."""

    groups: list[list[int]]
    size_bytes: int
    times_s: list[float]
    alone_s: float


@dataclass
class Examination:
    """Everything that was measured, what is slow, and what could not be told."""

    world: World
    pairs: dict[str, PairsOf] = field(default_factory=dict)
    dims: dict[str, GroupsOf] = field(default_factory=dict)
    work_s: dict[str, list[float]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Suspect:
    """A rank (one) or a link (two). pairs, controls: what to measure in turns."""

    ranks: tuple[int, ...]
    kind: str
    share: float
    pairs: tuple[Pair, ...] = ()
    controls: tuple[Pair, ...] = ()


def examine(world: World) -> Generator[Command, Answers, Examination]:
    """The whole conversation."""
    found = Examination(world)
    suspects: list[_Suspect] = []
    for kind, rounds in rounds_of(world.hosts).items():
        found.pairs[kind] = yield from _screen_pairs(rounds)
        suspects += _suspect_links(kind, found.pairs[kind], found.notes)
    for kind in (MATMUL, COPY):
        found.work_s[kind] = yield from _screen_work(kind, world.size)
        suspects += _suspect_ranks(kind, found.work_s[kind], found.notes)
    for dim, groups in groups_by_dim(*zip(*world.mesh, strict=True)).items():
        if len(groups[0]) > 1:
            found.dims[dim] = yield from _screen_dim(dim, groups)
    for suspect in suspects:
        finding = yield from _confirm(suspect, found, LEVEL / len(suspects))
        found.findings += [finding] if finding else []
    found.findings = _by_host(found.findings, world)
    yield from _confirm_groups(found)
    return found


# -------------------------------------------------------------------------------------------- screen


def _screen_pairs(rounds: Sequence[Round]) -> Generator[Command, Answers, PairsOf]:
    size = FIRST_BYTES
    times = yield from _exchange(rounds[:1], 2, size)
    typical = median(min(of) for of in times.values())
    size = fitting_bytes(size, typical)
    return PairsOf(size, (yield from _exchange(rounds, SCREEN_REPS, size)))


def fitting_bytes(size_bytes: int, seconds: float) -> int:
    """A power of two that takes about `TARGET_S`, where `size_bytes` took so long."""
    wanted = size_bytes * TARGET_S / max(seconds, 1e-9)
    return int(min(max(2 ** round(math.log2(wanted)), FIRST_BYTES), MOST_BYTES))


def _exchange(
    rounds: Sequence[Round], reps: int, size_bytes: int
) -> Generator[Command, Answers, dict[Pair, list[float]]]:
    """Pair -> the slower rank's time of each exchange."""
    answers = yield {
        "do": "pairs",
        "rounds": [[list(pair) for pair in one] for one in rounds],
        "reps": reps,
        "bytes": size_bytes,
    }
    times: dict[Pair, list[float]] = {}
    for at, one in enumerate(rounds):
        for a, b in one:
            both = zip(answers[a][at], answers[b][at], strict=True)
            times.setdefault((a, b), []).extend(max(turn) for turn in both)
    return times


def _screen_work(kind: str, size: int) -> Generator[Command, Answers, list[float]]:
    """By rank, while all work."""
    answers = yield {"do": "work", "kind": kind, "ranks": list(range(size)), "reps": WORK_REPS}
    return [median(of) for of in answers]


def _screen_dim(dim: str, groups: list[list[int]]) -> Generator[Command, Answers, GroupsOf]:
    first = yield _collective(dim, groups, 2, FIRST_BYTES)
    size = fitting_bytes(FIRST_BYTES, median(min(of) for of in first))
    together = yield _collective(dim, groups, SCREEN_REPS, size)
    alone = yield _collective(dim, groups[:1], SCREEN_REPS, size)
    return GroupsOf(groups, size, [_of_group(together, of) for of in groups], _of_group(alone, groups[0]))


def _collective(dim: str, groups: Sequence[Sequence[int]], reps: int, size_bytes: int) -> Command:
    ranks = [rank for group in groups for rank in group]
    return {"do": "all_reduce", "dim": dim, "ranks": ranks, "reps": reps, "bytes": size_bytes}


def _of_group(answers: Answers, group: Iterable[int]) -> float:
    """Of the median call the slowest rank's time."""
    return float(median(max(turn) for turn in zip(*(answers[rank] for rank in group), strict=True)))


# ------------------------------------------------------------------------------------------ suspects


def _suspect_links(kind: str, of: PairsOf, notes: list[str]) -> list[_Suspect]:
    """Ranks that are slow with nearly all partners, then links that are slow between two ranks which are not."""
    times = {pair: median(seconds) for pair, seconds in of.times_s.items()}
    if len(times) < 2:
        notes.append(f"{kind}: a single pair has no peers to be compared with")
        return []
    met: dict[int, list[float]] = {}
    for pair, seconds in times.items():
        for rank in pair:
            met.setdefault(rank, []).append(seconds)
    usual = median(times.values())
    # Of a rank with one partner nothing tells it from the link.
    # Its lower quartile over partners: one exchange may be fast by luck, and partners may be slow themselves.
    best = {rank: sorted(seconds)[len(seconds) // 4] for rank, seconds in met.items() if len(seconds) > 1}
    slow = _below(best, notes, kind)
    links = {}
    for pair, seconds in times.items():
        if not slow.keys() & set(pair):
            usual_here = max(best.get(rank, usual) for rank in pair)
            if (share := usual_here / seconds) < SUSPECT:
                links[pair] = share
    worst = sorted(links, key=lambda pair: links[pair])[:MAX_SUSPECTS]
    sound = [pair for pair in times if not slow.keys() & set(pair) and pair not in links]
    made = [
        _Suspect((rank,), kind, share, _of_rank(rank, times, slow), tuple(sound))
        for rank, share in slow.items()
    ]
    return made + [_Suspect(pair, kind, links[pair], (pair,), tuple(_beside(pair, sound))) for pair in worst]


def _of_rank(rank: int, pairs: Iterable[Pair], slow: Mapping[int, float]) -> tuple[Pair, ...]:
    """The pairs of a rank with partners that are not suspects, else all of its pairs."""
    mine = [pair for pair in pairs if rank in pair]
    return tuple([pair for pair in mine if not (slow.keys() - {rank}) & set(pair)] or mine)


def _beside(pair: Pair, sound: Sequence[Pair]) -> Sequence[Pair]:
    """Sound links of the same two ranks, else any."""
    return [other for other in sound if set(other) & set(pair)] or sound


def _suspect_ranks(kind: str, times_s: Sequence[float], notes: list[str]) -> list[_Suspect]:
    return [
        _Suspect((rank,), kind, share)
        for rank, share in _below(dict(enumerate(times_s)), notes, kind).items()
    ]


def _below(times: Mapping[int, float], notes: list[str], kind: str) -> dict[int, float]:
    """Rank -> its share of the usual speed, of those that lie below `SUSPECT`, the worst first."""
    if len(times) < 3:  # of two, either may be the slow one
        return {}
    usual = median(times.values())
    slow = {rank: usual / seconds for rank, seconds in times.items() if usual / seconds < SUSPECT}
    worst = dict(sorted(slow.items(), key=lambda item: item[1])[:MAX_SUSPECTS])
    if len(slow) > len(worst):
        notes.append(
            f"{kind}: {len(slow)} of {len(times)} ranks are slow; the worst {len(worst)} were looked at"
        )
    return worst


# ------------------------------------------------------------------------------------------- confirm


def _confirm(
    suspect: _Suspect, found: Examination, level: float
) -> Generator[Command, Answers, Finding | None]:
    """It is named if it is slow in every comparison; the first in which it is not ends them."""
    if suspect.kind in found.pairs:
        comparisons = [_again_links(suspect, found)] if suspect.controls else []
    else:
        comparisons = _again_work(suspect, found)
    worst: Finding | None = None
    for comparison in comparisons:
        controls, again = yield from comparison
        finding = _judge(suspect, controls, again, level, found.world)
        if finding is None:
            return None
        if worst is None or finding.share > worst.share:
            worst = finding
    if worst is None:
        found.notes.append(
            f"{found.world.words(suspect.ranks)}: no sound peers to compare it with ({suspect.kind})"
        )
    return worst


def _judge(
    suspect: _Suspect, controls: Sequence[float], again: Sequence[float], level: float, world: World
) -> Finding | None:
    share = 1 / hodges_lehmann_ratio(controls, again).ratio
    p = rank_test(controls, again).p_slower
    if share > NAMED or p > level:
        return None
    words = world.words(suspect.ranks)
    what = f"the link of {words}" if len(suspect.ranks) > 1 else words
    return Finding(what, suspect.kind, suspect.ranks, share, p)


def _again_links(suspect: _Suspect, found: Examination) -> _Comparison:
    """Pair by pair with nobody else at work."""
    turns = zip(itertools.cycle(suspect.pairs), itertools.cycle(suspect.controls), strict=False)
    rounds: list[Round] = [(pair,) for turn in itertools.islice(turns, CONFIRM_REPS) for pair in turn]
    size = found.pairs[suspect.kind].size_bytes
    answers = yield {
        "do": "pairs",
        "rounds": [[list(pair) for pair in one] for one in rounds],
        "reps": 1,
        "bytes": size,
    }
    times = [max(answers[a][at][0], answers[b][at][0]) for at, ((a, b),) in enumerate(rounds)]
    return times[1::2], times[::2]


def _again_work(suspect: _Suspect, found: Examination) -> list[_Comparison]:
    """The suspect beside some peers of usual speed, one after another: what else a machine does for a moment slows
    whoever is there."""
    rank, times = suspect.ranks[0], found.work_s[suspect.kind]
    usual = median(times)
    peers = [r for r in range(len(times)) if r != rank and usual / times[r] >= SUSPECT]
    return [_beside_peer(suspect.kind, rank, peer) for peer in peers[:PEERS]]


def _beside_peer(kind: str, rank: int, peer: int) -> _Comparison:
    answers = yield {"do": "work", "kind": kind, "ranks": [rank, peer], "reps": CONFIRM_REPS}
    return answers[peer], answers[rank]


def _by_host(findings: Sequence[Finding], world: World) -> list[Finding]:
    """All ranks of a host that are slow in the same are one finding: the host."""
    made: list[Finding] = []
    for kind in dict.fromkeys(one.kind for one in findings):
        mine = [one for one in findings if one.kind == kind]
        single = {one.ranks[0]: one for one in mine if len(one.ranks) == 1}
        for host in dict.fromkeys(world.hosts):
            ranks = tuple(rank for rank, name in enumerate(world.hosts) if name == host)
            if set(ranks) <= single.keys() and len(set(world.hosts)) > 1:
                parts = [single.pop(rank) for rank in ranks]
                share = median(one.share for one in parts)
                made.append(Finding(f"host {host}", kind, ranks, share, max(one.p for one in parts)))
        made += [*single.values(), *(one for one in mine if len(one.ranks) > 1)]
    return made


def _confirm_groups(found: Examination) -> Generator[Command, Answers, None]:
    """Groups of a mesh dim that are slow though nothing of theirs was named."""
    named = {rank for one in found.findings for rank in one.ranks}
    for dim, of in found.dims.items():
        kind = f"all_reduce over {dim}"
        slow = _below(dict(enumerate(of.times_s)), found.notes, kind)
        slow = {at: share for at, share in slow.items() if not named & set(of.groups[at])}
        peers = [at for at in range(len(of.groups)) if at not in slow and not named & set(of.groups[at])]
        for at, share in slow.items():
            if not peers:
                break
            control = of.groups[peers[0]]
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(CONFIRM_REPS):
                for group, times in ((of.groups[at], mine), (control, theirs)):
                    answers = yield _collective(dim, [group], 1, of.size_bytes)
                    times.append(_of_group(answers, group))
            suspect = _Suspect(tuple(of.groups[at]), kind, share)
            if (finding := _judge(suspect, theirs, mine, LEVEL / len(slow), found.world)) is not None:
                found.findings.append(
                    Finding(
                        f"the group of ranks {_ranges(of.groups[at])}",
                        kind,
                        finding.ranks,
                        finding.share,
                        finding.p,
                    )
                )


def _ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs = [
        [rank for _, rank in run]
        for _, run in itertools.groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
