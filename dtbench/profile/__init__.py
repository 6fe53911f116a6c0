"""`dtbench profile`: where the time of a case goes.

    profile   which cases, and from these to the folder
    calls     cases of simulated worlds: stages and frames of a call   (recorders -> spans, stages)
    ranks     cases of real ranks: one trace of all, on one clock      (gpu -> trace, sections)
    text      the tables, frames for speedscope, and the folder

`spans`, `stages`, `trace` and `sections` are pure: they neither import torch nor read a clock.
"""
