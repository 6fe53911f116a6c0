"""Dispatch of an op: caching, the fast path of repeated calls, and modes and transforms that rule it out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import dtbench_core
from core.tests.on_device import DEVICE_TYPE, torch
from core.tests.torch_version import needs_213
from dtbench_core import (
    DTensor,
    PlacementError,
    Replicate,
    Shard,
    cache_info,
    clear_caches,
)
from dtbench_core.dispatch import entry as dispatching


def distribute_tensor(full: torch.Tensor, device_mesh: DeviceMesh, placements: Any) -> DTensor:
    """Distributes without communication, because a scatter of the fake group returns arbitrary values."""
    return dtbench_core.distribute_tensor(full, device_mesh, placements, src_data_rank=None)


@pytest.fixture
def mesh(fake_world: Callable[[int], None]) -> DeviceMesh:
    """A mesh of eight simulated ranks on rank 0, with empty caches."""
    fake_world(8)
    clear_caches()
    return init_device_mesh(DEVICE_TYPE, (8,))


@pytest.fixture
def x(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the ops that reach torch_dispatch."""
    seen: list[str] = []
    original = dispatching.torch_dispatch

    def spy(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(op))
        return original(cls, op, types, args, kwargs)

    monkeypatch.setattr(DTensor, "__torch_dispatch__", classmethod(spy))
    return seen


def _repeat(call: Any, *args: Any) -> None:
    for _ in range(3):
        call(*args)


FAST: dict[str, Any] = {
    "one result": lambda x, w: [torch.relu(x)],
    "one of several results": lambda x, w: [F.layer_norm(x, (4,), w, w)],
    "a new list": lambda x, w: torch._foreach_sqrt([x + 1, x * 2]),
}


@pytest.mark.parametrize("name", FAST)
def test_repeated_call_skips_torch_dispatch(x: DTensor, slow_calls: list[str], name: str) -> None:
    weight = distribute_tensor(torch.rand(4), x.device_mesh, [Replicate()])
    with torch.no_grad():
        _repeat(lambda: FAST[name](x, weight))
        slow_calls.clear()
        results = FAST[name](x, weight)
    expected = FAST[name](x.to_local(), weight.to_local())
    assert not slow_calls and type(results) is type(expected)
    for result, plain in zip(results, expected, strict=True):
        assert result.placements == (Shard(0),) and torch.equal(result.to_local(), plain)


def test_repeated_views_share_the_version_of_their_base(x: DTensor) -> None:
    for call in (x.t, x.detach, lambda: x.view(-1), lambda: x[:, 1:], lambda: torch.transpose(x, 0, 1)):
        _repeat(call)
        before = x._version
        call().add_(1)
        assert x._version == before + 1


def test_repeated_writes_bump_the_version_as_in_torch(x: DTensor) -> None:
    expected = x.to_local().clone()
    for _ in range(4):
        assert x.add_(1) is x
        expected += 1
    assert torch.equal(x.to_local(), expected)
    w = torch.full_like(x, 2.0).requires_grad_()
    out = torch.zeros_like(x)
    for call, written in (
        (lambda: x.add_(1), x),
        (lambda: x.mul_(x), x),
        (lambda: torch.add(x, x, out=out), out),
    ):
        for _ in range(4):
            before = written._version
            product = w * written  # saves what is written next
            call()
            assert written._version == before + 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


def test_plan_cache_distinguishes_dims_from_numbers(x: DTensor) -> None:
    square = x.redistribute(placements=[Replicate()])[:4]
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: torch.max(t, t * 2),
        lambda t: torch.max(t, 0).values,
        lambda t: torch.max(t, 1).values,
        lambda t: t.sum(0),
        lambda t: t.sum(1),
    ]
    for call in calls * 3:
        assert torch.equal(call(square).to_local(), call(square.to_local()))


@pytest.mark.parametrize("form", [list, tuple])
def test_requires_grad_is_detected_inside_sequences(x: DTensor, form: Any) -> None:
    """torch's check of whether an argument requires grad does not look into tuples."""
    y = x.clone().requires_grad_()
    for tensors in (form((y, x)), form((x, y))):
        assert torch.cat(tensors, 1).requires_grad and torch.cat(tensors=tensors, dim=1).requires_grad
    assert torch.cat((x, x)).requires_grad is False


def test_autograd_grad_takes_plain_and_distributed_inputs(x: DTensor) -> None:
    plain = torch.ones(1, 4, requires_grad=True)
    y = x.clone().requires_grad_()
    out = (DTensor.from_local(plain, x.device_mesh, [Shard(0)]) * y).to_local()
    first, second = torch.autograd.grad(out, (plain, y), torch.full((1, 4), 2.0))
    assert torch.equal(first, 2 * x.to_local()) and torch.equal(second.to_local(), torch.full((1, 4), 2.0))


