"""Tensors whose strides differ between ranks: what is sent arrives where it belongs; ranks that agree keep theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from dtbench_core import (
    CommTensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    local_map,
    to_torch,
)
from dtbench_core.bucketer import ReduceScatterBucketer
from dtbench_core.interop import collective_utils
from dtbench_core.interop.torch_dtensor import from_torch
from dtbench_core.torch_compat import all_gather_single

R, P = Replicate(), Partial()


def _dense(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`values`, which lie in memory with their dims in this order, outermost first."""
    back = [order.index(d) for d in range(len(order))]
    return values.permute(order).contiguous().permute(back)


def _gapped(values: torch.Tensor) -> torch.Tensor:
    """`values`, with other elements between theirs."""
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 99, dtype=values.dtype)
    wide[..., 1::2] = values
    return wide[..., 1::2]


def _layouts(values: torch.Tensor) -> list[torch.Tensor]:
    """`values`, as they may lie on ranks."""
    orders = list(itertools.permutations(range(values.ndim)))
    dense = [_dense(values, order) for order in (orders[-1], orders[0], orders[len(orders) // 2])]
    return [
        dense[0],
        dense[1],
        _gapped(values),
        dense[2],
        _gapped(dense[0].t() if values.ndim == 2 else values),
    ][:4]


def _values(shape: tuple[int, ...], start: float = 0.0) -> torch.Tensor:
    return start + torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def _mine(values: torch.Tensor) -> torch.Tensor:
    """`values`, as they lie on this rank."""
    return _layouts(values)[dist.get_rank() % 4]


SHAPES = (3, 2), (4, 6), (5, 3), (2, 3, 4), (4, 3, 2, 2)


@on_ranks
def test_distribute_tensor() -> None:
    wrong = []
    for shape, sizes in itertools.product(SHAPES, ((2,), (4,), (2, 2))):
        mesh = mesh_of(sizes)
        for placed in itertools.product((R, P, Shard(0), Shard(1)), repeat=len(sizes)):
            whole = _values(shape)
            if dist.get_rank() % 4:  # only the source's values count
                whole = whole * 0
            tensor = distribute_tensor(_mine(whole), mesh, placed)
            if mesh.get_coordinate() is None:
                continue
            expected = distribute_tensor(_values(shape), mesh, placed, src_data_rank=None).to_local()
            if not torch.equal(tensor.to_local(), expected):
                wrong.append((shape, sizes, placed))
            if not torch.equal(tensor.full_tensor(), _values(shape)):
                wrong.append((shape, sizes, placed, "full"))
    assert not wrong, wrong


def _moves(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Any, DTensor, torch.Tensor]]:
    """(placements, a tensor of local ones that lie otherwise on each rank, its values). Of uneven ones the strides are
    given, and are not those of all local tensors."""
    mesh = mesh_of(sizes)
    if mesh.get_coordinate() is None:
        return
    for placed in itertools.product((R, P, Partial("max"), Shard(0), Shard(1)), repeat=len(sizes)):
        if {"max", "sum"} <= {p.reduce_op for p in placed if isinstance(p, Partial)}:
            continue
        pending = tuple(R if p.is_partial() else p for p in placed)
        whole = distribute_tensor(_values(shape), mesh, pending, src_data_rank=None)
        factor = 1
        for p, n in zip(placed, sizes, strict=True):
            factor *= n if p == P else 1
        strides = {} if whole._spec.is_even() else {"shape": shape, "stride": whole.stride()}
        yield (
            placed,
            DTensor.from_local(_mine(whole.to_local()), mesh, placed, **strides),
            factor * _values(shape),
        )


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "elementwise": lambda x: x * 2 + x,
    "transposed": lambda x: x.transpose(0, 1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "contiguous itself": lambda x: x.contiguous() - 1,
    "flat view": lambda x: x.reshape(-1),
    "transposed, flat view": lambda x: x.transpose(0, 1).reshape(-1),
    "transposed, split view": lambda x: x.transpose(-1, -2).reshape(
        *x.shape[:-2], x.shape[-1], 1, x.shape[-2]
    ),
    "contiguous view": lambda x: x.transpose(-1, -2).contiguous().view(-1, x.shape[-2]).t(),
    "sliced": lambda x: x.transpose(0, 1)[1:].clone(),
    "reduced": lambda x: x.transpose(0, 1).sum(-1),
    "expanded": lambda x: x.unsqueeze(-1).expand(*x.shape, 3) + 1,
    "likes": lambda x: torch.ones_like(x.transpose(0, 1)) + x.transpose(0, 1),
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "two": lambda x: x.t() @ x if x.ndim == 2 else x + x.clone(memory_format=torch.contiguous_format),
    "by dims": lambda x: torch.stack(x.unbind(1)),
    "cumsum": lambda x: x.transpose(0, 1).cumsum(0),
    "softmax": lambda x: (x / 100).transpose(0, 1).softmax(0),
}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@on_ranks
def test_from_local(sizes: tuple[int, ...]) -> None:
    wrong, targets = [], itertools.cycle((R, Shard(0), Shard(1)))
    for shape in SHAPES if len(sizes) == 1 else ((4, 6), (4, 3, 2, 2)):
        for placed, tensor, values in _moves(shape, sizes):
            for name, program in PROGRAMS.items():
                if "view" in name and not tensor._spec.is_even():
                    continue
                result, expected = program(tensor), program(values)
                to = [next(targets) if result.ndim > 1 else Shard(0)] * len(sizes)
                moved = result.redistribute(placements=to).to_local()
                part = distribute_tensor(expected, tensor.device_mesh, to, src_data_rank=None).to_local()
                if not (torch.allclose(moved, part) and torch.allclose(result.full_tensor(), expected)):
                    wrong.append((shape, name, placed, to))
    assert not wrong, wrong[:10]


@on_ranks
def test_expanded_and_lazily_negated_ones() -> None:
    """Memory that says less, or other, than the values."""
    mesh, first = mesh_of((4,)), dist.get_rank() == 0
    row = torch.tensor([[1.0, 2.0]])
    for placed, whole in ((R, row.expand(3, 2)), (Shard(0), row.expand(12, 2)), (P, 4 * row.expand(3, 2))):
        local = row.expand(3, 2) if first else row.repeat(3, 1)
        tensor = DTensor.from_local(local, mesh, [placed])
        assert torch.equal(tensor.full_tensor(), whole), placed
        assert torch.equal((tensor.t() + 1).full_tensor(), whole.t() + 1), placed
    number = torch.complex(_values((3, 2)), _values((3, 2)) + 1)
    for lazy in (number.conj(), number.conj().imag, number.conj().imag[:1, :1]):
        local = lazy if first else lazy.resolve_conj().resolve_neg()
        for placed, whole in ((R, lazy), (Shard(1), torch.cat([lazy] * 4, 1)), (P, 4 * lazy)):
            assert torch.equal(DTensor.from_local(local, mesh, [placed]).full_tensor(), whole), (lazy, placed)
            spread = distribute_tensor(local, mesh, [placed] if placed != P else [Shard(0)])
            assert torch.equal(spread.full_tensor(), lazy), (lazy, placed)


# ---- where ranks agree, what is seen stays ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks
def test_strides_are_kept(shape: tuple[int, ...]) -> None:
    """As torch says them: of the values in the layout that every rank gives, dense."""
    mesh = mesh_of((2,))
    if mesh.get_coordinate() is None:
        return
    for order in itertools.permutations(range(len(shape))):
        whole = _dense(_values(shape), order)
        for placed in (R, Shard(0), Shard(1)):
            for tensor in (
                distribute_tensor(whole, mesh, [placed]),
                distribute_tensor(whole, mesh, [placed], src_data_rank=None),
            ):
                assert tensor.stride() == tensor.full_tensor().stride() == whole.stride(), (order, placed)
                moved = tensor.redistribute(placements=[Shard(1 if placed == Shard(0) else 0)])
                assert moved.stride() == whole.stride(), (order, placed)
                for local in (tensor.to_local(), moved.to_local()):
                    assert local.numel() == 0 or local.stride() == _dense(local, order).stride(), (
                        order,
                        placed,
                    )


# ---- local_map, gradients ----


@on_ranks
def test_local_map_and_gradients() -> None:
    mesh = mesh_of((4,))
    weight = _values((8, 4)) / 10
    for placed, to in itertools.product((R, Shard(0), Shard(1)), repeat=2):
        mapped = local_map(lambda x: _mine(x * 2), [placed], ([placed],))
        tensor = distribute_tensor(weight, mesh, [placed], src_data_rank=None).requires_grad_()
        result = mapped(tensor)
        assert torch.equal(result.full_tensor(), weight * 2), (placed, to)
        moved = result.redistribute(placements=[to])
        local = moved.to_local()
        local.backward(_mine(local.detach() + 1))
        assert torch.allclose(tensor.grad.full_tensor(), 2 * (weight * 2 + 1)), (placed, to)
        tensor.grad = None
        local = distribute_tensor(weight, mesh, [placed], src_data_rank=None).to_local().requires_grad_()
        whole = DTensor.from_local(local, mesh, [placed]).full_tensor()
        whole.backward(_mine(weight))
        assert torch.equal(
            local.grad, distribute_tensor(weight, mesh, [placed], src_data_rank=None).to_local()
        )


@on_ranks
def test_torchs_dtensors() -> None:
    from torch.distributed.tensor import DTensor as Theirs
    from torch.distributed.tensor import Replicate as TheirReplicate
    from torch.distributed.tensor import Shard as TheirShard

    mesh, values = mesh_of((4,)), _values((8, 4))
    for placed in (TheirReplicate(), TheirShard(0), TheirShard(1)):
        local = distribute_tensor(values, mesh, [placed], src_data_rank=None).to_local()
        ours = from_torch(Theirs.from_local(_mine(local), mesh, [placed]))
        assert torch.equal(ours.full_tensor(), values), placed
        assert torch.equal(to_torch(ours).full_tensor(), values), placed


# ---- what a transport reads by itself: on gloo, which takes memory as it lies ----


@on_gloo_ranks(world_size=2)
def test_buckets_and_collective_utils() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    values = _values((4, 6))
    for layout in range(4):  # another one on each rank
        mine = _layouts(values + rank)[(layout + rank) % 4]
        total = 2 * values + 1
        for cap, hold in itertools.product((0, 1), (False, True)):
            results: list[torch.Tensor] = []
            bucketer = ReduceScatterBucketer(cap, hold_inputs=hold)
            for given in (mine, [mine, mine + 1], mine.reshape(-1)):
                bucketer.reduce_scatter_async(given, mesh.get_group(), results.append)
            bucketer.flush()
            assert torch.equal(results[0], total.chunk(2)[rank])
            assert torch.equal(results[1], total + 2 * rank)
            assert torch.equal(results[2], total.reshape(-1).chunk(2)[rank])
        for async_op in (False, True):
            output = mine.clone() if layout % 2 else _gapped(values * 0)
            work = collective_utils.mesh_broadcast(mine, mesh, async_op=async_op)
            if work is not None:
                work.wait()
            assert torch.equal(mine, values)
            parts = [_layouts(values + i)[(layout + i) % 4] for i in range(2)]
            work = collective_utils.mesh_scatter(output, parts, mesh, async_op=async_op, group_src=1)
            if work is not None:
                work.wait()
            assert torch.equal(output, values + rank)
        part = _layouts(values + 10 * rank)[(layout + rank) % 4]
        whole = torch.cat([values, values + 10])
        moved = collective_utils.shard_dim_alltoall(part, 0, 1, mesh, 0)
        assert torch.equal(moved, whole.chunk(2, 1)[rank])


def _lists(values: torch.Tensor, layout: int) -> list[torch.Tensor]:
    return [_layouts(values * 0)[(layout + i) % 4] for i in range(2)]


@on_gloo_ranks(world_size=2)
def test_comm_tensors() -> None:
    rank, values = dist.get_rank(), _values((4, 6))
    for layout, async_op in itertools.product(range(4), (False, True)):
        mine, each = _layouts(values + rank)[(layout + rank) % 4], [values, values + 1]

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            return CommTensor(tensor.clone() if tensor.is_contiguous() else tensor)

        reduced = wrap(_layouts(values + rank)[(layout + rank) % 4])
        dist.all_reduce(reduced, async_op=async_op)
        assert torch.equal(reduced + 0, 2 * values + 1)
        sent = wrap(_layouts(values + rank)[(layout + rank) % 4])
        dist.broadcast(sent, 1, async_op=async_op)
        assert torch.equal(sent + 0, values + 1)
        gathered = list(map(wrap, _lists(values, layout)))
        dist.all_gather(gathered, wrap(mine), async_op=async_op)
        assert all(torch.equal(one + 0, e) for one, e in zip(gathered, each, strict=True))
        output = wrap(_layouts(values * 0)[(layout + rank) % 4])
        dist.reduce_scatter(output, [wrap(_layouts(e + rank)[layout]) for e in each], async_op=async_op)
        assert torch.equal(output + 0, 2 * values + 2 * rank + 1)
        dist.scatter(
            output, [wrap(one) for one in _layouts(values + 5)[:2]] if rank == 0 else None, async_op=async_op
        )
        assert torch.equal(output + 0, values + 5)
        whole = wrap(_layouts(torch.zeros(8, 6))[(layout + rank) % 4])
        all_gather_single(whole, wrap(mine), async_op=async_op)
        assert torch.equal(whole + 0, torch.cat(each))
        columns = torch.zeros(4, 12)
        dist.all_gather([wrap(part) for part in columns.chunk(2, 1)], CommTensor(mine), async_op=False)
        assert torch.equal(columns, torch.cat(each, 1)), "a sync collective is over when it returns"
        received = wrap(_layouts(values * 0)[(layout + rank) % 4])
        dist.irecv(received, 1 - rank)
        dist.send(wrap(mine), 1 - rank)
        assert torch.equal(received + 0, each[1 - rank])

        def summed(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            result = CommTensor(tensor * 2)
            dist.all_reduce(result, async_op=True)
            gathered = CommTensor(output)
            dist.all_gather([gathered, CommTensor(torch.empty_like(output))], CommTensor(result + 1))
            return gathered + 0

        traced = make_fx(summed)(mine, output := _layouts(values * 0)[(layout + rank) % 4])
        assert torch.equal(traced(mine, output), 4 * values + 3)
