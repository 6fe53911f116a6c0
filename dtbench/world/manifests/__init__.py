"""`dtbench launch --print`: what runs a command on a cluster, in the words of its scheduler. Nothing is submitted.

A template per scheduler; in each, torchrun starts the ranks of every node. `schedulers.py` fills them in.
"""
