"""Where a mode, a transform or a subclass has a say, the fast calls give way: results are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from dtbench_core import DTensor, Replicate, Shard, distribute_tensor


@pytest.fixture
def mesh(fake_world: Callable[[int], None]) -> DeviceMesh:
    fake_world(4)
    return init_device_mesh("cpu", (4,))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + x,
    "scalar": lambda x, w: x * 2.0,
    "relu": lambda x, w: torch.relu(x),
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w),
    "view": lambda x, w: x.view(-1, 2, 2)[:, 0],
    "sum": lambda x, w: x.sum(1),
    "in place": lambda x, w: (x * 1).add_(1),
}


def _inputs(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    x = torch.arange(32.0).view(8, 4) / 8 - 2
    weight = torch.arange(16.0).view(4, 4) / 4
    return (
        distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None),
        distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None),
    )


def _learn(call: Callable[..., Any], *args: Any) -> None:
    for _ in range(3):
        call(*args)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_stay_fake_and_real_ones_real(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _learn(CALLS[name], x, w)
    real = CALLS[name](x, w).to_local()
    for _ in range(3):
        with FakeTensorMode():
            fake_x = DTensor.from_local(torch.empty(2, 4), mesh, [Shard(0)])
            fake_w = DTensor.from_local(torch.empty(4, 4), mesh, [Replicate()])
            result = CALLS[name](fake_x, fake_w)
            assert isinstance(result.to_local(), FakeTensor)
            assert result.to_local().shape == real.shape
    again = CALLS[name](x, w).to_local()
    assert not isinstance(again, FakeTensor) and torch.equal(again, real)


@pytest.mark.parametrize("name", CALLS)
def test_a_trace_holds_the_local_ops(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _learn(CALLS[name], x, w)

    def program(local_x: torch.Tensor, local_w: torch.Tensor) -> torch.Tensor:
        placed_x = DTensor.from_local(local_x, mesh, [Shard(0)])
        placed_w = DTensor.from_local(local_w, mesh, [Replicate()])
        return CALLS[name](placed_x, placed_w).to_local()

    traced = make_fx(program)(x.to_local(), w.to_local())
    other = x.to_local() + 1
    expected = CALLS[name](DTensor.from_local(other, mesh, [Shard(0)]), w).to_local()
    assert torch.equal(traced(other, w.to_local()), expected)


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_torch_function_modes_see_calls_that_were_learnt(mesh: DeviceMesh) -> None:
    x, w = _inputs(mesh)
    for name, function in (("relu", "relu"), ("linear", "linear"), ("view", "view"), ("view", "__getitem__")):
        _learn(CALLS[name], x, w)
        with _Seen() as seen:
            CALLS[name](x, w)
        assert function in seen.names


# torch scripts some of its own formulas when forward mode is first used, and takes them apart into prims,
# which have no rules: right, and slow.
@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_derivatives(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _learn(CALLS[name], x, w)
    tangent = torch.ones_like(x)
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(CALLS[name](forward_ad.make_dual(x, tangent), w)).tangent
    plain_x, plain_w = x.to_local(), w.to_local()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain_x, torch.ones_like(plain_x))
        expected = forward_ad.unpack_dual(CALLS[name](dual, plain_w)).tangent
    assert torch.equal(result.to_local(), expected)


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    expected = CALLS[name](x, w).to_local()
    with torch.inference_mode():
        for _ in range(3):
            result = CALLS[name](x, w)
            assert torch.equal(result.to_local(), expected)


@pytest.mark.parametrize("name", [n for n in CALLS if n != "relu"])
def test_double_backward(mesh: DeviceMesh, name: str) -> None:
    """Of a cubed result, so that second derivatives are not zero; each rank's own shard is compared."""
    x, w = _inputs(mesh)
    _learn(CALLS[name], x, w)
    seconds = []
    for one, weight in ((x, w), (x.to_local(), w.to_local())):
        leaf = one.detach().requires_grad_()
        (first,) = torch.autograd.grad(CALLS[name](leaf, weight).pow(3).sum(), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.sum(), leaf)[0])
    assert seconds[1].any()
    torch.testing.assert_close(seconds[0].to_local(), seconds[1])
