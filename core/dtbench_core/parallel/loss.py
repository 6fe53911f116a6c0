"""`loss_parallel`: cross entropy of logits whose classes are spread over ranks, for plain targets too."""

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
    """Inside, `F.cross_entropy` and nn.CrossEntropyLoss of a DTensor keep its classes where they are.

    Logits of any placement, sharded by class, by sample or both. A plain target or weight counts as
    replicated: the same on every rank. The loss is a DTensor, replicated, or with reduction "none" placed as
    the samples are. The backward may run inside or outside.
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
    """`F.cross_entropy` as inside `loss_parallel`: of a DTensor, with a target and weight that may be plain.

    Args:
        input: [N, C, ...] or [C].
        target: [N, ...] or [], the classes; or probabilities in the input's shape.
        weight: [C].
        The others as F.cross_entropy takes them.

    Raises:
        IndexError: a target that is no class, on a CPU and on every rank; on an accelerator an assertion fails.
    """
    logits = input
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.float16, torch.bfloat16):
        logits = cast("DTensor", logits.float())  # as autocast would
    logits = reduce_partials(logits)
    target = _replicated(target, logits)
    weight = None if weight is None else _replicated(weight, logits)
    options: Any = (size_average, ignore_index, reduce, reduction, label_smoothing)
    loss = core.cross_entropy(logits, target, weight, *options)
    if loss is NotImplemented:
        with implicit_replication():
            loss = F.cross_entropy(logits, target, weight, *options)
    return cast("DTensor", loss)


def _replicated(tensor: torch.Tensor, beside: DTensor) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, beside.device_mesh, [Replicate()] * mesh_info(beside.device_mesh).ndim)
