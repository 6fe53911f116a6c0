"""torch.autograd.grad of DTensors, with all that it takes, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.gloo_world import forget_meshes, mesh_of, on_worlds
from core.tests.torch_version import needs_213
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor


def _check(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor(), want)


@on_worlds
def test_gradients_are_those_of_torch() -> None:
    mesh = mesh_of((4,))
    full = torch.arange(32.0).view(8, 4) / 7
    plain, unused = full.clone().requires_grad_(), full.clone().requires_grad_()
    x, y = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (plain, unused))
    cotangent = full.sin()
    spread = distribute_tensor(cotangent, mesh, [Replicate()], src_data_rank=None)

    # A cotangent placed otherwise, a scalar without one, several outputs at once.
    got = torch.autograd.grad(x.exp(), x, spread)[0]
    _check(got, torch.autograd.grad(plain.exp(), plain, cotangent)[0])
    _check(torch.autograd.grad((x * x).sum(), x)[0], 2 * plain.detach())
    got = torch.autograd.grad([x.exp(), x.sin()], [x], [spread, spread])[0]
    _check(got, torch.autograd.grad([plain.exp(), plain.sin()], [plain], [cotangent, cotangent])[0])

    # Kept, and differentiated again.
    made = x.exp()
    first = torch.autograd.grad(made, x, spread, retain_graph=True)[0]
    assert torch.equal(first.full_tensor(), torch.autograd.grad(made, x, spread)[0].full_tensor())
    once = torch.autograd.grad(x**3, x, spread, create_graph=True)[0]
    _check(torch.autograd.grad(once, x, spread)[0], 6 * plain.detach() * cotangent**2)

    # Inputs that the output does not depend on.
    missing = torch.autograd.grad(x.exp(), [x, y], spread, allow_unused=True)
    assert missing[1] is None and isinstance(missing[0], DTensor)
    zeros = torch.autograd.grad(x.exp(), [x, y], spread, materialize_grads=True)[1]
    _check(zeros, torch.zeros(8, 4))


@pytest.fixture
def x(fake_world: Any) -> Iterator[DTensor]:
    fake_world(4)
    made: DTensor = distribute_tensor(torch.ones(8, 4), mesh_of((4,)), [Shard(0)]).requires_grad_()
    yield made
    forget_meshes()


def test_what_torch_refuses_is_refused(x: DTensor) -> None:
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(x.exp(), x, x.detach()[:4])
    with pytest.raises(RuntimeError, match=r"unused|not have been used"):
        torch.autograd.grad(x.exp(), [x.detach().requires_grad_()], x.detach())
    with pytest.raises(RuntimeError, match="scalar outputs"):
        torch.autograd.grad(x.exp(), x)
    made = x.exp()
    torch.autograd.grad(made, x, x.detach())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(made, x, x.detach())


@needs_213("there is no such op")
@on_worlds
def test_linear_cross_entropy_in_chunks() -> None:
    """torch's op for it makes plain buffers in its backward. For a DTensor's loss and a plain one."""
    mesh, options = mesh_of((4,)), nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    full = [torch.arange(n * 4.0).view(n, 4).sin() for n in (6, 5)]
    target = torch.tensor([0, 3, 1, 4, 2, 2])

    for reduction in ("none", "mean"):
        plain = [t.clone().requires_grad_() for t in full]
        wanted = F.linear_cross_entropy(*plain, target, reduction=reduction, options=options)
        wanted.pow(2).sum().backward()
        for whole in (False, True):
            parts = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in full]
            labels = distribute_tensor(target, mesh, [Replicate()])
            loss = F.linear_cross_entropy(*parts, labels, reduction=reduction, options=options)
            _check(loss, wanted.detach())
            (loss.full_tensor() if whole else loss).pow(2).sum().backward()
            for part, reference in zip(parts, plain, strict=True):
                assert reference.grad is not None
                _check(part.grad, reference.grad)
