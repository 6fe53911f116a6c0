"""The names of torch.distributed.tensor.debug. CommDebugMode is torch's, which supports DTensors of both libraries."""

from torch.distributed.tensor.debug import CommDebugMode

from dtbench_core.interop import debug_modes
from dtbench_core.interop.visualize import visualize_sharding

__all__ = ["CommDebugMode", "debug_modes", "visualize_sharding"]
