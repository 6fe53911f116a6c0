"""`dtbench` as a user starts it: in a fresh process, or in one forked off a server that has imported torch.

An import of torch takes seconds of a core, and a run on two ranks needs three. So only the tests of a launcher,
of a signal or of what a fresh process finds start fresh ones; the others are forked, and so are their ranks.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from core.tests.gloo_world import START

LIMIT_S = 240  # for a whole command: a hang, not slowness
PATH = tuple(sys.path)  # of a process that has loaded no suite's file
FRESH = (sys.executable, "-P", "-m", "dtbench")
RANK = (sys.executable, "-P", "-m", "dtbench.rank_main")


def environment() -> dict[str, str]:
    """This process's, without what makes a process a rank, or pytest a worker (which does not measure)."""
    prefixes = (
        "DTBENCH_",
        "SLURM_",
        "TORCHELASTIC_",
        "PYTEST_XDIST",
        "OMPI_",
        "PMI_",
        "PMIX_",
        "MV2_",
        "FLUX_",
    )
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTEST_ADDOPTS"}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and name not in names
    } | {"OMP_NUM_THREADS": "1"}


def start_fresh(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`command` in a new process, which imports what it needs."""
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )


def start_ranks(places: Sequence[Mapping[str, str]], *words: str) -> list[tuple[int, str, str]]:
    """Runs `dtbench WORDS` once per set of launcher variables; returns each exit code, stdout and stderr."""
    started = [
        subprocess.Popen(
            [*FRESH, *words],
            env=environment() | dict(place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    outputs = [process.communicate(timeout=LIMIT_S) for process in started]
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def start(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`dtbench ARGS` in a forked process, and its ranks in others."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = Forked(["dtbench", *args], environment(), [str(file) for file in files], cwd or Path.cwd())
        try:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(args, code, *(file.read_text() for file in files))


class Forked:
    """A forked process with the part of Popen's interface that torch's launcher and `start` use."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], files: Sequence[str], cwd: Path) -> None:
        self._process = START.Process(target=_enter, args=(argv, dict(env), files, str(cwd)))
        path, sys.path[:] = [*sys.path], PATH  # the new process starts as a fresh one would
        self._process.start()
        sys.path[:] = path
        assert self._process.pid is not None
        self.pid = self._process.pid
        # A Popen returns when the new session is there, which is killed as a group.
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("dtbench", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _enter(argv: Sequence[str], env: dict[str, str], files: list[str], cwd: str) -> None:
    """In the forked process: becomes the program. Its ranks write to the same files."""
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # of the server's environment
    # SIGINT is ignored in programs that a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from dtbench.cli import program as cli
    from dtbench.rank_main import join_launch

    def fork(_handler: SubprocessHandler, command: Sequence[str], env: dict[str, str]) -> Forked:
        assert tuple(command[: len(RANK)]) == RANK, command
        return Forked(command[len(RANK) - 1 :], env, files, Path.cwd())

    SubprocessHandler._popen = fork  # type: ignore[assignment, method-assign]
    # A fork can reach the server it comes from, and would start another: it is not that one's parent.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = [*argv]
    cli.main((lambda: join_launch(json.loads(Path(argv[1]).read_text()))) if argv[0] == RANK[-1] else None)
