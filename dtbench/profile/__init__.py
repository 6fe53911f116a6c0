"""`dtbench profile`: where the time of a case goes.

    request, profile   from the options to the folder
    calls     cases of simulated worlds: stages and frames of a call   (counters, frames -> spans, stages, speedscope)
    ranks     cases of real ranks: one trace of all, on one clock      (gpu -> trace, sections)
    text      the tables, and the folder

`spans`, `stages`, `speedscope`, `trace` and `sections` are pure: they neither import torch nor read a clock.
"""
