"""What a row of the table of faults is, how it is started, and what is looked at after every one.

The policy that the rows hold, by number:

1. Each result is a line, appended and flushed; a torn last line is dropped on reading and by `--resume`. Nothing
   finished is lost to kill -9, a full disk, Ctrl-C or a dead rank.
2. No rank outlives its parent.
3. A hang or a lost rank ends the case in bounded time with its name, rank and line, and the sweep goes on.
4. A user's mistake and a damaged file get one line; nothing from a file is executed, trusted or printed as an escape.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.engine.progress import summary_of
from dtbench.records.run import read_run
from dtbench.tests.programs import FRESH, LIMIT_S, environment

SUITE = Path(__file__).parents[1] / "faults_suite.py"
# Words of a row's command line that are long.
WORDS = {
    "SUITE": str(SUITE),
    "LONG": "x" * 300,
    "DTBENCH": shlex.join(FRESH),
    "TORCHRUN": f"{Path(sys.executable).with_name('torchrun')} --nproc-per-node 2 --no-python",
}
# What a kernel gets to end killed processes in, on a busy machine.
GONE_S = 30.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Our own on standard error; torch's launcher and libraries have theirs."""
        return [line for line in self.err.splitlines() if line.startswith("dtbench: ")]


@dataclass
class Running:
    """A command that a row can do something to."""

    process: subprocess.Popen[bytes]
    folder: Path

    def wait_for_results(self, count: int) -> None:
        """Until x.jsonl has so many; the command has not ended before."""
        path, deadline = self.folder / "at/x.jsonl", time.monotonic() + LIMIT_S
        while not path.exists() or path.read_bytes().count(b'"kind":"result"') < count:
            assert self.process.poll() is None, f"ended too early: {(self.folder / 'stderr').read_text()}"
            assert time.monotonic() < deadline
            time.sleep(0.01)


@dataclass(frozen=True)
class Fault:
    """A fault, what starts it and what must be seen.

    holds: the number of the policy's sentence. words: a shell's command line, in the row's own folder. code: of exit;
    negative for a signal. says: patterns of our lines on standard error, in order. before: puts into the folder what
    the command finds. during: what happens to it while it runs. makes: patterns of the files that it may leave.
    results: the summary of x.jsonl, with ", cut short" where it has no end. then: a command that goes well afterwards;
    then_results: the summary of x.jsonl after it. also: what else must be so.
    """

    holds: int
    name: str
    words: str
    code: int | tuple[int, ...] = 2
    says: tuple[str, ...] = ()
    before: Callable[[], object] | None = None
    during: Callable[[Running], object] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    makes: tuple[str, ...] = ("x.jsonl",)
    results: str = ""
    then: str = ""
    then_results: str = ""
    also: Callable[[Ended], object] | None = None


def run_shell(words: str, folder: Path, fault: Fault | None = None) -> Ended:
    """The command in a process of its own, ended."""
    command = re.sub("|".join(WORDS), lambda word: WORDS[word[0]], words)
    env = environment() | {"TMPDIR": str(folder / "tmp")} | (fault.env if fault else {})
    files = [folder / name for name in ("stdout", "stderr")]
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(file.open("wb")) for file in files)
        # `exec`, so that a signal reaches the program.
        shell = ["bash", "-c", command if "|" in command or ";" in command else f"exec {command}"]
        process = subprocess.Popen(shell, env=env, stdout=out, stderr=err, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if fault is not None and fault.during is not None:
            fault.during(Running(process, folder))
        code = process.wait(LIMIT_S)
        wait_until_none_runs_in(folder)
    return Ended(code, *(file.read_text(errors="replace") for file in files))


def check(fault: Fault, ended: Ended, before: Mapping[str, bytes | None], folder: Path) -> None:
    """Looks at all that the row asks for, and at what must be so after every one: no process, no temporary file and no
    other file is left."""
    shown = f"exit {ended.code}\n{ended.out[-2000:]}\n{ended.err[-4000:]}"
    assert ended.code in (fault.code if isinstance(fault.code, tuple) else (fault.code,)), shown
    assert len(ended.lines) == len(fault.says), shown
    for line, pattern in zip(ended.lines, fault.says, strict=True):
        assert re.search(pattern, line), shown
    assert "Traceback" not in ended.err, shown
    after = contents()
    touched = [name for name in {**before, **after} if before.get(name, b"-") != after.get(name, b"-")]
    strange = [name for name in touched if not any(fnmatch.fnmatch(name, made) for made in fault.makes)]
    assert not strange, f"{strange} is new, changed or gone\n{shown}"
    if fault.results:
        assert summary() == fault.results, shown
    if fault.also is not None:
        fault.also(ended)
    if fault.then:
        had = read_run("x.jsonl").results if Path("x.jsonl").exists() else ()
        again = run_shell(fault.then, folder)
        assert again.code == 0, f"{fault.then}: {again.err}"
        if fault.then_results:
            assert summary() == fault.then_results and read_run("x.jsonl").results[: len(had)] == had
    assert not list((folder / "tmp").iterdir()) or fault.code == -9, f"temporary files are left\n{shown}"


def summary() -> str:
    run = read_run("x.jsonl")
    return summary_of(run.results) + ("" if run.complete else ", cut short")


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
    text = text.replace(f"{folder}/at/", "").replace(f"{folder}/", "").replace(os.uname().nodename, "HOST")
    return re.sub("x{300}", "x…x", text).replace("|", "&#124;").replace("<", "&lt;")


@contextlib.contextmanager
def place(folder: Path) -> Iterator[None]:
    """The row's own current folder, `at`, beside its temporary one."""
    for name in ("at", "tmp"):
        (folder / name).mkdir()
    with contextlib.chdir(folder / "at"):
        yield
