"""Profiles cases of a suite: a call by stage on simulated ranks, an iteration like the step of a job on real ranks."""