def test_dispatch_modes_see_every_op(x: DTensor) -> None:
    ops: list[str] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    _repeat(lambda: x + x)
    with Recording():
        x + x
    assert ops == ["aten.add.Tensor"]


def test_profile_shows_the_op_that_communicates(x: DTensor) -> None:
    torch.mm(x, x.T)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.mm(x, x.T)
    gathers = [e for e in profiler.events() if "allgather" in e.name and e.name.startswith("c10d::")]
    assert gathers
    for gather in gathers:
        assert any(
            e.name == "aten::mm"
            and e.time_range.start <= gather.time_range.start
            and gather.time_range.end <= e.time_range.end
            for e in profiler.events()
        )


def test_repeated_calls_follow_autocast_and_default_dtype(x: DTensor) -> None:
    a = distribute_tensor(torch.randn(8, 8), x.device_mesh, [Replicate()])
    counts = distribute_tensor(torch.arange(8), x.device_mesh, [Shard(0)])
    _repeat(lambda: (torch.mm(a, a), counts * 0.5, x + 1))
    with torch.autocast(DEVICE_TYPE, torch.bfloat16):
        result = torch.mm(a, a)
    assert result.dtype == result.to_local().dtype == torch.bfloat16
    assert torch.mm(a, a).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        result = counts * 0.5
        assert result.dtype == result.to_local().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (counts * 0.5).dtype == torch.float32
    with torch.inference_mode():
        result = x + 1
    assert result.is_inference() and not (x + 1).is_inference()


def test_caches_are_bounded(x: DTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtbench_core.runtime.MAX_PLANS", 5)
    for dim in range(2):
        for start in range(4):
            x.sum(dim).view(-1)[start : start + 1].sum()
    counts = cache_info()
    assert 0 < counts["plans"] <= 5 and counts["fast"] <= 5
    clear_caches()
    assert cache_info() == {"plans": 0, "fast": 0, "bound": 5, "misses": counts["misses"]}


def test_cache_info_counts_calls_that_found_no_plan(x: DTensor) -> None:
    for _ in range(2):
        torch.add(x, x)  # the first call of a function may be recorded again in the next one

    def misses_of(other: DTensor) -> int:
        before = cache_info()["misses"]
        torch.add(other, other)
        return cache_info()["misses"] - before

    longer = DTensor.from_local(torch.ones(13, 5), x.device_mesh, [Shard(0)] * x.device_mesh.ndim)
    assert misses_of(x) == 0
    assert misses_of(longer) == 2  # of the function, and of the op below autograd
    assert misses_of(longer) == 0
    clear_caches()
    assert misses_of(longer) == 2


def test_equal_mesh_of_a_new_world_has_its_own_groups() -> None:
    """A mesh of a destroyed world must not provide its process groups to an equal mesh."""
    groups = []
    for _ in range(2):
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        device_mesh = init_device_mesh(DEVICE_TYPE, (8,))
        groups.append(distribute_tensor(torch.ones(8), device_mesh, [Shard(0)])._spec.info.groups[0])
        assert groups[-1] is device_mesh.get_group(0)
        dist.destroy_process_group()
    assert groups[0] is not groups[1]


def test_repeated_list_writes_bump_each_version(mesh: DeviceMesh) -> None:
    xs, ys = (
        [distribute_tensor(torch.full((8, 2), value), mesh, [Shard(0)]) for _ in range(3)]
        for value in (1.0, 2.0)
    )
    for step in range(4):
        versions = [x._version for x in xs]
        assert torch._foreach_add_(xs, ys)[0] is xs[0]
        assert [x._version for x in xs] == [v + 1 for v in versions]
        assert all(bool((x.to_local() == 3 + 2 * step).all()) for x in xs)


SGD = {
    **dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0),
    **dict.fromkeys(("nesterov", "maximize"), False),
}


