"""Rows of what is read and written: devices and pipes, names, read-only places, absurd numbers, hostile names."""

from __future__ import annotations

import os
from pathlib import Path

from dtbench.tests.faults.table import Fault

RESULTS = Path(__file__).parents[3] / "results"
TOPOLOGY = RESULTS / "baseline-cpu-gloo-4ranks.topology.json"
READERS = {
    "show": "show {}",
    "compare": "compare {} {}",
    "calibrate": "calibrate {} -o t.json",
    "report": "report {} -o p.html",
    "coverage": "coverage {}",
    "import": "import {} -o i.jsonl",
    "validate": "validate {} {}",
    "regret": "regret {} --topology {}",
    "export": "export {} --to torch -o e.py",
    "predict": "predict --topology {} --mesh dp=2 --model llama-70b",
}


def pipe() -> None:
    os.mkfifo("pipe")


def folder() -> None:
    Path("folder").mkdir()


ROWS = [
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
    *(
        Fault(f"a name of 300 characters: {what}", words, says=says)
        for what, words, says in (
            ("a topology", "predict --topology LONG --mesh dp=2 --model llama-70b", "File name too long"),
            (
                "a model",
                f"predict --topology {TOPOLOGY} --mesh dp=2 --model LONG",
                "is not known: expected one of",
            ),
            ("results", "report LONG -o out.html", "File name too long"),
            ("a suite", "run LONG.py", "no suite file at"),
            ("a run file", "run SUITE -o LONG", "File name too long; give another -o"),
            ("an interpreter", "gate --base env: --head python:LONG dispatch", "no program lies there"),
        )
    ),
]
