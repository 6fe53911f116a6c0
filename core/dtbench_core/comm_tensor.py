"""CommTensor: a tensor that waits for its collective at its first use, not when the collective is issued.

    grad = CommTensor(grad)
    dist.all_reduce(grad, async_op=True)    # the returned handle is not needed
    other = x @ w                           # runs concurrently
    step = grad * lr                        # waits, then reads

It works with the functions of torch.distributed, which call c10d ops that CommTensor intercepts. A graph traced with
make_fx has a `_wrap_comm_result` node after the collective and a `_wait_comm` node before the first node that reads.
Thus each run of the graph waits for the collective that this run issued.

Note [Waiting]: an op that reads a tensor waits for the collectives that write to it. An op that writes to a tensor also
waits for the collectives that read it. Views share memory, so they share the list of collectives in flight.
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

# The c10d ops that can be traced. They write to their first argument, and return (outputs, Work).
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


# ---- functions that traced graphs call ----


@dataclass(frozen=True)
class _CommResult:
    """An output of a collective, with the handle to wait for it."""

    tensor: torch.Tensor
    work: Any


@has_side_effect
def _wrap_comm_result(result: tuple[Any, Any]) -> tuple[Any, Any]:
    """Wraps each tensor of a collective's result (tensors, work) in a `_CommResult`."""
    tensors, work = result
    return tree_map(lambda tensor: _CommResult(tensor, work), tensors), work


def _wait(work: Any) -> None:
    """Waits for a handle that an op returned; None if the backend has already waited."""
    if work is not None:
        # `work.wait()` would hold the GIL, which threads of the backend may need.
        Work.unbox(work).wait()


@has_side_effect
def _wait_comm(result: _CommResult) -> torch.Tensor:
    """Waits for a collective and returns its output."""
    _wait(result.work)
    return result.tensor


# ---- collectives in flight ----


@dataclass
class _InFlight:
    """An output of a collective that was issued, with what is needed to wait for it.

    On CUDA, a wait only makes the current stream wait, so each stream has to wait separately.

    Attributes:
        work: handle to wait for.
        device: device of the output.
        tracer: tracer that records the collective; None outside traces.
        tensor: tensor that the collective writes to.
        result: the `_CommResult` node in the graph.
        waited_streams: streams that already wait for it; [None] on devices without streams.
        output: the user's tensor if `tensor` is a packed copy of it.
        complete: event after the collective, on the stream that waited first.
        captured: whether that event belongs to a CUDA graph, so that it cannot be waited for outside the capture.
    """

    work: Any
    device: torch.device
    tracer: Any = None
    tensor: torch.Tensor | None = None
    result: Value = None
    waited_streams: list[Value] = field(default_factory=list)
    output: torch.Tensor | None = None
    complete: Any = None
    captured: bool = False

    def wait(self) -> None:
        stream = None if self.tracer is not None else current_stream(self.device)
        if stream in self.waited_streams or (self.captured and not is_capturing(self.device)):
            return
        if self.tracer is None:
            # A second `work.wait()` of gloo's reduce_scatter_tensor would write its result again.
            if self.waited_streams:
                stream.wait_event(self.complete)  # type: ignore[union-attr]
            else:
                self._wait_first(stream)
            self.waited_streams.append(stream)
            return
        self.waited_streams.append(stream)
        waited = self.tracer.create_proxy("call_function", _wait_comm, (self.result,), {}, name="wait_comm")
        trace_as(self.tensor, waited, self.tracer)  # type: ignore[arg-type]
        with untraced():  # some backends run ops in their wait
            _wait(self.work)
        if self.output is not None:
            self.output.copy_(self.tensor)  # type: ignore[arg-type]

    def _wait_first(self, stream: Any) -> None:
        _wait(self.work)  # if it raises, the next use raises, too
        if self.output is not None:
            self.output.copy_(self.tensor)  # type: ignore[arg-type]
        if stream is not None:
            self.complete, self.captured = stream.record_event(), is_capturing(self.device)

    def is_over(self) -> bool:
        """Whether no stream has to wait for it any more."""
        if None in self.waited_streams or self.tracer is not None:
            return None in self.waited_streams
        if is_capturing(self.device):
            return False
        if self.waited_streams:
            return self.captured or bool(self.complete.query())
        return self.output is None and (self.work is None or bool(Work.unbox(self.work).is_completed()))


