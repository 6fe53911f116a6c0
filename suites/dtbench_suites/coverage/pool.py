"""Worker processes that judge ops or programs: a crash in native code, or a deadlock, costs one verdict.

A worker is sent a `Job` and answers with a `Case` after each case, then with the number of fallbacks. Only the
workers import torch, with the module that judges: its `judging` is a context that yields a function from a
`Job` to these answers.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from dtbench.engine.signals import how_ended
from dtbench.engine.workers import StartedProgram, connection_at, left_s
from dtbench.records.verdicts import OpVerdict
from dtbench.suite.errors import last_line
from dtbench_suites.coverage.verdicts import Case, Job, summarize

# The slowest op takes some seconds for all its cases on a core of its own, and starting ten; a busy
# machine takes many times as long.
OP_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 300.0
_LATE = "took too long"
# torch keeps what it worked out per shape without a bound: after so many ops a process has some 500 MB.
_OPS_PER_WORKER = 400


class WorkerFailedError(Exception):
    """Workers do not start: the message is the last they said."""


def judge_all(
    jobs: Sequence[Job],
    workers: int,
    timeout_s: float = OP_TIMEOUT_S,
    judge_module: str = "dtbench_suites.coverage.judge",
) -> Iterator[OpVerdict]:
    """The verdicts of the jobs, in the order in which they are done.

    An op whose process dies is an "error". So is one that computes for longer than `timeout_s`; one that
    does not even compute is a "hang". The cases before that are kept. It counts when it happens twice: the
    second time in a fresh process, which no op before it has harmed.

    Raises:
        WorkerFailedError: no worker can be started.
    """
    count = max(1, min(workers, len(jobs)))
    free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
    for _ in range(count):
        free.put(None)
    live: list[Worker] = []
    stopped = threading.Event()

    def judge(job: Job) -> OpVerdict:
        worker = free.get() or Worker(live, judge_module)
        result = worker.judge(job, timeout_s)
        if not worker.alive and not stopped.is_set():
            worker = Worker(live, judge_module)
            result = worker.judge(job, timeout_s)
        if worker.judged == _OPS_PER_WORKER:
            worker.end()
        free.put(worker if worker.alive else None)
        return result

    threads = ThreadPoolExecutor(count)
    try:
        for done in as_completed([threads.submit(judge, job) for job in jobs]):
            yield done.result()
    finally:
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(live):
            worker.program.tell(signal.SIGKILL)  # whoever waits for it sees that
        threads.shutdown()
        for worker in tuple(live):
            worker.end()


class Worker:
    """One process: this file as a program."""

    def __init__(self, live: list[Worker], judge_module: str) -> None:
        self._live = live
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by end)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            # Ranks take turns, workers share the cores.
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", __name__, judge_module]
        self.program = StartedProgram(command, out=self._said, env=env, connected=True)
        self.alive = True
        self.judged = 0
        live.append(self)
        if how := self._read([], _START_TIMEOUT_S)[1]:
            message = f"a worker did not start, it {how}: {self._last_words()}"
            self.end()
            raise WorkerFailedError(message)

    def judge(self, job: Job, timeout_s: float) -> OpVerdict:
        self.judged += 1
        before_s = self._cpu_s()
        with suppress(BrokenPipeError):
            self.program.connection.send(job)
        cases: list[Case] = []
        fallbacks, how = self._read(cases, timeout_s)
        if how:
            verdict, reason = "error", f"the process {how}: {self._last_words()}"
            if how == _LATE:
                computed_s = self._cpu_s() - before_s
                verdict = "error" if computed_s > timeout_s / 10 else "hang"
                reason = f"no answer within {timeout_s:.0f} s, of which it computed {computed_s:.0f} s"
            self.end()
            cases.append(Case(len(cases), (), verdict, "", f"after {len(cases)} cases {reason}"))
        return summarize(job, cases, fallbacks)

    def _read(self, cases: list[Case], timeout_s: float) -> tuple[int, str]:
        """(fallbacks, "" or how it ended instead); what it says before that are cases."""
        deadline = time.monotonic() + timeout_s
        answers = self.program.connection
        try:
            while answers.poll(left_s(deadline)):
                answer = answers.recv()
                if isinstance(answer, int):
                    return answer, ""
                cases.append(answer)
        except (EOFError, OSError):  # OSError: killed in the middle of an answer
            return 0, how_ended(self.program.wait() or 0)
        return 0, _LATE

    def _cpu_s(self) -> float:
        """The process' time on a core so far, all threads together."""
        try:
            fields = Path(f"/proc/{self.program.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _last_words(self) -> str:
        self._said.seek(0)
        return last_line(self._said.read().decode(errors="replace"))

    def end(self) -> None:
        """Kills the process, which has nothing to lose, and lets go of it."""
        self.alive = False
        self._live.remove(self)
        self.program.end()
        self._said.close()


def serve(judge_module: str, fd: str) -> None:
    """The worker: judges jobs until nobody listens any more."""
    answers = connection_at(fd)
    judging = importlib.import_module(judge_module).judging
    with judging() as judge, suppress(EOFError, BrokenPipeError):
        answers.send(0)  # the slow imports are done: the first job's time runs from here
        while True:
            for answer in judge(answers.recv()):
                answers.send(answer)


if __name__ == "__main__":
    serve(*sys.argv[1:])
