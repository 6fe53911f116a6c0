"""What a rank outside a mesh does in an op on DTensors of that mesh: nothing, with the right metadata.

So a program may run the same lines on every rank of the world, as torch.distributed.tensor allows: the
rank holds empty parts (a 0 of a tensor without dims), takes part in no collective, and its results say the
global shape and dtype.
Only values it cannot know: asking for one (`item()`, a shape that depends on values) raises.
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


def unknown_value(what: object, mesh: MeshInfo) -> MeshError:
    """The error for a value that only the members of `mesh` have."""
    return MeshError(
        f"{what} got a DTensor on {mesh}, which rank {dist.get_rank()} is not in, and asks for its values; expected "
        "a member: guard the call with `mesh.get_coordinate() is not None`, or send the value with torch.distributed"
    )


def kernel(op: OpOverload, mesh: MeshInfo, results: Sequence[DTensorSpec | None], structure: str) -> Call:
    """Runs in the op's place on the empty parts.

    structure: "tensor", "list" or "value", of what the op gives. A written argument stays as it is.
    """
    if structure == "value" and op is torch.ops.aten.equal.default:
        return lambda *_, **__: True  # nothing here differs
    if structure == "value" and op._schema.returns:

        def refuse(*_: object, **__: object) -> Value:
            raise unknown_value(op, mesh)

        return refuse

    def make(*args: object, **kwargs: object) -> Value:
        where = device_of_results(args, kwargs, mesh.device_type)
        parts = [None if s is None else empty_part(s, where) for s in results]
        return tuple(parts) if structure == "list" else parts[0] if parts else None

    return make


def keep_in_step(op: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Draws as much as the members do, with the op on ones of the global shapes, and drops it."""
    args, kwargs = torch.utils._pytree.tree_map(_whole_ones, (list(args), kwargs))
    op(*args, **kwargs)


def _whole_ones(leaf: object) -> Value:
    spec = getattr(leaf, "_spec", None)
    if not isinstance(spec, DTensorSpec):
        return leaf
    return torch.ones(spec.shape, dtype=spec.dtype, device=spec.info.device_type)
