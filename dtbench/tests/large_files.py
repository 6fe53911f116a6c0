"""How long commands take on large run files and logs: `python -m dtbench.tests.large_files TABLE.md`.

The least time of a processor that three runs of each command took as a process, and the most memory that any held.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from dtbench.tests import large_run, made_up_logs

SIZES = (2_000, 20_000, 200_000)
LOG_ROWS = (1_000, 10_000, 100_000)
NOISE = 1_000_000  # lines of a log that are no rows
RUNS = 3
FOLDER_OF = 3
COMMANDS = {
    "show": "show RUN",
    "show --csv": "show RUN --csv",
    "compare": "compare RUN OTHER",
    "report": "report RUN -o page.html",
    f"report on a folder of {FOLDER_OF}": "report FOLDER -o page.html",
    "calibrate": "calibrate RUN -o topology.json",
    "calibrate --split": "calibrate --split RUN",
}


def measure(arguments: list[str], folder: Path, makes: str = "topology.json") -> str:
    """Seconds of a processor at the least, and MB at most, of the command; ends the program where it fails otherwise
    than by its verdict. makes: a file that must not be there before."""
    least, most = float("inf"), 0.0
    for _ in range(RUNS):
        (folder / makes).unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "dtbench", *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, status, used = os.wait4(process.pid, 0)
        least = min(least, used.ru_utime + used.ru_stime)
        most = max(most, used.ru_maxrss * 1024 / 1e6)
        code = os.waitstatus_to_exitcode(status)
        assert process.stderr is not None
        if code not in (0, 1, 3):
            said = process.stderr.read().decode()
            sys.exit(f"dtbench {' '.join(arguments)} ended with {code}: {said}")
        process.stderr.close()
    return f"{least:.1f} s, {most:,.0f} MB"


def table(launches: int) -> str:
    """The table in Markdown: a row for each command, time and memory by results. launches: of each case."""
    cells: dict[str, list[str]] = {title: [] for title in COMMANDS}
    weights = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            runs = folder / "runs"
            runs.mkdir()
            for n in range(FOLDER_OF):
                large_run.write(size, runs / f"{n}.jsonl", launches)
            weights.append((runs / "0.jsonl").stat().st_size)
            names = {"RUN": "runs/0.jsonl", "OTHER": "runs/1.jsonl", "FOLDER": "runs"}
            for title, words in COMMANDS.items():
                if "--split" in words and size < 5_000:  # too few sizes to hold one out
                    cells[title].append("-")
                    continue
                cells[title].append(measure([names.get(word, word) for word in words.split()], folder))
    head = [f"{size:,} ({weight / 2**20:,.1f} MiB)" for size, weight in zip(SIZES, weights, strict=True)]
    return _markdown([["command", *head], *([title, *row] for title, row in cells.items())])


def logs() -> str:
    """The table of `import`, by the log's rows."""
    cells, sizes, imports = (
        [],
        [1024 + 4 * n for n in range(max(LOG_ROWS))],
        ["import", "log", "-o", "run.jsonl"],
    )
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        for rows in LOG_ROWS:
            (folder / "log").write_text(made_up_logs.table(sizes=sizes[:rows]), "utf-8")
            cells.append(measure(imports, folder, "run.jsonl"))
        (folder / "log").write_text(made_up_logs.NCCL * NOISE + made_up_logs.table(), "utf-8")
        cells.append(measure(imports, folder, "run.jsonl"))
    head = [f"{rows:,} rows" for rows in LOG_ROWS]
    return _markdown([["log of nccl-tests", *head, f"{NOISE:,} other lines"], ["import", *cells]])


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


TEXT = """# Large run files

How long commands take on a run file, and how much memory, by the number of its results. `make large` writes this.

Files of made-up numbers (`dtbench/tests/large_run.py`): five launches on a mesh of 4 x 2 ranks, half of the results
collectives with each rank's samples. Each figure is of the whole process, from its start to its exit: the least time of
a processor (user and system) that {runs} runs took, and the most memory (resident) that one of them held. Both
arguments of `compare` are as large.

Python {python} on {cores} cores, one thread.

{table}

The same of files in which no two results are of one case:

{distinct}

{logs}

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
        table=table(large_run.LAUNCHES),
        distinct=table(1),
        logs=logs(),
        rows=MAX_ROWS,
    )
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
