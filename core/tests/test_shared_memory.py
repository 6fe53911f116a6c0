"""DTensors and plain tensors that share memory: a write to one is a write to the other, also for autograd.

DTensors give the values and gradients of plain torch, or refuse the write. They never use old values in a gradient.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

from core.tests.gloo_world import mesh_of, on_ranks
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor
from dtbench_core.layout.wrapper import shares_memory

RANKS = 2


def _x() -> torch.Tensor:
    return torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)


def _sharded(full: torch.Tensor | None = None) -> DTensor:
    return distribute_tensor(
        _x() if full is None else full, mesh_of((RANKS,)), [Shard(0)], src_data_rank=None
    )


# ---- to_local and from_local ----

changed = pytest.raises(RuntimeError, match="modified by an inplace operation")
refused = pytest.raises(RuntimeError, match="is being modified inplace")


@on_ranks(world_size=RANKS)
def test_backward_pass_refuses_saved_tensors_written_to_through_shared_memory() -> None:
    y = _sharded().requires_grad_() * 2
    local, z = y.to_local(), (y * y).sum()
    with torch.no_grad():
        local.add_(1)
    with changed:
        z.backward()

    kept, w = _sharded(), _sharded().requires_grad_()  # kept is saved for the gradient of w
    z = (kept * w).sum()
    kept.to_local().add_(1)
    with changed:
        z.backward()

    part = torch.ones(2, 2, dtype=torch.float64)
    z = (DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)]) * w).sum()
    part.add_(1)
    with changed:
        z.backward()

    part, plain = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    z = (part * plain).sum()
    DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)])[:, :1].mul_(2)
    with changed:
        z.backward()


@on_ranks(world_size=RANKS)
def test_writes_that_autograd_cannot_record_are_refused() -> None:
    y = _sharded().requires_grad_() * 2
    leaf = torch.ones(2, 2, requires_grad=True)
    wrapped = partial(DTensor.from_local, device_mesh=mesh_of((RANKS,)), placements=[Shard(0)])
    for written in (y.to_local(), wrapped(leaf), wrapped(leaf)[:, :1], wrapped(leaf.t())):
        with refused:
            written.mul_(3)
    assert torch.equal(leaf.detach(), torch.ones(2, 2))


# Writes that do the same to every row.
WRITTEN: dict[str, Callable[[Any], Any]] = {
    "whole": lambda d: d.mul_(3),
    "a column": lambda d: d[:, :1].mul_(3),
    "twice": lambda d: d.mul_(2).add_(1),
    "a product with itself": lambda d: d.mul_(d.detach() + 1),
    "relu_": lambda d: d.sub_(3).relu_(),
    "copy_": lambda d: d.copy_(d.detach() * 2),
    "masked": lambda d: d.masked_fill_(d > 6, 0.5),
    "through a view": lambda d: d.t().mul_(3),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("of_view", [False, True])
@on_ranks(world_size=RANKS)
def test_write_to_a_result_of_from_local_gives_values_and_gradients_of_plain_tensors(
    name: str, of_view: bool
) -> None:
    """Uses the result, or the input, after the write."""
    for used, placement in (("result", Shard(0)), ("result", Replicate()), ("input", Shard(0))):
        # A second write would spoil what relu saved of the first, in plain torch too.
        for times in (1, 2) if used == "input" and name != "relu_" else (1,):
            leaf, plain = (torch.ones(3, 3, dtype=torch.float64).cumsum(0).requires_grad_() for _ in range(2))
            y, expected = ((t * 2)[1:, :2] if of_view else (t * 2)[1:, :2].clone() for t in (leaf, plain))
            d = DTensor.from_local(y, mesh_of((RANKS,)), [placement])
            if used == "result":
                expected = expected.clone()
            for _ in range(times):
                WRITTEN[name](d)
                WRITTEN[name](expected)
            (d * d if used == "result" else y * y).sum().backward()
            (expected * expected).sum().backward()
            torch.testing.assert_close([d.to_local(), y], [expected, expected])  # one memory
            torch.testing.assert_close(leaf.grad, plain.grad)


@on_ranks(world_size=RANKS)
def test_write_to_a_result_of_from_local_reaches_the_base_of_its_argument() -> None:
    def written(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
        leaf = torch.ones(3, 3).requires_grad_()
        y = leaf * 2
        wrap(y[1:]).mul_(3)  # the view y[1:] is not kept
        wrap(y[:1]).mul_(5)
        with torch.no_grad():
            wrap(y).mul_(7)
        y.sum().backward()
        return [y.detach(), leaf.grad]

    got = written(lambda t: DTensor.from_local(t, mesh_of((RANKS,)), [Shard(0)]))
    torch.testing.assert_close(got, written(lambda t: t))


@on_ranks(world_size=RANKS)
def test_writes_without_autograd_reach_tensors_that_share_memory() -> None:
    x = _sharded()
    x.to_local().mul_(2)
    part = torch.ones(2, 2, dtype=torch.float64)
    DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)]).mul_(5)
    same = _sharded()
    same.redistribute(placements=[Shard(0)]).mul_(3)
    whole = distribute_tensor(_x(), mesh_of((RANKS,)), [Replicate()], src_data_rank=None)
    whole.full_tensor().mul_(7)  # shares memory with no other tensor
    assert torch.equal(x.full_tensor(), 2 * _x()) and torch.equal(part, torch.full_like(part, 5))
    assert torch.equal(same.full_tensor(), 3 * _x()) and torch.equal(whole.full_tensor(), _x())


def _assigned(put: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Makes parameters views of other tensors by `.data` and `set_`, and returns all of them after writes."""
    flat, x = put(torch.arange(9.0)), put(_x().float())
    a, b, c, d = (nn.Parameter(put(torch.ones(3))) for _ in range(4))
    a.data, b.data, c.data = flat[:6].view(3, 2), x, x[1:3]
    with torch.no_grad():
        d.set_(flat[5:])
    late = b.data[1:]
    flat.mul_(2)
    x.add_(1)
    read = [p.detach().clone() for p in (a, b, c, d, late)]
    (a.sum() ** 2 + (b * b).sum() + c.exp().sum() + d.sum()).backward()
    torch.optim.SGD([a, b, c, d], lr=0.1).step()
    c.data = put(torch.ones(2))
    c.data.zero_()
    twin = copy.deepcopy(d)
    assert isinstance(twin, nn.Parameter) and twin.requires_grad
    twin.data.add_(1)  # a deep copy shares no memory
    return [
        *read,
        twin.detach(),
        flat,
        x,
        late,
        *(p.grad for p in (a, b, d)),
        *(p.detach() for p in (a, b, c, d)),
    ]


