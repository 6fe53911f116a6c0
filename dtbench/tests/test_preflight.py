"""Preflights: rounds, what is named on made-up worlds, what is written, and real ranks."""

import itertools
import json
import math
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtbench.cost.estimate import estimate_collective
from dtbench.preflight.examine import (
    ALL_PAIRS_UP_TO,
    BETWEEN,
    INSIDE,
    MATMUL,
    DimTimes,
    Examination,
    ExaminedWorld,
    examine,
    matchings,
    rounds_of,
    turns_of,
)
from dtbench.preflight.preflight import compare_with, names_of, print_all, result_of, summary_line
from dtbench.suite.mesh import default_mesh
from dtbench.tests import preflight_selftest as selftest
from dtbench.tests import programs
from dtbench.tests.made_up_topology import a_topology, ring_dim

# ------------------------------------------------------------------------------------------ rounds


@given(st.integers(1, 70))
def test_rounds_are_of_disjoint_pairs(n: int) -> None:
    rounds = matchings(n)
    for pairs_of_round in rounds:
        ranks = [rank for pair in pairs_of_round for rank in pair]
        assert len(set(ranks)) == len(ranks)
    pairs = list(itertools.chain(*rounds))
    assert all(0 <= a < b < n for a, b in pairs)
    if n <= ALL_PAIRS_UP_TO:
        assert sorted(pairs) == list(itertools.combinations(range(n), 2)) and len(rounds) <= n
    else:
        assert set(itertools.chain(*pairs)) == set(range(n))


def test_kinds_of_links_are_not_mixed() -> None:
    assert {
        kind: set(itertools.chain(*rounds))
        for kind, rounds in rounds_of(("a", "a", "b", "b", "b", "c")).items()
    } == {
        INSIDE: {(0, 1), (2, 3), (2, 4), (3, 4)},
        BETWEEN: {(0, 2), (1, 3), (0, 5), (2, 5)},
    }
    assert set(rounds_of(("a", "b"))) == {BETWEEN} and set(rounds_of(("a", "a"))) == {INSIDE}


# ------------------------------------------------------------------------------------- made-up worlds


class FakeRanks:
    """Ranks of given speeds. link: (a, b) -> share of the usual speed; noise: of the logarithm of a time."""

    cpus = 2  # of each host

    def __init__(
        self,
        hosts: Sequence[str],
        link: Callable[[int, int], float] = lambda _a, _b: 1.0,
        work: Mapping[int, float] | None = None,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.world = ExaminedWorld(tuple(hosts), default_mesh(len(hosts)))
        self._link, self._work, self._noise = link, work or {}, noise
        self._random = random.Random(seed)
        self.commands: list[dict[str, Any]] = []

    def _time(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, self._noise))

    def answer(self, command: dict[str, Any]) -> list[Any]:
        self.commands.append(command)
        everyone = range(self.world.size)
        if command["do"] == "pairs":
            answers: list[list[Any]] = [[None] * len(command["rounds"]) for _ in everyone]
            for at, pairs_of_round in enumerate(command["rounds"]):
                for a, b in pairs_of_round:
                    speed = 1e9 if self.world.hosts[a] == self.world.hosts[b] else 1e8
                    seconds = command["bytes"] / speed / self._link(a, b)
                    answers[a][at] = [self._time(seconds) for _ in range(command["reps"])]
                    answers[b][at] = [answer * 0.9 for answer in answers[a][at]]  # the slower rank counts
            return answers
        if command["do"] == "place":
            return [(host, list(range(self.cpus)), 1) for host in self.world.hosts]
        usual = {"work": 0.04, "all_reduce": command.get("bytes", 0) / 1e8}[command["do"]]
        shares = self._work if command["do"] == "work" and command["kind"] == MATMUL else {}
        return [
            [self._time(usual / shares.get(rank, 1)) for _ in range(command["reps"])]
            if rank in (command.get("ranks") or itertools.chain(*command["turns"]))
            else []
            for rank in everyone
        ]

    def examine(self) -> Examination:
        examination: Examination = selftest.drive(examine(self.world), self.answer)
        return examination


def hosts_of(count: int, ranks: int = 1) -> list[str]:
    return [f"node-{host}" for host in range(count) for _ in range(ranks)]


