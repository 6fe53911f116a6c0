"""`loss_parallel` computes the cross entropy of logits whose classes are sharded, also for plain targets."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dtbench_core.dispatch.contexts import implicit_replication
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import Replicate
from dtbench_core.rules import cross_entropy as core
from dtbench_core.rules.labels import reduce_partials
from dtbench_core.tensor.dtensor import DTensor


class loss_parallel(TorchFunctionMode):  # noqa: N801 - a context, called as torch's is
    """Context in which `F.cross_entropy` and nn.CrossEntropyLoss of a DTensor leave its classes sharded.

    The logits may have any placement: sharded by class, by sample or both. A plain target or weight is taken as
    replicated, so it must be the same on every rank. The loss is a replicated DTensor; with reduction "none" it is
    placed as the samples are. The backward pass may run inside or outside the context.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


def cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DTensor:
    """`F.cross_entropy` of a DTensor, as inside `loss_parallel`. Target and weight may be plain.

    Args:
        input: [N, C, ...] or [C].
        target: class indices [N, ...] or []; or probabilities in the shape of the input.
        weight: [C].

    The other arguments are those of `F.cross_entropy`.

    Raises:
        IndexError: a target is not a class; raised on every rank on a CPU. On an accelerator, a device assertion
            fails.
    """
    logits = input
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.float16, torch.bfloat16):
        logits = cast("DTensor", logits.float())  # as autocast would
    logits = reduce_partials(logits)
    target = _as_replicated(target, logits)
    weight = None if weight is None else _as_replicated(weight, logits)
    options: Any = (size_average, ignore_index, reduce, reduction, label_smoothing)
    loss = core.cross_entropy(logits, target, weight, *options)
    if loss is NotImplemented:
        with implicit_replication():
            loss = F.cross_entropy(logits, target, weight, *options)
    return cast("DTensor", loss)


def _as_replicated(tensor: torch.Tensor, like: DTensor) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * mesh_info(like.device_mesh).ndim)
