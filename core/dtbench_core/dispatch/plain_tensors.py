"""Plain tensors in calls with DTensors: mostly refused, because their placement is not known.

They count as replicated, the same on every rank, in these cases:

- An op or a formula of autograd made them, such as zeros for the gradient of an unused output.
- They have one element, which torch treats as a number.
- The call is inside `implicit_replication()`.
- The call is `copy_` into a DTensor, by which `load_state_dict` loads plain tensors. Each rank takes its part; that all
  ranks pass the same values is not checked.
- They are the initial states of a recurrent module, which makes plain zeros if it is given none.

Lists, as optimizers and gradient clipping pass them, may contain both: ops on lists combine only tensors at the same
index. A plain tensor may also be scaled or shifted in place by DTensors of one element.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from dtbench_core.dispatch import contexts
from dtbench_core.errors import MixedTensorError
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.torch_compat import (
    active_tracer,
    functorch_level,
    in_backward,
    in_backward_pass,
    innermost,
    is_torchs_dtensor,
    traced_node,
)

SCALING = {f"{word}_" for word in ("add", "sub", "mul", "div")}
SCALING |= {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
RECURRENT = {f"{kind}{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("", "_cell")}


def mixes_plain(cls: type[Wrapper], func: Call, args: Args, kwargs: Kwargs) -> bool:
    """Whether the call has plain tensors that must be made replicated DTensors first.

    Raises:
        MixedTensorError: it has plain tensors that do not count as replicated.
    """
    replicates = False
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind is cls or kind is int or kind is float:
            continue
        for item in a if kind is list or kind is tuple else (a,):
            if item.__class__ is cls:
                continue
            if isinstance(item, torch.Tensor) and not isinstance(item, Wrapper) and item.numel() != 1:
                if _is_made_by_transform(func, item) or _is_unused_gradient(item):
                    continue
                name = getattr(func, "__name__", str(func))
                if is_torchs_dtensor(item):
                    raise MixedTensorError(
                        f"{name} got a DTensor of torch.distributed.tensor of shape {list(item.shape)} together with "
                        "one of dtbench_core, expected one class: convert it with from_torch(tensor)"
                    )
                if name == "__set__" or _keeps_lists_apart(name, args):  # these handle both kinds
                    return False
                if contexts.replicates_plain() or _is_scaled(name, args):
                    return True
                if _counts_as_whole(name, item, args):
                    replicates = True
                    continue
                raise MixedTensorError(
                    f"{name} got a plain torch.Tensor of shape {list(item.shape)} together with a DTensor, expected "
                    "DTensors only: place it with distribute_tensor(tensor, mesh, placements), or wrap every rank's "
                    "shard with DTensor.from_local(...), or take the DTensor's own shard with .to_local()"
                )
    return replicates


def _is_unused_gradient(item: torch.Tensor) -> bool:
    """Whether autograd made it as the gradient of an unused output: plain zeros, the same on every rank."""
    if (tracer := active_tracer()) is not None and in_backward_pass():
        node = traced_node(item, tracer)  # it has no values while traced
        return node is not None and node.target is torch.ops.aten.zeros.default
    return in_backward() and not item.is_meta and not bool(item.any())


def _is_scaled(name: str, args: Args) -> bool:
    """Whether a plain tensor is scaled or shifted in place by DTensors of one element, as in gradient clipping."""
    has_no_other_tensor = not isinstance(args[0], Wrapper) and all(
        isinstance(a, (Wrapper, int, float)) for a in args[1:]
    )
    return (
        name in SCALING
        and has_no_other_tensor
        and all(a.numel() == 1 and not a.requires_grad for a in args[1:] if isinstance(a, Wrapper))
    )


def _counts_as_whole(name: str, item: torch.Tensor, args: Args) -> bool:
    """Whether `item` is copied into a DTensor, or is a state of a recurrent module.

    The signatures are copy_(self, source), lstm(input, states, ...) and gru_cell(input, state, ...).
    """
    if name == "copy_":
        return isinstance(args[0], Wrapper)
    if name not in RECURRENT:
        return False
    states = args[1] if isinstance(args[1], (list, tuple)) else args[1:2]
    return any(item is state for state in states)


def _keeps_lists_apart(name: str, args: Args) -> bool:
    """Whether each column of an op on lists is either plain or distributed (rules/foreach.py)."""
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    columns = ([t for t in column if isinstance(t, torch.Tensor)] for column in zip(*lists, strict=False))
    return all(
        len({isinstance(t, Wrapper) for t in column if isinstance(t, Wrapper) or t.numel() != 1}) < 2
        for column in columns
    )


def _is_made_by_transform(func: Call, item: torch.Tensor) -> bool:
    """Whether torch.func or forward-mode autograd made the tensor.

    It wraps a DTensor, or a basis of tangents, which is the same on every rank. Or it is a meta tensor used to compute
    a shape. Inside `implicit_replication()` it may wrap any tensor.
    """
    if functorch_level() is None:
        return item.is_meta and forward_ad._current_level >= 0
    inner = innermost(item)
    if inner is item:
        return item.is_meta
    return isinstance(inner, Wrapper) or func is torch._VF._make_dual or contexts.replicates_plain()


def with_replicas(cls: type[Wrapper], func: Call, args: Args, kwargs: Kwargs) -> Value:
    """Runs the call with its plain tensors as replicated DTensors, which pass gradients back to them."""
    leaves = tree_leaves((list(args), kwargs))
    mesh = next(leaf._spec.info.mesh for leaf in leaves if isinstance(leaf, Wrapper))

    def replicated(leaf: object) -> Value:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Wrapper)
        return cls.from_local(leaf, mesh) if plain else leaf  # type: ignore[attr-defined]

    full_args, full_kwargs = tree_map(replicated, (list(args), kwargs))
    result = func(*full_args, **full_kwargs)
    return args[0] if result is full_args[0] and not isinstance(args[0], Wrapper) else result