@on_ranks(world_size=RANKS)
def test_tensor_shares_memory_with_a_tensor_assigned_to_its_data() -> None:
    for placed in (Shard(0), Replicate()):
        put = partial(
            distribute_tensor, device_mesh=mesh_of((RANKS,)), placements=[placed], src_data_rank=None
        )
        torch.testing.assert_close([t.full_tensor() for t in _assigned(put)], _assigned(torch.clone))


@on_ranks(world_size=RANKS)
def test_tensor_in_reused_memory_is_no_view_of_a_freed_tensor() -> None:
    """Ranks reuse different memory. A rank that took a new tensor for a view would gather it alone."""
    x, kept = _sharded(torch.ones(1, 4)), []
    for _ in range(30):
        squeezed = (x + 1).squeeze_(0)  # the sharded dim is gathered, and what it held before is free
        assert squeezed.full_tensor().equal(torch.full((4,), 2.0))
        kept.append((squeezed, *(x + 1 for _ in range(8))))
    assert not any(shares_memory(other) for _, *others in kept for other in others)


# ---- tools ----


@on_ranks(world_size=RANKS)
def test_debug_modes_show_ops_and_collectives() -> None:
    x = _sharded().requires_grad_()
    with DebugMode() as seen:
        x.softmax(0)
    with CommDebugMode() as counted:
        # To columns for the softmax, back to rows, and to columns for its gradient.
        x.softmax(0).redistribute(placements=[Shard(0)]).pow(2).sum().backward()
    plain = _x().requires_grad_()
    plain.softmax(0).pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    text = seen.debug_string()
    assert "aten::_softmax" in text and "_c10d_functional::all_to_all_single" in text
    assert counted.get_total_counts() == 3
