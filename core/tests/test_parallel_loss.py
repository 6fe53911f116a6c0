"""Cross entropy of logits whose classes are spread over ranks: values, gradients, and what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from dtbench_core import (
    DTensor,
    MixedTensorError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    count_collectives,
    distribute_tensor,
)
from dtbench_core.parallel import cross_entropy, loss_parallel

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Class weights, label smoothing, an ignored class.
OPTIONS = list(itertools.product([False, True], [0.0, 0.3], [None, 1]))


def _random(
    shape: tuple[int, ...], target_shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(shape, dtype=torch.float64, generator=rng)
    target = torch.randint(0, classes, target_shape, generator=rng)
    return logits, target, torch.rand(classes, dtype=torch.float64, generator=rng) + 0.5


def _moved(*counts: Any) -> int:
    """Bytes that went by other means than all-reduces."""
    return sum(nbytes for count in counts for name, nbytes in count.bytes.items() if name != "all_reduce")


def _compare(logits: Tensor, target: Tensor, placements: list[Any], sent: int | None, **options: Any) -> None:
    """Loss and gradient on the mesh against those of one device. sent: the most bytes that may be."""
    mesh = mesh_of((2, 2))
    x = logits.clone().requires_grad_()
    expected = F.cross_entropy(x, target, **options)
    factor = torch.linspace(0.5, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
    (expected * factor).sum().backward()
    dt = distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()
    with count_collectives() as forward, loss_parallel():
        loss = F.cross_entropy(dt, target, **options)
    rest = distribute_tensor(factor, mesh, src_data_rank=None)
    scaled = (loss * rest).sum()
    with count_collectives() as backward:
        scaled.backward()
    torch.testing.assert_close(loss.full_tensor(), expected, equal_nan=True)
    torch.testing.assert_close(dt.grad.full_tensor(), x.grad)
    assert loss.dtype == expected.dtype
    if sent is not None:
        assert dt.grad.placements == dt.placements
        assert _moved(forward, backward) == 0 and backward.calls.total() == 0
        assert forward.bytes["all_reduce"] <= sent


@on_worlds
def test_reductions() -> None:
    logits, target, weight = _random((6, 10), (6,), 10)
    layouts = ([R, S1], [S0, S1], [S1, S1], [S1, S0])
    cases = [*(("mean", layout) for layout in layouts), ("none", layouts[1]), ("sum", layouts[1])]
    for (reduction, placements), (weighted, smoothing, ignored) in itertools.product(cases, OPTIONS):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        options |= {"weight": weight} if weighted else {}
        options |= {"ignore_index": ignored} if ignored is not None else {}
        _compare(logits, target, placements, 8 * 80, **options)


@on_worlds
def test_shapes_and_layouts() -> None:
    for shape, target_shape, classes, placements in (
        ((4, 7, 3), (4, 3), 7, [Shard(2), S1]),
        ((2, 5, 2, 3), (2, 2, 3), 5, [S0, S1]),
        ((10,), (), 10, [R, S0]),
        ((10,), (), 10, [S0, S0]),
        ((4, 3), (4,), 3, [S1, S1]),  # the last rank has no class
        ((3, 4), (3,), 4, [S0, S1]),  # samples that the ranks cannot share evenly
        ((4, 9), (4,), 9, [R, RaggedShard(1, (2, 7))]),
    ):
        logits, target, weight = _random(shape, target_shape, classes)
        _compare(logits, target, placements, 8 * 80, weight=weight, label_smoothing=0.1)
    logits, target, weight = _random((6, 8), (6,), 8)
    # What is no stretch of classes, or no class number, or not sharded by class: right, by torch's own ops.
    _compare(logits, target, [StridedShard(1, split_factor=2), R], None, weight=weight)
    _compare(logits, logits.softmax(1), [R, S1], None, weight=weight, label_smoothing=0.1)
    _compare(logits, target, [S0, R], None, weight=weight)
    # Values at the edge.
    logits[0, :4] = -torch.inf
    logits[1] *= 1e4
    _compare(logits, torch.tensor([7, 1, 2, 3, 4, 5]), [R, S1], 8 * 80, reduction="sum")
    _compare(logits.float(), target, [S0, S1], 8 * 80)


@on_worlds
def test_ignored_samples() -> None:
    """The mean of nothing is NaN and its gradient zero; samples of one rank alone may be ignored."""
    mesh = mesh_of((2, 2))
    logits, target, _ = _random((4, 6), (4,), 6)
    target[:2] = -100
    _compare(logits, target, [S0, S1], 8 * 80)  # all that the first rank of mesh dim 0 has
    _compare(logits, target, [S0, R], None)
    dt = distribute_tensor(logits, mesh, [R, S1], src_data_rank=None).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(dt, torch.full((4,), -100))
    loss.backward()
    assert loss.full_tensor().isnan()
    assert not dt.grad.full_tensor().any()


@on_worlds
def test_refused() -> None:
    mesh = mesh_of((2, 2))
    logits, target, _ = _random((4, 6), (4,), 6)
    for placements in ([R, S1], [S0, S1], [S1, S0]):
        dt = distribute_tensor(logits, mesh, placements, src_data_rank=None)
        for wrong, reduction in ((6, "mean"), (-1, "none"), (100, "sum")):
            bad = target.clone()
            bad[3] = wrong  # with batch shards, on some ranks alone
            with loss_parallel(), pytest.raises(IndexError, match=r"1 invalid targets.*\[0, 6\)"):
                F.cross_entropy(dt, bad, reduction=reduction)
    assert mesh.get_coordinate() is not None  # nobody waits for anybody
    with loss_parallel():
        plain = F.cross_entropy(logits, target)  # what is not distributed is not touched
    torch.testing.assert_close(plain, F.cross_entropy(logits, target))
    with pytest.raises(MixedTensorError):
        F.cross_entropy(dt, target)


@on_worlds
def test_ways_to_call() -> None:
    mesh = mesh_of((4,), ("tp",))
    logits, target, weight = _random((6, 12), (6,), 12)
    x = logits.clone().requires_grad_()
    module = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2)
    expected = module(x, target)
    expected.backward()
    there = [distribute_tensor(one, mesh, [R], src_data_rank=None) for one in (target, weight)]

    def calls() -> Any:
        with loss_parallel(), loss_parallel():
            yield module(dt, target)
        yield cross_entropy(dt, target, weight, label_smoothing=0.2)
        yield cross_entropy(input=dt, target=there[0], weight=there[1], label_smoothing=0.2)
        yield F.cross_entropy(dt, *there, label_smoothing=0.2)  # without the context, with DTensors alone

    for placement in (S1, Partial()):
        dt = distribute_tensor(logits, mesh, [S1], src_data_rank=None)
        if placement == Partial():
            dt = DTensor.from_local(logits / 4, mesh, [placement])
        dt.requires_grad_()
        for loss in calls():
            torch.testing.assert_close(loss.full_tensor(), expected)
            (grad,) = torch.autograd.grad(loss, dt)
            torch.testing.assert_close(grad.full_tensor(), x.grad)


@on_worlds
def test_other_ops_inside() -> None:
    """The context is about cross_entropy: what else is computed of class-sharded logits inside is as outside."""
    mesh = mesh_of((4,), ("tp",))
    logits, target, _ = _random((6, 12), (6,), 12)
    weights = torch.linspace(-1, 1, 72, dtype=torch.float64).view(6, 12)
    x = logits.clone().requires_grad_()
    dt = distribute_tensor(logits, mesh, [S1], src_data_rank=None).requires_grad_()
    there, factors = (distribute_tensor(one, mesh, [R], src_data_rank=None) for one in (target, weights))

    def total(values: Any, labels: Any, scale: Any) -> Any:
        first = (F.log_softmax(values, 1) * scale).sum() + F.nll_loss(values.log_softmax(1), labels)
        return first + (values.softmax(1) * scale).sum()

    expected = total(x, target, weights)
    expected.backward()
    with loss_parallel():
        loss = total(dt, there, factors)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(dt.grad.full_tensor(), x.grad)


@on_ranks
def test_precision_and_bytes() -> None:
    """Half precision adds up in float32, autocast asks for it; nothing as large as the logits is sent."""
    mesh = mesh_of((4,), ("tp",))
    rng = torch.Generator().manual_seed(1)
    logits, target = torch.randn(8, 4096, generator=rng), torch.randint(0, 4096, (8,), generator=rng)
    half = logits.bfloat16()
    dt = distribute_tensor(half, mesh, [S1], src_data_rank=None).requires_grad_()
    there = distribute_tensor(target, mesh, [R], src_data_rank=None)
    with count_collectives() as count:
        loss = F.cross_entropy(dt, there)
        loss.backward()
    # The maxima in bfloat16, with what tells a NaN, and two sums in float32: the logits take 65536 bytes.
    assert dict(count.bytes) == {"all_reduce": 2 * 8 * 2 + 2 * 8 * 4}
    assert loss.dtype == dt.grad.dtype == torch.bfloat16
    x = half.float().requires_grad_()
    expected = F.cross_entropy(x, target)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor().float(), expected.detach(), rtol=2**-8, atol=0)
    torch.testing.assert_close(dt.grad.full_tensor().float(), x.grad, rtol=2**-7, atol=1e-8)
    with torch.autocast("cpu", torch.bfloat16), loss_parallel():
        cast = F.cross_entropy(dt, target)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast.full_tensor(), expected)


@on_ranks
def test_second_derivatives() -> None:
    mesh = mesh_of((4,), ("tp",))
    logits, target, weight = _random((3, 8), (3,), 8)
    x = logits.clone().requires_grad_()
    dt = distribute_tensor(logits, mesh, [S1], src_data_rank=None).requires_grad_()

    def twice(values: Any, *rest: Any) -> Any:
        loss = F.cross_entropy(values, *rest, label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, values, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), values)[0]

    there = [distribute_tensor(one, mesh, [R], src_data_rank=None) for one in (target, weight)]
    torch.testing.assert_close(twice(dt, *there).full_tensor(), twice(x, target, weight))
