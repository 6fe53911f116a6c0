"""What torch.compile puts into its graph as one call each: conversions from and to torch's DTensor.

As tensor/compiled.py, and imported as late.
"""

from __future__ import annotations

from torch._dynamo import nonstrict_trace

from dtbench_core.interop import torch_dtensor

to_torch = nonstrict_trace(torch_dtensor.to_torch)
from_torch = nonstrict_trace(torch_dtensor.from_torch)
