"""Random command lines on whole and damaged files: none ends in a traceback, whatever it is given.

Those that would measure, start ranks or make networks are refused before they do.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import click
import msgspec
import pytest

from dtbench.cli import program as cli
from dtbench.suite.errors import EXIT_OWN_FAULT
from dtbench.tests import made_up
from dtbench.tests.faults.conftest import TABLE
from dtbench.tests.made_up import Cli

TOPOLOGY = "baseline-cpu-gloo-4ranks.topology.json"
SOUND = (
    "show run.jsonl",
    "report run.jsonl -o out.html",
    "import nccl.log -o out.jsonl",
    "compare run.jsonl run.jsonl",
    "calibrate run.jsonl -o out.json",
    f"calibrate --validate {TOPOLOGY} run.jsonl",
    f"plan --topology {TOPOLOGY} --model llama-8b --gpus 16 --batch 64",
    f"export {TOPOLOGY} --to torch -o out.py",
    "list collectives --device cpu",
    "plan --model llama-8b --gpus 16 --batch 64",
    "plan --validate a100-64-gpus.csv",
    # Whatever word is changed, another is left that ends it before it measures.
    "run nosuch nosuch-either --quick -o out.jsonl",
    "gate --base rubbish --head rubbish dispatch -o out.gate",
    "profile nosuch nosuch-either",
    "doctor nosuch nosuch-either",
)
# Nothing here names a place outside the current folder that could be written.
VALUES = (
    "",
    "-",
    "0",
    "-1",
    "1e999",
    "9" * 30,
    "nan",
    "dp=2,tp=2",
    "dp=0",
    "=,=",
    "\x1b[2J",
    "x" * 300,
    "é\udc80",
)
PLACES = ("out.json", "out.html", "out.md", "out.py", "", ".", "no/such/out.json", "run.jsonl", "dangling")
LOG = "# nccl-tests\n#  size count type redop root time algbw busbw #wrong\n 1024 256 float sum -1 10.0 0.10 0.10 0\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """One of each kind, and what is no file."""
    results = [*islice(made_up.collectives(samples=5), 12), *islice(made_up.dispatch(), 6), *made_up.NOT_OK]
    lines = [json.dumps(line) for line in (made_up.header(), *(msgspec.to_builtins(r) for r in results))]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "nccl.log").write_text(LOG)
    root = Path(__file__).parents[3] / "results"
    known = (TOPOLOGY, "reference/step-times/a100-64-gpus.csv")
    for name in known:
        (tmp_path / name.rpartition("/")[2]).write_bytes((root / name).read_bytes())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    names = [name.rpartition("/")[2] for name in known]
    return ["run.jsonl", "nccl.log", *names, "pipe", "dangling", ".", "/dev/zero", "missing"]


def command_line(rng: random.Random, files: list[str]) -> list[str]:
    """A sound one; often with another word in a place, with options of the command, or with one word too few."""
    words = rng.choice(SOUND).split()
    command = cli.cli.get_command(click.Context(cli.cli), words[0])
    assert command is not None
    # The self-test of a gate measures for minutes.
    options = [p for p in command.params if isinstance(p, click.Option)]
    for option in rng.sample(options, rng.choice([0, 0, 0, 1, 2]) % (len(options) + 1)):
        words.append(option.opts[-1])
        if not option.is_flag:
            choices = option.type.choices if isinstance(option.type, click.Choice) else ()
            words.append(
                rng.choice([*choices, *(PLACES if "--output" in option.opts else (*VALUES, *files))])
            )
    # A word after -o names a place to write.
    at = rng.randrange(1, len(words))
    change = rng.random()
    if change < 0.2:
        words[at] = rng.choice(PLACES if words[at - 1] == "-o" else (*VALUES, *files))
    elif change < 0.3:
        del words[at]
    return words


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut, with bits flipped, a part repeated, or a value that has another type."""
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    values = [b"null", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"true", b"9" * 40, b"\xff\x00"]
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 3]) + data[at + 3 :]
        case 2:
            return data[:end] + data[at:end] + data[end:]
    colons = [n for n, byte in enumerate(data[:20_000]) if byte == ord(":")]
    start = rng.choice(colons or [at]) + 1
    ends = [n for n in (data.find(c, start) for c in (b",", b"}")) if n >= 0]
    return data[:start] + rng.choice(values) + data[min(ends, default=start) :]


@pytest.mark.parametrize("count", [100, 5000 if TABLE else 1000])
def test_no_command_line_ends_in_a_traceback(
    dtbench: Cli,
    files: list[str],
    tmp_path: Path,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"{count} random command lines and files (seeds 0 to {count - 1})")
    ends = Counter[int]()
    for seed in range(count):
        rng = random.Random(seed)
        words = command_line(rng, files)
        there = [n for n, word in enumerate(words) if word in files[:5] and words[n - 1] != "-o"]
        if there and rng.random() < 0.5:
            at = rng.choice(there)
            (tmp_path / "damaged").write_bytes(damaged(rng, (tmp_path / words[at]).read_bytes()))
            words[at] = "damaged"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LOG.encode())))  # `-` reads it
        code, _, stderr = dtbench(*words)
        assert code != EXIT_OWN_FAULT and "Traceback" not in stderr, (seed, words, stderr)
        assert code in (0, 1, 3, 4, 5) or stderr.count("\n") == 1, (seed, words, stderr)
        ends[code] += 1
        for made in tmp_path.glob("out.*"):
            made.unlink()
    record_property("seen", ", ".join(f"exit {code}: {n}" for code, n in sorted(ends.items())))
    assert ends[0] > count / 10 and ends[2] > count / 10, ends  # some go well
