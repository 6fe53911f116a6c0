"""How long commands take on large run files: `python -m dtbench.tests.large_files TABLE.md`.

The shortest of three runs of each command as a process, from start to exit, and the most memory that any of them held.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtbench.tests import large_run

SIZES = (2_000, 20_000, 200_000)
RUNS = 3
FOLDER_OF = 3
COMMANDS = {
    "show": "show RUN",
    "show --csv": "show RUN --csv",
    "compare": "compare RUN OTHER",
    "report": "report RUN -o page.html",
    f"report on a folder of {FOLDER_OF}": "report FOLDER -o page.html",
    "calibrate": "calibrate RUN -o topology.json",
    "validate --split": "validate --split RUN",
}


def measure(arguments: list[str], folder: Path) -> tuple[float, float]:
    """(seconds, MB at most) of the command; ends the program where it fails otherwise than by its verdict."""
    least, most = float("inf"), 0.0
    for _ in range(RUNS):
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "dtbench", *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, status, used = os.wait4(process.pid, 0)
        least = min(least, time.perf_counter() - begun)
        most = max(most, used.ru_maxrss * 1024 / 1e6)
        code = os.waitstatus_to_exitcode(status)
        assert process.stderr is not None
        if code not in (0, 1, 3):
            said = process.stderr.read().decode()
            sys.exit(f"dtbench {' '.join(arguments)} ended with {code}: {said}")
        process.stderr.close()
    return least, most


def table() -> str:
    """The table in Markdown: a row for each command, time and memory by results."""
    cells: dict[str, list[str]] = {title: [] for title in COMMANDS}
    weights = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            runs = folder / "runs"
            runs.mkdir()
            for n in range(FOLDER_OF):
                large_run.write(size, runs / f"{n}.jsonl")
            weights.append((runs / "0.jsonl").stat().st_size)
            names = {"RUN": "runs/0.jsonl", "OTHER": "runs/1.jsonl", "FOLDER": "runs"}
            for title, words in COMMANDS.items():
                if "--split" in words and size < 5_000:  # too few sizes to hold one out
                    cells[title].append("-")
                    continue
                seconds, megabytes = measure([names.get(word, word) for word in words.split()], folder)
                cells[title].append(f"{seconds:.1f} s, {megabytes:,.0f} MB")
    head = [f"{size:,} ({weight / 2**20:,.1f} MiB)" for size, weight in zip(SIZES, weights, strict=True)]
    rows = [["command", *head], ["---"] * (1 + len(SIZES)), *([title, *row] for title, row in cells.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TEXT = """# Large run files

How long commands take on a run file, and how much memory, by the number of its results. `make large` writes this.

Files of made-up numbers (`dtbench/tests/large_run.py`): five launches on a mesh of 4 x 2 ranks, half of the results
collectives with each rank's samples. Each figure is the shortest of {runs} runs of the whole process, from its start to
its exit, and the most memory (resident) that one of them held. Both arguments of `compare` are as large.

Python {python} on {cores} cores, one thread.

{table}

Times grow linearly with the results, above what loading the libraries, fitting and drawing take in any case. Tables in
a terminal end after {rows:,} rows and pages after 2 MB, and say what they leave out; `--json` and `--csv` give all.
"""


def main(path: Path) -> None:
    from dtbench.text.terminal import MAX_ROWS

    os.environ |= {"OMP_NUM_THREADS": "1"}
    text = TEXT.format(
        runs=RUNS,
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        table=table(),
        rows=MAX_ROWS,
    )
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
