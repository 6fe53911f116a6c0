"""Worker processes that judge ops, some at a time. Imports neither torch nor the op database."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtbench_suites.coverage.verdicts import Case, OpVerdict, summarize

# The slowest op takes some seconds for all its cases on a core of its own, and starting ten; a busy
# machine takes many times as long.
OP_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 300.0
# torch keeps what it worked out per shape without a bound: after so many ops a process has some 500 MB.
_OPS_PER_WORKER = 400


@dataclass(frozen=True)
class Job:
    """An op to judge, at most so many samples and placements of each."""

    op: str
    mode: str
    impl: str
    samples: int
    places: int


class WorkerFailedError(Exception):
    """Workers do not start: the message is the last they said."""


def judge_all(
    jobs: Sequence[Job], workers: int, timeout_s: float = OP_TIMEOUT_S
) -> Iterator[tuple[Job, OpVerdict]]:
    """The verdicts of the jobs, in the order in which they are done.

    An op whose process dies is an "error". So is one that computes for longer than `timeout_s`; one that
    does not even compute is a "hang". The cases before that are kept. It counts when it happens twice: the
    second time in a fresh process, which no op before it has harmed.

    Raises:
        WorkerFailedError: no worker can be started.
    """
    todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    done: queue.SimpleQueue[tuple[Job, OpVerdict] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    live: list[_Worker] = []
    count = max(1, min(workers, len(jobs)))
    threads = [
        threading.Thread(target=_drive, args=(todo, done, stop, live, timeout_s)) for _ in range(count)
    ]
    for _ in threads:
        todo.put(None)
    for thread in threads:
        thread.start()
    try:
        running = count
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        stop.set()
        for worker in tuple(live):
            worker.kill()
        for thread in threads:
            thread.join()


def _drive(todo: Any, done: Any, stop: threading.Event, live: list[_Worker], timeout_s: float) -> None:
    worker: _Worker | None = None
    try:
        while (job := todo.get()) is not None and not stop.is_set():
            worker = worker or _Worker(live)
            verdict = worker.judge(job, timeout_s)
            if not worker.alive and not stop.is_set():
                worker = _Worker(live)
                verdict = worker.judge(job, timeout_s)
            if not stop.is_set():
                done.put((job, verdict))
            if worker.alive and worker.judged == _OPS_PER_WORKER:
                worker.end()
            if not worker.alive:
                worker = None
    except BaseException as error:
        done.put(error)
    finally:
        if worker is not None:
            worker.end()
        done.put(None)


class _Worker:
    """One process."""

    def __init__(self, live: list[_Worker]) -> None:
        self._live = live
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by end)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",  # ranks take turns, workers share the cores
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dtbench_suites.coverage.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
            start_new_session=True,  # an interrupt of the terminal reaches it through us
        )
        self.alive = True
        self.judged = 0
        self._used_s = 0.0
        live.append(self)
        answers, how = self._read("ready", _START_TIMEOUT_S)
        if how:
            message = f"a worker did not start ({how}): {self._last_words()}"
            self.end()
            raise WorkerFailedError(message)
        assert not answers

    def judge(self, job: Job, timeout_s: float) -> OpVerdict:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(
                json.dumps([job.op, job.mode, job.impl, job.samples, job.places]) + "\n"
            )
            self._process.stdin.flush()
        self.judged += 1
        used = self._cpu_s()
        answers, how = self._read("done", timeout_s)
        cases = [
            Case(sample, tuple(map(tuple, places)), verdict, stage, reason)
            for kind, verdict, stage, reason, sample, places in (a for a in answers if a[0] == "case")
        ]
        if not how:
            return summarize(job.op, job.mode, job.impl, cases, fallbacks=answers[-1][1])
        words = self._last_words()
        self.end()
        verdict, reason = "error", f"the process died ({how}): {words}"
        if how == "timeout":
            computed = self._used_s - used
            verdict = "error" if computed > timeout_s / 10 else "hang"
            reason = f"no answer within {timeout_s:.0f} s, of which it computed {computed:.0f} s"
        cases.append(Case(len(cases), (), verdict, "", f"after {len(cases)} cases {reason}"))
        return summarize(job.op, job.mode, job.impl, cases)

    def _read(self, last: str, timeout_s: float) -> tuple[list[list[Any]], str]:
        """(answers up to the kind `last`, "" or how the process ended instead)."""
        assert self._process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._used_s = self._cpu_s()
            self._process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        answers: list[list[Any]] = []
        try:
            for line in self._process.stdout:
                answer = json.loads(line)
                if answer[0] == last:
                    if answer[1:]:
                        answers.append(answer)
                    return answers, ""
                answers.append(answer)
        except json.JSONDecodeError:  # killed in the middle of a line
            pass
        finally:
            timer.cancel()
        if late.is_set():
            return answers, "timeout"
        code = self._process.wait()
        return answers, signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _cpu_s(self) -> float:
        """The process' time on a core so far, all threads together."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Ends the process; whoever reads from it sees that."""
        self._process.kill()

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"

    def end(self) -> None:
        """Kills the process, which has nothing to lose, and lets go of it."""
        self.alive = False
        self.kill()
        self._live.remove(self)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
