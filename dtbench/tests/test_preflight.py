"""Preflights: rounds, what is named on made-up worlds, what is written, and real ranks."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtbench.cost.plan.machines import NodeLinks
from dtbench.machine.provenance import segments
from dtbench.preflight import show
from dtbench.preflight.examine import (
    MATMUL,
    MAX_SUSPECTS,
    NAMED,
    Examination,
    World,
    examine,
    fitting_bytes,
    turns_of,
)
from dtbench.preflight.preflight import file_of, names_of
from dtbench.preflight.rounds import ALL_PAIRS_UP_TO, BETWEEN, INSIDE, matchings, rounds_of
from dtbench.records.preflight import DimTimes, Preflight
from dtbench.suite.errors import UsageError
from dtbench.suite.mesh import default_mesh
from dtbench.tests import preflight_selftest as selftest
from dtbench.tests import programs
from dtbench.tests.made_up import Cli

# ------------------------------------------------------------------------------------------ rounds


@given(st.integers(1, 70))
def test_rounds_are_of_disjoint_pairs(n: int) -> None:
    rounds = matchings(n)
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(set(ranks)) == len(ranks)
        assert all(0 <= a < b < n for a, b in one)
    if n <= ALL_PAIRS_UP_TO:
        assert sorted(pair for one in rounds for pair in one) == [
            (a, b) for a in range(n) for b in range(a + 1, n)
        ]
        assert len(rounds) <= n
    else:
        assert len(rounds) == 2 * math.ceil(math.log2(n))
        assert all(len(one) == n // 2 for one in rounds)


def test_rounds_grow_with_the_logarithm_and_everybody_meets_several() -> None:
    rounds = matchings(1000)
    met: dict[int, set[int]] = {}
    for a, b in (pair for one in rounds for pair in one):
        met.setdefault(a, set()).add(b)
        met.setdefault(b, set()).add(a)
    assert len(rounds) == 20
    assert min(len(partners) for partners in met.values()) >= 10


def test_kinds_of_links_are_not_mixed() -> None:
    hosts = ("a", "a", "b", "b", "b", "c")
    found = rounds_of(hosts)
    for kind, rounds in found.items():
        for a, b in (pair for one in rounds for pair in one):
            assert (hosts[a] == hosts[b]) == (kind == INSIDE)
    assert {pair for one in found[INSIDE] for pair in one} == {(0, 1), (2, 3), (2, 4), (3, 4)}
    assert {pair for one in found[BETWEEN] for pair in one} == {(0, 2), (1, 3), (0, 5), (2, 5)}
    assert set(rounds_of(("a", "b"))) == {BETWEEN}
    assert set(rounds_of(("a", "a"))) == {INSIDE}


# ------------------------------------------------------------------------------------- made-up worlds


class Ranks:
    """Ranks of given speeds. link: (a, b) -> share of the usual speed; lost: of the packets between
    them; noise: of the logarithm of a time."""

    cpus = 2  # of each host

    def __init__(
        self,
        hosts: Sequence[str],
        link: Callable[[int, int], float] = lambda _a, _b: 1.0,
        work: Mapping[int, float] | None = None,
        lost: Callable[[int, int], float] = lambda _a, _b: 0.0,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.world = World(tuple(hosts), default_mesh(len(hosts)))
        self._link, self._work, self._lost, self._noise = link, work or {}, lost, noise
        self._random = random.Random(seed)
        self.asked: list[dict[str, Any]] = []

    def _time(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, self._noise))

    def answer(self, command: dict[str, Any]) -> list[Any]:
        json.dumps(command)  # it goes to the ranks as JSON
        self.asked.append(command)
        everyone = range(self.world.size)
        if command["do"] == "pairs":
            answers: list[list[Any]] = [[None] * len(command["rounds"]) for _ in everyone]
            for at, one in enumerate(command["rounds"]):
                for a, b in one:
                    speed = 1e9 if self.world.hosts[a] == self.world.hosts[b] else 1e8
                    seconds = command["bytes"] / speed / self._link(a, b)
                    answers[a][at] = [(self._time(seconds), 0.0) for _ in range(command["reps"])]
                    # The slower rank counts, and the one that sends more again.
                    answers[b][at] = [(one * 0.9, self._lost(a, b)) for one, _ in answers[a][at]]
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
        examining = examine(self.world)
        command = next(examining)
        while True:
            try:
                command = examining.send(self.answer(command))
            except StopIteration as end:
                found: Examination = end.value
                return found


def hosts_of(count: int, ranks: int = 1) -> list[str]:
    return [f"node-{host}" for host in range(count) for _ in range(ranks)]


def slow_rank(rank: int, share: float) -> Callable[[int, int], float]:
    return lambda a, b: share if rank in (a, b) else 1.0


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 40])
def test_a_healthy_world_names_nothing(hosts: int) -> None:
    for seed in range(10):
        assert Ranks(hosts_of(hosts), seed=seed).examine().findings == []


@pytest.mark.parametrize("hosts", [3, 4, 8, 40])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.1])
def test_a_slow_host_is_named_and_nothing_else(hosts: int, share: float) -> None:
    for seed in range(5):
        found = Ranks(hosts_of(hosts), slow_rank(2, share), seed=seed).examine()
        assert [(one.ranks, one.kind) for one in found.findings] == [((2,), BETWEEN)], seed
        assert found.findings[0].what == "host node-2"
        assert found.findings[0].share == pytest.approx(share, rel=0.05)


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
def test_what_is_slow_is_named_as_a_link_a_host_or_a_rank(
    hosts: list[str], slow: Callable[[int, int], object], named: dict[str, tuple[int, ...]]
) -> None:
    found = Ranks(hosts, lambda a, b: 0.6 if slow(a, b) else 1.0).examine()
    assert {one.what: one.ranks for one in found.findings} == named


def test_a_rank_that_computes_slowly_is_named() -> None:
    found = Ranks(hosts_of(1, 8), work={3: 0.75}).examine()
    assert [(one.what, one.kind) for one in found.findings] == [("rank 3 (node-0)", MATMUL)]


def test_a_host_that_loses_packets_is_named_though_it_is_as_fast_as_its_peers() -> None:
    drawn = random.Random(1)
    ranks = Ranks(hosts_of(8), lost=lambda a, b: drawn.uniform(0, 0.03) if 5 in (a, b) else 0.001)
    (found,) = ranks.examine().findings
    assert (found.what, found.kind) == ("host node-5", BETWEEN)
    assert 0.01 < found.lost < 0.02
    assert found.share > NAMED


def test_a_link_that_loses_packets_is_named_as_a_link_and_what_all_lose_is_not() -> None:
    drawn = random.Random(1)
    link = Ranks(hosts_of(8), lost=lambda a, b: drawn.uniform(0.01, 0.03) if (a, b) == (1, 6) else 0.0)
    assert [one.what for one in link.examine().findings] == [
        "the link of rank 1 (node-1) and rank 6 (node-6)"
    ]
    everywhere = Ranks(hosts_of(8), lost=lambda _a, _b: drawn.uniform(0, 0.03))
    assert everywhere.examine().findings == []


def test_segments_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    snmp = tmp_path / "snmp"
    snmp.write_text("Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm OutSegs RetransSegs\nTcp: 1 500 7\n")
    assert segments(snmp) == (500, 7)
    for text in ("", "Tcp: a\n", "Tcp: OutSegs RetransSegs\nTcp: 1 x\n"):
        snmp.write_text(text)
        assert segments(snmp) == (0, 0)
    assert segments(tmp_path / "none") == (0, 0)


def test_ranks_that_work_at_once_have_a_cpu_each() -> None:
    shared = [("a", [0, 1, 2, 3], 2)] * 4 + [("b", [0], 1), ("b", [1], 1), ("b", [2], 1)]
    assert turns_of(range(7), shared) == [[0, 1, 4, 5, 6], [2, 3]]
    assert turns_of(range(3), [("a", [0], 4)] * 3) == [[0], [1], [2]]
    assert turns_of(range(3), [("a", [], 64)] * 3) == [[0, 1, 2]]  # each on a GPU
    ranks = Ranks(hosts_of(1, 8), work={3: 0.5})
    assert [one.what for one in ranks.examine().findings] == ["rank 3 (node-0)"]
    assert all(len(turn) <= 2 for asked in ranks.asked if asked["do"] == "work" for turn in asked["turns"])


def test_what_looks_slow_once_is_measured_again_before_it_is_named() -> None:
    """A hiccup in the screen: the exchanges of one rank are slow in the first rounds only."""
    ranks = Ranks(hosts_of(8))
    slow = {"on": True}
    ranks._link = lambda a, b: 0.5 if slow["on"] and 3 in (a, b) else 1.0
    plain = ranks.answer

    def answer(command: dict[str, Any]) -> list[Any]:
        slow["on"] = not (command["do"] == "pairs" and command["reps"] == 1)
        return plain(command)

    ranks.answer = answer  # type: ignore[method-assign]
    assert ranks.examine().findings == []
    assert any(command["do"] == "pairs" and command["reps"] == 1 for command in ranks.asked)


def test_a_single_pair_has_no_peers_and_that_is_said() -> None:
    found = Ranks(hosts_of(2), lambda _a, _b: 0.5).examine()
    assert found.findings == []
    assert any("a single pair has no peers" in note for note in found.notes)


def test_a_world_that_is_uneven_everywhere_ends_and_says_so() -> None:
    drawn = random.Random(5)
    speeds = [drawn.uniform(0.2, 1) for _ in range(40)]
    ranks = Ranks(hosts_of(40), lambda a, b: min(speeds[a], speeds[b]))
    found = ranks.examine()
    assert any("the worst" in note for note in found.notes)
    confirmed = [c for c in ranks.asked if c["do"] == "pairs" and c["reps"] == 1]
    assert len(confirmed) <= 2 * MAX_SUSPECTS


@settings(max_examples=25)
@given(st.integers(3, 12), st.integers(1, 3), st.integers(0, 2**16))
def test_whatever_the_speeds_it_ends_and_names_what_is_there(hosts: int, ranks: int, seed: int) -> None:
    drawn = random.Random(seed)
    speeds = [drawn.choice([1.0, 1.0, 1.0, 0.9, 0.5, 0.01]) for _ in range(hosts * ranks)]
    found = Ranks(hosts_of(hosts, ranks), lambda a, b: min(speeds[a], speeds[b]), seed=seed).examine()
    for one in found.findings:
        assert one.share <= NAMED
        assert set(one.ranks) <= set(range(hosts * ranks))
    msgspec.json.encode(file_of(found, 1.0, "cpu"))


def test_sizes_are_those_that_take_about_as_long_as_wanted() -> None:
    assert fitting_bytes(2**16, 0.04) == 2**16
    assert fitting_bytes(2**16, 0.00125) == 2**21
    assert fitting_bytes(2**16, 1e-9) == 2**28
    assert fitting_bytes(2**16, 10) == 2**16


def test_hosts_of_one_name_are_told_apart_by_their_kernels() -> None:
    infos = [
        {"host": host, "boot_id": kernel}
        for host, kernel in (("a", 1), ("localhost", 2), ("localhost", 3), ("a", 1))
    ]
    assert names_of(infos) == ("a", "localhost#0", "localhost#1", "a")


# ------------------------------------------------------------------------------------- the self-test


def pool(slow: int | None = None, share: float = 0.8, reps: int = 30) -> dict[str, Any]:
    """Gathered from made-up ranks, by the program that gathers from real ones."""
    made: dict[str, Any] = {}

    class Kept:
        def write_text(self, text: str) -> None:
            made.update(json.loads(text))

    ranks = Ranks(hosts_of(8), (lambda _a, _b: 1.0) if slow is None else slow_rank(slow, share))
    examining = selftest.gather_pool(ranks.world, Kept(), reps)  # type: ignore[arg-type]
    command = next(examining)
    try:
        while True:
            command = examining.send(ranks.answer(command))
    except StopIteration:
        return made


def test_trials_of_a_gathered_pool_name_what_is_slow_in_it() -> None:
    healthy = selftest.judge([pool()], 40, None)
    assert (healthy.trials, healthy.wrong) == (40, 0)
    slow = selftest.judge([pool(5)], 20, 5)
    assert (slow.found, slow.wrong) == (20, 0)
    mistaken = selftest.judge([pool(5)], 5, 4)
    assert (mistaken.found, mistaken.wrong) == (0, 5)


# --------------------------------------------------------------------------------------- what is written


def example(share: float = 0.7) -> Preflight:
    ranks = Ranks(hosts_of(4, 2), slow_rank(5, share), work={1: 0.6}, noise=0.01)
    return file_of(ranks.examine(), 3.21, "cpu")


def test_the_verdict_stands_in_one_line_and_in_junit() -> None:
    slow, healthy = example(), example(1.0)
    assert re.search(
        r"; rank 5 \(node-2\): (69|70|71)% of its peers \(links between hosts\)", show.sentence(slow)
    )
    assert re.search(
        r"preflight: slow .*: rank 1 \(node-0\): (59|60|61)% of its peers \(matrix", show.sentence(healthy)
    )
    root = ET.fromstring(show.junit(slow))
    (suite,) = root
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failed == {BETWEEN, INSIDE, MATMUL}
    assert suite.get("failures") == "3"
    assert int(suite.get("tests") or 0) == len(suite)


def test_junit_holds_a_dim_of_any_name() -> None:
    dim = msgspec.structs.replace(example().dims[0], dim='<a>&"\x00\x1b')
    finding = msgspec.structs.replace(example().findings[0], kind=f"all_reduce over {dim.dim}")
    text = show.junit(msgspec.structs.replace(example(), dims=(dim,), findings=(finding,)))
    names = [case.get("name") for case in ET.fromstring(text)[0] if case.find("failure") is not None]
    assert names == ['all_reduce over <a>&"\\x00\\x1b']


def test_a_page_shows_the_map_and_what_is_slow(tmp_path: Path, dtbench: Cli) -> None:
    path, page = tmp_path / "preflight.json", tmp_path / "page.html"
    path.write_bytes(msgspec.json.encode(example()))
    code, _, err = dtbench("report", str(path), "-o", str(page))
    assert code == 0, err
    text = page.read_text()
    assert "Slow links, hosts and ranks" in text
    assert "Links between hosts" in text
    assert "rank 5 (node-2)" in text


def test_what_is_slower_than_before_is_named(tmp_path: Path) -> None:
    from dtbench.preflight.expected import compare_with, read_expected

    before = tmp_path / "before.json"
    before.write_bytes(msgspec.json.encode(file_of(Ranks(hosts_of(8)).examine(), 1.0, "cpu")))
    expected = read_expected(before)
    same, slower = Ranks(hosts_of(8), seed=1).examine(), Ranks(hosts_of(8), lambda _a, _b: 0.5).examine()
    compare_with(expected, same, "cpu")
    compare_with(expected, slower, "cpu")
    assert same.findings == []
    assert [(one.what, one.kind) for one in slower.findings] == [
        ("all links against what is expected", BETWEEN)
    ]
    other = Ranks(hosts_of(4)).examine()
    compare_with(expected, other, "cpu")
    assert other.findings == []
    assert any("--expect is of 8 ranks" in note for note in other.notes)
    on_gpus = Ranks(hosts_of(8), lambda _a, _b: 0.5).examine()
    before.write_bytes(msgspec.json.encode(file_of(Ranks(hosts_of(8)).examine(), 1.0, "cuda")))
    with pytest.raises(UsageError, match="was measured on cuda, this on cpu"):
        compare_with(read_expected(before), on_gpus, "cpu")


def dim_of_eight(size: int, seconds: float) -> DimTimes:
    return DimTimes(dim="dp", groups=(tuple(range(8)),), size_bytes=size, times_s=(seconds,), alone_s=seconds)


def test_what_is_slower_than_a_public_machine_is_named() -> None:
    from dtbench.preflight.expected import compare_with, read_expected

    expected = read_expected(Path("h100-8x"))
    assert expected.machine is not None
    links = NodeLinks(expected.machine)
    for times_as_long, named in ((1.2, False), (2.5, True)):
        found = Ranks(hosts_of(1, 8)).examine()
        found.findings.clear()
        size = 2**26
        usual_s = links.in_node("all_reduce", size, 8)
        found.dims = {"dp": dim_of_eight(size, usual_s * times_as_long)}
        compare_with(expected, found, "cuda")
        assert [one.what for one in found.findings] == ["mesh dim dp against what is expected"] * named
    across = Ranks(hosts_of(2, 4)).examine()
    across.dims = {"dp": dim_of_eight(size, 1.0)}
    compare_with(expected, across, "cuda")  # what is public is of one node
    assert any("holds nothing that was measured here" in note for note in across.notes)
    with pytest.raises(UsageError, match="--expect h100-8x is of GPUs, this was measured on cpu"):
        compare_with(expected, across, "cpu")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--nproc", "1"], "a world of one has none to compare"),
        (["-o", "x.txt"], "expected a name that ends in .html, .json, .xml"),
        (["--expect", "/dev/zero"], "is not a regular file"),
        (["--mesh", "dp=2", "--nproc", "3"], "make them agree"),
        (["--timeout", "0"], "expected seconds above 0"),
    ],
)
def test_wrong_input_is_told_in_a_line(given: list[str], says: str, dtbench: Cli) -> None:
    code, _, err = dtbench("preflight", *given)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


# -------------------------------------------------------------------------------------- real ranks


def test_real_ranks_are_examined_and_nothing_is_left(tmp_path: Path) -> None:
    """Their speeds are this machine's: what is named is not judged."""
    done = programs.start(
        "preflight", "--nproc", "4", "--json", "--timeout", "200", "-o", "out.xml", cwd=tmp_path
    )
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["findings"] else 0), done.stderr
    assert len(found["links"]) == 6
    assert all(link["rate"] > 0 for link in found["links"])
    assert {dim["dim"] for dim in found["dims"]} == {"dp", "tp", "dp+tp"}
    assert all(len(times) == 4 for times in found["work_s"].values())
    assert ET.parse(tmp_path / "out.xml").getroot()[0].get("failures") in ("0", "1", "2", "3")
    assert [path.name for path in tmp_path.iterdir()] == ["out.xml"]
    again = programs.start("preflight", "--nproc", "4", "-o", "out.xml", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_under_torchrun_too_and_its_time_is_limited(tmp_path: Path) -> None:
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python")
    done = programs.start_fresh(*torchrun, *programs.FRESH, "preflight", "--timeout", "200", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "preflight: " in done.stdout.splitlines()[-1]
    done = programs.start_fresh(*torchrun, *programs.FRESH, "preflight", "--timeout", "0.2", cwd=tmp_path)
    assert "no verdict" in done.stderr  # torchrun itself ends with 1
    assert "peers" not in done.stdout
