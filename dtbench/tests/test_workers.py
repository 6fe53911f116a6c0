"""Programs and forks that are ours to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from dtbench.engine.workers import Fork, StartedProgram, send_connection

ECHO = """
import sys
from dtbench.engine.workers import connection_at, receive_connection
ours = connection_at(sys.argv[1])
ours.send(receive_connection(ours).recv())
"""


def test_a_program_talks_on_its_connection_and_on_one_handed_over(tmp_path: Path):
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    with StartedProgram([sys.executable, "-c", ECHO], connected=True) as program:
        send_connection(program.connection, theirs)
        theirs.close()
        ours.send({"size": 3})
        assert program.connection.recv() == {"size": 3}
        with pytest.raises(EOFError):
            program.connection.recv()
        assert program.wait() == 0


def test_the_end_of_a_program_is_that_of_what_it_started(tmp_path: Path):
    script = "sleep 600 & touch started; wait"
    read, written = os.pipe()
    program = StartedProgram(["sh", "-c", script], cwd=tmp_path, out=written)
    os.close(written)
    while not (tmp_path / "started").exists():
        assert program.wait(0.01) is None
    assert program.end() == -signal.SIGKILL
    with os.fdopen(read) as lines:
        assert lines.read() == "", "nobody holds its output any more"


def test_a_fork_ends_with_what_its_function_returns():
    fork = Fork(lambda: 7)
    assert wait([fork.ended], 60) == [fork.ended]
    assert fork.code() == fork.end() == 7
    assert Fork(lambda: time.sleep(600) or 0).end() == -signal.SIGKILL


def test_a_fork_that_becomes_another_program_has_not_ended():
    program = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(5)"]
    fork = Fork(lambda: os.execv(program[0], program))
    assert not wait([fork.ended], 0.2)
    assert wait([fork.ended], 60)
    assert fork.code() == 5


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_a_fork_has_ended_though_what_it_started_goes_on(tmp_path: Path):
    def starts_another_and_ends() -> int:
        started = subprocess.Popen(["sleep", "600"], close_fds=False)
        (tmp_path / "pid").write_text(str(started.pid))
        return 3

    fork = Fork(starts_another_and_ends)
    assert wait([fork.ended], 60) == [fork.ended]
    assert fork.code() == 3
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
