"""`dtbench plan`: how to shard a transformer over a machine, by the time and memory of a training step.

machines.py   what a machine is: its peaks, its links, and the constants fitted to measured steps
job.py        what is trained, and one way to lay it out over the ranks
step.py       the time of one step
memory.py     the bytes that the fullest rank holds
search.py     all layouts that fit, the best ones, and what would change the answer
validate.py   tables of measured steps: predicted, compared, and constants fitted to them
show.py       tables, a figure, JSON
"""
