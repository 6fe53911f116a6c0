"""CommTensor: a tensor that waits for its collective when it is first used, not when it is issued.

    grad = CommTensor(grad)
    dist.all_reduce(grad, async_op=True)    # the handle need not be kept
    other = x @ w                           # runs meanwhile
    step = grad * lr                        # waits, then reads

It works with torch.distributed's own functions, which reach it through the c10d ops below them. Traced with
make_fx, the graph says the same: a `_wrap_comm_result` node after the collective, a `_wait_comm` node before
the first node that reads, so that every run of the graph waits for the collective that it issued itself.

Note [Who waits]: an op that reads a tensor waits for the collectives that write it; one that writes to it
waits for those that read it too. Views share memory, so they share the list of what is in flight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed import Work, distributed_c10d
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_iter, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from dtbench_core import comm
from dtbench_core.dispatch.metadata import written_arguments
from dtbench_core.errors import ArgumentError
from dtbench_core.op_types import Call, Ctx, Kwargs, Value
from dtbench_core.rules.base import bound_arguments
from dtbench_core.torch_compat import (
    active_tracer,
    current_stream,
    disabled_torch_function,
    is_capturing,
    make_wrapper,
    share_memory,
    trace_as,
    traced_value,
    untraced,
)

# The collectives that can be traced: ops of c10d, which all return (what they wrote, Work). Their first
# argument is what they write.
SUPPORTED = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allreduce_",
    "allgather_",
    "alltoall_",
    "broadcast_",
    "reduce_scatter_",
    "scatter_",
)


# ---- what a traced graph calls ----


@dataclass(frozen=True)
class _CommResult:
    """A tensor that a collective writes, with the handle to wait for it."""

    tensor: torch.Tensor
    work: Any


@has_side_effect
def _wrap_comm_result(result: tuple[Any, Any]) -> tuple[Any, Any]:
    """(tensors, work), as a collective returns it, with each tensor as a `_CommResult`."""
    tensors, work = result
    return tree_map(lambda tensor: _CommResult(tensor, work), tensors), work


def _wait(work: Any) -> None:
    """For a handle as ops give it; None, if the transport has waited already."""
    if work is not None:
        # The handle's own wait would keep the interpreter's lock, which the transport's threads may need.
        Work.unbox(work).wait()


@has_side_effect
def _wait_comm(result: _CommResult) -> torch.Tensor:
    """The tensor, complete."""
    _wait(result.work)
    return result.tensor


# ---- what is in flight ----


@dataclass
class _Flight:
    """A collective that was issued. In a trace, also the `_CommResult` node of a tensor that it writes. On CUDA a
    wait orders one stream behind it: the current one. output: what `tensor`, that it writes to, is a packed copy of."""

    work: Any
    device: torch.device
    tracer: Any = None
    tensor: torch.Tensor | None = None
    result: Value = None
    waiting: list[Value] = field(default_factory=list)  # the streams behind it; [None] without streams
    output: torch.Tensor | None = None
    complete: Any = None  # the event behind it, on the stream that waited first
    captured: bool = False  # that event is a CUDA graph's: outside of its capture nobody can wait for it

    def wait(self) -> None:
        stream = None if self.tracer is not None else current_stream(self.device)
        if stream in self.waiting or (self.captured and not is_capturing(self.device)):
            return
        if self.tracer is None:
            if self.waiting:  # a second wait of gloo's reduce_scatter_tensor writes its result again
                stream.wait_event(self.complete)  # type: ignore[union-attr]
            else:
                self._wait_first(stream)
            self.waiting.append(stream)
            return
        self.waiting.append(stream)
        waited = self.tracer.create_proxy("call_function", _wait_comm, (self.result,), {}, name="wait_comm")
        trace_as(self.tensor, waited, self.tracer)  # type: ignore[arg-type]
        with untraced():  # some transports finish the result here, with ops
            _wait(self.work)
        if self.output is not None:
            self.output.copy_(self.tensor)  # type: ignore[arg-type]

    def _wait_first(self, stream: Any) -> None:
        _wait(self.work)  # where it raises, the next use does, too
        if self.output is not None:
            self.output.copy_(self.tensor)  # type: ignore[arg-type]
        if stream is not None:
            self.complete, self.captured = stream.record_event(), is_capturing(self.device)

    def over(self) -> bool:
        """Whether there is nothing to wait for any more, on any stream."""
        if None in self.waiting or self.tracer is not None:
            return None in self.waiting
        if is_capturing(self.device):
            return False
        if self.waiting:
            return self.captured or bool(self.complete.query())
        return self.output is None and (self.work is None or bool(Work.unbox(self.work).is_completed()))


@dataclass
class _CommMemory:
    """The collectives in flight on a piece of memory, for all views of it. See Note [Who waits]."""

    writing: list[_Flight] = field(default_factory=list)
    reading: list[_Flight] = field(default_factory=list)
    unseen: bool = False  # given to a collective that may have passed by: see `CommTensor.is_complex`

    def wait(self, *, for_readers: bool = False) -> bool:
        """Whether a collective had been writing."""
        if self.unseen:
            raise ArgumentError(
                "got a CommTensor as an output of all_gather, whose input is a plain tensor: c10d does not look for "
                "CommTensors in a list of lists, and nobody knows when it is written; wrap the input too"
            )
        waited = bool(self.writing)
        for flight in [*self.writing, *(self.reading if for_readers else ())]:
            flight.wait()
        self.writing = [flight for flight in self.writing if not flight.over()]
        if for_readers:
            self.reading = [flight for flight in self.reading if not flight.over()]
        return waited

    def add_reader(self, flight: _Flight) -> None:
        self.reading = [*(f for f in self.reading if not f.over()), flight]


class CommTensor(torch.Tensor):
    """`tensor`, with the collectives in flight on it; in ops a tensor like any other. Shares its memory.

    A collective issued on it with `async_op=True` is waited for by the first op that reads the result, or
    writes to what the collective reads. Use the CommTensor from then on: `tensor` itself knows of nothing.
    What a CommTensor is computed into is one too, until a wait; views always are. `wait()` gives the plain
    tensor. A CommTensor of a CommTensor is the same one.

    Raises:
        ArgumentError: a collective that writes to a plain tensor beside a CommTensor; the first use of an output of
            an all_gather whose input is plain (wrap the input too); a collective that is traced and is not among
            the eight of `SUPPORTED`.
    """

    _tensor: torch.Tensor
    _memory: _CommMemory

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> CommTensor:
        if isinstance(tensor, CommTensor):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            result: CommTensor = _Wrap.apply(tensor)
            return result
        return _wrapped(tensor, _CommMemory())

    def wait(self) -> torch.Tensor:
        """The plain tensor, complete."""
        self._memory.wait()
        return self._tensor

    def is_complex(self) -> bool:
        # all_gather asks this of its outputs before it hands them to c10d, which shows them to us only if the input
        # is a CommTensor as well.
        if sys._getframe(1).f_globals.get("__name__") == distributed_c10d.__name__:
            self._memory.unseen = True
        return self.dtype.is_complex

    # These read memory without an op.
    def tolist(self) -> Value:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Value:
        return self.wait().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._memory.writing:  # its values may be half written
            return f"CommTensor({str(self.dtype).removeprefix('torch.')}{list(self.shape)}, in flight)"
        return f"CommTensor({self._tensor!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Value, ...] = (), kwargs: Kwargs | None = None
    ) -> Value:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        waited = False
        owners: list[CommTensor] = []
        mutated = {name for _, name in written_arguments(func)}
        for name, value in bound_arguments(func, args, kwargs).items():
            written = name in mutated
            for leaf in tree_iter(value):
                if isinstance(leaf, CommTensor):
                    if written and leaf._memory.unseen:  # by that collective
                        continue
                    waited |= leaf._memory.wait(for_readers=written)
                    owners.append(leaf)
        result = func(*_plain(args), **_plain(kwargs))
        return tree_map_only(torch.Tensor, functools.partial(_result, owners=owners, waited=waited), result)


class _Wrap(torch.autograd.Function):
    """A CommTensor under autograd: the gradient passes through."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor) -> CommTensor:
        return _wrapped(tensor.detach(), _CommMemory())

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _wrapped(tensor: torch.Tensor, memory: _CommMemory) -> CommTensor:
    # By position: storage offset, memory format, dtype, layout, device, pinned, requires grad.
    metadata = tensor.shape, tensor.stride(), tensor.storage_offset(), None, tensor.dtype
    result: Value = make_wrapper(CommTensor, *metadata, torch.strided, tensor.device, False, False)
    result._tensor, result._memory = tensor, memory
    tracer = active_tracer()
    if tracer is not None:
        _follow(tracer)
    return result  # type: ignore[no-any-return]


