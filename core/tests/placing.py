"""Short names of placements, and helpers that distribute tensors and modules over a test's mesh and gather them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from core.tests.gloo_world import mesh_of
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


def full(tree: Any) -> Any:
    """Replaces each DTensor of a pytree by its full tensor."""
    return tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, tree)


def place(tensor: torch.Tensor, *placements: Placement, mesh: Sequence[int] = (4,)) -> DTensor:
    """Distributes a tensor that all ranks have, without communication. It is replicated if no placements are given."""
    return distribute_tensor(
        tensor, mesh_of(tuple(mesh)), placements or (Replicate(),) * len(mesh), src_data_rank=None
    )


def sharded(module: nn.Module, placement: Placement | None = None) -> nn.Module:
    """Returns a copy of a module with distributed parameters, by default sharded by rows, and replicated buffers."""

    def spread(name: str, part: nn.Module, mesh: Any) -> None:
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, nn.Parameter(place(parameter.detach(), placement or Shard(0))))

    return distribute_module(copy.deepcopy(module), mesh_of((4,)), spread)


def assert_like_plain(
    fn: Callable[..., Any], plain: Sequence[torch.Tensor], placed: Sequence[DTensor], where: object = ""
) -> None:
    """Asserts that `fn` has the same value and gradients for the placed tensors as for the plain ones."""
    results, gradients = (fn(*plain), fn(*placed)), []
    for result, inputs in zip(results, (plain, placed), strict=True):
        weights = torch.arange(1.0, result.numel() + 1).view(result.shape) / 7
        if inputs[0].requires_grad:
            whole = result.full_tensor() if isinstance(result, DTensor) else result
            gradients.append(full(list(torch.autograd.grad((whole.sin() * weights).sum(), inputs))))
    torch.testing.assert_close(
        [results[1].full_tensor(), *gradients[1:]],
        [results[0], *gradients[:1]],
        msg=lambda m: f"{where}: {m}",
    )
