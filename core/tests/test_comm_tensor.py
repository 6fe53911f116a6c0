"""CommTensor: who waits for a collective and when, in eager mode and in graphs that make_fx traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from core.tests.gloo_world import RankError, Worlds
from core.tests.local_world import AnyWorlds
from core.tests.on_device import torch
from core.tests.torch_version import BEFORE_213
from dtbench_core import ArgumentError, CommTensor
from dtbench_core.comm_tensor import SUPPORTED, _wait_comm, _wrap_comm_result
from dtbench_core.simulate import rank_map
from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single

Wrap = Callable[[torch.Tensor], torch.Tensor]
N = 4


def _input(scale: float = 1.0) -> torch.Tensor:
    """(8,) other numbers on every rank."""
    return rank_map(lambda rank: scale * (torch.arange(8.0) + 10 * rank))


def _inputs(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.narrow(0, 2 * r, 2).clone() for r in range(N)]


# ---- the eight collectives: what each writes, and in `wrap` whether that is waited for at its first use ----


def allreduce(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x * 1)
    dist.all_reduce(out, async_op=True)
    return [out]


def allgather(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    outs = [wrap(torch.zeros_like(x)) for _ in range(N)]
    dist.all_gather(outs, wrap(x), async_op=True)
    return outs


def allgather_base(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x.new_zeros(N * 8))
    all_gather_single(out, x, async_op=True)
    return [out]


def reduce_scatter(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x.new_zeros(2))
    dist.reduce_scatter(out, [wrap(one) for one in _inputs(x)], async_op=True)
    return [out]


def reduce_scatter_base(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x.new_zeros(2))
    reduce_scatter_single(out, wrap(x), async_op=True)
    return [out]


def alltoall(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    outs = [wrap(x.new_zeros(2)) for _ in range(N)]
    dist.all_to_all(outs, _inputs(x), async_op=True)
    return outs


def broadcast(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x * 1)
    dist.broadcast(out, src=2, async_op=True)
    return [out]


def scatter(x: torch.Tensor, wrap: Wrap) -> list[torch.Tensor]:
    out = wrap(x.new_zeros(2))
    dist.scatter(out, _inputs(x) if dist.get_rank() == 1 else None, src=1, async_op=True)
    return [out]


PROGRAMS: dict[str, Any] = {
    "allreduce_": allreduce,
    "allgather_": allgather,
    "_allgather_base_": allgather_base,
    "reduce_scatter_": reduce_scatter,
    "_reduce_scatter_base_": reduce_scatter_base,
    "alltoall_": alltoall,
    "broadcast_": broadcast,
    "scatter_": scatter,
}


ON_GLOO = [name for name in SUPPORTED if not (BEFORE_213 and name == "alltoall_")]


def _expected(name: str, scale: float, rank: int) -> list[torch.Tensor]:
    """What rank `rank` gets, from every rank's input."""
    inputs = [scale * (torch.arange(8.0) + 10 * r) for r in range(N)]
    mine = slice(2 * rank, 2 * rank + 2)
    if name == "allreduce_":
        return [sum(inputs)]  # type: ignore[list-item]
    if name == "allgather_":
        return inputs
    if name == "_allgather_base_":
        return [torch.cat(inputs)]
    if name in ("reduce_scatter_", "_reduce_scatter_base_"):
        return [sum(inputs)[mine]]  # type: ignore[index]
    if name == "alltoall_":
        return [one[mine] for one in inputs]
    return [inputs[2]] if name == "broadcast_" else [inputs[1][mine]]


def test_every_supported_collective_has_a_program() -> None:
    assert set(PROGRAMS) == set(SUPPORTED)


def _eager(name: str) -> dict[str, bool]:
    outs: list[Any] = PROGRAMS[name](_input(), CommTensor)
    in_flight = all(len(out._memory.writing) == 1 for out in outs) and "in flight" in repr(outs[0])
    used = [out * 2 for out in outs]
    landed = all(not out._memory.writing for out in outs) and "in flight" not in repr(outs[0])
    want = _expected(name, 2.0, dist.get_rank())
    return {
        "in flight": in_flight,
        "landed": landed,
        "right": all(torch.equal(u, w) for u, w in zip(used, want, strict=True)),
        "plain": all(type(u) is torch.Tensor for u in used),
        "still there": all(out.tolist() == (w / 2).tolist() for out, w in zip(outs, want, strict=True)),
    }


@pytest.mark.parametrize("name", ON_GLOO)
def test_eager_waits_at_first_use(ranks: Worlds, name: str) -> None:
    for got in ranks(_eager, name):
        assert all(got.values()), got


def _simulated() -> list[list[float]]:
    out = CommTensor(_input())
    dist.all_reduce(out, async_op=True)
    used: Any = out + 1
    return used.tolist()  # type: ignore[no-any-return]


def test_on_every_kind_of_ranks(worlds: AnyWorlds) -> None:
    want = (sum(torch.arange(8.0) + 10 * r for r in range(N)) + 1).tolist()  # type: ignore[union-attr]
    assert worlds(_simulated) == [want] * N


