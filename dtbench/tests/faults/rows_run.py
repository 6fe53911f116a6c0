"""Rows of `dtbench run`: ranks that die, hang or disagree, launchers that are killed, Ctrl-C, resuming."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from dtbench.records.run import read_run
from dtbench.tests.faults.table import Done, Fault, Running

RUN = "run SUITE --quick --nproc 2 -o x.jsonl"
CGROUP = Path(f"/sys/fs/cgroup/memory/dtbench-faults-{os.getpid()}")
MADE = ("x.jsonl",)


def at_two_results(number: int):
    def during(running: Running) -> None:
        running.wait_for_results(2)
        os.kill(running.pid, number)

    return during


def limit_memory() -> None:
    CGROUP.mkdir(exist_ok=True)
    # A launcher and two ranks need less; the first to ask for more is killed.
    (CGROUP / "memory.limit_in_bytes").write_text(str(3 * 2**30))


def while_they_start(times: str, running: Running) -> None:
    running.wait_for(lambda: list((running.folder / "tmp").glob("*")))
    for _ in range(1 + (times == "twice")):
        time.sleep(0.5)
        os.kill(running.pid, signal.SIGINT)


def with_a_clock_that_steps() -> None:
    source = Path(__file__).with_name("clock_step.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "../step.so", source, "-ldl"], check=True)
    Path("../step").write_bytes(struct.pack("q", 0))


def an_hour_ahead_then_back(running: Running) -> None:
    for results, seconds in (1, 3600), (3, -3600):
        running.wait_for_results(results)
        with (running.folder / "step").open("r+b") as file:
            file.write(struct.pack("q", seconds))


def times_are_as_ever(done: Done) -> None:
    times = [r.time_s.max for r in read_run("x.jsonl").results if r.time_s is not None]
    assert len(times) == 6 and max(times) < 60
    late = [max(ranks) for r in read_run("x.jsonl").results for ranks in r.rank_arrivals_s.values()]
    assert late and max(late) < 60
    assert "the clock was set 3600 s back meanwhile" in done.out
    assert b'"clock_moved_s":-3600' in Path("x.jsonl").read_bytes()


ROWS = [
    Fault(
        "the clock steps an hour ahead, then two back, while cases are measured",
        f"{RUN} --filter good",
        0,
        given=with_a_clock_that_steps,
        how="fresh",
        env={"LD_PRELOAD": "../step.so", "CLOCK_STEP": "../step"},
        during=an_hour_ahead_then_back,
        also=times_are_as_ever,
        makes=MADE,
        results="6 ok",
        needs=("cc",),
        slow=True,
    ),
    Fault(
        "a rank is killed, --on-failure stop",
        f"{RUN} --filter dies --on-failure stop",
        5,
        r"rank 1 on \S+ died or did not answer during bad grave how=dies \(core\): 1 result is in x.jsonl; go on",
        how="forked",
        makes=MADE,
        results="1 failed, cut short",
    ),
    Fault(
        "rank 0 is killed in the simulated world",
        f"{RUN} --filter simulated",
        5,
        r"rank 0 on \S+ died or did not answer during simulated die \(core\): recorded as failed; going on",
        how="forked",
        makes=MADE,
        results="2 ok, 1 failed",
    ),
    Fault(
        "the only rank is killed",
        f"{RUN} --nproc 1 --filter rank0",
        5,
        r"rank 0 died of SIGKILL during bad grave how=rank0 \(core\): recorded as failed; going on",
        how="forked",
        makes=MADE,
        results="1 failed",
    ),
    Fault(
        "one rank dies, one raises alone, one hangs",
        f"{RUN} --timeout 3 --filter 'grave\nhow=none'",
        5,
        tuple(
            f"{why}.*: recorded as failed; going on with new ranks$"
            for why in (
                "rank 1 on .* died or did not",
                "rank 0 on .* died or did not",
                r"rank 1 .*only I \(faults_suite.py:81\)",
                r"rank 1 .*within --timeout 3 s \(at faults_suite.py:",
            )
        ),
        how="forked",
        makes=MADE,
        results="2 ok, 4 failed",
        slow=True,
    ),
    Fault(
        "Ctrl-C while cases are measured",
        f"{RUN} --filter long",
        130,
        r"interrupted: \d+ results are in x.jsonl; go on with --resume -o x.jsonl$",
        how="fresh",
        during=at_two_results(signal.SIGINT),
        makes=MADE,
        slow=True,
    ),
    Fault(
        "the launcher is killed",
        f"{RUN} --filter long",
        -signal.SIGKILL,
        "the process that started the ranks died: .* go on with --resume",
        how="fresh",
        during=at_two_results(signal.SIGKILL),
        then="run SUITE --quick --nproc 1 --filter 'good n=1' -o y.jsonl",
        makes=MADE,
        slow=True,
    ),
    Fault(
        "the disk is full",
        f"bash -c 'ulimit -f 8; exec \"$@\"' bash {sys.executable} -P -m dtbench {RUN} --filter long",
        2,
        "^dtbench: cannot write to x.jsonl: file too large",
        how="program",
        makes=MADE,
        slow=True,
    ),
    Fault(
        "ranks pass tensors of different sizes to a collective",
        f"{RUN} --filter 'gone sizes\nhow=none'",
        5,
        r"the ranks disagree on the size of a collective: rank 1 on \S+ was sent 4096 bytes at a time where "
        r"it expected 4 during gone sizes \(core\): recorded as failed; going on with new ranks$",
        how="forked",
        makes=MADE,
        results="1 ok, 1 failed",
    ),
    Fault(
        "a rank takes more memory than its cgroup has",
        f"sh -c 'echo $$ > {CGROUP}/cgroup.procs && exec \"$@\"' sh {sys.executable} -P -m dtbench {RUN} "
        "--filter 'gone memory\nhow=none'",
        5,
        r"rank 1 on \S+ ran out of memory: the kernel ended it during gone memory \(core\): recorded as failed; going",
        how="program",
        given=limit_memory,
        also=lambda _done: CGROUP.rmdir(),
        makes=MADE,
        results="1 ok, 1 failed",
        needs=("memory limits",),
        slow=True,
    ),
    Fault(
        "rank 0 is killed while a child that its case forked lives",
        f"{RUN} --filter forks",
        5,
        r"rank 0 on \S+ died or did not answer during first forks \(core\): recorded as failed; going on",
        how="fresh",
        makes=MADE,
        results="1 failed",
        slow=True,
    ),
    Fault(
        "a case raises on 8 ranks",
        "run SUITE --quick --nproc 8 -o x.jsonl --filter how=raises",
        5,
        how="forked",
        makes=MADE,
        results="1 ok, 1 failed",
        slow=True,
    ),
    *(
        Fault(
            f"rank 0 alone raises in a case's {where}",
            f"{RUN} --filter 'how={where}'",
            5,
            rf"rank 0 on \S+ raised ValueError: in its {where} .*during first alone how={where} .*: recorded as failed",
            how="forked",
            makes=MADE,
            results="1 failed",
            slow=True,
        )
        for where in ("build", "check")
    ),
    Fault(
        "a case leaves processes behind",
        f"{RUN} --filter 'gone children'",
        0,
        how="fresh",
        makes=MADE,
        results="1 ok",
        slow=True,
    ),
    Fault(
        "a case leaves processes behind and its rank is killed",
        f"{RUN} --filter parent_dies",
        5,
        r"rank 1 on \S+ died or did not answer during gone parent_dies \(core\): recorded as failed; going on",
        how="fresh",
        makes=MADE,
        results="1 failed",
        slow=True,
    ),
    *(
        Fault(
            f"Ctrl-C {times} while ranks start",
            f"{RUN} --filter good",
            (130, -signal.SIGINT),  # the second may come when all is said
            "interrupted",
            how="fresh",
            during=partial(while_they_start, times),
            slow=True,
        )
        for times in ("once", "twice")
    ),
]
