"""`dtbench profile`: where the time of a case goes.

profile   which cases, and from these to the folder
calls     cases of simulated worlds: stages and frames of a call   (-> stages, which is pure)
ranks     cases of real ranks: one trace of all, on one clock      (-> trace, which is pure)
text      the tables, frames for speedscope, and the folder
"""
