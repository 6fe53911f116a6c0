"""The names of torch.distributed.tensor.placement_types."""

from dtbench_core.layout.placement import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
