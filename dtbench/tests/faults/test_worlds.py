"""Worlds of another launcher whose ranks differ or do not come: one line that says so, and no rank is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtbench.records.run import read_run
from dtbench.tests.faults.table import SUITE, processes_in, split, wait_until_none_runs_in
from dtbench.tests.programs import LIMIT_S, Forked, environment

RUN = "run SUITE --quick -o x.jsonl"
OTHER_SUITE = "suite.py"


@dataclass(frozen=True)
class World:
    """What each rank of a world is started with, and what comes of it.

    words: rank -> its command line, those of rank 0 for a rank without; None for one that is not started. env: of a
    rank beside its place. says: patterns of all lines on standard error. results: how many are in x.jsonl, None
    where there is no file.
    """

    name: str
    says: tuple[str, ...]
    words: Mapping[int, str | None] = field(default_factory=dict)
    all_words: str = f"{RUN} --filter 'good n=1'"
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    size: int = 2
    code: int = 2
    results: int | None = None
    given: Callable[[], object] | None = None


def another_suite() -> None:
    for number, more in enumerate(("", "\nX = 1\n")):
        Path(str(number)).mkdir()
        Path(str(number), OTHER_SUITE).write_text(SUITE.read_text() + more)


def differs(name: str, theirs: str, ours: str) -> tuple[str]:
    return (rf"^dtbench: rank 1 has {name} {theirs}, rank 0 has {ours}: expected the same on every rank$",)


def options(rank_0: str, rank_1: str) -> Mapping[int, str]:
    return {0: f"{RUN} --filter 'good n=1' {rank_0}", 1: f"{RUN} --filter 'good n=1' {rank_1}"}


def disagree(rank: int, sent: int, room: int, case: str) -> tuple[str]:
    told = (
        rf"rank {rank} on \S+ was sent {sent} bytes at a time where it expected {room} during {case} \(core\)"
    )
    return (
        rf"^dtbench: the ranks disagree on the size of a collective: {told}: 1 result is in x.jsonl; go on",
    )


SHORT = {"DTBENCH_JOIN_TIMEOUT": "8"}
WORLDS = [
    World("dims of the mesh by another name", differs("--mesh", "x=2", "tp=2"), options("", "--mesh x=2")),
    World("another number of launches", differs("--launches", "2", "1"), options("", "--launches 2")),
    World("another timeout", differs("--timeout", "9", "60"), options("", "--timeout 9")),
    World("another filter", differs("--filter", "good n=2", "good n=1"), {1: f"{RUN} --filter 'good n=2'"}),
    World(
        "another file of the suite",
        differs("the file suite.py with sha256", r"\w+", r"\w+"),
        {rank: f"run {rank}/suite.py --quick -o x.jsonl" for rank in (0, 1)},
        given=another_suite,
    ),
    World("a bad option on rank 1", (r"^dtbench: rank 1: No such option '--nope'",), options("", "--nope 1")),
    World("a bad option on rank 0", (r"^dtbench: No such option '--nope'",), options("--nope 1", "")),
    World(
        "a bad option on all ranks", (r"^dtbench: No such option '--nope'",), options("--nope 1", "--nope 1")
    ),
    World(
        "rank 1 never comes",
        (
            r"^dtbench: rank 0 waits for rank 1 of 2; up to 3 s more \(DTBENCH_JOIN_TIMEOUT\)$",
            "^dtbench: rank 0 waited 8 s for rank 1 of 2: nothing was measured$",
        ),
        {1: None},
        env={0: SHORT},
        code=5,
    ),
    World(
        "rank 0 never comes",
        (
            r"^dtbench: rank 1 waits for the store of the ranks at localhost:\d+ \(connection refused\); up to",
            r"^dtbench: rank 1 waited 8 s for the store of the ranks at localhost:\d+ \(connection refused\): nothing",
        ),
        {0: None},
        env={1: SHORT},
        code=5,
    ),
    World(
        "an address that no name server knows",
        (
            r"^dtbench: rank 0 waits for the store of the ranks at no.invalid:\d+ \(.*\); up to",
            r"^dtbench: rank 0 waited 8 s for the store of the ranks at no.invalid:\d+ \(.*\): nothing was measured",
        ),
        {1: None},
        env={0: SHORT | {"MASTER_ADDR": "no.invalid"}},
        code=5,
    ),
    *(
        World(
            f"{what} of other sizes on the ranks",
            disagree(rank, sent, room, case),
            all_words=f"{RUN} --filter '{case}'",
            code=5,
            results=1,
        )
        for what, case, rank, sent, room in (
            ("tensors", "gone sizes", 1, 4096, 4),
            ("elements", "first dtypes", 0, 128, 64),
        )
    ),
    *(
        World(
            f"{name}={value}",
            (f"^dtbench: the environment has {name}='{value}': expected ",),
            {1: None},
            env={0: {name: value}},
        )
        for name, value in {
            "RANK": "5",
            "WORLD_SIZE": "0",
            "MASTER_PORT": "99999",
            "MASTER_ADDR": "",
            "LOCAL_WORLD_SIZE": "3",
            "DTBENCH_JOIN_TIMEOUT": "soon",
        }.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(world, id=world.name) for world in WORLDS])
def test_world(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"ranks of another's launcher: {world.name}")
    monkeypatch.chdir(tmp_path)
    if world.given is not None:
        world.given()
    code, ended = run_world(
        {
            rank: words
            for rank in range(world.size)
            if (words := world.words.get(rank, world.all_words)) is not None
        },
        world.size,
        world.env,
    )
    # A rank that was ended before it began has none.
    files = [path for rank in sorted(ended) if (path := Path(f"stderr{rank}")).exists()]
    said = [line for path in files for line in path.read_text().splitlines()]
    record_property("seen", "; ".join([f"exit {code}", *said]))
    assert len(said) == len(world.says), said
    for line, pattern in zip(said, world.says, strict=True):
        assert re.search(pattern, line), said
    assert code == world.code, (ended, said)
    assert world.results == (len(read_run("x.jsonl").results) if Path("x.jsonl").exists() else None)


def run_world(
    commands: Mapping[int, str],
    size: int,
    env: Mapping[int, Mapping[str, str]],
    late_s: Mapping[int, float] | None = None,
    killed_s: Mapping[int, float] | None = None,
) -> tuple[int, dict[int, int]]:
    """The first exit code but 0, and rank -> its own. As torchrun does, the others are told to end at that one.

    late_s: what a rank waits before it is started. killed_s: when it is killed, from then on.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    place["LOCAL_WORLD_SIZE"] = str(size)
    ranks: dict[int, Forked] = {}
    late_s = late_s or {}
    for rank in sorted(commands, key=lambda rank: late_s.get(rank, 0.0)):
        time.sleep(late_s.get(rank, 0.0))
        own = environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | env.get(rank, {})
        files = [f"stdout{rank}", f"stderr{rank}"]
        ranks[rank] = Forked(["dtbench", *split(commands[rank])], own, files, Path.cwd())
    started = time.monotonic()
    deadline = time.monotonic() + LIMIT_S
    first = 0
    try:
        while any(process.poll() is None for process in ranks.values()):
            assert time.monotonic() < deadline, processes_in(Path.cwd())
            for rank, after_s in (killed_s or {}).items():
                if rank in ranks and time.monotonic() - started > after_s:
                    ranks[rank].kill()
            codes = [code for process in ranks.values() if (code := process.poll())]
            if not first and codes:
                first = codes[0]
                for process in ranks.values():
                    if process.poll() is None:
                        with contextlib.suppress(ProcessLookupError):  # it ends just now
                            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.1)  # as often as torch's agent looks
    finally:
        for process in ranks.values():
            process.kill()
    wait_until_none_runs_in(Path.cwd())
    ended = {rank: process.wait() for rank, process in ranks.items()}
    return first or next((code for code in ended.values() if code), 0), ended
