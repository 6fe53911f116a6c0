"""What torch.compile puts into its graph as one call, in tensor parallelism (see tensor/compiled.py)."""

from torch._dynamo import nonstrict_trace

from dtbench_core.parallel import style
from dtbench_core.tensor import compiled  # noqa: F401 - placements become constants of a graph

annotated = nonstrict_trace(style.annotated)
