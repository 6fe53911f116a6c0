"""Worker processes that judge ops or programs: a crash in native code, or a deadlock, costs one verdict.

A worker is sent a `Job` and answers with a `Case` after each case, then with the number of fallbacks. Only the
workers import torch, with the module that judges: its `judging` is a context that yields a function from a
`Job` to these answers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from dtbench.errors import last_line
from dtbench.model import Result
from dtbench.world.signals import how_ended
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
) -> Iterator[Result]:
    """The verdicts of the jobs, in the order in which they are done.

    An op whose process dies is an "error". So is one that computes for longer than `timeout_s`; one that
    does not even compute is a "hang". The cases before that are kept. It counts when it happens twice: the
    second time in a fresh process, which no op before it has harmed.

    Raises:
        WorkerFailedError: no worker can be started.
    """
    count = max(1, min(workers, len(jobs)))
    free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    for _ in range(count):
        free.put(None)
    live: list[_Worker] = []
    stopped = threading.Event()

    def judge(job: Job) -> Result:
        worker = free.get() or _Worker(live, judge_module)
        result = worker.judge(job, timeout_s)
        if not worker.alive and not stopped.is_set():
            worker = _Worker(live, judge_module)
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
            worker.kill()  # whoever waits for it sees that
        threads.shutdown()
        for worker in tuple(live):
            worker.end()


class _Worker:
    """One process."""

    def __init__(self, live: list[_Worker], judge_module: str) -> None:
        self._live = live
        self._said = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by end)
        self._answers, others_end = multiprocessing.Pipe()
        # spawned: a fork would take over locks that other threads hold
        self.process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(others_end, self._said.name, judge_module), daemon=True
        )
        self.process.start()
        others_end.close()
        self.alive = True
        self.judged = 0
        live.append(self)
        if how := self._read([], _START_TIMEOUT_S)[1]:
            message = f"a worker did not start, it {how}: {self._last_words()}"
            self.end()
            raise WorkerFailedError(message)

    def judge(self, job: Job, timeout_s: float) -> Result:
        self.judged += 1
        before_s = self._cpu_s()
        with suppress(BrokenPipeError):
            self._answers.send(job)
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
        try:
            while self._answers.poll(max(deadline - time.monotonic(), 0)):
                answer = self._answers.recv()
                if isinstance(answer, int):
                    return answer, ""
                cases.append(answer)
        except (EOFError, OSError):  # OSError: killed in the middle of an answer
            self.process.join()
            return 0, how_ended(self.process.exitcode or 0)
        return 0, _LATE

    def _cpu_s(self) -> float:
        """The process' time on a core so far, all threads together."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _last_words(self) -> str:
        self._said.seek(0)
        return last_line(self._said.read())

    def kill(self) -> None:
        """With the processes it has made, once it has a group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def end(self) -> None:
        """Kills the process, which has nothing to lose, and lets go of it."""
        self.alive = False
        self._live.remove(self)
        self.kill()
        self.process.join()
        self._answers.close()
        self._said.close()


def _serve(answers: Connection, said: str, judge_module: str) -> None:
    """The worker: judges jobs until nobody listens any more."""
    os.setsid()  # an interrupt of the terminal reaches it through the pool
    log = os.open(said, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    # Ranks take turns, workers share the cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    judging = importlib.import_module(judge_module).judging
    with judging() as judge, suppress(EOFError, BrokenPipeError):
        answers.send(0)  # the slow imports are done: the first job's time runs from here
        while True:
            for answer in judge(answers.recv()):
                answers.send(answer)