def _who_waits() -> dict[str, bool]:
    rank, got = float(dist.get_rank()), {}
    base = CommTensor(torch.full((4, 2), rank))
    view: Any = base.view(8)[2:6]
    got["views are one too"] = isinstance(view, CommTensor) and view._memory is base._memory
    dist.all_reduce(view, async_op=True)
    got["of the whole"] = (base + 0).tolist() == [[rank] * 2, [6.0] * 2, [6.0] * 2, [rank] * 2]

    source, outs = CommTensor(torch.full((3,), rank)), [CommTensor(torch.zeros(3)) for _ in range(N)]
    dist.all_gather(outs, source, async_op=True)
    flight = source._memory.reading[0]
    read = source * 1
    got["a reader of what is read does not"] = not flight.waiting and torch.equal(
        read, torch.full((3,), rank)
    )
    returned = source.add_(100)
    got["a writer of it does"] = flight.waiting == [None] and returned is source
    got["gathered before"] = [o.tolist() for o in outs] == [[float(r)] * 3 for r in range(N)]
    got["written after"] = source.tolist() == [rank + 100] * 3

    for _ in range(20):
        outs = [CommTensor(torch.zeros(3)) for _ in range(N)]
        dist.all_gather(outs, source, async_op=True)
        outs[-1].wait()  # the others are never read
    got["forgets what is over"] = len(source._memory.reading) <= 2

    twice = CommTensor(torch.ones(2))
    dist.all_reduce(twice, async_op=True)
    dist.all_reduce(twice, async_op=True)
    got["consecutive"] = len(twice._memory.writing) == 1 and (twice * 1).tolist() == [16.0, 16.0]

    nested = CommTensor(CommTensor(torch.ones(2)))
    got["nested"] = type(nested._tensor) is torch.Tensor and CommTensor(nested) is nested

    derived: Any = CommTensor(torch.ones(2)) * 3
    dist.all_reduce(derived, async_op=True)
    got["what it is computed into"] = (derived / 2).tolist() == [6.0, 6.0]

    copied = torch.zeros(2)
    last = CommTensor(torch.ones(2))
    dist.all_reduce(last, async_op=True)
    copied.copy_(last)
    got["copied"] = copied.tolist() == [4.0, 4.0]
    dist.all_reduce(last, async_op=True)
    got["wait"] = type(last.wait()) is torch.Tensor and last.numpy().tolist() == [16.0, 16.0]

    done = CommTensor(torch.ones(2))
    dist.all_reduce(done)  # waits itself
    got["a collective that waits"] = (done + 0).tolist() == [4.0, 4.0]

    swapped = CommTensor(torch.zeros(N))
    dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank, async_op=True)
    got["others than the eight"] = (swapped + 0).tolist() == [10.0 * r + rank for r in range(N)]
    return got


def test_who_waits(ranks: Worlds) -> None:
    for got in ranks(_who_waits):
        assert all(got.values()), got


def _plain_input() -> None:
    outs = [CommTensor(torch.zeros(2)) for _ in range(N)]
    work = dist.all_gather(outs, torch.ones(2), async_op=True)
    try:
        outs[1] + 1
    finally:
        work.wait()


def test_a_collective_that_passes_by_is_told(ranks: Worlds) -> None:
    with pytest.raises(RankError, match="wrap the input too") as caught:
        ranks(_plain_input)
    assert isinstance(caught.value.__cause__, ArgumentError) and len(caught.value.failures) == N


def test_gradients_pass_through() -> None:
    x = torch.ones(3, requires_grad=True)
    wrapped = CommTensor(x)
    (wrapped * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 3.0]
    assert not CommTensor(x.detach()).requires_grad


def _plain_output() -> None:
    dist.all_gather([torch.zeros(2) for _ in range(N)], CommTensor(torch.ones(2)), async_op=True)


def _plain_output_traced() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        outs = [torch.zeros_like(x) for _ in range(N)]
        dist.all_gather(outs, CommTensor(x), async_op=True)
        return outs[0]

    make_fx(program)(torch.ones(2))


@pytest.mark.parametrize("program", [_plain_output, _plain_output_traced])
def test_outputs_must_be_wrapped(ranks: Worlds, program: Any) -> None:
    text = (
        "Type of output tensors from collective communication during tracing should always be CommTensor instead of "
        "torch.Tensor"
    )
    with pytest.raises(RankError, match=text) as caught:
        ranks(program)
    assert isinstance(caught.value.__cause__, RuntimeError) and len(caught.value.failures) == N


# ---- traced ----


def _nodes(graph: Any) -> list[str]:
    """collective, result, wait, getitem or compute, in order."""
    kinds = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "c10d":
            kinds.append("collective")
        else:
            kinds.append(
                {_wrap_comm_result: "result", _wait_comm: "wait"}.get(node.target, node.target.__name__)
            )
    return kinds