@dataclass
class _CommMemory:
    """The collectives in flight on memory that several views may share. See Note [Waiting].

    Attributes:
        writing: collectives that write to it.
        reading: collectives that read it.
        unseen: whether a collective may write to it without being intercepted, see `CommTensor.is_complex`.
    """

    writing: list[_InFlight] = field(default_factory=list)
    reading: list[_InFlight] = field(default_factory=list)
    unseen: bool = False

    def wait(self, *, for_readers: bool = False) -> bool:
        """Waits for the collectives that write, and `for_readers` also for those that read.

        Returns:
            Whether a collective was writing.
        """
        if self.unseen:
            raise ArgumentError(
                "got a CommTensor as an output of all_gather, expected the input to be a CommTensor too: c10d does not "
                "find CommTensors in a list of lists, so the end of the collective is unknown; wrap the input too"
            )
        waited = bool(self.writing)
        for flight in [*self.writing, *(self.reading if for_readers else ())]:
            flight.wait()
        self.writing = [flight for flight in self.writing if not flight.is_over()]
        if for_readers:
            self.reading = [flight for flight in self.reading if not flight.is_over()]
        return waited


class CommTensor(torch.Tensor):
    """A tensor that waits for the collectives in flight on it when an op uses it. It shares the memory of `tensor`.

    A collective issued on it with `async_op=True` is waited for by the first op that reads its result or writes to its
    input. From then on use only the CommTensor: `tensor` itself does not wait.

    Results of ops on CommTensors are CommTensors, too, unless the op waited; views always are. `wait()` returns the
    plain tensor. `CommTensor(t)` of a CommTensor returns it unchanged.

    Raises:
        ArgumentError: a collective writes to plain tensors as well as to CommTensors; the output of an all_gather with
            a plain input is used (wrap the input too); a traced collective is not in `SUPPORTED`.
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
        """Waits and returns the plain tensor."""
        self._memory.wait()
        return self._tensor

    def is_complex(self) -> bool:
        # all_gather calls this on its outputs before it calls the c10d op. The op is intercepted only if the input is a
        # CommTensor, too.
        if sys._getframe(1).f_globals.get("__name__") == distributed_c10d.__name__:
            self._memory.unseen = True
        return self.dtype.is_complex

    # tolist and numpy read memory without an op.
    def tolist(self) -> Value:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Value:
        return self.wait().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._memory.writing:  # values may be incomplete
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
                    # This op is a part of the collective that was not intercepted.
                    if written and leaf._memory.unseen:
                        continue
                    waited |= leaf._memory.wait(for_readers=written)
                    owners.append(leaf)
        result = func(*_plain(args), **_plain(kwargs))
        return tree_map_only(torch.Tensor, functools.partial(_result, owners=owners, waited=waited), result)


class _Wrap(torch.autograd.Function):
    """Creates a CommTensor under autograd. The gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor) -> CommTensor:
        return _wrapped(tensor.detach(), _CommMemory())

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _wrapped(tensor: torch.Tensor, memory: _CommMemory) -> CommTensor:
    # Positional arguments: shape, stride, storage offset, memory format, dtype, layout, device, pinned, requires grad.
    metadata = tensor.shape, tensor.stride(), tensor.storage_offset(), None, tensor.dtype
    result: Value = make_wrapper(CommTensor, *metadata, torch.strided, tensor.device, False, False)
    result._tensor, result._memory = tensor, memory
    if (tracer := active_tracer()) is not None:
        _prepare_tracer(tracer)
    return result  # type: ignore[no-any-return]


def _plain(values: Any) -> Value:
    return tree_map_only(CommTensor, lambda tensor: tensor._tensor, values)


def _result(result: torch.Tensor, owners: Sequence[CommTensor], waited: bool) -> torch.Tensor:
    """Returns the result for the user: the CommTensor that was written, a view of one, or a new tensor."""
    for owner in owners:
        if result is owner._tensor:
            return owner
    for owner in owners:
        if share_memory(result, owner._tensor):
            return _wrapped(result, owner._memory)
    return result if waited else _wrapped(result, _CommMemory())


# ---- collectives ----


