"""`dtbench preflight`: finds links, hosts and ranks that are slower than their peers, within seconds, before a job.

dtbench/tests/preflight_selftest.py measures how often it is wrong, on simulated hosts.
"""
