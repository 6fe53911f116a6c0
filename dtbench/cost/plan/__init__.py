"""`dtbench plan`: how to shard a transformer over a machine, by the time and memory of a training step, and what its
shardings spend on communication.

models.py         the transformer: built in, or from a file
shardings.py      which collectives each sharding needs, per layer and per step, and how large they are
machines.py       what a machine is: its peaks, its links, and the constants fitted to measured steps
job.py            what is trained, and one way to lay it out over the ranks
step.py           the time of one step
memory.py         the bytes that the fullest rank holds
search.py         all layouts that fit, the best ones, and what would change the answer
communication.py  the collectives of all shardings over a mesh, priced by a measured topology
columns.py        titles of tables, in the words of those who publish them
csv_table.py      tables of measured steps, and of collectives, read from CSV
tables.py         their rows as jobs and layouts; what cannot be said is left out and named
validate.py       what is predicted for them, and how far off that is
ground.py         what a machine's constants stand on: intervals, and how far a job lies beyond
fit.py            a machine's constants fitted to measured steps
show.py           tables, a figure, JSON
"""
