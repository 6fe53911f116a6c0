"""Every command that takes a file, on damaged ones of each kind: none ends in a traceback, or does not end.

Files are cut, with bits flipped, parts repeated, values of another type; or whole, but of another kind.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from dtbench.suite.errors import EXIT_OWN_FAULT
from dtbench.tests import made_up
from dtbench.tests.faults.conftest import TABLE
from dtbench.tests.faults.test_random_commands import TOPOLOGY, damaged
from dtbench.tests.made_up import Cli
from dtbench.tests.test_damaged_files import LLAMA, RESULTS
from dtbench.tests.test_damaged_files import READERS as MADE

MODEL = "--mesh dp=2,tp=2 --model"
PLAN = "--gpus 16 --batch 64"

# Kind -> command lines that take a file of it, as FILE.
COMMANDS = {
    "run.jsonl": (
        "show FILE",
        "show FILE --json",
        "show FILE --csv",
        "show FILE --export bmf:out.json",
        "report FILE -o out.html",
        "report run.jsonl --base FILE -o out.html",
        "report folder -o out.html",
        "compare run.jsonl FILE",
        "compare FILE run.jsonl --json",
        "compare FILE --reference",
        "calibrate FILE -o out.json",
        "calibrate FILE run.jsonl -o out.json",
        f"calibrate --validate {TOPOLOGY} FILE",
        "calibrate --split FILE",
        "settings FILE",
        "settings FILE run.jsonl -o out.csv",
        "settings --arm NCCL_ALGO=Ring FILE --arm '' run.jsonl -o out.csv",
        "run nosuch --resume -o FILE",
    ),
    "ways.jsonl": (f"calibrate --regret {TOPOLOGY} FILE", f"calibrate --regret {TOPOLOGY} FILE --json"),
    TOPOLOGY: (
        "calibrate --validate FILE run.jsonl",
        "calibrate --regret FILE ways.jsonl",
        f"plan --topology FILE {MODEL} llama-70b",
        "export FILE --to torch -o out.py",
        "export FILE --to inductor -o out.py",
        "export FILE --to autoparallel -o out.py",
        "report FILE -o out.html",
        "report run.jsonl --topology FILE -o out.html",
        f"plan --model llama-8b {PLAN} --topology FILE",
        "preflight --expect FILE --mesh nosuch",
    ),
    "config.json": (f"plan --topology {TOPOLOGY} {MODEL} FILE", f"plan --model FILE {PLAN}"),
    "model.toml": (f"plan --topology {TOPOLOGY} {MODEL} FILE", f"plan --model FILE {PLAN}"),
    "machine.json": (f"plan --model llama-8b {PLAN} --machine FILE",),
    "a100-64-gpus.csv": (
        "plan --validate FILE",
        "plan --validate FILE --json",
        "plan --fit FILE -o out.json",
    ),
    "gate.json": ("report FILE -o out.html",),
    "history.jsonl": ("report FILE -o out.html",),
    "preflight.json": ("report FILE -o out.html", "preflight --expect FILE --mesh nosuch"),
    "calls.json": ("report FILE -o out.html",),
    **{
        f"{n}.log": ("import FILE -o out.jsonl",)
        for n in ("nccl", "nccl-json", "deepspeed", "osu", "ml-engineering")
    },
}
LINES = [(kind, words) for kind, several in COMMANDS.items() for words in several]


@pytest.fixture
def files(dtbench: Cli, tmp_path: Path) -> Callable[[str], bytes]:
    """A sound file of each kind by its name; those that a command writes are written by it."""
    results = [*islice(made_up.collectives(samples=5), 40), *islice(made_up.dispatch(), 6), *made_up.NOT_OK]
    lines = [json.dumps(line) for line in (made_up.header(), *(msgspec.to_builtins(r) for r in results))]
    made = {
        "run.jsonl": "\n".join(lines).encode() + b"\n",
        "config.json": json.dumps(LLAMA).encode(),
        "nccl.log": MADE["nccl-tests text"][0](),
        "nccl-json.log": MADE["nccl-tests JSON"][0](),
        "deepspeed.log": MADE["DeepSpeed"][0](),
        "osu.log": MADE["OSU"][0](),
        "ml-engineering.log": MADE["ml-engineering"][0](),
        "preflight.json": MADE["preflight"][0](),
        "model.toml": MADE["model in TOML"][0](),
    }
    committed = {
        TOPOLOGY: TOPOLOGY,
        "a100-64-gpus.csv": "reference/step-times/a100-64-gpus.csv",
        "gate.json": "gate/same.json",
        "history.jsonl": "history/intel-r-xeon-r-processor-2c-dee4835e.jsonl",
        "calls.json": "profile/add/table.json",
    }
    made |= {name: (RESULTS / path).read_bytes() for name, path in committed.items()}
    ways = (RESULTS / "lab/2x2-400mbit-ways.jsonl").read_bytes().splitlines(keepends=True)
    made["ways.jsonl"] = b"".join(ways[:40])
    written = {
        "machine.json": "plan --fit a100-64-gpus.csv -o machine.json",
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    for name, words in written.items():
        code, out, err = dtbench(*words.split())
        assert code == 0, err
        if "-o" not in words.split():
            (tmp_path / name).write_text(out)
        made[name] = (tmp_path / name).read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/0.jsonl").write_bytes(made["run.jsonl"])
    return made.__getitem__


@pytest.mark.parametrize("count", [150, 10_000 if TABLE else 2000])
def test_no_file_ends_a_command_in_a_traceback(
    dtbench: Cli,
    files: Callable[[str], bytes],
    bounded: None,
    tmp_path: Path,
    count: int,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"{count} random files to {len(LINES)} command lines (seeds 0 to {count - 1})")
    seen, longest = Counter[int](), 0.0
    for seed in range(count):
        rng = random.Random(seed)
        kind, words = LINES[seed % len(LINES)]
        data = files(kind)
        if rng.random() < 0.1:
            data = files(rng.choice(list(COMMANDS)))
        else:
            for _ in range(rng.choice([1, 1, 2, 3])):
                data = damaged(rng, data)
        place = tmp_path / f"given{Path(kind).suffix}"
        if "folder" in words and kind == "run.jsonl":
            place = tmp_path / "folder/1.jsonl"
        place.write_bytes(data)
        begun = time.monotonic()
        code, _, stderr = dtbench(*[w.replace("FILE", place.name) for w in without_quotes(words)])
        longest = max(longest, time.monotonic() - begun)
        assert code != EXIT_OWN_FAULT and "Traceback" not in stderr, (seed, words, stderr)
        assert code in (0, 1, 3, 4, 5) or stderr.count("\n") == 1, (seed, words, stderr)
        seen[code] += 1
        for made in (*tmp_path.glob("out.*"), place):
            made.unlink(missing_ok=True)
    shown = ", ".join(f"exit {code}: {n}" for code, n in sorted(seen.items()))
    record_property("seen", f"{shown}; the longest took {longest:.1f} s")
    assert seen[0] > count / 20 and seen[2] > count / 10, seen  # some go well


def without_quotes(words: str) -> list[str]:
    return [word.replace("''", "") for word in words.split()]
