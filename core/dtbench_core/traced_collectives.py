"""Makes the compilers of all ranks keep the same collectives in the same order.

Each rank's compiler decides by the sizes of its shards. If sizes differ between ranks, one rank would wait for
collectives that others do not issue:

- An op that depends on no gradient may be moved to the forward graph. So a collective of a backward pass is made to
  depend on a gradient.
- Equal calls are merged. A rank with an empty shard computes with constants, which may be equal where values on other
  ranks are not. So in a graph with shards of different lengths every collective is made unique.
- Compilers save only the small ones of the results that a checkpoint recomputes. Which results are small differs
  between ranks. So in such a graph the results of all collectives are saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtbench_core.torch_compat import active_tracer, in_backward_pass, traced_node


class GroupName(str):
    """Name of a process group in one call of a graph. It equals no other object, so no pass merges the call."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


# Collectives by tracer while all shards have equal lengths; None afterwards.
_by_tracer: weakref.WeakKeyDictionary[fx.Tracer, list[fx.Node] | None] = weakref.WeakKeyDictionary()
# Collectives by tracer that were made unique. Their results must be saved once the forward pass is traced.
_unsaved: weakref.WeakKeyDictionary[fx.Tracer, list[fx.Node]] = weakref.WeakKeyDictionary()


def keep_on_all_ranks(result: torch.Tensor, depend: Callable[..., object]) -> None:
    """Keeps a collective that was just traced in its half of the graph, forward or backward.

    Args:
        depend: op of (input, gradient) that returns the input.
    """
    tracer = active_tracer()
    node = None if tracer is None else traced_node(result, tracer)
    if tracer is None or node is None:
        return
    if in_backward_pass():
        _keep_in_backward(node, tracer.graph, depend)
    issued = _by_tracer.setdefault(tracer, [])
    if issued is None:
        _make_unique(node, tracer)
    else:
        issued.append(node)


def see_uneven_shards() -> None:
    """Records that the graph of the running tracer may differ between ranks, since shards differ in length."""
    tracer = active_tracer()
    if tracer is None:
        return
    for node in _by_tracer.get(tracer) or ():
        _make_unique(node, tracer)
    _by_tracer[tracer] = None
    if in_backward_pass():
        _save_results(tracer)


def _make_unique(node: fx.Node, tracer: fx.Tracer) -> None:
    *args, group = node.args
    node.args = (*args, GroupName(group))
    _unsaved.setdefault(tracer, []).append(node)


def _save_results(tracer: fx.Tracer) -> None:
    """Marks the results of the forward pass's collectives as saved. By now the checkpoint has marked all its nodes."""
    for node in _unsaved.pop(tracer, ()):
        for user in (node, *node.users):  # its users wait for it
            if "recompute" in user.meta:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _keep_in_backward(node: fx.Node, graph: fx.Graph, depend: Callable[..., object]) -> None:
    gradients = [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]
    if not gradients or _depends_on(node, set(gradients)):
        return
    sent = node.args[0]
    assert isinstance(sent, fx.Node)
    with graph.inserting_before(node):
        dependent = graph.call_function(depend, (sent, gradients[0]))
    dependent.meta = dict(sent.meta)
    node.update_arg(0, dependent)


def _depends_on(node: fx.Node, sources: set[fx.Node]) -> bool:
    visited, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current in sources:
            return True
        if current not in visited:
            visited.add(current)
            todo += current.all_input_nodes
    return False
