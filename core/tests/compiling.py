"""Helpers of the tests of compiled programs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from core.tests.local_world import AnyWorlds
from core.tests.placing import place
from core.tests.torch_version import needs_213
from dtbench_core import DTensor, Placement, Shard

RANKS = 2
mesh_in_graphs = needs_213("Dynamo takes no mesh into a graph")
quiet = pytest.mark.filterwarnings("ignore")  # of torch's tracers
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    """`fn` compiled afresh; its graphs are executed by eager kernels if `options` name no backend."""
    return torch.compile(fn, **({"backend": "aot_eager"} | options))


def numbers(requires_grad: bool = False) -> torch.Tensor:
    """The full tensor of most tests."""
    return torch.arange(32.0).view(8, 4).requires_grad_(requires_grad)


def placed(full: torch.Tensor, placement: Placement | None = None) -> DTensor:
    """A leaf as `full` is, sharded by rows if nothing else is said."""
    return place(full.detach(), placement or Shard(0), mesh=(RANKS,)).requires_grad_(full.requires_grad)


def whole(tensor: Any) -> torch.Tensor:
    """The full values, without their graph."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_equal(got: Iterable[Any], expected: Iterable[torch.Tensor], where: object = None) -> None:
    """Compares the tensors of each pair bit by bit."""
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(whole(one), other), where


def assert_close(pairs_by_rank: Iterable[Pairs], **tolerances: float) -> None:
    """Compares the tensors of each pair, for the pairs of every rank."""
    for pairs in pairs_by_rank:
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, **tolerances)


def ranks_for(request: pytest.FixtureRequest, backend: str) -> AnyWorlds:
    """Ranks in threads; for inductor processes, as its caches of compiled code belong to one."""
    worlds: AnyWorlds = request.getfixturevalue("gloo_ranks" if backend == "inductor" else "ranks")
    return worlds