def test_list_write_to_a_copied_view_is_refused(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    y = distribute_tensor(torch.ones(1, 2), mesh, [Replicate()])
    for _ in range(3):
        with pytest.raises(PlacementError, match="one view is a copy"):
            torch._fused_sgd_([x[:1], x[1:2]], [y, y], [], lr=0.1, is_first_step=True, **SGD)


def test_contiguous_and_reshape_copy_if_the_full_tensor_is_strided(mesh: DeviceMesh) -> None:
    """A shard of one row is contiguous even if the full tensor is not."""
    channels_last = {"memory_format": torch.channels_last}
    calls: list[tuple[tuple[int, ...], Any]] = [
        ((4, 8), lambda t: t.contiguous()),
        ((8, 8, 1, 2), lambda t: t.contiguous(**channels_last)),
        ((8, 8, 1, 2), lambda t: t.to(**channels_last)),
        ((4, 8), lambda t: t.ravel()),
        ((4, 8), lambda t: t.reshape(16, 2)),
    ]
    for shape, call in calls:
        full = torch.arange(float(torch.Size(shape).numel())).view(shape).transpose(0, 1)
        for _ in range(3):
            x = distribute_tensor(full, mesh, [Shard(0)])
            before, result = x.to_local().clone(), call(x)
            assert result.stride() == call(full).stride()
            result.to_local().fill_(-1)
            assert torch.equal(x.to_local(), before)
            assert torch.equal(
                call(x).to_local(), call(full)[: len(result.to_local())].reshape_as(result.to_local())
            )


@needs_213("the fake group leaves unwritten what it gathers")
def test_results_of_a_copied_view_may_be_written(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    view = x[:1]
    for result in (
        view.redistribute(placements=[Replicate()]),
        view.redistribute(forward_dtype=torch.float64),
        view + 0,
        view.detach().clone(),
    ):
        assert type(result) is DTensor and bool((result.add_(1).to_local() == 2).all())
    column = view[:, :1]
    assert type(column) is type(view) is not DTensor
    x.to_local().fill_(3)
    assert all(bool((stale.to_local() == 3).all()) for stale in (view, column))


# ---- modes and transforms ----


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
    return (
        distribute_tensor(torch.arange(32.0).view(8, 4) / 8 - 2, mesh, [Shard(0)]),
        distribute_tensor(torch.arange(16.0).view(4, 4) / 4, mesh, [Replicate()]),
    )


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_stay_fake_and_real_ones_real(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _repeat(CALLS[name], x, w)
    real = CALLS[name](x, w).to_local()
    for _ in range(3):
        with FakeTensorMode():
            fake_x = DTensor.from_local(torch.empty(1, 4), mesh, [Shard(0)])
            result = CALLS[name](fake_x, DTensor.from_local(torch.empty(4, 4), mesh, [Replicate()]))
            assert isinstance(result.to_local(), FakeTensor) and result.to_local().shape == real.shape
    again = CALLS[name](x, w).to_local()
    assert not isinstance(again, FakeTensor) and torch.equal(again, real)


@pytest.mark.parametrize("name", CALLS)
def test_trace_contains_the_local_ops(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _repeat(CALLS[name], x, w)

    def program(local_x: torch.Tensor, local_w: torch.Tensor) -> torch.Tensor:
        placed_x = DTensor.from_local(local_x, mesh, [Shard(0)])
        return CALLS[name](placed_x, DTensor.from_local(local_w, mesh, [Replicate()])).to_local()

    traced = make_fx(program)(x.to_local(), w.to_local())
    other = x.to_local() + 1
    expected = CALLS[name](DTensor.from_local(other, mesh, [Shard(0)]), w).to_local()
    assert torch.equal(traced(other, w.to_local()), expected)


@pytest.mark.parametrize(
    ("name", "function"), [("relu", "relu"), ("linear", "linear"), ("view", "view"), ("view", "__getitem__")]
)
def test_torch_function_modes_see_repeated_calls(mesh: DeviceMesh, name: Any, function: Any) -> None:
    names: list[str] = []

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    x, w = _inputs(mesh)
    _repeat(CALLS[name], x, w)
    with Recording():
        CALLS[name](x, w)
    assert function in names


# torch scripts some of its own formulas when forward mode is first used, and takes them apart into prims,
# which have no rules: right, and slow.
@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_have_forward_mode_derivatives(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    _repeat(CALLS[name], x, w)
    tangents = []
    for point, weight in ((x, w), (x.to_local(), w.to_local())):
        with forward_ad.dual_level():
            result = CALLS[name](forward_ad.make_dual(point, torch.ones_like(point)), weight)
            tangents.append(forward_ad.unpack_dual(result).tangent)
    assert torch.equal(tangents[0].to_local(), tangents[1])


@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_equal_in_inference_mode(mesh: DeviceMesh, name: str) -> None:
    x, w = _inputs(mesh)
    expected = CALLS[name](x, w).to_local()
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(CALLS[name](x, w).to_local(), expected)


@pytest.mark.parametrize("name", [n for n in CALLS if n != "relu"])
def test_repeated_calls_have_second_derivatives(mesh: DeviceMesh, name: str) -> None:
    """Cubes the result, so that second derivatives are not zero, and compares each rank's own shard."""
    x, w = _inputs(mesh)
    _repeat(CALLS[name], x, w)
    seconds = []
    for point, weight in ((x, w), (x.to_local(), w.to_local())):
        leaf = point.detach().requires_grad_()
        (first,) = torch.autograd.grad(CALLS[name](leaf, weight).pow(3).sum(), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.sum(), leaf)[0])
    assert seconds[1].any()
    torch.testing.assert_close(seconds[0].to_local(), seconds[1])
