"""`dtbench gate`: compares two arms, base and head, in fresh launches.

    gate.py       from the options to the report
    options.py    the options of a gate, checked before anything is built
    arms.py       builds an arm from a revision, an interpreter or a set of variables
    benchmark.py  selections, orders and listings of benchmarks, exchanged with launches
    messages.py   the kinds of messages between the gate, its loaders and its launches
    launcher.py   the launches that count and time; repeats a launch without the benchmark that ended it
    process.py    loaders and launches as processes, seen from the gate
    loader.py     the process from which launches are forked, after it has loaded torch
    worker.py     one launch, in the arm's interpreter: lists and counts, or times
    sampler.py    the schedule of a timed launch: a fixed number of samples, in turns
    counting.py   the counters of one call: Python calls, allocations, collectives
    control.py    the control benchmarks, whose code is the same in both arms
    schedule.py   decides which launches are needed, and when to stop; pure
    verdict.py    paired statistics, counters, trust; pure
    outputs.py    tables, JUnit, GitHub
    history.py    head's times over successive gates

Both arms run the same harness. Only `dtbench_core`, the suites and the other sources of a revision differ, so the
harness is not part of the comparison. `python -m dtbench.tests.gate_selftest`, in a checkout, measures how often a gate
is wrong on a machine.
"""