def slow_rank(rank: int, share: float) -> Callable[[int, int], float]:
    return lambda a, b: share if rank in (a, b) else 1.0


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 40])
def test_examine_healthy_world_has_no_findings(hosts: int) -> None:
    for seed in range(10):
        assert FakeRanks(hosts_of(hosts), seed=seed).examine().findings == []


@pytest.mark.parametrize("hosts", [3, 4, 8, 40])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.1])
def test_examine_names_only_the_slow_host(hosts: int, share: float) -> None:
    for seed in range(5):
        findings = FakeRanks(hosts_of(hosts), slow_rank(2, share), seed=seed).examine().findings
        assert [(finding.ranks, finding.kind, finding.what) for finding in findings] == [
            ((2,), BETWEEN, "host node-2")
        ], seed
        assert findings[0].share == pytest.approx(share, rel=0.05)


PAIRED = hosts_of(4, 2)


@pytest.mark.parametrize(
    ("hosts", "slow", "named"),
    [
        (
            hosts_of(8),
            lambda a, b: {a, b} == {1, 6},
            {"the link of rank 1 (node-1) and rank 6 (node-6)": (1, 6)},
        ),
        (PAIRED, lambda a, b: PAIRED[a] != PAIRED[b] and {a, b} & {4, 5}, {"host node-2": (4, 5)}),
        (PAIRED, lambda a, b: PAIRED[a] != PAIRED[b] and 4 in (a, b), {"rank 4 (node-2)": (4,)}),
        (hosts_of(8), lambda a, b: {a, b} & {1, 6}, {"host node-1": (1,), "host node-6": (6,)}),
    ],
)
def test_examine_names_a_slow_link_host_or_rank(
    hosts: list[str], slow: Callable[[int, int], object], named: dict[str, tuple[int, ...]]
) -> None:
    findings = FakeRanks(hosts, lambda a, b: 0.6 if slow(a, b) else 1.0).examine().findings
    assert {finding.what: finding.ranks for finding in findings} == named


def test_ranks_that_work_at_once_have_a_cpu_each() -> None:
    assert turns_of(
        range(7), [("a", [0, 1, 2, 3], 2)] * 4 + [("b", [0], 1), ("b", [1], 1), ("b", [2], 1)]
    ) == [[0, 1, 4, 5, 6], [2, 3]]
    assert turns_of(range(3), [("a", [0], 4)] * 3) == [[0], [1], [2]]
    assert turns_of(range(3), [("a", [], 64)] * 3) == [[0, 1, 2]]  # each on a GPU
    ranks = FakeRanks(hosts_of(1, 8), work={3: 0.5})
    assert [finding.what for finding in ranks.examine().findings] == ["rank 3 (node-0)"]
    turns = itertools.chain(*(command["turns"] for command in ranks.commands if command["do"] == "work"))
    assert max(map(len, turns)) <= 2


def test_examine_repeats_a_slow_measurement_before_naming_it() -> None:
    """A hiccup in the screen: the exchanges of one rank are slow in the first rounds only."""
    ranks = FakeRanks(hosts_of(8))
    ranks._link = lambda a, b: 0.5 if 3 in (a, b) and not repeats(ranks) else 1.0
    assert ranks.examine().findings == [] and repeats(ranks)


def repeats(ranks: FakeRanks) -> bool:
    """Whether an exchange was measured again."""
    return any(command["do"] == "pairs" and command["reps"] == 1 for command in ranks.commands)


def printed(examination: Examination, capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], str]:
    """The cells of the table that preflight prints, and its last line."""
    capsys.readouterr()
    print_all(result_of(examination, 3.0, "cpu"))
    lines = capsys.readouterr().out.splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[:-1]], lines[-1]


