"""`dtbench gate`: does a change make anything slower? Two arms, measured in fresh launches of one job.

    gate.py       from the options to the report
    arms.py       a revision, an interpreter or a set of variables -> what a launch is started with
    benchmark.py  what a gate and its launches tell each other: selections, orders, listings of benchmarks
    launcher.py   the launches that are asked for: counting, timing, and again without what brought one down
    process.py    loaders and launches as processes, seen from the gate
    loader.py     the process that launches are forked off, once it has loaded torch
    worker.py     one launch, in the arm's interpreter: lists and counts, or times
    sampler.py    the schedule of a launch that times: fixed and in turns
    counting.py   the counters of one call: Python calls, allocations, collectives
    control.py    the benchmarks that no arm touches
    schedule.py   which launches are needed, and when to stop; pure
    verdict.py    paired statistics, counters, trust; pure
    outputs.py    tables, JUnit, GitHub
    history.py    head's times of one gate after the other

The harness is the same in both arms: only `dtbench_core`, the suites and what else a revision holds
differ, so that the instrument is not part of the comparison. How often it is wrong on a machine:
`python -m dtbench.tests.gate_selftest`, in a checkout.
"""
