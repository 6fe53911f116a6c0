"""What a row of the list of faults is, how it is started, and what is looked at after every one.

Whatever a row says, these hold: standard error has its one line or none, no temporary file and no process is left,
and of the folder's files none but those that the row names are new or changed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from dtbench.engine.progress import summary_of
from dtbench.records.run import read_run
from dtbench.tests import lab
from dtbench.tests.programs import FRESH, LIMIT_S, Forked, environment, start

SUITE = Path(__file__).parents[1] / "faults_suite.py"
# Names in a row's command line that stand for something long.
NAMES = {"SUITE": str(SUITE), "LONG": "x" * 300}
# What a kernel gets to end killed processes in, on a busy machine.
GONE_S = 30.0


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Running:
    """A command that a row can do something to."""

    process: Forked | subprocess.Popen[bytes]
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, there: Callable[[], object]) -> None:
        """Until it is so; the command has not ended before."""
        deadline = time.monotonic() + LIMIT_S
        while not there():
            assert self.process.poll() is None, f"ended too early: {(self.folder / 'stderr').read_text()}"
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_results(self, count: int, file: str = "x.jsonl") -> None:
        path = self.folder / "at" / file
        self.wait_for(lambda: path.exists() and path.read_bytes().count(b'"kind":"result"') >= count)


@dataclass(frozen=True)
class Fault:
    """A fault, what starts it and what must be seen.

    words: the command line after `dtbench`, in the row's own folder. says: a pattern found in the one line on
    standard error; "" where there is none. may_say: a pattern of a line that comes or not, as who ends first.
    given: puts into the folder what the command finds. how: in this process
    (`here`), `forked`, or in a `fresh` process. during: what happens to it while it runs. patched: what is another in
    this process. makes: patterns of the files it leaves; may_make: of those it leaves or not, as who is faster.
    results: the last line of x.jsonl's summary, with ", cut short" where it has no end. also: what else must be so.
    then: a command that goes well afterwards, before it is looked at what is left. needs: abilities of the machine,
    without which it is not run.
    """

    name: str
    words: str = ""
    code: int | tuple[int, ...] = 2
    says: str | tuple[str, ...] = ""
    may_say: str = "nothing else"
    given: Callable[[], object] | None = None
    how: str = "here"
    during: Callable[[Running], object] | None = None
    patched: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    makes: tuple[str, ...] = ()
    may_make: tuple[str, ...] = ()
    results: str = ""
    also: Callable[[Done], object] | None = None
    then: str = ""
    needs: tuple[str, ...] = ()
    slow: bool = False

    @property
    def command(self) -> list[str]:
        return split(self.words)


def split(words: str) -> list[str]:
    return shlex.split(re.sub("|".join(NAMES), lambda found: NAMES[found[0]], words))


def started(fault: Fault, folder: Path) -> Done:
    """The command in a process of its own, ended."""
    files = [folder / name for name in ("stdout", "stderr")]
    env = environment() | {"TMPDIR": str(folder / "tmp")} | fault.env
    with contextlib.ExitStack() as stack:
        process: Forked | subprocess.Popen[bytes]
        if fault.how == "forked":
            process = Forked(["dtbench", *fault.command], env, [str(f) for f in files], Path.cwd())
        else:
            out, err = (stack.enter_context(file.open("wb")) for file in files)
            command = fault.command if fault.how == "program" else [*FRESH, *fault.command]
            process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if fault.during is not None:
            fault.during(Running(process, folder))
        code = process.wait(LIMIT_S)
        wait_until_none_runs_in(folder)
        return Done(code, *(file.read_text() for file in files))


# --------------------------------------------------------------------------------- what is looked at


def contents() -> dict[str, bytes | None]:
    """What stands in the current folder: a file's bytes, None of anything else."""
    found = sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    return {str(p): p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in found}


def processes_in(folder: Path) -> list[int]:
    """Those that run in the folder, but for this one and its fork server.

    A launcher that is killed while it asks the server for a rank ends the server (forkserver.py of CPython meets the
    end of the connection), and the next test starts it again where it is.
    """
    own = (os.getpid(), vars(forkserver._forkserver)["_forkserver_pid"])
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if place.readlink().is_relative_to(folder) and int(place.parent.name) not in own:
                found.append(int(place.parent.name))
    return found