def _traced(name: str) -> dict[str, bool]:
    def program(x: torch.Tensor) -> Any:
        outs = PROGRAMS[name](x, CommTensor)
        meanwhile = x + 5
        return [out * 2 for out in outs], meanwhile

    graph = make_fx(program)(_input())
    got = {}
    for scale in (1.0, 3.0, -2.0):  # the traced input, and fresh ones
        x = _input(scale)
        outs, meanwhile = graph(x)
        want = _expected(name, scale, dist.get_rank())
        right = all(torch.equal(out, 2 * w) for out, w in zip(outs, want, strict=True))
        got[f"inputs times {scale}"] = right and torch.equal(meanwhile, x + 5)
    kinds = _nodes(graph)
    issued, read = kinds.index("collective"), kinds.index("mul.Tensor", kinds.index("collective"))
    between = kinds[issued + 2 : read]
    got["result after the collective"] = kinds[issued + 1] == "result" and kinds.count("result") == 1
    got["what does not read comes before the wait"] = between.index("add.Tensor") < between.index("wait")
    got["wait before the reader"] = between[-1] == "wait"
    got["a wait for each"] = kinds.count("wait") == kinds.count("mul.Tensor") - (
        name in ("allreduce_", "broadcast_")
    )
    got["names"] = any(n.name == "comm_result" for n in graph.graph.nodes) and "wait_comm" in graph.code
    graph.graph.eliminate_dead_code()
    graph.recompile()
    got["nothing of it is dead"] = _nodes(graph).count("wait") == kinds.count("wait")
    return got


@pytest.mark.parametrize("name", ON_GLOO)
def test_a_traced_graph_runs_with_fresh_inputs(ranks: Worlds, name: str) -> None:
    for got in ranks(_traced, name):
        assert all(got.values()), got


def _consecutive(x: torch.Tensor) -> Any:
    out = CommTensor(CommTensor(x * 1))
    dist.all_reduce(out, async_op=True)
    dist.all_reduce(out, async_op=True)
    return out + 1


def _of_a_view(x: torch.Tensor) -> Any:
    whole = CommTensor(x * 1)
    dist.all_reduce(whole.view(4, 2)[1:3], async_op=True)
    return whole + 0


def _returned(x: torch.Tensor) -> Any:
    out, idle = CommTensor(x * 1), CommTensor(x * 3)
    dist.all_reduce(out, async_op=True)
    return {"out": out, "view": out.view(4, 2), "idle": idle}


def _alone(x: torch.Tensor) -> Any:
    out = CommTensor(x * 1)
    dist.all_reduce(out, async_op=True)
    return out


def _never_read(x: torch.Tensor) -> Any:
    dist.all_reduce(CommTensor(x), async_op=True)
    return


def _overwritten(x: torch.Tensor) -> Any:
    source, outs = CommTensor(x * 1), [CommTensor(torch.zeros_like(x)) for _ in range(N)]
    dist.all_gather(outs, source, async_op=True)
    source.zero_()
    return [out.clone() for out in outs], source + 0


def _sums(scale: float) -> torch.Tensor:
    return sum(scale * (torch.arange(8.0) + 10 * r) for r in range(N))  # type: ignore[return-value]


def _graphs() -> dict[str, bool]:
    got = {}
    consecutive = make_fx(_consecutive)(_input())
    kinds = [k for k in _nodes(consecutive) if k in ("collective", "result", "wait")]
    got["consecutive: order"] = kinds == ["collective", "result", "wait"] * 2
    of_a_view, returned, alone = (
        make_fx(_of_a_view)(_input()),
        make_fx(_returned)(_input()),
        make_fx(_alone)(_input()),
    )
    never_read, overwritten = make_fx(_never_read)(_input()), make_fx(_overwritten)(_input())
    for scale in (1.0, 7.0):
        x, total = _input(scale), _sums(scale)
        got[f"consecutive {scale}"] = torch.equal(consecutive(x), N * total + 1)
        want = x.clone()
        want[2:6] = total[2:6]
        got[f"of a view {scale}"] = torch.equal(of_a_view(x), want)
        results = returned(x)
        got[f"returned {scale}"] = (
            all(type(t) is torch.Tensor for t in results.values())
            and torch.equal(results["out"], total)
            and torch.equal(results["view"], total.view(4, 2))
            and torch.equal(results["idle"], 3 * x)
        )
        got[f"alone {scale}"] = torch.equal(alone(x), total)
        gathered, emptied = overwritten(x)
        wants = [scale * (torch.arange(8.0) + 10 * r) for r in range(N)]
        got[f"overwritten {scale}"] = all(map(torch.equal, gathered, wants)) and not emptied.any()
        never_read(x)
        got[f"never read {scale}"] = torch.equal(x, total)
    got["no constants"] = not any(
        isinstance(value, torch.Tensor) for g in (returned, alone) for value in vars(g).values()
    )
    return got


def test_graphs(ranks: Worlds) -> None:
    for got in ranks(_graphs):
        assert all(got.values()), got


def _gather_traced() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        out = CommTensor(x)
        dist.reduce(out, dst=0, async_op=True)
        return out + 0

    make_fx(program)(torch.ones(2))


def test_other_collectives_are_not_traced(ranks: Worlds) -> None:
    with pytest.raises(RankError, match="expected one of _allgather_base_, _reduce_scatter_base_") as caught:
        ranks(_gather_traced)
    assert isinstance(caught.value.__cause__, ArgumentError) and len(caught.value.failures) == N
