"""Worker processes that judge ops: a crash in native code, or a deadlock, costs one verdict."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection

import torch

from core.tests.coverage.judge import OpOutcome, judge_op
from core.tests.coverage.samples import RANKS, database
from dtbench_core.simulate import ThreadWorld

# The slowest op takes some seconds on a core of its own, and starting ten; a busy machine takes many times as long.
OP_TIMEOUT_S = START_TIMEOUT_S = 300.0
# torch keeps what it worked out per shape without a bound: after so many ops a process has some 500 MB.
_OPS_PER_WORKER = 400

OpJob = tuple[str, str, str, int, int]  # what `judge_op` takes after the world


def judge_all(
    jobs: Sequence[OpJob], workers: int, timeout_s: float = OP_TIMEOUT_S
) -> Iterator[tuple[OpJob, OpOutcome]]:
    """The jobs with their outcomes, in the order in which they are done.

    An op whose process dies, or gives no answer in time, is an "error" if that happens twice: the second time in a
    fresh process, which no op before has harmed. Ranks that wait for each other are noticed without a clock.
    """
    free: queue.SimpleQueue[OpWorker | None] = queue.SimpleQueue()
    for _ in range(workers):
        free.put(None)

    def judge(job: OpJob) -> tuple[OpJob, OpOutcome]:
        worker = free.get() or OpWorker()
        outcome = worker.judge(job, timeout_s)
        if not worker.process.is_alive():
            worker = OpWorker()
            outcome = worker.judge(job, timeout_s)
        if worker.judged == _OPS_PER_WORKER:
            worker.process.kill()
        free.put(worker if worker.process.is_alive() else None)
        return job, outcome

    threads = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([threads.submit(judge, job) for job in jobs]):
            yield done.result()
    finally:
        threads.shutdown(cancel_futures=True)
        while not free.empty():
            if worker := free.get():
                worker.process.kill()


class OpWorker:
    """One process that judges job after job; a daemon, which ends with this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.judged = 0
        self.process.start()
        theirs.close()
        if not isinstance(answer := self._answer(START_TIMEOUT_S), OpOutcome):
            raise RuntimeError(f"a worker did not start: {answer}")

    def judge(self, job: OpJob, timeout_s: float) -> OpOutcome:
        self.judged += 1
        self.connection.send(job)
        outcome = self._answer(timeout_s)
        if not isinstance(outcome, OpOutcome):
            ending, outcome = outcome, OpOutcome()
            outcome.add("error", ending)
        return outcome

    def _answer(self, timeout_s: float) -> OpOutcome | str:
        """What the process answers, or how it ended, killed where it took too long."""
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv()  # type: ignore[no-any-return]
            ending = f"no answer within {timeout_s:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            ending = f"the process ended with code {self.process.exitcode}"
        self.process.kill()
        self.process.join()
        return ending


def _serve(connection: Connection) -> None:
    warnings.simplefilter("ignore")  # thousands of calls would repeat the libraries' own
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    database()
    with ThreadWorld(RANKS) as world:
        connection.send(OpOutcome())  # the slow imports are done: the first job's time runs from here
        while True:
            job = connection.recv()
            try:
                connection.send(judge_op(world, *job))
            except Exception as error:  # of the judge
                outcome = OpOutcome()
                outcome.add("error", f"the judge raised {type(error).__name__}: {error}")
                connection.send(outcome)
