"""The table of faults: its rows, how each is started, and what is checked after each.

`make faults` starts every row and writes what was seen to results/faults.md.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from dtbench.engine.progress import format_status_counts
from dtbench.records.run import read_run
from dtbench.tests import made_up
from dtbench.tests.programs import FRESH, LIMIT_S, environment

# Words of a row's command line that are long.
SUITE = str(Path(__file__).parents[1] / "faults_suite.py")
TORCHRUN = f"{Path(sys.executable).with_name('torchrun')} --nproc-per-node 2 --no-python"
WORDS = {"SUITE": SUITE, "LONG": "x" * 300, "DTBENCH": shlex.join(FRESH), "TORCHRUN": TORCHRUN}
# Seconds that the kernel may take to end killed processes on a busy machine.
GONE_S = 30.0
WAITS = re.compile(r"dtbench: rank \d+ waits for .* s more \(DTBENCH_JOIN_TIMEOUT\)$")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of dtbench on standard error, without those of torch's launcher and libraries."""
        return [line for line in self.err.splitlines() if line.startswith("dtbench: ")]


@dataclass(frozen=True)
class Fault:
    """A fault, how it is started, and the expected outcome.

    Attributes:
        holds: number of the sentence of CONTRIBUTING's crash policy that the row tests.
        name: one line for the table.
        words: command line for a shell in the row's own folder.
        code: exit code, or several possible ones; negative for a signal.
        says: patterns of dtbench's lines on standard error, in order; None if they depend on timing.
        results: summary of x.jsonl, the only file that may remain, with ", cut short" if it lacks its end.
        before: prepares the folder.
        during: acts on the process while it runs.
        env: variables that are added.
        also: a further check.
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


def run_shell(fault: Fault, folder: Path) -> Ended:
    """Runs the row's command in a new process, and waits for it and for all processes that it starts."""
    command = re.sub("|".join(WORDS), lambda word: WORDS[word[0]], fault.words)
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
    """Checks everything that the row expects, and that no other file is left."""
    shown = f"exit {ended.code}\n{ended.out[-2000:]}\n{ended.err[-4000:]}"
    assert ended.code in (fault.code if isinstance(fault.code, tuple) else (fault.code,)), shown
    if fault.says is not None:
        # A rank reports that it waits if another needs more than five seconds to start, as on a busy machine.
        expects_wait = any("waits for" in pattern for pattern in fault.says)
        lines = [line for line in ended.lines if expects_wait or not WAITS.match(line)]
        assert len(lines) == len(fault.says), shown
        for line, pattern in zip(lines, fault.says, strict=True):
            assert re.search(pattern, line), shown
    assert "Traceback" not in ended.err or "TORCHRUN" in fault.words, shown
    after = contents()
    touched = [name for name in {**before, **after} if before.get(name, b"-") != after.get(name, b"-")]
    assert {*touched} <= {"x.jsonl"}, f"{touched} are new, changed or gone\n{shown}"
    temporary = list((folder / "tmp").glob("dtbench*"))
    assert not temporary or ended.code == -9, f"{temporary} are left\n{shown}"
    if fault.results:
        run = read_run("x.jsonl")
        counts = format_status_counts(run.results) + ("" if run.complete else ", cut short")
        assert counts == fault.results, shown
    if fault.also is not None:
        fault.also(ended)


def contents() -> dict[str, bytes | None]:
    """Returns the bytes of each file in the current folder, and None for other entries."""
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(Path().rglob("*"))
        if "__pycache__" not in path.parts
    }


