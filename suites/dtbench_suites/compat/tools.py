"""Modes and tools that look on, random numbers, placement objects."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, randn


def _count(w: Given, place: str, to: str) -> AnyTensor:
    x, move = w.rows(place), w.move(to)
    with CommDebugMode() as seen:
        out = move(x)
    return out, w.expected(seen.get_total_counts(), 1)


def _same_on_all(w: Given, local: torch.Tensor) -> bool:
    if w.plain:
        return True
    every = [torch.empty_like(local) for _ in range(w.ranks)]
    dist.all_gather(every, local.contiguous())
    return all(torch.equal(every[0], other) for other in every)


def _partial(w: Given, op: str, plain: Any) -> AnyTensor:
    local = torch.arange(8.0).view(2, 4) + 1 + w.rank
    if w.plain:
        return plain(torch.stack([torch.arange(8.0).view(2, 4) + 1 + rank for rank in range(w.ranks)]))
    made = w.api.DTensor.from_local(local, w.mesh, [w.api.Partial(op)], run_check=False)
    return made.redistribute(w.mesh, [w.api.Shard(1)])


def _on_ranks(w: Given, ranks: Sequence[int]) -> AnyTensor:
    """Rows over a mesh of these ranks, and what they become."""
    if w.plain:
        return randn(8, 4), randn(8, 4).exp().sum(0)
    mesh, [rows] = DeviceMesh("cpu", list(ranks)), w.placements(["S(0)"])
    x = w.api.distribute_tensor(randn(8, 4), mesh, [rows], src_data_rank=None)
    return x, x.exp().sum(0)


class Modes(Programs):
    topic = "modes"
    cases: ClassVar[Cases] = {
        "comm debug mode counts an all gather": lambda w: _count(w, "S(0)", "R"),
        "functionalization": lambda w: w.on(lambda x: torch.func.functionalize(lambda t: (t * 2).add_(1))(x)),
    }

    def comm_debug_mode_sees_a_product(self) -> object:
        a, b = self.rows("S(1)"), self.place(randn(4, 8, seed=1), "S(0)")
        gather = self.gather()
        with CommDebugMode() as seen:
            out = gather(a @ b)
        return out, self.expected(seen.get_total_counts(), 1)

    def comm_debug_mode_of_a_parallel_block(self) -> object:
        net = self.block()
        with CommDebugMode() as seen:
            out = net(randn(8, 4))
        return out, self.expected(seen.get_total_counts(), 1)

    def debug_mode(self) -> object:
        from torch.utils._debug_mode import DebugMode

        x = self.rows()
        with DebugMode() as seen:
            out = x.softmax(0)
        return out, self.expected("softmax" in seen.debug_string(), True)

    def fake_tensor_mode(self) -> object:
        from torch._subclasses import FakeTensorMode

        wrap = self.from_local("S(0)")  # makes the mesh, whose ranks are compared by value
        with FakeTensorMode():
            out = wrap(torch.empty(2, 4)).softmax(0)
            return self.expected(tuple(out.shape), (8, 4))

    def profiler(self) -> object:
        x = self.rows(grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            x.softmax(0).pow(2).sum().backward()
        return x.grad, any("softmax" in event.key for event in seen.key_averages())

    def dispatch_mode_of_a_user(self) -> object:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Look(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        x = self.rows(grad=True)
        with Look():
            out = x.softmax(0) @ x.t()
            out.pow(2).sum().backward()
        return out, x.grad

    def function_mode_of_a_user(self) -> object:
        from torch.overrides import TorchFunctionMode

        seen: list[bool] = []

        class Look(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(True)
                return func(*args, **(kwargs or {}))

        x = self.rows()
        with Look():
            out = torch.sin(x) + 1
        return out, bool(seen)

    def autocast(self) -> object:
        x, weight = self.rows("R", grad=True), self.place(randn(8, 4, seed=1), "S(0)", grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, weight)
        return self.backward(out.float(), weight, power=1), out.dtype is torch.bfloat16

    def inference_mode(self) -> object:
        x = self.rows(grad=True)
        with torch.inference_mode():
            y = x.softmax(0)
            y.mul_(2)
        return self.to_local()(y).is_inference(), y.requires_grad

    def inference_tensor_in_autograd(self) -> object:
        with torch.inference_mode():
            x = self.rows()
        y = self.rows(grad=True)
        return self.backward(x * y, y, power=1)

    def no_grad(self) -> object:
        x = self.rows(grad=True)
        with torch.no_grad():
            y = x * 2
            x.add_(1)
        return x, y, y.requires_grad

    def set_grad_enabled(self) -> object:
        x = self.rows(grad=True)
        with torch.no_grad(), torch.enable_grad():
            x.sin().sum().backward()
        return x.grad

    def default_dtype(self) -> object:
        torch.set_default_dtype(torch.float64)
        try:
            x = self.place(torch.ones(8, 4), "S(0)")
            return (x / 3).dtype is torch.float64, x / 3
        finally:
            torch.set_default_dtype(torch.float32)

    def default_device(self) -> object:
        with torch.device("cpu"):
            return self.rows().softmax(0)

    def deterministic_algorithms(self) -> object:
        torch.use_deterministic_algorithms(True)
        try:
            return self.rows().cumsum(0), torch.empty_like(self.rows()).isnan()
        finally:
            torch.use_deterministic_algorithms(False)

    def flops_counted(self) -> object:
        from torch.utils.flop_counter import FlopCounterMode

        a, b = self.rows("R"), self.place(randn(4, 8, seed=1), "R")
        with FlopCounterMode(display=False) as seen:
            out = a @ b
        return out, seen.get_total_flops()


class Random(Programs):
    topic = "random"

    def replicas_of_dropout_agree(self) -> object:
        torch.manual_seed(self.rank)
        self.rows().uniform_()
        out = F.dropout(self.place(torch.ones(8, 4), "R"))
        return _same_on_all(self, self.to_local()(out))

    def replicas_of_dropout_agree_after_another_seed(self) -> object:
        torch.manual_seed(self.rank)
        torch.rand(self.rank + 1)
        out = F.dropout(self.place(torch.ones(8, 4), "R"))
        return _same_on_all(self, self.to_local()(out))

    def replicas_of_an_initial_weight_agree(self) -> object:
        torch.manual_seed(0)
        p = self.place(torch.zeros(8, 4), "R")
        nn.init.xavier_uniform_(p)
        return _same_on_all(self, self.to_local()(p)), bool((p.abs() > 0).any())

    def shards_draw_other_numbers(self) -> object:
        torch.manual_seed(0)
        x = self.gather()(self.place(torch.zeros(8, 64), "S(0)").normal_())
        return not torch.equal(x[:2], x[2:4])

    def same_seed_same_numbers(self) -> object:
        torch.manual_seed(5)
        a = self.gather()(torch.rand_like(self.rows()))
        torch.manual_seed(5)
        return torch.equal(a, self.gather()(torch.rand_like(self.rows())))

    def dropout_backward_uses_the_mask(self) -> object:
        torch.manual_seed(0)
        x = self.place(torch.ones(8, 16), "S(0)", grad=True)
        out = F.dropout(x, 0.5)
        out.sum().backward()
        return torch.equal(self.gather()(out).detach(), self.gather()(x.grad))

    def random_factories_agree(self) -> object:
        if self.plain:
            return True, (8, 4)
        torch.manual_seed(0)
        x = self.api.randn((8, 4), device_mesh=self.mesh, placements=self.placements(["R"]))
        return _same_on_all(self, x.to_local()), tuple(x.shape)

    def fork_of_the_generator(self) -> object:
        torch.manual_seed(3)
        with torch.random.fork_rng():
            a = self.gather()(torch.rand_like(self.rows("R")))
        return torch.equal(a, self.gather()(torch.rand_like(self.rows("R"))))


class Placements(Programs):
    topic = "placements"
    cases: ClassVar[Cases] = {
        "partial sum": lambda w: _partial(w, "sum", lambda t: t.sum(0)),
        "partial average": lambda w: _partial(w, "avg", lambda t: t.mean(0)),
        "partial largest": lambda w: _partial(w, "max", lambda t: t.amax(0)),
        "partial smallest": lambda w: _partial(w, "min", lambda t: t.amin(0)),
        "partial product": lambda w: _partial(w, "product", lambda t: t.prod(0)),
        "a number beside a tensor": lambda w: 2 * w.rows() + torch.tensor(3.0),
    }

    def distribute_tensor_to_partial(self) -> object:
        if self.plain:
            return randn(8, 4)
        return self.api.distribute_tensor(randn(8, 4), self.mesh, [self.api.Partial()])

    def placements_of_torch(self) -> object:
        from torch.distributed.tensor import Replicate, Shard

        if self.plain:
            return randn(8, 4) * 2
        return (self.api.distribute_tensor(randn(8, 4), self.mesh, [Shard(0)]) * 2).redistribute(
            self.mesh, [Replicate()]
        )

    def placements_of_torch_in_styles(self) -> object:
        from torch.distributed.tensor import Shard

        torch.manual_seed(1)
        net, x = nn.Linear(4, 8), randn(8, 4)
        if self.plain:
            return net(x)
        style = self.parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        return self.parallel.parallelize_module(net, self.mesh, style)(self.part(x))

    def mesh_whose_ranks_descend(self) -> object:
        return _on_ranks(self, range(self.ranks)[::-1])

    def mesh_whose_outer_ranks_change_places(self) -> object:
        return _on_ranks(self, [self.ranks - 1, *range(1, self.ranks - 1), 0])

    def negative_dim_of_a_shard(self) -> object:
        x = randn(8, 4)
        return x if self.plain else self.api.distribute_tensor(x, self.mesh, [self.api.Shard(-1)])

    def mixed_with_a_plain_tensor_is_told(self) -> object:
        x = self.rows()
        if self.plain:
            raise RuntimeError("got mixed torch.Tensor and DTensor")
        return x + torch.ones(8, 4)

    def input_and_output_functions_of_two_arguments(self) -> object:
        torch.manual_seed(1)
        net, x = nn.Linear(4, 8), randn(8, 4)
        if self.plain:
            return net(x)
        wrap, local_of = self.from_local("R"), self.to_local()
        made = self.api.distribute_module(
            net, self.mesh, None, lambda m, i, mesh: wrap(i[0]), lambda m, out, mesh: local_of(out)
        )
        return made(x)

    def local_map(self) -> object:
        if self.plain:
            return randn(8, 4) * 2
        module = "dtbench_core" if self.impl == "core" else "torch.distributed.tensor.experimental"
        mapped = importlib.import_module(module).local_map
        shard = self.placements(["S(0)"])
        return mapped(lambda t: t * 2, out_placements=shard, in_placements=(shard,), device_mesh=self.mesh)(
            self.rows()
        )

    def asynchronous_redistribute(self) -> object:
        x: AnyTensor = self.rows()
        return x if self.plain else x.redistribute(self.mesh, self.placements(["R"]), async_op=True) + 0