@pytest.mark.parametrize("kind", ["rank", "link", "work"])
def test_table_shows_the_repeated_measurement_that_the_verdict_rests_on(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first measurement is slow, the repeated one is not: whoever reads the table can follow the verdict."""
    ranks = FakeRanks(hosts_of(8))
    if kind == "work":
        ranks._work = {3: 0.5}
        ranks.answer = forgetting(ranks)  # type: ignore[method-assign]
    else:
        slow = {3} if kind == "rank" else {3, 5}
        ranks._link = lambda a, b: 0.5 if slow <= {a, b} and not repeats(ranks) else 1.0
    table, verdict = printed(ranks.examine(), capsys)
    assert verdict.endswith("nothing below 90% of its peers (1 suspect measured again)")
    (again,) = table[next(i for i, row in enumerate(table) if row[0].startswith("measured again")) + 1 :]
    suspect, peers = (float(cell.split()[0]) for cell in again[1:3])
    ratio = peers / suspect if kind == "work" else suspect / peers
    assert again[-1] == "like its peers" and ratio > 0.9
    assert float(again[3].rstrip("%")) / 100 == pytest.approx(ratio, abs=0.01)


def forgetting(ranks: FakeRanks) -> Callable[[dict[str, Any]], list[Any]]:
    """Answers of ranks whose slow work is slow the first time only."""
    answer = ranks.answer

    def answers(command: dict[str, Any]) -> list[Any]:
        times = answer(command)
        if command["do"] == "work" and command["kind"] == MATMUL:
            ranks._work = {}
        return times

    return answers


@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.1, 0.3]), st.sampled_from([2, 3, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_every_row_below_the_peers_is_measured_again_or_named(seed: int, noise: float, hosts: int) -> None:
    """Healthy means: each link and rank of the tables is near the median or has a row of its own below."""
    examination = FakeRanks(hosts_of(hosts, 2), noise=noise, seed=seed).examine()
    again = {(recheck.finding.kind, recheck.finding.ranks) for recheck in examination.rechecks}
    cut = any("were measured again" in note for note in examination.notes)
    for kind, times in examination.pairs.items():
        usual = median(map(times.seconds, times.exchanges))
        for a, b in times.exchanges:
            assert (
                usual / times.seconds((a, b)) >= 0.9
                or cut
                or len(times.exchanges) < 2
                or again & {(kind, (a, b)), (kind, (a,)), (kind, (b,))}
            )
    for kind, work_s in examination.work_s.items():
        for rank, seconds in enumerate(work_s):
            assert median(work_s) / seconds >= 0.9 or cut or len(work_s) < 3 or (kind, (rank,)) in again
    uncertain = [
        recheck for recheck in examination.rechecks if recheck.finding.share <= 0.9 and not recheck.slow
    ]
    line = summary_line(result_of(examination, 3.0, "cpu"))
    assert not (uncertain and "healthy" in line)
    if uncertain and not examination.findings:
        assert "no verdict" in line and "too unsteady to exclude chance" in line


def test_hosts_of_one_name_are_told_apart_by_their_kernels() -> None:
    hosts = (("a", 1), ("localhost", 2), ("localhost", 3), ("a", 1))
    infos = [{"host": host, "boot_id": kernel} for host, kernel in hosts]
    assert names_of(infos) == ("a", "localhost#0", "localhost#1", "a")


# ------------------------------------------------------------------------------------- the self-test


def test_trials_of_a_gathered_pool_name_what_is_slow_in_it() -> None:
    """Gathered from made-up ranks, by the program that gathers from real ones."""
    healthy, slow = (
        selftest.drive(selftest.gather_pool(ranks.world, 30), ranks.answer)
        for ranks in (FakeRanks(hosts_of(8)), FakeRanks(hosts_of(8), slow_rank(5, 0.8)))
    )
    counts = [selftest.judge([pool], 20, host) for pool, host in ((healthy, None), (slow, 5), (slow, 4))]
    assert [(count.named, count.wrong) for count in counts] == [(0, 0), (20, 0), (0, 20)]


# --------------------------------------------------------------------------------------- what is written


def test_preflight_sentence_names_slow_ranks() -> None:
    def text_of_share(share: float) -> str:
        ranks = FakeRanks(hosts_of(4, 2), slow_rank(5, share), work={1: 0.6}, noise=0.01)
        return summary_line(result_of(ranks.examine(), 3.21, "cpu"))

    assert re.search(r"; rank 5 \(node-2\): (69|70|71)% of its peers \(between hosts\)", text_of_share(0.7))
    only_work = text_of_share(1.0)
    assert re.search(r"preflight: slow .*: rank 1 \(node-0\): (59|60|61)% of its peers \(matrix", only_work)
    assert "rank 5" not in only_work


@pytest.mark.parametrize(
    ("hosts", "link", "unjudged"),
    [
        (hosts_of(2), 1.0, "2 ranks have one link and no peers; start 3 or more, or give --expect"),
        (hosts_of(1, 2), 0.1, "2 ranks have one link and no peers; start 3 or more, or give --expect"),
        (["a", "a", "b"], 1.0, "links between hosts: a single pair has no peers"),
        (hosts_of(3), 1.0, ""),
        (hosts_of(1, 8), 1.0, ""),
    ],
)
def test_verdict_without_peers_is_not_healthy(hosts: list[str], link: float, unjudged: str) -> None:
    examination = FakeRanks(hosts, lambda _a, _b: link, noise=0.001).examine()
    reason = unjudged or "nothing below 90% of its peers"
    assert re.fullmatch(
        rf"preflight: {'no verdict' if unjudged else 'healthy'} \(.*{reason}",
        summary_line(result_of(examination, 3.0, "cpu")),
    )
    assert bool(examination.unjudged) == bool(unjudged)


def compared_with_topology(examination: Examination, times_as_long: float) -> Examination:
    """Compares an examination whose ranks are one group of dp, which took so many times as long as expected."""
    ranks = examination.world.size
    topology = a_topology(ring_dim("dp", ranks, 100.0, 1.0, "all_reduce"))
    expected_s = estimate_collective(topology.dims[0], "all_reduce", ranks, 2**26).high_us * 1e-6
    groups, times_s = (tuple(range(ranks)),), (expected_s * times_as_long,)
    examination.dims = {"dp": DimTimes(dim="dp", groups=groups, size_bytes=2**26, times_s=times_s)}
    compare_with(topology, examination)
    return examination


@pytest.mark.parametrize(("times_as_long", "word"), [(1.0, "as expected"), (2.0, "slow")])
def test_two_ranks_are_judged_by_what_is_expected(times_as_long: float, word: str) -> None:
    assert summary_line(
        result_of(compared_with_topology(FakeRanks(hosts_of(2)).examine(), times_as_long), 3.0, "cpu")
    ).startswith(f"preflight: {word} (2 ranks on 2 hosts")


@pytest.mark.parametrize(("times_as_long", "named"), [(1.1, False), (2.0, True)])
def test_a_mesh_dim_that_is_slower_than_the_topology_is_named(times_as_long: float, named: bool) -> None:
    findings = compared_with_topology(
        Examination(ExaminedWorld(("node-0",) * 8, (("dp", 8),))), times_as_long
    ).findings
    assert [finding.what for finding in findings] == ["mesh dim dp compared with --expect"] * named


def test_mesh_dim_of_the_topology_that_was_not_measured_is_not_judged() -> None:
    examination = Examination(ExaminedWorld(("a", "b"), (("tp", 2),)))
    compare_with(a_topology(ring_dim("dp", 8, 100.0, 1.0, "all_reduce")), examination)
    assert examination.unjudged == ["--expect has mesh dim dp, measured here: none"]


# -------------------------------------------------------------------------------------- real ranks


def test_real_ranks_are_examined_and_nothing_is_left(tmp_path: Path) -> None:
    """Their speeds are this machine's: what is named is not judged."""
    done = programs.start("preflight", "--nproc", "4", "--json", "--timeout", "200", cwd=tmp_path)
    content = json.loads(done.stdout)
    assert done.returncode == (1 if content["findings"] else 3 if content["unjudged"] else 0), done.stderr
    assert len(content["links"]) == 6 and all(link["rate"] > 0 for link in content["links"])
    assert {dim["dim"] for dim in content["dims"]} == {"dp", "tp", "dp+tp"}
    assert all(len(times) == 4 for times in content["work_s"].values())
    assert not list(tmp_path.iterdir())


def test_under_torchrun_too_and_its_time_is_limited(tmp_path: Path) -> None:
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python")
    command = (*torchrun, *programs.FRESH, "preflight", "--timeout")
    done = programs.start_fresh(*command, "200", cwd=tmp_path)
    assert done.returncode in (0, 1) and "preflight: " in done.stdout.splitlines()[-1], done.stderr
    late = programs.start_fresh(*command, "0.2", cwd=tmp_path)
    assert "no verdict" in late.stderr and "peers" not in late.stdout  # torchrun itself ends with 1
