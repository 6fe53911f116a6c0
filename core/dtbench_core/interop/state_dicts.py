"""State dicts of whole tensors: gathered from DTensors, and spread again, on any mesh.

`full_state_dict` and `sharded_state_dict` take any nesting of dicts and lists, a module's state or an optimizer's.
torch.distributed.checkpoint saves and loads both kinds: sharded ones as they are (tensor/checkpoint.py).

`torch.distributed.checkpoint.state_dict` gathers and spreads tensors of torch's own class alone, and takes a DTensor
of ours for a plain tensor: a full state dict would hold one rank's part. `_teach` mends that where torch does it.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

from dtbench_core import comm
from dtbench_core.errors import ArgumentError
from dtbench_core.op_types import Call
from dtbench_core.tensor.distribute import distribute_tensor
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.torch_compat import device_of_group, teach_loading, when_imported


def full_state_dict(state: Any, *, cpu_offload: bool = False, rank0_only: bool = False) -> Any:
    """`state` with every DTensor as the whole tensor. Every rank must call it, as the ranks gather from each other.

    Args:
        state: dicts and lists, nested, as `module.state_dict()` and `optimizer.state_dict()` give them. Plain
            tensors in it are handed on, sharing memory.
        cpu_offload: each tensor is moved to the CPU before the next is gathered.
        rank0_only: the other ranks keep nothing and get an empty dict.
    """
    kept = not rank0_only or dist.get_rank() == 0
    full = tree_map_only(torch.Tensor, lambda tensor: _whole(tensor, kept, cpu_offload), state)
    return full if kept else {}


def sharded_state_dict(full: Any, like: Any, *, broadcast_from_rank0: bool = False) -> Any:
    """`full` with every tensor placed as the DTensor at its place in `like`, for `load_state_dict`.

    Args:
        full: whole tensors in dicts and lists, nested, as `full_state_dict` gives them.
        like: of the same keys: the state of the module or optimizer that is to be loaded. Only its placements,
            shapes and dtypes are read. An optimizer has its state after a first step.
        broadcast_from_rank0: only rank 0's `full` counts; tensors are sent one by one.

    Returns:
        A state of the shape of `like`, with the values of `full`. Plain tensors in `like` get plain tensors.

    Raises:
        ArgumentError: keys that are in one of the two alone, or tensors of other shapes; on all ranks.
    """
    leaves, tree = tree_flatten_with_path(like)
    wanted = {keystr(path): leaf for path, leaf in leaves}
    mine = {keystr(path): leaf for path, leaf in tree_flatten_with_path(full)[0]}
    described: dict[str, Any] = {name: _described(leaf) for name, leaf in mine.items()}
    if broadcast_from_rank0:
        described = comm.all_gather_objects(described if dist.get_rank() == 0 else None)[0]
    _check_same(described, wanted)
    tensors = []
    for name, leaf in wanted.items():
        value = described[name]
        if isinstance(value, _Meta):
            value = _from_rank0(mine.get(name), value) if broadcast_from_rank0 else mine[name].detach()
            value = spread(value, leaf) if isinstance(leaf, DTensor) else value
        tensors.append(value)
    return tree_unflatten(tensors, tree)


def spread(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of `whole`, which every rank holds, as a DTensor placed as `like`, of its dtype."""
    whole = whole.detach().to(like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _whole(tensor: torch.Tensor, kept: bool, cpu_offload: bool) -> torch.Tensor | None:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if not kept:
        return None
    return whole.cpu() if cpu_offload else whole


class _Meta(NamedTuple):
    """What rank 0 says of a tensor before it sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(leaf: object) -> Any:
    return _Meta(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _check_same(described: dict[str, Any], like: dict[str, Any]) -> None:
    missing, unknown = [n for n in like if n not in described], [n for n in described if n not in like]
    if missing or unknown:
        raise ArgumentError(
            f"sharded_state_dict got a full state without {missing or 'nothing'} and with {unknown or 'nothing'} "
            "besides, expected the keys of the state to load: leave out of both what is not to be loaded"
        )
    for name, leaf in like.items():
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
        got = described[name].shape if isinstance(described[name], _Meta) else None
        if shape != got:
            raise ArgumentError(
                f"sharded_state_dict got {_shown(got)} as {name}, expected {_shown(shape)}: pass the state of the same "
                "model"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"a tensor of shape {list(shape)}"


def _from_rank0(tensor: torch.Tensor | None, meta: _Meta) -> torch.Tensor:
    world = dist.group.WORLD
    assert world is not None
    device = device_of_group(world)
    if dist.get_rank() == 0 and tensor is not None:
        sent = tensor.detach().to(device).contiguous()
    else:
        sent = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    if sent.numel():
        comm.broadcast(sent, world)
    return sent


# ---- torch's own functions for state dicts ----

# Of torch.distributed._state_dict_utils; its checkpoint.state_dict holds them by name.
_PLACING = ("_broadcast_tensors", "_broadcast_state_dict", "_distribute_state_dict")


def _teach(utils: ModuleType) -> None:
    """Lets torch's functions for state dicts gather and spread DTensors of ours, as they do torch's."""
    taught = {name: _placing(vars(utils)[name]) for name in _PLACING if name in vars(utils)}
    taught["_gather_state_dict"] = _gathering(vars(utils)["_gather_state_dict"])
    for module in (utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
        for name, function in taught.items():
            if module is not None and name in vars(module):
                setattr(module, name, function)


def _gathering(function: Call) -> Call:
    @functools.wraps(function)
    def gather(
        state_dict: Any, *, cpu_offload: bool = False, ranks_only: tuple[int, ...] = (), **options: Any
    ) -> Any:
        kept = not ranks_only or dist.get_rank(options.get("pg")) in ranks_only
        state_dict = tree_map_only(DTensor, lambda tensor: _whole(tensor, kept, cpu_offload), state_dict)
        return function(state_dict, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather


def _placing(function: Call) -> Call:
    """Of a function that replaces tensors of its second argument, a dict, by whole ones where they are not torch's."""

    @functools.wraps(function)
    def place(full: Any, local: dict[str, Any], *rest: object, **options: object) -> Any:
        names = rest[0] if rest and isinstance(rest[0], list) else list(local)  # given for some tensors alone
        like = {name: local[name] for name in names if isinstance(local.get(name), DTensor)}
        result = function(full, local, *rest, **options)
        for name, placed in like.items():
            whole = local.get(name)
            if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
                local[name] = spread(whole, placed)
        return result

    return place


when_imported("torch.distributed._state_dict_utils", _teach)


def _teach_optimizers(module: ModuleType) -> None:
    module._load_optim_state_dict = _keeping_all(module._load_optim_state_dict)  # type: ignore[attr-defined]


def _keeping_all(function: Call) -> Call:
    """Wraps torch's loading of an optimizer's state so that it keeps the saved state of every parameter.

    torch drops that of a frozen parameter, and of one that has no state yet beside others that have one
    (pytorch#192202).
    """

    @functools.wraps(function)
    def load(model: Any, optimizers: Any, saved: Any, info: Any) -> Any:
        groups = [[p for group in optim.param_groups for p in group["params"]] for optim in optimizers]
        parameters = [parameter for group in groups for parameter in group]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return function(model, optimizers, saved, info)
        # As it is, or flat: "state.layer.weight.exp_avg".
        names = set(saved.get("state", ())) or {key[6:].rpartition(".")[0] for key in saved}
        if info.broadcast_from_rank0:
            names = comm.all_gather_objects(names)[0]
        frozen = [
            p for p in parameters if not p.requires_grad and not names.isdisjoint(info.fqn_param_mapping[p])
        ]
        before = [optim.state for optim in optimizers], [parameter.grad for parameter in parameters]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            for parameter in parameters:
                parameter.grad = None  # torch gives first states, to be loaded into, where no gradient is
            for optim, group in zip(optimizers, groups, strict=True):
                if any(p.requires_grad and p not in optim.state for p in group):
                    optim.state = defaultdict(dict)
            function(model, optimizers, saved, info)
        except BaseException:
            for optim, state in zip(optimizers, before[0], strict=True):
                optim.state = state
            raise
        finally:
            for parameter, grad in zip(parameters, before[1], strict=True):
                parameter.grad = grad
            for parameter in frozen:
                parameter.requires_grad_(False)

    return load


when_imported("torch.distributed.checkpoint.state_dict", _teach_optimizers)


def _loading(process: Call) -> Call:
    """Of what an optimizer's `load_state_dict` does with each value: a whole tensor becomes this rank's part, as in a
    module's."""

    @functools.wraps(process)
    def load(param: torch.Tensor, value: torch.Tensor, *rest: object, **options: object) -> Any:
        whole = not isinstance(value, DTensor) and value.ndim and value.shape == param.shape
        if isinstance(param, DTensor) and whole:
            value = spread(value, param)
        return process(param, value, *rest, **options)

    return load


teach_loading(_loading)