def _plain(values: Any) -> Value:
    return tree_map_only(CommTensor, lambda one: one._tensor, values)


def _result(result: torch.Tensor, owners: Sequence[CommTensor], waited: bool) -> torch.Tensor:
    """What the user gets for a result: the CommTensor that was written, a view of one, or a new tensor."""
    for owner in owners:
        if result is owner._tensor:
            return owner
    for owner in owners:
        if share_memory(result, owner._tensor):
            return _wrapped(result, owner._memory)
    return result if waited else _wrapped(result, _CommMemory())


# ---- collectives ----


def _collective(func: OpOverload, args: tuple[Value, ...], kwargs: Kwargs) -> Value:
    """Issues it on the plain tensors, and remembers the handle with those that it works on."""
    traceable = func._schema.name.removeprefix("c10d::") in SUPPORTED
    tracer = active_tracer()
    if tracer is not None and not traceable:
        raise ArgumentError(
            f"got {func} in a trace, expected one of {', '.join(SUPPORTED)}: issue it outside the traced function, or "
            "use torch.distributed._functional_collectives"
        )
    everything = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, CommTensor)]
    outputs = [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(leaf, CommTensor) for leaf in outputs):
        raise ArgumentError(
            "Type of output tensors from collective communication during tracing should always be CommTensor instead "
            f"of torch.Tensor: {func} writes to {[type(leaf).__name__ for leaf in outputs]}; wrap each in a "
            "CommTensor, or nobody waits for it"
        )
    # What it writes may be read by an earlier one. An op whose arguments are not known may write to any.
    written = {id(leaf) for leaf in (outputs if traceable else everything)}
    for leaf in everything:
        leaf._memory.unseen = False
        leaf._memory.wait(for_readers=id(leaf) in written)
    # Transports read memory as if it were packed: what is not travels as a copy.
    tensors = [leaf for leaf in tree_iter(_plain((args, kwargs))) if isinstance(leaf, torch.Tensor)]
    staged = {id(tensor): comm.packed(tensor) for tensor in tensors if not comm.is_packed(tensor)}
    sent = tree_map_only(torch.Tensor, lambda t: staged.get(id(t), t), _plain((args, kwargs)))
    if tracer is None:
        result = func(*sent[0], **sent[1])
        work = result[-1] if isinstance(result, tuple) else result
        flights = {id(leaf): _Flight(work, leaf.device) for leaf in everything if id(leaf) in written}
        if func._schema.name.endswith("_"):  # in c10d, one that writes to its first argument
            for one in everything:
                if id(one) in flights and any(one is output for output in outputs):
                    _copy_from(staged.get(id(one._tensor)), one._tensor, flights[id(one)], func, sent[0])
    else:
        result, flights = _traced(func, args[0], sent, staged, tracer)
    for leaf in everything:
        if id(leaf) in written:
            leaf._memory.writing.append(flights[id(leaf)])
    if flights:
        for leaf in everything:
            leaf._memory.add_reader(next(iter(flights.values())))
    # The very tensors that were given, so that the caller goes on with those that wait.
    return (args[0], *result[1:]) if traceable else result


