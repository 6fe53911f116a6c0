"""Writes to what a compiled function returned, or was given twice: who shares the memory follows, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.torch_version import needs_213
from dtbench_core import PlacementError, Replicate, Shard, distribute_tensor

RANKS = 2


def _view_after_write(x: Any) -> Any:
    x.mul_(2)
    return x.t()


def _same_after_write(x: Any) -> Any:
    x.mul_(2)
    return x


def _two_after_write(x: Any) -> Any:
    x.add_(1)
    return x[:, :1], x.view(2, 4, 4)


def _detached_after_write(x: Any) -> Any:
    x.mul_(2)
    return x.detach()


def _new_after_write(x: Any) -> Any:
    x.mul_(2)
    return (x + 1).t()


# name -> (compiled function, whether a write to its first result must be refused where x is sharded by rows)
RETURNED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "view": (lambda x: x.t(), False),
    "columns": (lambda x: (x[:, 1:3], x * 2), False),
    "rows": (lambda x: (x[1:3], x * 2), True),
    "view after a write": (_view_after_write, True),
    "two views after a write": (_two_after_write, True),
    "detached after a write": (_detached_after_write, True),
    "the same after a write": (_same_after_write, False),
    "new after a write": (_new_after_write, False),
}


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_an_input_follows_a_write_to_its_view() -> None:
    for name, (fn, refused) in RETURNED.items():
        for placement in (Shard(0), Replicate()):
            torch._dynamo.reset()
            plain = torch.arange(32.0).view(8, 4)
            x = distribute_tensor(plain, mesh_of((RANKS,)), [placement], src_data_rank=None)
            first, wanted = (
                result[0] if isinstance(result, tuple) else result
                for result in (torch.compile(fn, backend="aot_eager")(x), fn(plain))
            )
            assert torch.equal(first.full_tensor(), wanted), name
            if refused and (placement == Shard(0) or name != "rows"):
                with pytest.raises(
                    PlacementError, match=r"a view of its input that a compiled .* return a clone"
                ):
                    first.add_(1)
            else:
                first.add_(1)
                wanted.add_(1)
            assert torch.equal(first.full_tensor(), wanted), name
            assert torch.equal(x.full_tensor(), plain), name


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_write_to_one_of_two_inputs_of_one_memory_is_refused() -> None:
    views: dict[str, Callable[[Any], Any]] = {
        "detached": lambda x: x.detach(),
        "transposed": lambda x: x.t(),
        "columns": lambda x: x[:, 1:3],
        "rows": lambda x: x[1:3],
    }
    for name, view in views.items():
        for placement in (Shard(0), Replicate()):
            torch._dynamo.reset()
            x = distribute_tensor(torch.ones(8, 4), mesh_of((RANKS,)), [placement], src_data_rank=None)
            with pytest.raises(
                RuntimeError
            ):  # of torch, as of its own wrappers; of detached ones in other words
                torch.compile(lambda a, b: (a.mul_(2), b + 1)[1], backend="aot_eager")(x, view(x))
            assert torch.equal(x.full_tensor(), torch.ones(8, 4)), name
            # Without a write both may be given.
            both = torch.compile(lambda a, b: a.sum() + b.sum(), backend="aot_eager")(x, view(x))
            assert torch.equal(both.full_tensor(), x.full_tensor().sum() + view(x.full_tensor()).sum()), name
