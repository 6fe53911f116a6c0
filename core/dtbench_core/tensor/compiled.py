"""What torch.compile puts into its graph as one call each: entering and leaving DTensors, and moving them.

Dynamo reads the Python of what it traces, and that of these methods is not for it: context variables, caches by
identity. AOTAutograd then runs them as they are, and sees their ops and collectives. Imported by what is being
traced, as torch._dynamo takes a second to load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import nonstrict_trace

from dtbench_core.layout.placement import Partial, RaggedShard, Replicate, Shard, StridedShard
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.torch_compat import register_constant

for _kind in (Shard, Replicate, Partial, StridedShard, RaggedShard):
    register_constant(_kind)


def from_local(local: torch.Tensor, **options: Any) -> DTensor:
    return _from_local(local, _given(options))


def to_local(tensor: DTensor, **options: Any) -> torch.Tensor:
    return _to_local(tensor, _given(options))


def full_tensor(tensor: DTensor, **options: Any) -> torch.Tensor:
    return _full_tensor(tensor, _given(options))


def redistribute(tensor: DTensor, **options: Any) -> DTensor:
    return _redistribute(tensor, _given(options))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None, which no call in a graph may hold."""
    return {name: value for name, value in options.items() if value is not None}


@nonstrict_trace
def _from_local(local: torch.Tensor, options: dict[str, Any]) -> DTensor:
    return DTensor.from_local(local, **options)


@nonstrict_trace
def _to_local(tensor: DTensor, options: dict[str, Any]) -> torch.Tensor:
    return tensor.to_local(**options)


@nonstrict_trace
def _full_tensor(tensor: DTensor, options: dict[str, Any]) -> torch.Tensor:
    return tensor.full_tensor(**options)


@nonstrict_trace
def _redistribute(tensor: DTensor, options: dict[str, Any]) -> DTensor:
    return tensor.redistribute(**options)
