"""Modes and tools that look on, random numbers, placement objects."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from dtbench_suites.compat.program import RANKS, Given, program, randn


def _rows(w: Given, *places: str, grad: bool = False) -> torch.Tensor:
    return w.place(randn(8, 4), *(places or ("S(0)",)), grad=grad)


def _count(w: Given, place: str, to: str) -> Any:
    x, move = _rows(w, place), w.move(to)
    with CommDebugMode() as seen:
        out = move(x)
    return out, w.known(seen.get_total_counts(), 1)


@program("modes")
def comm_debug_mode_counts_an_all_gather(w: Given) -> Any:
    return _count(w, "S(0)", "R")


@program("modes")
def comm_debug_mode_sees_a_product(w: Given) -> Any:
    a, b = w.place(randn(8, 4), "S(1)"), w.place(randn(4, 8, seed=1), "S(0)")
    gather = w.gather()
    with CommDebugMode() as seen:
        out = gather(a @ b)
    return out, w.known(seen.get_total_counts(), 1)


@program("modes")
def comm_debug_mode_of_a_parallel_block(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), {"0": "col", "2": "row"})
    with CommDebugMode() as seen:
        out = net(randn(8, 4))
    return out, w.known(seen.get_total_counts(), 1)


@program("modes")
def debug_mode(w: Given) -> Any:
    from torch.utils._debug_mode import DebugMode

    x = _rows(w)
    with DebugMode() as seen:
        out = x.softmax(0)
    return out, w.known("softmax" in seen.debug_string(), True)


@program("modes")
def fake_tensor_mode(w: Given) -> Any:
    from torch._subclasses import FakeTensorMode

    enter = w.enter("S(0)")  # makes the mesh, whose ranks are compared by value
    with FakeTensorMode():
        out = enter(torch.empty(2, 4)).softmax(0)
        return w.known(tuple(out.shape), (8, 4))


@program("modes")
def profiler(w: Given) -> Any:
    x = _rows(w, grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        x.softmax(0).pow(2).sum().backward()
    return x.grad, any("softmax" in event.key for event in seen.key_averages())


@program("modes")
def dispatch_mode_of_a_user(w: Given) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = _rows(w, grad=True)
    with Look():
        out = x.softmax(0) @ x.t()
        out.pow(2).sum().backward()
    return out, x.grad


@program("modes")
def function_mode_of_a_user(w: Given) -> Any:
    from torch.overrides import TorchFunctionMode

    seen: list[bool] = []

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(True)
            return func(*args, **(kwargs or {}))

    x = _rows(w)
    with Look():
        out = torch.sin(x) + 1
    return out, bool(seen)


@program("modes")
def autocast(w: Given) -> Any:
    x, weight = _rows(w, "R", grad=True), w.place(randn(8, 4, seed=1), "S(0)", grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, weight)
    out.float().sum().backward()
    return out.dtype is torch.bfloat16, out.float(), weight.grad


@program("modes")
def inference_mode(w: Given) -> Any:
    x = _rows(w, grad=True)
    with torch.inference_mode():
        y = x.softmax(0)
        y.mul_(2)
    return w.leave()(y).is_inference(), y.requires_grad


@program("modes")
def inference_tensor_in_autograd(w: Given) -> Any:
    with torch.inference_mode():
        x = _rows(w)
    y = _rows(w, grad=True)
    (x * y).sum().backward()
    return y.grad


@program("modes")
def no_grad(w: Given) -> Any:
    x = _rows(w, grad=True)
    with torch.no_grad():
        y = x * 2
        x.add_(1)
    return x, y, y.requires_grad


@program("modes")
def set_grad_enabled(w: Given) -> Any:
    x = _rows(w, grad=True)
    with torch.no_grad(), torch.enable_grad():
        x.sin().sum().backward()
    return x.grad


@program("modes")
def default_dtype(w: Given) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        x = w.place(torch.ones(8, 4), "S(0)")
        return (x / 3).dtype is torch.float64, x / 3
    finally:
        torch.set_default_dtype(torch.float32)


@program("modes")
def default_device(w: Given) -> Any:
    with torch.device("cpu"):
        return _rows(w).softmax(0)


@program("modes")
def deterministic_algorithms(w: Given) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return _rows(w).cumsum(0), torch.empty_like(_rows(w)).isnan()
    finally:
        torch.use_deterministic_algorithms(False)


@program("modes")
def functionalization(w: Given) -> Any:
    x = _rows(w)
    return torch.func.functionalize(lambda t: (t * 2).add_(1))(x)


@program("modes")
def flops_counted(w: Given) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    a, b = _rows(w, "R"), w.place(randn(4, 8, seed=1), "R")
    with FlopCounterMode(display=False) as seen:
        out = a @ b
    return out, seen.get_total_flops()


# ---- random numbers ----


def _same_on_all(w: Given, local: torch.Tensor) -> bool:
    if w.plain:
        return True
    every = [torch.empty_like(local) for _ in range(RANKS)]
    dist.all_gather(every, local.contiguous())
    return all(torch.equal(every[0], other) for other in every)


@program("random")
def replicas_of_dropout_agree(w: Given) -> Any:
    torch.manual_seed(w.rank)
    _rows(w).uniform_()
    out = F.dropout(w.place(torch.ones(8, 4), "R"))
    return _same_on_all(w, w.leave()(out))


@program("random")
def replicas_of_dropout_agree_after_another_seed(w: Given) -> Any:
    torch.manual_seed(w.rank)
    torch.rand(w.rank + 1)
    out = F.dropout(w.place(torch.ones(8, 4), "R"))
    return _same_on_all(w, w.leave()(out))


@program("random")
def replicas_of_an_initial_weight_agree(w: Given) -> Any:
    torch.manual_seed(0)
    p = w.place(torch.zeros(8, 4), "R")
    nn.init.xavier_uniform_(p)
    return _same_on_all(w, w.leave()(p)), bool((p.abs() > 0).any())


@program("random")
def shards_draw_other_numbers(w: Given) -> Any:
    torch.manual_seed(0)
    x = w.gather()(w.place(torch.zeros(8, 64), "S(0)").normal_())
    return not torch.equal(x[:2], x[2:4])


@program("random")
def same_seed_same_numbers(w: Given) -> Any:
    torch.manual_seed(5)
    a = w.gather()(torch.rand_like(_rows(w)))
    torch.manual_seed(5)
    return torch.equal(a, w.gather()(torch.rand_like(_rows(w))))


@program("random")
def dropout_backward_uses_the_mask(w: Given) -> Any:
    torch.manual_seed(0)
    x = w.place(torch.ones(8, 16), "S(0)", grad=True)
    out = F.dropout(x, 0.5)
    out.sum().backward()
    return torch.equal(w.gather()(out).detach(), w.gather()(x.grad))


@program("random")
def random_factories_agree(w: Given) -> Any:
    if w.plain:
        return True, (8, 4)
    torch.manual_seed(0)
    x = w.api.randn((8, 4), device_mesh=w.mesh, placements=w.placements(["R"]))
    return _same_on_all(w, x.to_local()), tuple(x.shape)


@program("random")
def fork_of_the_generator(w: Given) -> Any:
    torch.manual_seed(3)
    with torch.random.fork_rng():
        a = w.gather()(torch.rand_like(_rows(w, "R")))
    return torch.equal(a, w.gather()(torch.rand_like(_rows(w, "R"))))


# ---- placements ----


def _partial(w: Given, op: str, plain: Any) -> Any:
    local = torch.arange(8.0).view(2, 4) + 1 + w.rank
    if w.plain:
        return plain(torch.stack([torch.arange(8.0).view(2, 4) + 1 + rank for rank in range(RANKS)]))
    made = w.api.DTensor.from_local(local, w.mesh, [w.api.Partial(op)], run_check=False)
    return made.redistribute(w.mesh, [w.api.Shard(1)])


@program("placements")
def partial_sum(w: Given) -> Any:
    return _partial(w, "sum", lambda t: t.sum(0))


@program("placements")
def partial_average(w: Given) -> Any:
    return _partial(w, "avg", lambda t: t.mean(0))


@program("placements")
def partial_largest(w: Given) -> Any:
    return _partial(w, "max", lambda t: t.amax(0))


@program("placements")
def partial_smallest(w: Given) -> Any:
    return _partial(w, "min", lambda t: t.amin(0))


@program("placements")
def partial_product(w: Given) -> Any:
    return _partial(w, "product", lambda t: t.prod(0))


@program("placements")
def distribute_tensor_to_partial(w: Given) -> Any:
    if w.plain:
        return randn(8, 4)
    return w.api.distribute_tensor(randn(8, 4), w.mesh, [w.api.Partial()])


@program("placements")
def placements_of_torch(w: Given) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if w.plain:
        return randn(8, 4) * 2
    return (w.api.distribute_tensor(randn(8, 4), w.mesh, [Shard(0)]) * 2).redistribute(w.mesh, [Replicate()])


@program("placements")
def placements_of_torch_in_styles(w: Given) -> Any:
    from torch.distributed.tensor import Shard

    torch.manual_seed(1)
    net, x = nn.Linear(4, 8), randn(8, 4)
    if w.plain:
        return net(x)
    style = w.parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
    return w.parallel.parallelize_module(net, w.mesh, style)(x.chunk(RANKS)[w.rank])


@program("placements")
def negative_dim_of_a_shard(w: Given) -> Any:
    x = randn(8, 4)
    return x if w.plain else w.api.distribute_tensor(x, w.mesh, [w.api.Shard(-1)])


@program("placements")
def mixed_with_a_plain_tensor_is_told(w: Given) -> Any:
    x = _rows(w)
    if w.plain:
        raise RuntimeError("got mixed torch.Tensor and DTensor")
    return x + torch.ones(8, 4)


@program("placements")
def a_number_beside_a_tensor(w: Given) -> Any:
    return 2 * _rows(w) + torch.tensor(3.0)


@program("placements")
def input_and_output_functions_of_two_arguments(w: Given) -> Any:
    torch.manual_seed(1)
    net, x = nn.Linear(4, 8), randn(8, 4)
    if w.plain:
        return net(x)
    enter, leave = w.enter("R"), w.leave()
    made = w.api.distribute_module(
        net, w.mesh, None, lambda m, i, mesh: enter(i[0]), lambda m, out, mesh: leave(out)
    )
    return made(x)


@program("placements")
def local_map(w: Given) -> Any:
    if w.plain:
        return randn(8, 4) * 2
    module = "dtbench_core" if w.impl == "core" else "torch.distributed.tensor.experimental"
    mapped = importlib.import_module(module).local_map
    shard = w.placements(["S(0)"])
    return mapped(lambda t: t * 2, out_placements=shard, in_placements=(shard,), device_mesh=w.mesh)(_rows(w))


@program("placements")
def asynchronous_redistribute(w: Given) -> Any:
    x: Any = _rows(w)
    return x if w.plain else x.redistribute(w.mesh, w.placements(["R"]), async_op=True) + 0
