"""Profiles cases of a suite.

On simulated ranks, a call is broken down by stage. On real ranks, an iteration is analyzed like the step of a job.
"""
