"""`dtbench gate`: compares two arms, base and head, in newly started processes.

An arm is a git revision, an interpreter or a set of environment variables. A launch is one start of an arm's processes.

    gate.py       from the options to the report
    options.py    the options of a gate, checked before anything is built
    arms.py       builds an arm from a revision, an interpreter or a set of variables
    benchmark.py  selections, orders and listings of benchmarks, exchanged with launches
    messages.py   the messages between the gate, its loaders and its launches
    launcher.py   makes the launches that count and time; repeats a launch without the benchmark that ended it
    process.py    loaders and launches as processes, seen from the gate
    loader.py     the process from which launches are forked, after it has loaded torch
    worker.py     code of one launch, in the arm's interpreter: lists and counts, or times
    sampler.py    the samples of a timed launch, taken in turns with the other launches
    counting.py   the counters of one call: Python calls, allocations, collectives
    control.py    the control benchmarks, whose code is the same in both arms
    schedule.py   decides which launches are needed, and when to stop; starts no process
    verdict.py    verdicts from paired statistics and counters, and whether the times can be trusted
    outputs.py    text for the terminal, JUnit and GitHub
    history.py    appends head's times to a history

Both arms run the gate's own copy of `dtbench`. Only `dtbench_core`, the suites and the other sources of a revision
differ, so `dtbench` is not part of the comparison. In a checkout, `python -m dtbench.tests.gate_selftest` measures how
often a gate is wrong on a machine.
"""
