"""Collectives in a graph that a compiler changes: the compilers of all ranks must keep the same ones, in one order.

Each decides by the sizes of its own rank's shards. Where these differ, a rank would wait for calls others do not make:

- What depends on no gradient may go into either half of a graph. A collective of a backward pass is made to depend on
  one.
- Equal calls are merged, and a rank without a part computes with constants, which are equal where others' values are
  not. So in a graph with shards of different lengths no collective is equal to another.
- Of what a checkpoint computes again, compilers save what is small, as nothing is on a rank without a part. So in such
  a graph the results of all collectives are saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtbench_core.torch_compat import active_tracer, in_backward_pass, traced_node


class GroupName(str):
    """The name of a process group in one call of a graph: equal to itself alone, so that no pass merges the call."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


# By tracer: its collectives while all shards are equally long; None from then on.
_by_tracer: weakref.WeakKeyDictionary[fx.Tracer, list[fx.Node] | None] = weakref.WeakKeyDictionary()
# By tracer: its collectives that were set apart, whose results are to be saved once its forward pass is traced.
_unsaved: weakref.WeakKeyDictionary[fx.Tracer, list[fx.Node]] = weakref.WeakKeyDictionary()


def keep_on_all_ranks(result: torch.Tensor, after: Callable[..., object]) -> None:
    """Keeps a collective that was just traced, in the half where it is. after: (input, gradient) -> input."""
    tracer = active_tracer()
    node = None if tracer is None else traced_node(result, tracer)
    if tracer is None or node is None:
        return
    if in_backward_pass():
        _keep_in_backward(node, tracer.graph, after)
    issued = _by_tracer.setdefault(tracer, [])
    if issued is None:
        _set_apart(node, tracer)
    else:
        issued.append(node)


def see_uneven_shards() -> None:
    """Told of a tensor whose shards differ in length: the graph that is being traced may differ between ranks."""
    tracer = active_tracer()
    if tracer is None:
        return
    for node in _by_tracer.get(tracer) or ():
        _set_apart(node, tracer)
    _by_tracer[tracer] = None
    if in_backward_pass():
        _save_results(tracer)


def _set_apart(node: fx.Node, tracer: fx.Tracer) -> None:
    *args, group = node.args
    node.args = (*args, GroupName(group))
    _unsaved.setdefault(tracer, []).append(node)


def _save_results(tracer: fx.Tracer) -> None:
    """Of the forward pass: the checkpoint has marked all of its nodes by now."""
    for node in _unsaved.pop(tracer, ()):
        for one in (node, *node.users):  # those that wait
            if "recompute" in one.meta:
                one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _keep_in_backward(node: fx.Node, graph: fx.Graph, after: Callable[..., object]) -> None:
    gradients = [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]
    if not gradients or _depends_on(node, set(gradients)):
        return
    sent = node.args[0]
    assert isinstance(sent, fx.Node)
    with graph.inserting_before(node):
        held = graph.call_function(after, (sent, gradients[0]))
    held.meta = dict(sent.meta)
    node.update_arg(0, held)


def _depends_on(node: fx.Node, sources: set[fx.Node]) -> bool:
    seen, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here in sources:
            return True
        if here not in seen:
            seen.add(here)
            todo += here.all_input_nodes
    return False
