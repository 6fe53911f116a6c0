"""`dtbench profile`: where the time of a case goes.

    request   which cases of which suites, from `suite/case` and a filter
    calls     cases of simulated worlds: stages, frames, flame graph      (counters, frames -> spans, stages)
    world     cases of real ranks: one trace of all, on one clock         (recording, clocks, trace, sections, gpu)
    flame     spans -> SVG
    profile   from the options to the folder; command: the command line

`spans`, `stages`, `overlap`, `trace` and `flame` are pure: they neither import torch nor read a clock.
"""
