"""`dtbench plan`: how to shard a transformer over a machine, by the time and memory of a training step.

models.py          the transformer: built in, or from a file
machines.py        what a machine is: its peaks, its links, and the constants fitted to measured steps
links.py           what communication costs, by a machine or by a measured topology
training.py        what is trained, and one way to lay it out over the ranks
step.py            the time of one step
memory.py          the bytes that the fullest rank holds
search.py          all layouts that fit, the best ones, and what would change the answer
csv_table.py       the CSV format of measured steps and collectives
measured_steps.py  its rows as jobs and layouts; what cannot be said is left out and named
validate.py        what is predicted for them, and how far off that is
ground.py          what a machine's constants stand on: intervals, and how far a job lies beyond
fit.py             a machine's constants fitted to measured steps
show.py            tables and JSON
"""
