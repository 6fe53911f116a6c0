"""Finds links, hosts and ranks that are slower than their peers, within seconds, before a job (`dtbench preflight`).

dtbench/tests/preflight_selftest.py measures how often a preflight is wrong, on simulated hosts.
"""
