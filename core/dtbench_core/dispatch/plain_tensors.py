"""Plain tensors that a user gives beside DTensors: refused, because nobody knows where they belong.

One that an op or an autograd formula makes on the way counts as replicated; so does a single element,
which torch treats as a number; so does any inside `implicit_replication()`. In a list, as optimizers and gradient
clipping hand over, plain tensors may stand beside DTensors: each is computed with those of its place in other lists.

Zeros that autograd makes, for outputs of a function that nothing uses, count as replicated, too.

A plain tensor may be scaled, or shifted, in place by a DTensor of one element.

Two kinds of calls take a plain tensor for the whole one, the same on every rank, and nothing checks that it is:
`copy_` into a DTensor, with which `load_state_dict` loads plain tensors, each rank taking its part; and the states
that a recurrent module starts from, which it makes of plain zeros where it is given none.
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
    """Whether plain tensors must be replicated first.

    Raises:
        MixedTensorError: there are some, outside `implicit_replication()`.
    """
    whole = False
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind is cls or kind is int or kind is float:
            continue
        for item in a if kind is list or kind is tuple else (a,):
            if item.__class__ is cls:
                continue
            if isinstance(item, torch.Tensor) and not isinstance(item, Wrapper) and item.numel() != 1:
                if _comes_of_transform(func, item) or _is_unused_gradient(item):
                    continue
                name = getattr(func, "__name__", str(func))
                if is_torchs_dtensor(item):
                    raise MixedTensorError(
                        f"{name} got a DTensor of torch.distributed.tensor of shape {list(item.shape)} together with "
                        "one of dtbench_core, expected one class: convert it with from_torch(tensor)"
                    )
                if name == "__set__" or _apart(name, args):  # takes both rightly
                    return False
                if contexts.replicates_plain() or _is_scaled(name, args):
                    return True
                if _counts_as_whole(name, item, args):
                    whole = True
                    continue
                raise MixedTensorError(
                    f"{name} got a plain torch.Tensor of shape {list(item.shape)} together with a DTensor, expected "
                    "DTensors only: place it with distribute_tensor(tensor, mesh, placements), or wrap every rank's "
                    "shard with DTensor.from_local(...), or take the DTensor's own shard with .to_local()"
                )
    return whole


def _is_unused_gradient(item: torch.Tensor) -> bool:
    """Whether autograd made it of an output that nothing used: plain zeros, the same on every rank."""
    if (tracer := active_tracer()) is not None and in_backward_pass():
        node = traced_node(item, tracer)  # has no values to look at
        return node is not None and node.target is torch.ops.aten.zeros.default
    return in_backward() and not item.is_meta and not bool(item.any())


def _is_scaled(name: str, args: Args) -> bool:
    """Whether a plain tensor is written with numbers: DTensors of one element, such as the factor of clipping."""
    numbers = [a for a in args[1:] if isinstance(a, Wrapper)]
    alone = not isinstance(args[0], Wrapper) and all(isinstance(a, (Wrapper, int, float)) for a in args[1:])
    return name in SCALING and alone and all(a.numel() == 1 and not a.requires_grad for a in numbers)


def _counts_as_whole(name: str, item: torch.Tensor, args: Args) -> bool:
    """Whether `item` is copied into a DTensor, or is a state of a recurrent module: copy_(self, source),
    lstm(input, states, ...), gru_cell(input, state, ...)."""
    if name == "copy_":
        return isinstance(args[0], Wrapper)
    if name not in RECURRENT:
        return False
    states = args[1] if isinstance(args[1], (list, tuple)) else args[1:2]
    return any(item is state for state in states)


def _apart(name: str, args: Args) -> bool:
    """Whether each column of an op on lists is either plain or distributed (rules/foreach.py)."""
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    columns = ([t for t in column if isinstance(t, torch.Tensor)] for column in zip(*lists, strict=False))
    return all(
        len({isinstance(t, Wrapper) for t in column if isinstance(t, Wrapper) or t.numel() != 1}) < 2
        for column in columns
    )


def _comes_of_transform(func: Call, item: torch.Tensor) -> bool:
    """Whether the tensor is made by torch.func or forward AD: around a DTensor, or around a basis of tangents, the
    same on every rank; or on the meta device, to learn a shape.

    Inside `implicit_replication()` it may be around any. Below the transform a plain tensor counts as replicated.
    """
    if functorch_level() is None:
        return item.is_meta and forward_ad._current_level >= 0
    inner = innermost(item)
    if inner is item:
        return item.is_meta
    return isinstance(inner, Wrapper) or func is torch._VF._make_dual or contexts.replicates_plain()


def with_replicas(cls: type[Wrapper], func: Call, args: Args, kwargs: Kwargs) -> Value:
    """The call with its plain tensors as replicated DTensors, which carry gradients back to them."""
    leaves = tree_leaves((list(args), kwargs))
    mesh = next(leaf._spec.info.mesh for leaf in leaves if isinstance(leaf, Wrapper))

    def replicated(leaf: object) -> Value:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Wrapper)
        return cls.from_local(leaf, mesh) if plain else leaf  # type: ignore[attr-defined]

    full_args, full_kwargs = tree_map(replicated, (list(args), kwargs))
    result = func(*full_args, **full_kwargs)
    return args[0] if result is full_args[0] and not isinstance(args[0], Wrapper) else result
