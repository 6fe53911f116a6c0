"""`dtbench preflight`: which link, host or rank is slower than its peers, in seconds, before a job.

examine.py   what is measured next and what is named: a generator, without ranks or torch
part.py      what a rank does of it
preflight.py starting and joining ranks, and what is printed

How often it is wrong, on hosts made on one machine: dtbench/tests/preflight_selftest.py.
"""
