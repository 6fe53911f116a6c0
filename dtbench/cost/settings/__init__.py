"""`dtbench settings`: which values to set, out of measurements.

    buckets.py  the size of a bucket of gradients, for DDP and inductor
    nccl.py     algorithm and protocol per size range, for NCCL's tuner plugin
    sweep.py    the launches that measure variables against each other, in turns

Shown right on launches that they were not chosen on; results/settings/ has the tables.
"""
