"""CommTensor waits for a collective at the first use of its result, in eager mode and in graphs traced by make_fx."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from core.tests.gloo_world import WORLD_SIZE, on_gloo_ranks
from core.tests.local_world import LocalWorlds
from core.tests.on_device import torch
from core.tests.torch_version import BEFORE_213
from dtbench_core import ArgumentError, CommTensor
from dtbench_core.comm_tensor import SUPPORTED, _wait_comm, _wrap_comm_result
from dtbench_core.simulate import rank_map
from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single

Wrap = Callable[[torch.Tensor], torch.Tensor]
N = WORLD_SIZE
PART = 8 // N  # elements of an input for each rank


def _input(scale: float = 1.0) -> torch.Tensor:
    """Returns (8,) values that differ between ranks."""
    return rank_map(lambda rank: _of(rank, scale))


def _of(rank: int, scale: float = 1.0) -> torch.Tensor:
    return scale * (torch.arange(8.0) + 10 * rank)


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.narrow(0, PART * r, PART).clone() for r in range(N)]


# ---- the eight collectives ----


class Program(NamedTuple):
    """A collective on an input of shape (8,).

    Attributes:
        make: returns the output tensors.
        run: issues the collective; `wrap` is CommTensor, or a function that waits immediately.
        expected: (inputs of all ranks, rank r) -> the outputs on rank r.
    """

    make: Callable[[torch.Tensor], list[torch.Tensor]]
    run: Callable[[list[Any], torch.Tensor, Wrap], object]
    expected: Callable[[list[torch.Tensor], int], list[Any]]

    def __call__(self, x: torch.Tensor, wrap: Wrap) -> list[Any]:
        outs = [wrap(out) for out in self.make(x)]
        self.run(outs, x, wrap)
        return outs


def _scatter(outs: list[Any], x: torch.Tensor, wrap: Wrap) -> None:
    dist.scatter(outs[0], _parts(x) if dist.get_rank() == 1 else None, src=1, async_op=True)


PROGRAMS: dict[str, Program] = {
    "allreduce_": Program(
        lambda x: [x * 1],
        lambda outs, x, wrap: dist.all_reduce(outs[0], async_op=True),
        lambda inputs, r: [sum(inputs)],
    ),
    "allgather_": Program(
        lambda x: [torch.zeros_like(x) for _ in range(N)],
        lambda outs, x, wrap: dist.all_gather(outs, wrap(x), async_op=True),
        lambda inputs, r: inputs,
    ),
    "_allgather_base_": Program(
        lambda x: [x.new_zeros(N * 8)],
        lambda outs, x, wrap: all_gather_single(outs[0], x, async_op=True),
        lambda inputs, r: [torch.cat(inputs)],
    ),
    "reduce_scatter_": Program(
        lambda x: [x.new_zeros(PART)],
        lambda outs, x, wrap: dist.reduce_scatter(outs[0], [wrap(one) for one in _parts(x)], async_op=True),
        lambda inputs, r: [_parts(sum(inputs))[r]],
    ),
    "_reduce_scatter_base_": Program(
        lambda x: [x.new_zeros(PART)],
        lambda outs, x, wrap: reduce_scatter_single(outs[0], wrap(x), async_op=True),
        lambda inputs, r: [_parts(sum(inputs))[r]],
    ),
    "alltoall_": Program(
        lambda x: [x.new_zeros(PART) for _ in range(N)],
        lambda outs, x, wrap: dist.all_to_all(outs, _parts(x), async_op=True),
        lambda inputs, r: [_parts(one)[r] for one in inputs],
    ),
    "broadcast_": Program(
        lambda x: [x * 1],
        lambda outs, x, wrap: dist.broadcast(outs[0], src=N - 1, async_op=True),
        lambda inputs, r: [inputs[N - 1]],
    ),
    "scatter_": Program(lambda x: [x.new_zeros(PART)], _scatter, lambda inputs, r: [_parts(inputs[1])[r]]),
}
ON_GLOO = [name for name in SUPPORTED if not (BEFORE_213 and name == "alltoall_")]


def _expected(name: str, scale: float) -> list[torch.Tensor]:
    return PROGRAMS[name].expected([_of(r, scale) for r in range(N)], dist.get_rank())


@pytest.mark.parametrize("name", ON_GLOO)
@on_gloo_ranks
def test_eager_waits_at_first_use(name: str) -> None:
    outs: list[Any] = PROGRAMS[name](_input(), CommTensor)
    assert all(len(out._memory.writing) == 1 for out in outs) and "in flight" in repr(outs[0])
    used = [out * 2 for out in outs]
    assert all(not out._memory.writing for out in outs) and "in flight" not in repr(outs[0])
    want = _expected(name, 2.0)
    assert all(type(u) is torch.Tensor and torch.equal(u, w) for u, w in zip(used, want, strict=True))
    assert all(out.tolist() == (w / 2).tolist() for out, w in zip(outs, want, strict=True)), "still there"


def _reduced(x: torch.Tensor, times: int = 1) -> Any:
    """Returns a CommTensor of the input that is all-reduced, consecutively if several times."""
    out = CommTensor(x)
    for _ in range(times):
        dist.all_reduce(out, async_op=True)
    return out


def test_ranks_as_local_tensors() -> None:
    assert (
        LocalWorlds()(lambda: (_reduced(_input()) + 1).tolist())
        == [(sum(map(_of, range(N))) + 1).tolist()] * N
    )


@on_gloo_ranks
def test_first_uses_that_wait() -> None:
    rank, total = float(dist.get_rank()), float(sum(range(N)))
    base = CommTensor(torch.full((4, 2), rank))
    view: Any = base.view(8)[2:6]
    assert isinstance(view, CommTensor) and view._memory is base._memory, "views are one too"
    dist.all_reduce(view, async_op=True)
    assert (base + 0).tolist() == [[rank] * 2, [total] * 2, [total] * 2, [rank] * 2], "of the whole"

    source, outs = CommTensor(torch.full((3,), rank)), [CommTensor(torch.zeros(3)) for _ in range(N)]
    dist.all_gather(outs, source, async_op=True)
    flight = source._memory.reading[0]
    read = source * 1
    assert not flight.waited_streams and read.tolist() == [rank] * 3, "a reader of what is read does not"
    returned = source.add_(100)
    assert len(flight.waited_streams) == 1 and returned is source, "a writer of it does"
    assert [o.tolist() for o in outs] == [[float(r)] * 3 for r in range(N)], "gathered before"
    assert source.tolist() == [rank + 100] * 3, "written after"

    twice = _reduced(torch.ones(2), times=2)
    assert len(twice._memory.writing) == 1 and (twice * 1).tolist() == [N * N] * 2, "consecutive"

    derived: Any = CommTensor(torch.ones(2)) * 3
    dist.all_reduce(derived, async_op=True)
    assert (derived / 3).tolist() == [N, N], "what it is computed into"

    last = _reduced(torch.ones(2))
    assert torch.zeros(2).copy_(last).tolist() == [N, N], "copied"
    dist.all_reduce(last, async_op=True)
    assert type(last.wait()) is torch.Tensor and last.numpy(force=True).tolist() == [N * N] * 2, "wait"

    done = CommTensor(torch.ones(2))
    dist.all_reduce(done)  # waits itself
    assert (done + 0).tolist() == [N, N], "a collective that waits"

    swapped = CommTensor(torch.zeros(N))
    dist.all_to_all_single(swapped, torch.arange(float(N)) + 10 * rank, async_op=True)
    assert (swapped + 0).tolist() == [10.0 * r + rank for r in range(N)], "others than the eight"


def _plain_output() -> None:
    dist.all_gather([torch.zeros(2) for _ in range(N)], CommTensor(torch.ones(2)), async_op=True)


def _reduce_to_one_rank(x: torch.Tensor) -> torch.Tensor:
    out = CommTensor(x)
    dist.reduce(out, dst=0, async_op=True)
    return out + 0


def _plain_input() -> None:
    outs = [CommTensor(torch.zeros(2)) for _ in range(N)]
    work = dist.all_gather(outs, torch.ones(2), async_op=True)
    try:
        outs[1] + 1
    finally:
        work.wait()


OUTPUTS = (
    "Type of output tensors from collective communication during tracing should always be CommTensor instead of "
    "torch.Tensor"
)
REFUSED: dict[str, tuple[Callable[[], object], type, str]] = {
    "plain input": (_plain_input, ArgumentError, "wrap the input too"),
    "plain output": (_plain_output, RuntimeError, OUTPUTS),
    "plain output, traced": (
        lambda: make_fx(lambda _: _plain_output())(torch.ones(2)),
        RuntimeError,
        OUTPUTS,
    ),
    "untraceable collective": (
        lambda: make_fx(_reduce_to_one_rank)(torch.ones(2)),
        ArgumentError,
        "expected one of _allgather_base_, _reduce_scatter_base_",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@on_gloo_ranks
def test_collectives_that_cannot_be_waited_for_are_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_gradients_pass_through() -> None:
    x = torch.ones(3, requires_grad=True)
    (CommTensor(x) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 3.0]
    assert not CommTensor(x.detach()).requires_grad


# ---- traced ----


def _nodes(graph: Any) -> list[str]:
    """Returns the kind of each call of a graph in order: collective, result, wait, or the name of the function."""
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    kinds = {_wrap_comm_result: "result", _wait_comm: "wait"}
    kinds |= {call: "collective" for call in calls if getattr(call, "namespace", "") == "c10d"}
    return [kinds.get(call, call.__name__) for call in calls]


@pytest.mark.parametrize("name", ON_GLOO)
@on_gloo_ranks
def test_traced_graph_runs_with_new_inputs(name: str) -> None:
    def program(x: torch.Tensor) -> Any:
        outs = PROGRAMS[name](x, CommTensor)
        meanwhile = x + 5
        return [out * 2 for out in outs], meanwhile

    graph = make_fx(program)(_input())
    for scale in (1.0, 3.0, -2.0):  # the traced input, and fresh ones
        x = _input(scale)
        outs, meanwhile = graph(x)
        want = _expected(name, scale)
        assert all(torch.equal(out, 2 * w) for out, w in zip(outs, want, strict=True)), scale
        assert torch.equal(meanwhile, x + 5)
    kinds = _nodes(graph)
    issued, read = kinds.index("collective"), kinds.index("mul.Tensor", kinds.index("collective"))
    between = kinds[issued + 2 : read]
    assert kinds[issued + 1] == "result" and kinds.count("result") == 1, "result after the collective"
    assert between.index("add.Tensor") < between.index("wait"), "what does not read comes before the wait"
    assert between[-1] == "wait", "wait before the reader"
    uses = kinds.count("mul.Tensor") - (name in ("allreduce_", "broadcast_"))
    assert kinds.count("wait") == uses, "a wait for each"
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert _nodes(graph).count("wait") == kinds.count("wait"), "nothing of it is dead"


def _of_a_view(x: torch.Tensor) -> Any:
    whole = CommTensor(x * 1)
    dist.all_reduce(whole.view(4, 2)[1:3], async_op=True)
    return whole + 0


def _returned(x: torch.Tensor) -> Any:
    out, idle = _reduced(x * 1), CommTensor(x * 3)
    return {"out": out, "view": out.view(4, 2), "idle": idle}


def _never_read(x: torch.Tensor) -> None:
    _reduced(x)


def _overwritten(x: torch.Tensor) -> Any:
    source, outs = CommTensor(x * 1), [CommTensor(torch.zeros_like(x)) for _ in range(N)]
    dist.all_gather(outs, source, async_op=True)
    source.zero_()
    return [out.clone() for out in outs], source + 0


@on_gloo_ranks
def test_graphs_of_several_collectives() -> None:
    programs: list[Callable[[torch.Tensor], Any]] = [
        lambda x: _reduced(CommTensor(x * 1), times=2) + 1,
        lambda x: _reduced(x * 1),
        *(_of_a_view, _returned, _never_read, _overwritten),
    ]
    consecutive, alone, of_a_view, returned, never_read, overwritten = (
        make_fx(program)(_input()) for program in programs
    )
    kinds = [k for k in _nodes(consecutive) if k in ("collective", "result", "wait")]
    assert kinds == ["collective", "result", "wait"] * 2
    for scale in (1.0, 7.0):
        x, inputs = _input(scale), [_of(r, scale) for r in range(N)]
        total: Any = sum(inputs)
        assert torch.equal(consecutive(x), N * total + 1)
        assert torch.equal(of_a_view(x), torch.cat([x[:2], total[2:6], x[6:]]))
        results = returned(x)
        assert all(type(t) is torch.Tensor for t in results.values())
        assert torch.equal(results["out"], total) and torch.equal(results["view"], total.view(4, 2))
        assert torch.equal(results["idle"], 3 * x) and torch.equal(alone(x), total)
        gathered, emptied = overwritten(x)
        assert all(map(torch.equal, gathered, inputs)) and not emptied.any()
        never_read(x)
        assert torch.equal(x, total)
