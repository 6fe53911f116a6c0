"""Rows of what is read and written: devices and pipes, names, read-only places, absurd numbers, hostile names."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from dtbench.tests import made_up
from dtbench.tests.faults.table import Done, Fault

RESULTS = Path(__file__).parents[3] / "results"
TOPOLOGY = RESULTS / "baseline-cpu-gloo-4ranks.topology.json"
READERS = {
    "show": "show {}",
    "compare": "compare {} {}",
    "calibrate": "calibrate {} -o t.json",
    "report": "report {} -o p.html",
    "import": "import {} -o i.jsonl",
    "validate": "calibrate --validate {} {}",
    "export": "export {} --to torch -o e.py",
    "predict": "plan --topology {} --gpus 8 --batch 8 --model llama-8b",
}


def pipe() -> None:
    os.mkfifo("pipe")


def folder() -> None:
    Path("folder").mkdir()


def topology_with(key: str, value: str) -> None:
    whole = json.loads(TOPOLOGY.read_text())
    Path("t.json").write_text(json.dumps(whole | {key: "VALUE"}).replace('"VALUE"', value))


def model_with(key: str, value: str) -> None:
    sizes: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    }
    text = json.dumps(sizes | {"vocab_size": 128256} | {key: "VALUE"})
    Path("m.json").write_text(text.replace('"VALUE"', value))


def run_file(**changes: object) -> None:
    results = [
        json.dumps(msgspec.to_builtins(result)) for result in islice(made_up.collectives(samples=5), 12)
    ]
    Path("x.jsonl").write_text("\n".join([json.dumps(made_up.header(**changes)), *results]) + "\n")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x1b[1A\u202e\x9b1m"
HOSTILE_SUITE = f"""
from dtbench.suite import Case, Workload
from dtbench.suite import suite

def fail(world):
    raise ValueError({HOSTILE!r})

@suite("hostile", world="simulated", help="names that a terminal obeys")
def hostile(plan):
    for build in (fail, lambda world: Workload(lambda: None)):
        yield Case("c" + {HOSTILE!r}, {{"n" + {HOSTILE!r}: build.__name__ + {HOSTILE!r}}}, {{"core": build}})
"""

WANDERING_SUITE = """
import os, tempfile
from dtbench.suite import Case, Workload
from dtbench.suite import suite

@suite("wanders", world="ranks", help="cases that change the current folder")
def wanders(plan):
    for n in range(2):
        yield Case("go", {"n": n}, {"core": lambda world: Workload(lambda: os.chdir(tempfile.gettempdir()))})
"""


def a_hostile_suite() -> None:
    Path("hostile.py").write_text(HOSTILE_SUITE)


def a_hostile_topology() -> None:
    text = TOPOLOGY.read_text().replace('"tp', f'"tp{json.dumps(HOSTILE)[1:-1]}')
    Path("t.json").write_text(text)
    run_file()


def nothing_for_the_terminal(done: Done) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done.out + done.err), (done.out, done.err)


ROWS = [
    Fault(
        "cases that change the current folder, and a relative -o",
        "run ./wanders.py --quick --nproc 2 -o x.jsonl",
        0,
        how="forked",
        given=lambda: Path("wanders.py").write_text(WANDERING_SUITE),
        makes=("x.jsonl",),
        results="2 ok",
    ),
    Fault(
        "names and errors of a suite that a terminal would obey: run",
        "run ./hostile.py --quick -o y.jsonl",
        5,
        how="forked",
        given=a_hostile_suite,
        makes=("y.jsonl",),
        results="",
        also=nothing_for_the_terminal,
        then="show y.jsonl",
    ),
    *(
        Fault(
            f"dims of a topology that a terminal would obey: {words.split()[0]} {words.split()[1]}",
            words,
            (0, 2, 4),
            may_say=".",
            given=a_hostile_topology,
            also=nothing_for_the_terminal,
        )
        for words in (
            "plan --topology t.json --gpus 8 --batch 8 --model llama-8b",
            "calibrate --validate t.json x.jsonl",
            "show t.json",
        )
    ),
    *(
        Fault(f"{name} of {what}", words.format(given, given), says=r"is not a regular file", given=before)
        for name, words in READERS.items()
        for what, given, before in (
            ("/dev/zero", "/dev/zero", None),
            ("a pipe that nobody writes to", "pipe", pipe),
            ("a folder", "folder", folder),
        )
        if (name, given) != ("report", "folder")  # it takes a gate's
    ),
    Fault(
        "a history that cannot be appended to",
        "gate --base env: --head env: --history /proc/history --record dispatch",
        says="cannot append to /proc/history/.*give --history a folder",
    ),
    *(
        Fault(f"a name of 300 characters: {what}", words, says=says)
        for what, words, says in (
            ("a topology", "plan --topology LONG --gpus 8 --batch 8 --model llama-8b", "File name too long"),
            (
                "a model",
                f"plan --topology {TOPOLOGY} --gpus 8 --batch 8 --model LONG",
                "is not known: expected one of",
            ),
            ("results", "report LONG -o out.html", "File name too long"),
            ("a run to compare with", "compare LONG LONG", "File name too long"),
            ("a gate's folder", "gate --base env: --head env: -o LONG dispatch", "File name too long"),
            ("a history", "gate --base env: --head env: --history LONG dispatch", "File name too long"),
            ("a suite", "run LONG.py", "no suite file at"),
            ("a run file", "run SUITE -o LONG", "File name too long; give another -o"),
            ("an interpreter", "gate --base env: --head python:LONG dispatch", "no program lies there"),
        )
    ),
    *(
        Fault(
            f"a topology whose {key} is {value}",
            "plan --topology t.json --gpus 8 --batch 8 --model llama-8b",
            says=r"t\.json",
            given=partial(topology_with, key, value),
        )
        for key, value in (
            ("base_latency_us", "-1"),
            ("base_latency_us", "1e400"),
            ("mesh", "0"),
            ("schema", "99"),
            ("dims", "null"),
        )
    ),
    *(
        Fault(
            f"a model whose {key} is {value}",
            f"plan --topology {TOPOLOGY} --gpus 8 --batch 8 --model m.json",
            says=r"m\.json",
            given=partial(model_with, key, value),
        )
        for key in ("hidden_size", "num_hidden_layers")
        for value in ("0", "-1", "1e400", '"x"')
    ),
    Fault(
        "resume a run of another plan",
        "run SUITE --nproc 2 --resume -o x.jsonl",
        given=run_file,
        says="x.jsonl",
    ),
    Fault(
        "resume a run of a newer schema",
        "run SUITE --nproc 2 --resume -o x.jsonl",
        given=partial(run_file, schema=99),
        says="newer|schema",
    ),
    *(
        Fault(f"{words.split()[0]} into a place that cannot be written", words, given=run_file, says="/proc/")
        for words in (
            "report x.jsonl -o /proc/out.html",
            "calibrate x.jsonl -o /proc/out.json",
            "run SUITE -o /proc/out.jsonl",
            "gate --base env: --head env: dispatch -o /proc/gate",
        )
    ),
]