def wait_until_none_runs_in(folder: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while left := processes_in(folder):
        assert time.monotonic() < deadline, f"still run: {[described(pid) for pid in left]}"
        time.sleep(0.05)


def described(pid: int) -> str:
    """What a process that should have ended is, and what its threads wait for."""
    with contextlib.suppress(OSError):
        folder = Path("/proc", str(pid))
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")[:200].decode(errors="replace")
        kept = re.findall(r"(?:State|PPid|SigBlk|ShdPnd):.*", (folder / "status").read_text() + command)
        threads = [
            f"{(t / 'comm').read_text().strip()} in {(t / 'wchan').read_text()}"
            for t in (folder / "task").iterdir()
        ]
        return f"{pid} {command!r}: {'; '.join([*kept, *threads])}"
    return f"{pid}, which has ended"


def check(fault: Fault, done: Done, before: Mapping[str, bytes | None], folder: Path) -> None:
    shown = f"exit {done.code}\n{done.out[-2000:]}\n{done.err[-4000:]}"
    codes = fault.code if isinstance(fault.code, tuple) else (fault.code,)
    assert done.code in codes, shown
    says = (fault.says,) if isinstance(fault.says, str) else fault.says
    said = [line for line in done.err.splitlines() if not line.startswith("gate: ")]
    said = [line for line in said if not re.search(fault.may_say, line)]
    assert len(said) == len([pattern for pattern in says if pattern]), shown
    for line, pattern in zip(said, says, strict=False):
        assert "dtbench: " in line and re.search(pattern, line), shown
    after = contents()
    touched = [name for name in {**before, **after} if before.get(name, b"-") != after.get(name, b"-")]
    made_here = (*fault.makes, *fault.may_make)
    strange = [name for name in touched if not any(fnmatch.fnmatch(name, made) for made in made_here)]
    assert not strange, f"{strange} is new, changed or gone\n{shown}"
    assert all(fnmatch.filter(after, made) for made in fault.makes), f"only {sorted(after)}\n{shown}"
    if fault.results:
        run = read_run("x.jsonl")
        assert summary_of(run.results) + ("" if run.complete else ", cut short") == fault.results, shown
    if fault.also is not None:
        fault.also(done)
    if fault.then:
        after_all = start(*split(fault.then))
        assert after_all.returncode == 0, f"{fault.then}: {after_all.stderr}"
    wait_until_none_runs_in(folder)
    if "lab" in fault.needs:
        assert not lab.leftovers(), "a lab is left"
    assert not list((folder / "tmp").iterdir()), f"temporary files are left\n{shown}"


def seen(done: Done, folder: Path) -> str:
    """In one line, for the table."""
    lines = [line for line in done.err.splitlines() if not line.startswith("gate: ")]
    text = f"exit {done.code}" + "".join(f"; {line.removeprefix('dtbench: ')}" for line in lines)
    text = text.replace(f"{folder}/at/", "").replace(f"{folder}/", "").replace(os.uname().nodename, "HOST")
    return re.sub("x{300}", "x…x", text)


@contextlib.contextmanager
def place(folder: Path) -> Iterator[None]:
    """The row's own current folder, `at`, beside its temporary one."""
    for name in ("at", "tmp"):
        (folder / name).mkdir()
    with contextlib.chdir(folder / "at"):
        yield


# --------------------------------------------------------------------------------- abilities


def missing(ability: str) -> str:
    """Why the machine lacks it; "" where it does not."""
    match ability:
        case "root":
            return "" if os.geteuid() == 0 else "needs root"
        case "memory limits":
            return (
                "" if os.access("/sys/fs/cgroup/memory", os.W_OK) else "no cgroup of memory can be made here"
            )
        case "lab":
            from dtbench.tests.test_lab_hosts import what_is_missing

            return what_is_missing()
    return "" if shutil.which(ability) else f"{ability} is not installed"
