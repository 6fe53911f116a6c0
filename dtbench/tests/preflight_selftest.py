"""Measures how often a preflight is wrong on eight simulated hosts, with all healthy and with one slowed.

In each state real ranks gather a pool: every exchange, collective and piece of work that an examination may ask for,
many times over. Trials then run the examination itself on times drawn from the pool without replacement. The times
are real, the trials share them: the intervals (Clopper & Pearson 1934) hold for the pool.

    python -m dtbench.tests.preflight_selftest FILE.json      half an hour; root, Linux
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from dtbench.engine.options import RunRequest
from dtbench.engine.progress import print_status
from dtbench.engine.rank import silence_torch
from dtbench.engine.rank_env import find_rank_env
from dtbench.engine.workers import scratch
from dtbench.errors import EXIT_INCONCLUSIVE, EXIT_OK, UsageError
from dtbench.preflight.examine import (
    COPY,
    FIRST_BYTES,
    MATMUL,
    PEERS,
    WORK_CONFIRM_REPS,
    Answers,
    Examination,
    ExaminedWorld,
    Measuring,
    ProbeCommand,
    examine,
    pairs,
    rounds_of,
    slower_times,
    turns_of,
    work,
)
from dtbench.preflight.examine import fitting_bytes as fitting
from dtbench.preflight.preflight import Coordinator, PreflightRequest
from dtbench.records.atomic import check_output_path, write_atomically
from dtbench.suite.mesh import groups_by_dim
from dtbench.tests import lab as hosts
from dtbench.tests.gate_selftest import share

HOSTS, RATE = 8, 100_000_000
SLOW_HOST = 5
REPS = 16
TRIALS, FAULT_TRIALS = 1000, 200
# Goals: the share of healthy preflights that may name anything, and of slow links that must be named.
FALSE, FOUND = 0.005, 0.99


def gather_pool(world: ExaminedWorld, reps: int) -> Generator[ProbeCommand, Answers, dict[str, Any]]:
    """Asks the ranks for everything that an examination may ask, `reps` times."""
    pool: dict[str, Any] = {"hosts": world.hosts, "mesh": world.mesh, "pairs": {}, "work": {}, "dims": {}}
    for kind, rounds in rounds_of(world.hosts).items():
        first = yield pairs(rounds[:1], 2, FIRST_BYTES)
        size = fitting(FIRST_BYTES, median(min(first[a][0]) for a, _ in rounds[0]))
        alone = [(pair,) for pairs_of_round in rounds for pair in pairs_of_round]
        pool["pairs"][kind] = {
            "screen": _times_of_pairs((yield pairs(rounds, reps, size)), rounds),
            "alone": _times_of_pairs((yield pairs(alone, reps // 2, size)), alone),
        }
    everyone = list(range(world.size))
    pool["places"] = yield {"do": "place"}
    turns = turns_of(everyone, pool["places"])
    for kind in (MATMUL, COPY):
        pool["work"][kind] = {"all": (yield work(kind, turns, reps)), "beside": []}
        for _ in range(PEERS):
            pool["work"][kind]["beside"].append((yield work(kind, turns, WORK_CONFIRM_REPS)))
    for dim, groups in groups_by_dim(*zip(*world.mesh, strict=True)).items():
        if len(groups[0]) > 1:
            command = {"do": "all_reduce", "dim": dim, "ranks": everyone, "reps": 2, "bytes": FIRST_BYTES}
            first = yield command
            size = fitting(FIRST_BYTES, median(min(times) for times in first))
            pool["dims"][dim] = yield command | {"reps": reps, "bytes": size}
    return pool


def _times_of_pairs(answers: Answers, rounds: Sequence[Sequence[tuple[int, int]]]) -> dict[str, list[float]]:
    return {
        f"{a}-{b}": slower_times(answers, at, a, b)
        for at, pairs_of_round in enumerate(rounds)
        for a, b in pairs_of_round
    }


class Gathering(Coordinator):
    """A rank in the lab: it joins and answers as in any preflight, and rank 0 asks for the pool."""

    def __init__(self, path: Path) -> None:
        place = find_rank_env()
        assert place is not None
        super().__init__(PreflightRequest(RunRequest(device="cpu", timeout_s=600.0)), place)
        self._path = path

    def examining(self, world: ExaminedWorld) -> Measuring[Examination]:
        self._path.write_text(json.dumps((yield from gather_pool(world, REPS))))
        return Examination(world)

    def conclude(self, examination: Examination, seconds: float) -> int:
        return EXIT_OK


# -------------------------------------------------------------------------------------------- trials


class PoolAnswers:
    """Answers an examination with times drawn from a gathered pool."""

    def __init__(self, pool: Mapping[str, Any], seed: int) -> None:
        self._pool = pool
        self._random = random.Random(seed)
        self._left: dict[str, list[Any]] = {}
        self._passes: Counter[str] = Counter()
        self.world = ExaminedWorld(tuple(pool["hosts"]), tuple((name, size) for name, size in pool["mesh"]))
        self._kinds = {pair: kind for kind, times in pool["pairs"].items() for pair in times["screen"]}

    def answer(self, command: ProbeCommand) -> list[Any]:
        """Returns the answer of each rank."""
        if command["do"] == "place":
            return list(self._pool["places"])
        answers = {"pairs": self._pairs, "work": self._work, "all_reduce": self._all_reduce}
        return answers[command["do"]](command)

    def _draw(self, key: str, times: Sequence[Any], count: int) -> list[Any]:
        if len(self._left.get(key, ())) < count:
            self._left[key] = self._random.sample(list(times), len(times))
        return [self._left[key].pop() for _ in range(count)]

    def _pairs(self, command: ProbeCommand) -> list[Any]:
        answers: list[list[Any]] = [[None] * len(command["rounds"]) for _ in self.world.hosts]
        for at, pairs_of_round in enumerate(command["rounds"]):
            how = "alone" if len(pairs_of_round) == 1 and command["reps"] == 1 else "screen"
            for a, b in pairs_of_round:
                pair = f"{a}-{b}"
                times = self._pool["pairs"][self._kinds[pair]][how][pair]
                answers[a][at] = answers[b][at] = self._draw(f"{how} {pair}", times, command["reps"])
        return answers

    def _work(self, command: ProbeCommand) -> list[Any]:
        name = kind = command["kind"]
        ranks = {rank for turn in command["turns"] for rank in turn}
        times = self._pool["work"][kind]["all"]
        if len(ranks) < self.world.size:  # measured again, beside each peer in another pass
            number = self._passes[kind] % PEERS
            self._passes[kind] += 1
            times, name = self._pool["work"][kind]["beside"][number], f"{kind} {number}"
        return self._draw_of_ranks(name, times, ranks, command["reps"])

    def _all_reduce(self, command: ProbeCommand) -> list[Any]:
        dim = command["dim"]
        return self._draw_of_ranks(dim, self._pool["dims"][dim], command["ranks"], command["reps"])

    def _draw_of_ranks(
        self, name: str, times: Sequence[Any], ranks: Collection[int], count: int
    ) -> list[Any]:
        """Draws for each of `ranks`; `times` has those of all ranks."""
        return [
            self._draw(f"{name} {rank}", drawn_from, count) if rank in ranks else []
            for rank, drawn_from in enumerate(times)
        ]


def drive(
    examining: Generator[ProbeCommand, Answers, Any], answer: Callable[[ProbeCommand], list[Any]]
) -> Any:
    """Runs an examination, answers its commands with `answer`, and returns its result."""
    command = next(examining)
    while True:
        try:
            command = examining.send(answer(command))
        except StopIteration as end:
            return end.value


@dataclass
class TrialCounts:
    """named: trials in which the slow host was named; wrong: in which something without it was, and in which kinds."""

    trials: int = 0
    named: int = 0
    wrong: int = 0
    wrong_kinds: Counter[str] = field(default_factory=Counter)


def judge(pools: Sequence[Mapping[str, Any]], trials: int, slow: int | None) -> TrialCounts:
    """Runs `trials` trials, distributed over the pools; `slow` is the slowed host, if any."""
    tally = TrialCounts()
    for number in range(trials):
        drawn = PoolAnswers(pools[number % len(pools)], number)
        findings = drive(examine(drawn.world), drawn.answer).findings
        wrong = {finding.kind for finding in findings if slow not in finding.ranks}
        tally.trials += 1
        tally.named += any(finding.ranks == (slow,) for finding in findings)
        tally.wrong += bool(wrong)
        tally.wrong_kinds.update(wrong)
    return tally


# -------------------------------------------------------------------------------------------- the lab

# Share of the usual rate that the link of the slow host is left -> launches that gather.
STATES = {1.0: 3, 0.8: 2, 0.5: 2}


def selftest(output: Path) -> int:
    """Gathers the pools, runs the trials and writes the figures; 0 where what is aimed at is reached, else 3.

    Raises:
        UsageError: this machine cannot make hosts, or the file is taken.
    """
    check_output_path(output)
    hosts.require_abilities()
    rows, reached = [], True
    for rate, launches in STATES.items():
        slow = None if rate == 1 else SLOW_HOST
        trials = TRIALS if slow is None else FAULT_TRIALS
        tally = judge([_gather(rate) for _ in range(launches)], trials, slow)
        found = f"link at {rate:.0%}: named the host in {share(tally.named, tally.trials)}; "
        words = f"{'healthy: ' if slow is None else found}named another in {share(tally.wrong, tally.trials)}"
        click.echo(words)
        rows.append({"state": words, "launches": launches, **vars(tally)})
        found_enough = slow is None or tally.named >= FOUND * trials
        reached &= found_enough and tally.wrong <= FALSE * trials
    text = json.dumps(
        {"kind": "preflight-selftest", "hosts": HOSTS, "rate_bit_per_s": RATE, "states": rows}, indent=1
    )
    write_atomically(output, f"{text}\n", lambda _: False, "result of the self-test")
    return EXIT_OK if reached else EXIT_INCONCLUSIVE


def _gather(share: float) -> dict[str, Any]:
    """Launches real ranks, one per host, and returns the pool that they gathered."""
    print_status(f"gathering: the link of host {SLOW_HOST} at {share:.0%}")
    lab = hosts.Lab(f"p{os.getpid() % 100000}", HOSTS, RATE)
    with scratch() as folder, hosts.temporary(lab):
        hosts.shape(lab, SLOW_HOST, round(RATE * share))
        path = folder / "pool.json"
        code = hosts.run(lab, 1, [sys.executable, "-P", "-m", __spec__.name, "--gather", str(path)])
        if code or not path.exists():
            raise UsageError(f"its ranks ended with {code}")
        return dict(json.loads(path.read_text()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--gather", path]:
            silence_torch()
            Gathering(Path(path)).run_and_exit()
        case [path]:
            sys.exit(selftest(Path(path)))
        case _:
            sys.exit(__doc__)
