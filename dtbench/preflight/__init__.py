"""`dtbench preflight`: which link, host or rank is slower than its peers, in seconds, before a job.

rounds.py    who measures with whom: rounds of disjoint pairs, in every kind of link
examine.py   what is measured next and what is named: a generator, without ranks or torch
part.py      what a rank does of it
preflight.py starting and joining ranks
show.py      what was found, as JSON and on the terminal

How often it is wrong, on hosts made on one machine: dtbench/tests/preflight_selftest.py.
"""
