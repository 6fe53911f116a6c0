"""The names of torch.distributed.tensor.experimental."""

from dtbench_core.dispatch.contexts import implicit_replication
from dtbench_core.interop.local_map import local_map
from dtbench_core.rules.register import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
