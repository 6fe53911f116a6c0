"""What a row of the table of faults is, how it is started, and what is looked at after every one."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.engine.progress import format_status_counts
from dtbench.records.run import read_run
from dtbench.tests.programs import FRESH, LIMIT_S, environment

# Words of a row's command line that are long.
SUITE = str(Path(__file__).parents[1] / "faults_suite.py")
TORCHRUN = f"{Path(sys.executable).with_name('torchrun')} --nproc-per-node 2 --no-python"
WORDS = {"SUITE": SUITE, "LONG": "x" * 300, "DTBENCH": shlex.join(FRESH), "TORCHRUN": TORCHRUN}
# What a kernel gets to end killed processes in, on a busy machine.
GONE_S = 30.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended. lines: ours on standard error; torch's launcher and libraries have theirs."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("dtbench: ")]


@dataclass(frozen=True)
class Fault:
    """A fault, what starts it and what must be seen.

    holds: the number of the sentence of CONTRIBUTING's crash policy. words: a shell's command line, in the row's own
    folder. code: of exit; negative for a signal. says: patterns of our lines on standard error, in order; None where
    the moment decides. before: puts into the folder what the command finds. during: what happens to it while it runs.
    results: the summary of x.jsonl, the only file that it may leave, with ", cut short" where it has no end. also: what
    else must be so.
    """

    holds: int
    name: str
    words: str
    code: int | tuple[int, ...] = 2
    says: tuple[str, ...] | None = ()
    results: str = ""
    before: Callable[[], object] | None = None
    during: Callable[[subprocess.Popen[bytes]], object] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    also: Callable[[Ended], object] | None = None


def run_shell(fault: Fault, words: str, folder: Path) -> Ended:
    """The command in a process of its own, ended, with all that it has started."""
    command = re.sub("|".join(WORDS), lambda word: WORDS[word[0]], words)
    env = environment() | {"TMPDIR": str(folder / "tmp")} | fault.env
    files = [folder / name for name in ("stdout", "stderr")]
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(file.open("wb")) for file in files)
        # `exec`, so that a signal reaches the program.
        shell = ["bash", "-c", command if "|" in command or ";" in command else f"exec {command}"]
        process = subprocess.Popen(shell, env=env, stdout=out, stderr=err, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if fault.during is not None:
            fault.during(process)
        code = process.wait(LIMIT_S)
        wait_until_none_runs_in(folder)
    return Ended(code, *(file.read_text(errors="replace") for file in files))


def check(fault: Fault, ended: Ended, before: Mapping[str, bytes | None], folder: Path) -> None:
    """Looks at all that the row asks for, and that no other file is left."""
    shown = f"exit {ended.code}\n{ended.out[-2000:]}\n{ended.err[-4000:]}"
    assert ended.code in (fault.code if isinstance(fault.code, tuple) else (fault.code,)), shown
    if fault.says is not None:
        assert len(ended.lines) == len(fault.says), shown
        for line, pattern in zip(ended.lines, fault.says, strict=True):
            assert re.search(pattern, line), shown
    assert "Traceback" not in ended.err or "TORCHRUN" in fault.words, shown
    after = contents()
    touched = [name for name in {**before, **after} if before.get(name, b"-") != after.get(name, b"-")]
    assert {*touched} <= {"x.jsonl"}, f"{touched} are new, changed or gone\n{shown}"
    assert not list((folder / "tmp").glob("dtbench*")) or ended.code == -9, (
        f"temporary files are left\n{shown}"
    )
    if fault.results:
        run = read_run("x.jsonl")
        assert format_status_counts(run.results) + ("" if run.complete else ", cut short") == fault.results, (
            shown
        )
    if fault.also is not None:
        fault.also(ended)


def contents() -> dict[str, bytes | None]:
    """What stands in the current folder: a file's bytes, None of anything else."""
    paths = sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    return {str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in paths}


def wait_until_none_runs_in(folder: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while left := processes_in(folder):
        assert time.monotonic() < deadline, f"still run: {left}"
        time.sleep(0.05)


def processes_in(folder: Path) -> dict[int, str]:
    """Those that run in the folder, but for this one."""
    there = {}
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if place.readlink().is_relative_to(folder) and int(place.parent.name) != os.getpid():
                there[int(place.parent.name)] = (
                    (place.parent / "cmdline").read_text().replace("\0", " ")[:200]
                )
    return there


def seen(ended: Ended, folder: Path) -> str:
    """In one line, for the table."""
    text = "; ".join([f"exit {ended.code}", *(line.removeprefix("dtbench: ") for line in ended.lines)])
    text = text.replace(f"{folder}/at/", "").replace(os.uname().nodename, "HOST")
    return re.sub("x{300}", "x…x", text).replace("|", "&#124;").replace("<", "&lt;")