def _copy_from(
    staged: torch.Tensor | None, output: torch.Tensor, flight: _Flight, func: OpOverload, args: Any
) -> None:
    """`output` gets what the collective writes to `staged`: by the wait, or now if the caller does not look for one."""
    if staged is None:
        return
    flight.tensor, flight.output = staged, output
    names = [argument.name for argument in func._schema.arguments]
    if "async_op" in names[: len(args)] and not args[names.index("async_op")]:
        flight.wait()


def _traced(
    func: OpOverload, outputs: Any, sent: Any, staged: dict[int, torch.Tensor], tracer: Any
) -> tuple[Any, dict[int, _Flight]]:
    """Puts the collective and the node of its results into the graph, and runs it too: (what it gave, the
    flight of each CommTensor that it writes). sent: its arguments. staged: by id, those of packed copies."""
    proxies = tree_map_only(torch.Tensor, lambda t: traced_value(t, tracer), sent)
    issued = tracer.create_proxy("call_function", func, *proxies)
    results = tracer.create_proxy("call_function", _wrap_comm_result, (issued,), {}, name="comm_result")
    with untraced():
        outcome = func(*sent[0], **sent[1])
    flights: dict[int, _Flight] = {}
    for output, result in _each(outputs, results[0]):
        plain = output._tensor
        written = staged.get(id(plain), plain)
        behind = None if written is plain else plain
        flight = _Flight(outcome[1], output.device, tracer, written, result, output=behind)
        flights[id(output)] = flight
        _traced_flights[tracer].append(flight)
        # To read the tensor past its CommTensor is an error when the graph runs, and not a race.
        trace_as(written, result, tracer)
    return outcome, flights


def _each(outputs: Any, proxy: Any) -> Iterator[tuple[CommTensor, Any]]:
    """Every output with its part of the proxy, which is nested as they are."""
    if isinstance(outputs, CommTensor):
        yield outputs, proxy
    elif isinstance(outputs, (list, tuple)):
        for index, one in enumerate(outputs):
            yield from _each(one, proxy[index])


# ---- a graph's output ----

# tracer -> the flights in its graph. Waited for at its end, where the caller reads.
_traced_flights: Any = WeakIdKeyDictionary()


def _follow(tracer: Any) -> None:
    """Lets a CommTensor be an output of the graph, and whatever is still in flight land before it ends."""
    if tracer in _traced_flights:
        return
    flights: list[_Flight] = []
    _traced_flights[tracer] = flights
    graph: Any = tracer.graph
    create_in_tracer: Call = tracer.create_node
    create_in_graph: Call = graph.create_node

    def constant(kind: str, target: Any, *args: object, **kwargs: object) -> Value:
        # fx takes a tensor subclass that it does not know for a constant.
        value = getattr(tracer.root, target, None) if kind == "get_attr" else None
        if not isinstance(value, CommTensor):
            return create_in_tracer(kind, target, *args, **kwargs)
        delattr(tracer.root, target)
        del tracer.tensor_attrs[value]
        value._memory.wait()
        return tracer.create_arg(traced_value(value._tensor, tracer))

    def output(kind: str, *args: object, **kwargs: object) -> Value:
        if kind == "output":
            for flight in flights:
                flight.wait()
            del graph.create_node
        return create_in_graph(kind, *args, **kwargs)

    # The two that fx looks up after the traced function has run.
    tracer.create_node, graph.create_node = constant, output
