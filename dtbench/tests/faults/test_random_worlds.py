"""Random worlds of another's launcher: ranks that differ in options, files and speed, that do not come, or die in any
order. None hangs, leaves a process or says anything but lines of ours; those without a difference measure all."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.records.run import read_run
from dtbench.suite.errors import EXIT_OK, EXIT_OWN_FAULT
from dtbench.tests.faults.conftest import TABLE
from dtbench.tests.faults.test_worlds import RUN, another_suite, run_world

COUNT = 200 if TABLE else 6
SAME = f"{RUN} --filter 'good n=1'"
# What a rank's command line is beside that of the others.
OTHER = (
    f"{SAME} --mesh x=2",
    f"{SAME} --launches 2",
    f"{SAME} --timeout 9",
    f"{RUN} --filter 'good n=2'",
    f"{RUN} --filter good",
    f"{SAME} --nope 1",
    f"{SAME} --impl core",
    f"{SAME} --resume",
    "run 1/suite.py --quick -o x.jsonl --filter 'good n=1'",
    "run nosuch -o x.jsonl",
    "show nosuch.jsonl",
)
JOIN = {"DTBENCH_JOIN_TIMEOUT": "10"}


@pytest.mark.slow
def test_no_world_hangs_or_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    record_property("fault", f"{COUNT} random worlds of another's launcher (seeds 0 to {COUNT - 1})")
    ends: Counter[int] = Counter()
    for seed in range(COUNT):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        another_suite()
        size = rng.choice([2, 2, 3, 4])
        commands = dict.fromkeys(range(size), SAME)
        late = {rank: rng.choice([0.0, 0.0, 1.0]) for rank in commands}
        killed: dict[int, float] = {}
        what = rng.choice(["same", "options", "options", "absent", "death", "deaths"])
        one = rng.randrange(size)
        if what == "options":
            commands[one] = rng.choice(OTHER)
        elif what == "absent":
            del commands[one]
        elif what != "same":
            count = 1 if what == "death" else size
            killed = {rank: rng.uniform(0.0, 4.0) for rank in rng.sample(range(size), count)}
        told = (seed, what, one, commands.get(one), killed)
        code, ended = run_world(commands, size, dict.fromkeys(commands, JOIN), late, killed)
        # One that was killed at once has no file.
        files = [file for rank in sorted(ended) if (file := Path(f"stderr{rank}")).exists()]
        said = [line for file in files for line in file.read_text().splitlines()]
        assert EXIT_OWN_FAULT not in ended.values(), (told, ended, said)
        assert all(line.startswith("dtbench: ") for line in said), (told, said)
        if what == "same":
            assert (code, said) == (EXIT_OK, []), (told, ended, said)
        elif what in ("options", "absent"):
            assert code != EXIT_OK and said, (told, ended)
        if Path("x.jsonl").exists() and Path("x.jsonl").stat().st_size:
            run = read_run("x.jsonl")
            assert len({result.key for result in run.results}) == len(run.results), told
            assert what in ("same", "death", "deaths"), (told, "measured what differs")
        ends[code] += 1
        os.chdir(tmp_path)
    record_property(
        "seen", ", ".join(f"exit {code}: {n}" for code, n in sorted(ends.items())) + "; no rank is left"
    )
