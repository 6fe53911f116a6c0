"""State dicts of whole tensors: gathered from DTensors, and sharded again on any mesh.

`full_state_dict` and `sharded_state_dict` take nested dicts and lists, such as the state of a module or an optimizer.
torch.distributed.checkpoint saves and loads both kinds; tensor/checkpoint.py makes it handle sharded ones.

`torch.distributed.checkpoint.state_dict` gathers and shards only torch's own DTensors. It would treat ours as plain
tensors, and a full state dict would contain one rank's part. `_support_dtensor` wraps the functions of torch to
correct this.
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
from dtbench_core.torch_compat import device_of_group, when_imported, wrap_state_loading


def full_state_dict(state: Any, *, cpu_offload: bool = False, rank0_only: bool = False) -> Any:
    """Returns `state` with every DTensor gathered. Every rank must call it, since gathering is a collective.

    Args:
        state: nested dicts and lists, as returned by `module.state_dict()` and `optimizer.state_dict()`. Plain
            tensors are returned as they are, sharing memory.
        cpu_offload: whether each tensor is moved to the CPU before the next is gathered.
        rank0_only: whether only rank 0 gets the tensors; the other ranks get an empty dict.
    """
    is_kept = not rank0_only or dist.get_rank() == 0
    full = tree_map_only(torch.Tensor, lambda tensor: _gathered(tensor, is_kept, cpu_offload), state)
    return full if is_kept else {}


def sharded_state_dict(full: Any, like: Any, *, broadcast_from_rank0: bool = False) -> Any:
    """Returns `full` with every tensor placed as the DTensor with its key in `like`, for `load_state_dict`.

    Args:
        full: nested dicts and lists of whole tensors, as returned by `full_state_dict`.
        like: the state of the module or optimizer to be loaded, with the same keys. Only its placements, shapes and
            dtypes are read. An optimizer has its state only after a first step.
        broadcast_from_rank0: whether the values are those of rank 0; tensors are sent one by one.

    Returns:
        A state with the structure of `like` and the values of `full`. Where `like` has a plain tensor, so has the
        result.

    Raises:
        ArgumentError: keys that only one of them has, or tensors of different shapes; raised on all ranks.
    """
    leaves, tree = tree_flatten_with_path(like)
    like_by_name = {keystr(path): leaf for path, leaf in leaves}
    full_by_name = {keystr(path): leaf for path, leaf in tree_flatten_with_path(full)[0]}
    metas: dict[str, Any] = {
        name: _Meta(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in full_by_name.items()
    }
    if broadcast_from_rank0:
        metas = comm.all_gather_objects(metas if dist.get_rank() == 0 else None)[0]
    _check_same(metas, like_by_name)
    tensors = []
    for name, leaf in like_by_name.items():
        value = metas[name]
        if isinstance(value, _Meta):
            value = (
                _from_rank0(full_by_name.get(name), value)
                if broadcast_from_rank0
                else full_by_name[name].detach()
            )
            value = shard_like(value, leaf) if isinstance(leaf, DTensor) else value
        tensors.append(value)
    return tree_unflatten(tensors, tree)


def shard_like(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a tensor that every rank holds as a DTensor with the placements and dtype of `like`."""
    tensor = tensor.detach().to(like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _gathered(tensor: torch.Tensor, is_kept: bool, cpu_offload: bool) -> torch.Tensor | None:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if not is_kept:
        return None
    return tensor.cpu() if cpu_offload else tensor


class _Meta(NamedTuple):
    """Shape and dtype of a tensor, which rank 0 sends before the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _check_same(metas: dict[str, Any], like: dict[str, Any]) -> None:
    missing, unknown = [n for n in like if n not in metas], [n for n in metas if n not in like]
    if missing or unknown:
        raise ArgumentError(
            f"sharded_state_dict got a full state without the keys {missing} and with the additional keys {unknown}, "
            "expected the keys of the state to load: remove keys that should not be loaded from both"
        )
    for name, leaf in like.items():
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
        full_shape = metas[name].shape if isinstance(metas[name], _Meta) else None
        if shape != full_shape:
            raise ArgumentError(
                f"sharded_state_dict got {_describe(full_shape)} as {name}, expected {_describe(shape)}: pass the "
                "state of the same model"
            )


def _describe(shape: tuple[int, ...] | None) -> str:
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

# Functions of torch.distributed._state_dict_utils, which torch.distributed.checkpoint.state_dict imports by name.
_SHARDING_FUNCTIONS = ("_broadcast_tensors", "_broadcast_state_dict", "_distribute_state_dict")


def _support_dtensor(utils: ModuleType) -> None:
    """Makes torch's functions for state dicts gather and shard our DTensors, as they do torch's."""
    wrapped = {
        name: _sharding_dtensors(vars(utils)[name]) for name in _SHARDING_FUNCTIONS if name in vars(utils)
    }
    wrapped["_gather_state_dict"] = _gathering_dtensors(vars(utils)["_gather_state_dict"])
    for module in (utils, sys.modules.get("torch.distributed.checkpoint.state_dict")):
        for name, function in wrapped.items():
            if module is not None and name in vars(module):
                setattr(module, name, function)


def _gathering_dtensors(function: Call) -> Call:
    @functools.wraps(function)
    def gather(
        state_dict: Any, *, cpu_offload: bool = False, ranks_only: tuple[int, ...] = (), **options: Any
    ) -> Any:
        is_kept = not ranks_only or dist.get_rank(options.get("pg")) in ranks_only
        state_dict = tree_map_only(
            DTensor, lambda tensor: _gathered(tensor, is_kept, cpu_offload), state_dict
        )
        return function(state_dict, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather


def _sharding_dtensors(function: Call) -> Call:
    """Wraps a function that replaces the tensors of its second argument, a dict, by whole tensors.

    torch's function shards whole tensors only for its own DTensors. The wrapper shards them for ours.
    """

    @functools.wraps(function)
    def shard(full: Any, local: dict[str, Any], *args: object, **options: object) -> Any:
        # The third argument may be a list of the names to replace.
        dtensors = {
            name: local[name]
            for name in (args[0] if args and isinstance(args[0], list) else list(local))
            if isinstance(local.get(name), DTensor)
        }
        result = function(full, local, *args, **options)
        for name, dtensor in dtensors.items():
            tensor = local.get(name)
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                local[name] = shard_like(tensor, dtensor)
        return result

    return shard


when_imported("torch.distributed._state_dict_utils", _support_dtensor)


def _support_optimizers(module: ModuleType) -> None:
    module._load_optim_state_dict = _keeping_all_states(module._load_optim_state_dict)  # type: ignore[attr-defined]


def _keeping_all_states(function: Call) -> Call:
    """Wraps torch's loading of an optimizer's state, so that the saved state of every parameter is loaded.

    torch drops the state of a frozen parameter. It also drops the state of a parameter that has none yet, if others
    have one (pytorch#192202).
    """

    @functools.wraps(function)
    def load(model: Any, optimizers: Any, saved: Any, info: Any) -> Any:
        groups = [[p for group in optim.param_groups for p in group["params"]] for optim in optimizers]
        parameters = [parameter for group in groups for parameter in group]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return function(model, optimizers, saved, info)
        # The keys are nested, or flat, as in "state.layer.weight.exp_avg".
        names = set(saved.get("state", ())) or {key[6:].rpartition(".")[0] for key in saved}
        if info.broadcast_from_rank0:
            names = comm.all_gather_objects(names)[0]
        frozen = [
            p for p in parameters if not p.requires_grad and not names.isdisjoint(info.fqn_param_mapping[p])
        ]
        states, grads = [optim.state for optim in optimizers], [parameter.grad for parameter in parameters]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            for parameter in parameters:
                parameter.grad = None  # torch creates initial states only if no parameter has a gradient
            for optim, group in zip(optimizers, groups, strict=True):
                if any(p.requires_grad and p not in optim.state for p in group):
                    optim.state = defaultdict(dict)
            function(model, optimizers, saved, info)
        except BaseException:
            for optim, state in zip(optimizers, states, strict=True):
                optim.state = state
            raise
        finally:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            for parameter in frozen:
                parameter.requires_grad_(False)

    return load


when_imported("torch.distributed.checkpoint.state_dict", _support_optimizers)


def _sharding_values(process: Call) -> Call:
    """Wraps the function that an optimizer's `load_state_dict` applies to each value.

    The wrapper shards a whole tensor if the parameter is a DTensor, as the `load_state_dict` of a module does.
    """

    @functools.wraps(process)
    def load(param: torch.Tensor, value: torch.Tensor, *args: object, **options: object) -> Any:
        is_whole = not isinstance(value, DTensor) and value.ndim and value.shape == param.shape
        if isinstance(param, DTensor) and is_whole:
            value = shard_like(value, param)
        return process(param, value, *args, **options)

    return load


wrap_state_loading(_sharding_values)
