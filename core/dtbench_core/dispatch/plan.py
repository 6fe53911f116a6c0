"""A plan: how one op runs for one combination of specs and static arguments (make_plan.py makes it)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtbench_core.dispatch import contexts, fallback
from dtbench_core.dispatch.op_info import OpInfo
from dtbench_core.layout.placement import Placements
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, detach_view, wrap
from dtbench_core.redistribute import route as redistribute
from dtbench_core.torch_compat import DisableTorchFunction, increment_version, is_inference_mode_enabled


class Move(NamedTuple):
    """An input that must be placed otherwise: which of the tensors, how, what it is, what it becomes."""

    at: int
    steps: redistribute.Route
    spec: DTensorSpec
    placements: Placements


class Plan:
    """How one op runs for one combination of specs and static arguments.

    moves: of the inputs that must be placed otherwise.
    replaced: (argument position, local value) of global shapes made local.
    out: a spec, a list of specs and Nones (where the op gives none, or a number), or None for a Python value.
    returns_input: position, or name, of the written argument that is the result.
    copies: whether the op gives views and the local op, on these shards, copies.
    counts_write: whether `run` itself tells autograd of the write, as torch does on its own path.
    """

    __slots__ = (
        "aliases",
        "copies",
        "counts_write",
        "functional",
        "info",
        "kernel",
        "moves",
        "out",
        "plain_view",
        "replaced",
        "returns_input",
        "simple",
    )

    def __init__(
        self,
        info: OpInfo,
        local_op: Callable[..., Any] | None,
        moves: tuple[Move, ...],
        replaced: tuple[tuple[int, Any], ...],
        out: Any,
    ) -> None:
        self.kernel = local_op or info.kernel
        self.moves, self.replaced, self.out = moves, replaced, out
        self.returns_input = info.returned
        self.counts_write = False
        self.info = info
        self.aliases, self.copies = info.aliases, False
        self.functional = info.functional and local_op is None and not replaced
        still = not moves and not replaced and isinstance(out, DTensorSpec)
        self.simple, self.plain_view = info.functional and still, info.aliases and still

    def run(
        self,
        cls: type[Wrapper],
        call: Callable[..., Any],
        args: Sequence[Any],
        given: dict[str, Any],
        locals_: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """`call` (the op, or the function that became it) on the shards; the result as `cls`.

        args, given: the call's own arguments; locals_, kwargs: the same with shards for DTensors.
        """
        if self.simple:
            return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)
        if self.plain_view and not (
            self.copies or getattr(args[0], "_detached_view", False) or is_inference_mode_enabled()
        ):
            return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)
        if self.moves:
            locals_, kwargs = self._moved(args, given, locals_, kwargs)
        for position, value in self.replaced:
            locals_[position] = value
        if self.info.mutated:
            return self._write(cls, call, args, given, locals_, kwargs)
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        if self.aliases and is_inference_mode_enabled():
            # A view is an inference tensor only if its base is: torch ties their versions.
            with DisableTorchFunction():
                inference = args[0].is_inference()
            with torch.inference_mode(inference):
                made = self._wrapped(cls, result)
        else:
            made = self._wrapped(cls, result)
        if self.aliases and (self.moves or self.copies or getattr(args[0], "_detached_view", False)):
            for view in made if isinstance(made, (list, tuple)) else (made,):
                detach_view(view, args[0])
        return made

    def _wrapped(self, cls: type[Wrapper], result: Any) -> Any:
        out = self.out
        if out.__class__ is DTensorSpec:
            return wrap(cls, result, out)
        if out is None:
            return result
        made = [r if spec is None else wrap(cls, r, spec) for r, spec in zip(result, out, strict=True)]
        return made if isinstance(result, list) else tuple(made)

    def _write(
        self,
        cls: type[Wrapper],
        call: Callable[..., Any],
        args: Sequence[Any],
        given: dict[str, Any],
        locals_: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        at = self.returns_input
        if at is not None:
            written = [given[at] if at.__class__ is str else args[at]]
            # A plain tensor, made on the way, has no such mark.
            if getattr(written[0], "_detached_view", False):
                raise fallback.lost_write(written[0])
        else:
            written = self._written(args, given)
            for one in written:
                if one._detached_view:
                    raise fallback.lost_write(one)
        result = call(*locals_, **kwargs)
        # torch leaves out the members of lists, which ops without results write; and means to leave out the
        # running statistics of batch norm, which autograd saves before.
        if self.counts_write or (at is None and not self.info.op._schema.returns):
            increment_version(written)
        if at is not None:
            return written[0]
        if self.info.op._schema.returns:
            return self._wrapped(cls, result)
        return args[0] if self.counts_write else None  # torch's functions give back the list they wrote

    def _written(self, args: Sequence[Any], given: dict[str, Any]) -> list[Any]:
        """The DTensors that an op which returns none of them writes to."""
        if self.info.mutated == (0,) and args[0].__class__ is list:
            return [one for one in args[0] if isinstance(one, Wrapper)]
        arguments = self.info.op._schema.arguments
        written: list[Any] = []
        for position in self.info.mutated:
            name = arguments[position].name
            value = args[position] if position < len(args) else given.get(name)
            written += value if value.__class__ in (list, tuple) else [value]
        return [one for one in written if isinstance(one, Wrapper)]

    def for_function(self) -> Plan:
        """This plan for calls that do not pass through torch, which would count the writes."""
        if not self.info.mutated:
            return self
        counting = copy.copy(self)
        counting.counts_write = True
        return counting

    def showing(self, index: int) -> Plan:
        """This plan for a function that gives out result `index` of the op alone."""
        shown = copy.copy(self)
        shown.out = self.out[index]
        shown.simple = not self.moves and not self.replaced
        return shown

    def _moved(
        self, args: Sequence[Any], given: dict[str, Any], locals_: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        if (watch := contexts.watch()) is not None:
            for move in self.moves:
                watch.observe(self.info.op, move.spec, move.placements)
        places = _places(args)
        if places is None or self.moves[-1].at >= len(places):
            return self._moved_inside(args, given, locals_, kwargs)
        locals_ = list(locals_)
        for index, route, _, placements in self.moves:
            at = places[index]
            locals_[at] = _settled(args[at], locals_[at], placements, route)
        return locals_, kwargs

    def _moved_inside(
        self, args: Sequence[Any], given: dict[str, Any], locals_: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The same where a tensor may lie in a list, or is given by name."""
        tensors = [
            leaf
            for leaf in tree_leaves((list(args), sorted_by_name(given)))
            if isinstance(leaf, torch.Tensor)
        ]
        leaves, tree = tree_flatten((locals_, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for index, route, _, placements in self.moves:
            at = places[index]
            leaves[at] = _settled(tensors[index], leaves[at], placements, route)
        moved: tuple[list[Any], dict[str, Any]] = tree_unflatten(leaves, tree)
        return moved


def _places(args: Sequence[Any]) -> list[int] | None:
    """Where the tensors are among the arguments; None if some may lie inside another argument."""
    places = []
    for at, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            places.append(at)
        elif isinstance(arg, (list, tuple, dict)) and not all(isinstance(x, (int, float)) for x in arg):
            return None
    return places


def _settled(
    tensor: Any, local: torch.Tensor, placements: Placements, route: redistribute.Route
) -> torch.Tensor:
    if isinstance(tensor, Wrapper):
        return redistribute.settle(tensor, placements, route)
    return redistribute.apply(local, route)


def sorted_by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in sorted(kwargs)}