def wait_until_none_runs_in(folder: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while left := processes_in(folder):
        assert time.monotonic() < deadline, f"still run: {left}"
        time.sleep(0.05)


def processes_in(folder: Path) -> dict[int, str]:
    """Returns the command lines of all other processes that run in the folder, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder) and int(process.name) != os.getpid():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:200]
    return found


def seen(ended: Ended, folder: Path) -> str:
    """Formats the outcome as one line of the table."""
    text = "; ".join([f"exit {ended.code}", *(line.removeprefix("dtbench: ") for line in ended.lines)])
    text = text.replace(f"{folder}/at/", "").replace(os.uname().nodename, "HOST")
    return re.sub("x{300}", "x…x", text).replace("|", "&#124;").replace("<", "&lt;")


Process = subprocess.Popen[bytes]
RUN = "DTBENCH run SUITE --quick --nproc 2 -o x.jsonl"
LONG_RUN = f"{RUN} --filter long"
RUN_4 = "DTBENCH run SUITE --quick --nproc 4 -o x.jsonl"
TOPOLOGY = Path(__file__).parents[3] / "results/baseline-cpu-gloo-4ranks.topology.json"


def at_two_results(number: signal.Signals) -> Callable[[Process], object]:
    def during(process: Process) -> None:
        path, deadline = Path("x.jsonl"), time.monotonic() + LIMIT_S
        while not path.exists() or path.read_bytes().count(b'"kind":"result"') < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)

    return during


def after(number: signal.Signals, *seconds: float) -> Callable[[Process], object]:
    """Sends the signal after each of these times, the first counted from when dtbench handles signals."""

    def during(process: Process) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not handles_ending(process):  # until then, Python ends with a traceback
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        for wait_s in seconds:
            time.sleep(wait_s)
            if process.poll() is None:
                os.kill(process.pid, number)

    return during


def handles_ending(process: Process) -> bool:
    """Returns whether the process has a handler of SIGTERM."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def a_run() -> None:
    results = [json.dumps(msgspec.to_builtins(r)) for r in islice(made_up.collectives(samples=5), 12)]
    Path("r.jsonl").write_text("\n".join([json.dumps(made_up.header()), *results]) + "\n")


def a_torn_run() -> None:
    """Writes a run file with two results and a part of a third."""
    words = ["run", SUITE, "--quick", "--nproc", "2", "--filter", "good", "-o", "x.jsonl"]
    subprocess.run([*FRESH, *words], env=environment(), stdout=subprocess.DEVNULL, check=True)
    lines = Path("x.jsonl").read_bytes().splitlines(keepends=True)
    Path("x.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:40])


_SERVERS: list[socket.socket] = []
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x1b[1A\u202e\x9b1m"
HOSTILE_SUITE = f"""
from dtbench.suite import Case, Workload, suite

def fail(world):
    raise ValueError({HOSTILE!r})

@suite("hostile", world="simulated", help="names that a terminal obeys")
def hostile(options):
    for build in (fail, lambda world: Workload(lambda: None)):
        yield Case("c" + {HOSTILE!r}, {{"n" + {HOSTILE!r}: build.__name__ + {HOSTILE!r}}}, {{"core": build}})
"""


STUCK_SUITE = """
import os
import time
from dtbench.engine import rank
from dtbench.suite import Case, Workload, suite

if os.environ.get("RANK") == "1":
    rank.real_world = lambda *_: time.sleep(600)

@suite("stuck", world="ranks", help="of a rank that makes no process group")
def stuck(options):
    yield Case("c", {}, {"core": lambda world: Workload(lambda: None)})
"""


def serve_silently() -> None:
    """Listens in this process until its end, and answers nothing."""
    _SERVERS.append(socket.create_server(("localhost", 29632)))


def a_hostile_topology() -> None:
    Path("t.json").write_text(TOPOLOGY.read_text().replace('"tp', f'"tp{json.dumps(HOSTILE)[1:-1]}'))
    a_run()


def no_escape(ended: Ended) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ended.out + ended.err), ended


def lost(rank: str, why: str, case: str) -> str:
    during = rf"during bad grave how={case}.*: recorded as failed; continuing with new ranks$"
    return rf"^dtbench: rank {rank}{why} {during}"


def ranks_say_at_most_why(ended: Ended) -> None:
    """Checks that ranks print at most why they end: they may not have joined yet."""
    assert all("the process that started the ranks died" in line for line in ended.lines), ended


def interrupted_unless_too_early_or_late(ended: Ended) -> None:
    """Checks for the line of an interruption; a signal while torch is loaded or the interpreter ends leaves none."""
    # On a busy machine, the signal may arrive before torch's C++ code can handle it, which ends with -6.
    is_too_early = "pybind11::error_already_set" in ended.err
    assert is_too_early or ended.code != -6, ended
    assert len(ended.lines) == 1 or ((ended.code < 0 or is_too_early) and not ended.lines), ended
    assert all("interrupted" in line for line in ended.lines), ended


# A rank that another launcher started, whose place stands in the environment.
ALONE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29631"}
ALONE |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "DTBENCH_JOIN_TIMEOUT": "7"}
UNDER_TORCHRUN = "TORCHRUN bash -c 'exec DTBENCH run SUITE --quick -o x.jsonl {}'"
INTERRUPTED = (r"^dtbench: interrupted: \d+ results are in x.jsonl; continue with --resume -o x.jsonl$",)
DIED = r" on \S+ died or did not answer"
RAISED = r" on \S+ raised ValueError: {}.*"
LATE = r" on \S+ did not finish .* \(at faults_suite.py:\d+ .*\)"
KEPT = "cannot write to x.jsonl: file too large.*results are in x.jsonl; continue with --resume"
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL

ROWS = [
    # ---- 1: nothing finished is lost
    *(
        Fault(
            1,
            f"{n.name} while cases are measured",
            LONG_RUN,
            130,
            INTERRUPTED,
            during=at_two_results(n),
        )
        for n in (INT, TERM)
    ),
    Fault(
        1,
        "the launcher is killed while cases are measured",
        LONG_RUN,
        -9,
        ("^dtbench: the process that started the ranks died .* continue with --resume",),
        during=at_two_results(KILL),
    ),
    Fault(1, "the disk is full", f"ulimit -f 8; {LONG_RUN}", 2, (KEPT,)),
    Fault(
        1, "a last line that is torn", f"{RUN} --filter good --resume", 0, results="6 ok", before=a_torn_run
    ),
    Fault(
        1,
        "a rank is killed, --on-failure stop",
        f"{RUN} --filter 'good n=1\nhow=dies rank=1' --on-failure stop",
        5,
        (f"^dtbench: rank 1{DIED} during bad .*: 3 results are in x.jsonl; continue",),
        "2 ok, 1 failed, cut short",
    ),
    Fault(
        1, "a run file that is there", "DTBENCH run SUITE -o r.jsonl", 2, ("exists already",), before=a_run
    ),
    # ---- 2: no rank outlives its parent
    *(
        Fault(
            2,
            f"the launcher of four ranks is killed after {seconds:g} s",
            f"{RUN_4} --filter long",
            -9,
            None,
            during=after(KILL, seconds),
            also=ranks_say_at_most_why,
        )
        for seconds in (1.0, 3.0, 5.0)
    ),
    *(
        Fault(
            2,
            f"{number.name} after {' and '.join(f'{s:g} s' for s in seconds)}",
            LONG_RUN,
            (130, -number, -6),
            None,
            during=after(number, *seconds),
            also=interrupted_unless_too_early_or_late,
        )
        for number, *seconds in ((INT, 0.5), (INT, 3.0, 0.5), (TERM, 2.0), (TERM, 5.0))
    ),
    # ---- 3: a hang or a lost rank ends the case, and the sweep goes on
    Fault(
        3,
        "each rank of four is killed, one by one",
        f"{RUN_4} --filter 'how=none\nhow=dies'",
        5,
        tuple(lost(str(rank), DIED, f"dies rank={rank}") for rank in range(4)),
        "1 ok, 4 failed",
    ),
    Fault(
        3,
        "a rank is stopped",
        f"{RUN} --timeout 3 --filter 'how=none\nhow=stops'",
        5,
        (lost("1", DIED, "stops"),),
        "1 ok, 1 failed",
    ),
    Fault(
        3,
        "a rank raises alone, one hangs, rank 0 raises in a build and in a check, ranks reduce other sizes",
        f"{RUN} --timeout 3 --filter 'how=none\nhow=alone\nhow=hangs\nhow=build\nhow=check\nhow=sizes'",
        5,
        (
            lost("1", RAISED.format("only I"), "alone"),
            lost("1", LATE, "hangs"),
            lost("0", RAISED.format("in its build"), "build"),
            lost("0", RAISED.format("in its check"), "check"),
            lost(r"\d", ".*", "sizes"),
        ),
        "1 ok, 5 failed",
    ),
    Fault(
        3,
        "the only rank is killed",
        "DTBENCH run SUITE --quick --nproc 1 -o x.jsonl --filter 'how=dies rank=0'",
        5,
        (lost("0", " died of SIGKILL", "dies rank=0"),),
        "1 failed",
    ),
    Fault(
        3,
        "rank 0 is killed while it simulates ranks",
        f"{RUN} --filter 'simulated\nhow=none'",
        5,
        (rf"^dtbench: rank 0{DIED} during simulated die \(core\): recorded as failed",),
        "3 ok, 1 failed",
    ),
    Fault(
        3,
        "a rank is killed under torchrun",
        UNDER_TORCHRUN.format('--filter "how=dies rank=1"'),
        1,
        (f"^dtbench: rank 1{DIED} during bad .*: 1 result is in x.jsonl; continue",),
        "1 failed, cut short",
    ),
    Fault(
        3,
        "a rank never comes",
        RUN,
        5,
        (
            "rank 0 waits for rank 1 of 2 to join through .* at localhost:29631; up to 2 s",
            "rank 0 waited 7 s for rank 1 of 2 to join through .* at localhost:29631: nothing",
        ),
        env=ALONE,
    ),
    Fault(
        3,
        "an address that no name server knows",
        RUN,
        5,
        (
            "waits for the TCPStore of rank 0 at no.invalid:29631",
            "waited 7 s for the TCPStore of rank 0 at no.invalid:29631",
        ),
        env=ALONE | {"MASTER_ADDR": "no.invalid"},
    ),
    Fault(
        3,
        "the port of rank 0 is another server's, which says nothing",
        RUN,
        5,
        (
            "waits for the TCPStore of rank 0 at localhost:29632",
            "waited 7 s for .* localhost:29632 .*does not answer",
        ),
        env=ALONE | {"RANK": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29632"},
        before=serve_silently,
    ),
    Fault(
        3,
        "a rank does not come to make the process group",
        "DTBENCH run ./stuck.py --quick --nproc 2 -o x.jsonl",
        5,
        (
            r"^dtbench: rank 1 on \S+ did not finish the start of its gloo process group within 15 s \(at stuck.py:",
        ),
        env={"DTBENCH_JOIN_TIMEOUT": "15"},
        before=lambda: Path("stuck.py").write_text(STUCK_SUITE),
    ),
    # ---- 4: a mistake or a damaged file is a line
    *(
        Fault(4, f"{name} without {missing}", RUN, 2, (f"{name} is set but .*{missing}",), env={name: "1"})
        for name, missing in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "RANK and WORLD_SIZE"))
    ),
    *(
        Fault(4, what, UNDER_TORCHRUN.format(words), 1, (says,))
        for what, words, says in (
            (
                "ranks with other options",
                '--filter "good n=$((RANK + 1))"',
                "^dtbench: rank 1 has --filter good n=2",
            ),
            ("a bad option under torchrun", "--nope 1", "^dtbench: No such option '--nope'"),
        )
    ),
    Fault(
        4,
        "a rank that alone has a bad option",
        UNDER_TORCHRUN.format('--filter "$([ $RANK = 1 ] && echo zzz || echo good)"'),
        1,
        (
            "rank 0 waits for rank 1 of 2",
            "^dtbench: rank 1: .*--filter 'zzz' matches none",
            "nothing was measured",
        ),
    ),
    Fault(
        4,
        "names and errors of a suite that a terminal would obey",
        "DTBENCH run ./hostile.py --quick -o x.jsonl; DTBENCH show x.jsonl",
        0,
        before=lambda: Path("hostile.py").write_text(HOSTILE_SUITE),
        also=no_escape,
    ),
    Fault(
        4,
        "dims of a topology that a terminal would obey",
        "DTBENCH calibrate --validate t.json r.jsonl",
        0,
        before=a_hostile_topology,
        also=no_escape,
    ),
    *(
        Fault(4, f"`{words.split()[1]}` of {what}", words, 2, ("is not a regular file",), before=before)
        for what, words, before in (
            ("/dev/zero", "DTBENCH show /dev/zero", None),
            ("a pipe that nobody writes to", "DTBENCH calibrate pipe -o t.json", lambda: os.mkfifo("pipe")),
            ("a folder", "DTBENCH compare folder folder", lambda: Path("folder").mkdir()),
        )
    ),
    *(
        Fault(4, what, words, 2, (says,), before=a_run)
        for what, words, says in (
            (
                "a run of other options resumed",
                "DTBENCH run dispatch --nproc 2 --resume -o r.jsonl",
                "cannot resume",
            ),
            ("a name of 300 characters", "DTBENCH run SUITE -o LONG", "File name too long; give another -o"),
            ("a place that cannot be written", "DTBENCH run SUITE -o /proc/out.jsonl", "/proc"),
            (
                "a folder that is gone",
                "mkdir gone; cd gone; rmdir ../gone; DTBENCH doctor",
                "current folder no longer exists",
            ),
            ("`ulimit -n 12`", f"ulimit -n 12; {RUN}", "12 open files are allowed"),
        )
    ),
    Fault(4, "all standard streams closed", f"{RUN} --filter 'good n=1' <&- >&- 2>&-", 0, results="2 ok"),
    Fault(4, "a reader that has gone", "set -o pipefail; DTBENCH show r.jsonl | true", 0, before=a_run),
]
