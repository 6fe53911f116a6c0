"""`dtbench preflight`: which link, host or rank is slower than its peers, in seconds, before a job.

How often it is wrong, on hosts made on one machine: dtbench/tests/preflight_selftest.py.
"""
