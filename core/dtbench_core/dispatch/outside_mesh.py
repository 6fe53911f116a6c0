"""Ops on a rank outside the mesh of their DTensors: nothing is computed, and results have the right metadata.

So a program may run the same lines on every rank of the world, as torch.distributed.tensor allows. The rank has empty
local tensors (a 0 for a tensor without dims), takes part in no collective, and its results have the global shape and
dtype. Ops that need values (`item()`, a shape that depends on values) raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from dtbench_core.dispatch.metadata import device_of_results
from dtbench_core.errors import MeshError
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.layout.shard_layout import empty_part
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Args, Call, Kwargs, Value


def unknown_value(caller: object, mesh: MeshInfo) -> MeshError:
    """Returns the error for a value that only ranks of `mesh` have."""
    return MeshError(
        f"{caller} needs the values of a DTensor on {mesh}, but rank {dist.get_rank()} is not in that mesh; expected "
        "one of its ranks: guard the call with `mesh.get_coordinate() is not None`, or send the value otherwise"
    )


def kernel(op: OpOverload, mesh: MeshInfo, results: Sequence[DTensorSpec | None], structure: str) -> Call:
    """Returns the function that runs in place of the op on the empty local tensors. It writes to no argument.

    Args:
        results: specs of the op's results.
        structure: whether the op returns a "tensor", a "list" or a "value".
    """
    if structure == "value" and op is torch.ops.aten.equal.default:
        return lambda *_, **__: True  # empty tensors are equal
    if structure == "value" and op._schema.returns:

        def refuse(*_: object, **__: object) -> Value:
            raise unknown_value(op, mesh)

        return refuse

    def make(*args: object, **kwargs: object) -> Value:
        device = device_of_results(args, kwargs, mesh.device_type)
        parts = [None if s is None else empty_part(s, device) for s in results]
        return tuple(parts) if structure == "list" else parts[0] if parts else None

    return make


def keep_in_step(op: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Draws the same random numbers as the ranks of the mesh, by the op on ones of the global shapes."""
    args, kwargs = torch.utils._pytree.tree_map(_whole_ones, (list(args), kwargs))
    op(*args, **kwargs)


def _whole_ones(leaf: object) -> Value:
    spec = getattr(leaf, "_spec", None)
    if not isinstance(spec, DTensorSpec):
        return leaf
    return torch.ones(spec.shape, dtype=spec.dtype, device=spec.info.device_type)
