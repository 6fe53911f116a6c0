"""Bundles many small reduce-scatters into few large ones.

Reading order:

    packing   copies inputs into a buffer, one copy each, and orders the CUDA streams that use it
    bucket    one dtype, device and group: two buffers, of which one is reduced while the other fills
    inputs    checks inputs: tensors, lists of tensors, DTensors
    bucketer  ReduceScatterBucketer
"""

from dtbench_core.bucketer.bucketer import GradientFeed, ReduceScatterBucketer
from dtbench_core.bucketer.packing import BucketCounters, BucketError

__all__ = ["BucketCounters", "BucketError", "GradientFeed", "ReduceScatterBucketer"]