def _collective(func: OpOverload, args: tuple[Value, ...], kwargs: Kwargs) -> Value:
    """Issues a collective on the plain tensors, and stores its handle in the CommTensors that it reads or writes."""
    traceable = func._schema.name.removeprefix("c10d::") in SUPPORTED
    tracer = active_tracer()
    if tracer is not None and not traceable:
        raise ArgumentError(
            f"got {func} in a trace, expected one of {', '.join(SUPPORTED)}: call it outside the traced function, or "
            "use torch.distributed._functional_collectives"
        )
    comm_tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, CommTensor)]
    outputs = [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(leaf, CommTensor) for leaf in outputs):
        raise ArgumentError(
            "Type of output tensors from collective communication during tracing should always be CommTensor instead "
            f"of torch.Tensor: {func} writes to {[type(leaf).__name__ for leaf in outputs]}; wrap each output in a "
            "CommTensor, so that its first use waits"
        )
    # Earlier collectives may still read the outputs. An unsupported op may write to any of its arguments.
    written = {id(leaf) for leaf in (outputs if traceable else comm_tensors)}
    for leaf in comm_tensors:
        leaf._memory.unseen = False
        leaf._memory.wait(for_readers=id(leaf) in written)
    # Backends read memory as if it were packed, so other tensors are replaced by packed copies.
    staged = {
        id(tensor): comm.packed(tensor)
        for tensor in tree_iter(_plain((args, kwargs)))
        if isinstance(tensor, torch.Tensor) and not comm.is_packed(tensor)
    }
    sent = tree_map_only(torch.Tensor, lambda t: staged.get(id(t), t), _plain((args, kwargs)))
    if tracer is None:
        result = func(*sent[0], **sent[1])
        work = result[-1] if isinstance(result, tuple) else result
        flights = {id(leaf): _InFlight(work, leaf.device) for leaf in comm_tensors if id(leaf) in written}
        if func._schema.name.endswith("_"):  # in c10d, such an op writes to its first argument
            for output in comm_tensors:
                if id(output) in flights and any(output is leaf for leaf in outputs):
                    _copy_from(
                        staged.get(id(output._tensor)),
                        output._tensor,
                        flights[id(output)],
                        func,
                        sent[0],
                    )
    else:
        result, flights = _traced(func, args[0], sent, staged, tracer)
    for leaf in comm_tensors:
        if id(leaf) in written:
            leaf._memory.writing.append(flights[id(leaf)])
    if flights:
        for leaf in comm_tensors:
            leaf._memory.reading = [
                *(flight for flight in leaf._memory.reading if not flight.is_over()),
                next(iter(flights.values())),
            ]
    # Return the CommTensors of the caller, so that later uses wait.
    return (args[0], *result[1:]) if traceable else result


def _copy_from(
    staged: torch.Tensor | None, output: torch.Tensor, flight: _InFlight, func: OpOverload, args: Any
) -> None:
    """Arranges that `output` receives the values of its packed copy `staged`: in the wait, or now if synchronous."""
    if staged is None:
        return
    flight.tensor, flight.output = staged, output
    names = [argument.name for argument in func._schema.arguments]
    if "async_op" in names[: len(args)] and not args[names.index("async_op")]:
        flight.wait()


def _traced(
    func: OpOverload, outputs: Any, sent: Any, staged: dict[int, torch.Tensor], tracer: Any
) -> tuple[Any, dict[int, _InFlight]]:
    """Adds the collective and the node of its results to the graph, and runs the collective.

    Args:
        outputs: the outputs of the caller.
        sent: positional and keyword arguments of the op, with packed copies.
        staged: id of a tensor -> its packed copy.

    Returns:
        The result of the op, and the id of each output -> its collective in flight.
    """
    proxies = tree_map_only(torch.Tensor, lambda t: traced_value(t, tracer), sent)
    results = tracer.create_proxy(
        "call_function",
        _wrap_comm_result,
        (tracer.create_proxy("call_function", func, *proxies),),
        {},
        name="comm_result",
    )
    with untraced():
        result_of_op = func(*sent[0], **sent[1])
    flights: dict[int, _InFlight] = {}
    for output, result in _outputs_with_proxies(outputs, results[0]):
        plain = output._tensor
        written = staged.get(id(plain), plain)
        flight = flights[id(output)] = _InFlight(
            result_of_op[1],
            output.device,
            tracer,
            written,
            result,
            output=None if written is plain else plain,
        )
        _traced_flights[tracer].append(flight)
        # Reading the plain tensor, without its CommTensor, is then an error when the graph runs, instead of a race.
        trace_as(written, result, tracer)
    return result_of_op, flights


def _outputs_with_proxies(outputs: Any, proxy: Any) -> Iterator[tuple[CommTensor, Any]]:
    """Yields each output with its part of the proxy, which has the same nesting."""
    if isinstance(outputs, CommTensor):
        yield outputs, proxy
    elif isinstance(outputs, (list, tuple)):
        for index, output in enumerate(outputs):
            yield from _outputs_with_proxies(output, proxy[index])


# ---- the outputs of a graph ----

# tracer -> collectives in flight in its graph. The graph waits for them at its end, where the caller reads.
_traced_flights: Any = WeakIdKeyDictionary()


def _prepare_tracer(tracer: Any) -> None:
    """Makes a graph accept CommTensors as outputs, and wait at its end for all collectives in flight."""
    if tracer in _traced_flights:
        return
    flights = _traced_flights[tracer] = list[_InFlight]()
    graph: Any = tracer.graph
    create_in_tracer: Call = tracer.create_node
    create_in_graph: Call = graph.create_node

    def constant(kind: str, target: Any, *args: object, **kwargs: object) -> Value:
        # fx treats tensors of unknown subclasses as constants.
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

    # fx calls these two after the traced function has run.
    tracer.create_node, graph.create_node = constant, output
