"""Many small reduce-scatters as few large ones.

Reading order:

    packing   inputs into a buffer, at one copy each
    bucket    one dtype, device and group: two buffers, of which one is reduced while the other fills
    inputs    what may be handed over: tensors, lists of them, DTensors
    bucketer  ReduceScatterBucketer
"""

from dtbench_core.bucketer.bucketer import GradientFeed, ReduceScatterBucketer
from dtbench_core.bucketer.packing import BucketCounters, BucketError

__all__ = ["BucketCounters", "BucketError", "GradientFeed", "ReduceScatterBucketer"]
