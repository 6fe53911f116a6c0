"""Many small reduce-scatters as few large ones.

Reading order:

    layout    where inputs land, and the states of a bucket: pure
    packing   inputs into a buffer, at one copy each
    check     whether the ranks are about to reduce the same shapes
    bucket    one dtype, device and group: two buffers, of which one is reduced while the other fills
    inputs    what may be handed over: tensors, lists of them, DTensors
    hooks     gradients handed over as the backward makes them
    bucketer  ReduceScatterBucketer
"""

from dtbench_core.bucketer.bucketer import BucketCounters, BucketError, GradientFeed, ReduceScatterBucketer

__all__ = ["BucketCounters", "BucketError", "GradientFeed", "ReduceScatterBucketer"]
