"""Stopwatches that show how the time of a dispatch is divided between its stages.

`StageTimer` puts a stopwatch around the functions that make up a dispatch, and removes it again. The functions
themselves contain no switch, so they are not slower without it. A stopwatch costs about 0.3 us per call, more than
some stages take, so its readings must be corrected (dtbench's `profile` does this, and reports the remaining error).
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from dtbench_core import comm
from dtbench_core.dispatch import cache_key, make_plan
from dtbench_core.dispatch import entry as dispatch
from dtbench_core.dispatch.op_plan import DIRECT_KINDS, Moving, OpPlan
from dtbench_core.layout import shard_layout as layout
from dtbench_core.layout import wrapper
from dtbench_core.op_types import Call
from dtbench_core.redistribute import autograd, routes
from dtbench_core.tensor import dtensor as tensor
from dtbench_core.tensor.dtensor import DTensor

# Stage -> its contents. Time between the functions of a stage belongs to the stage of the caller.
STAGES: dict[str, str] = {
    "entry": "torch's argument parser, its dispatcher and autograd, before the core is called and after it returns",
    "checks": "whether autograd or a mode must see the call",
    "key": "the cache key: op, specs and static arguments, in one walk",
    "cache": "looking the plan up",
    "plan": "making a plan, on a miss",
    "redistribute": "moving inputs that must be placed otherwise",
    "communicate": "the process group's own calls",
    "local op": "torch's op on the shards",
    "wrap": "the result as a DTensor",
    "glue": "Python between the stages",
}
BOOKKEEPING = "stopwatch"  # the time of the stopwatches themselves
NAMES = (*STAGES, BOOKKEEPING)

# Stage -> module-level functions; and (class, method, stage).
_FUNCTIONS: dict[str, tuple[Call, ...]] = {
    "entry": (dispatch._through_torch,),
    "checks": (dispatch._requires_grad, dispatch.modes_active),
    "key": (cache_key.key_of,),
    "cache": (routes.requested_route, layout.even_spec),
    "plan": (make_plan.build, make_plan.first_run),
    "redistribute": (routes.run_route, autograd.redistribute_along, autograd.redistributed_local),
    "communicate": (
        comm.all_gather,
        comm.all_reduce,
        comm.all_to_all,
        comm.broadcast,
        comm.reduce_scatter,
        comm.scatter,
    ),
    "wrap": (wrapper.wrap, tensor.wrapped),
}
_METHODS: tuple[tuple[type, str, str], ...] = (
    (Moving, "_moved", "redistribute"),
    (DTensor, "redistribute", "glue"),
    (DTensor, "to_local", "glue"),
    (DTensor, "full_tensor", "glue"),
)
_CACHES = ("plans", "functions")  # attributes of `dispatch`

# The record of a call: index of its stage in NAMES, start (ns), the records of calls within it, end (ns), END.
Log = list[int]
_Replacement = tuple[Any, str, Any]  # owner, attribute, timed function
END = -1


def stopwatch(function: Call, stage: str, log: Log) -> Call:
    """Returns `function` wrapped so that each call is recorded in the log.

    Args:
        stage: one of `NAMES`.
    """
    record, now, index = log.append, perf_counter_ns, NAMES.index(stage)

    def timed(*args: object, **kwargs: object) -> Any:
        record(index)
        record(now())
        try:
            return function(*args, **kwargs)
        finally:
            record(now())
            record(END)

    return timed


class _TimedCache(dict[Any, Any]):
    """A copy of a cache with a timed `get`; all other methods are those of dict."""

    get: Call

    def __init__(self, plain: dict[Any, Any], log: Log) -> None:
        super().__init__(plain)
        self.plain = plain
        self.get = stopwatch(super().get, "cache", log)


class StageTimer:
    """Context that records every dispatch of this process in the log that it returns; may be entered repeatedly.

    Only one thread may dispatch meanwhile, since the records of several threads would not nest.
    """

    def __init__(self) -> None:
        self.log: Log = []
        self._replacements: list[_Replacement] = []
        for stage, functions in _FUNCTIONS.items():
            for function in functions:
                timed = stopwatch(function, stage, self.log)
                self._replacements += [(owner, name, timed) for owner, name in _references(function)]
        for entry in (dispatch.torch_function, dispatch.torch_dispatch):
            timed = stopwatch(entry, "glue", self.log)
            self._replacements.append((dispatch, entry.__name__, timed))
            self._replacements.append((DTensor, f"__{entry.__name__}__", classmethod(timed)))
        for owner, name, stage in _METHODS:
            self._replacements.append((owner, name, stopwatch(vars(owner)[name], stage, self.log)))
        self._replacements += [(kind, "run", _timed_run(kind, self.log)) for kind in DIRECT_KINDS]

    def __enter__(self) -> Log:
        self.log.clear()
        self._originals = [vars(owner)[name] for owner, name, _ in self._replacements]
        for owner, name, timed in self._replacements:
            setattr(owner, name, timed)
        for name in _CACHES:
            setattr(dispatch, name, _TimedCache(getattr(dispatch, name), self.log))
        return self.log

    def __exit__(self, *_: object) -> None:
        for (owner, name, _timed), original in zip(self._replacements, self._originals, strict=True):
            setattr(owner, name, original)
        for name in _CACHES:
            timed = getattr(dispatch, name)
            timed.plain.clear()
            timed.plain.update(timed)  # with the entries added meanwhile
            setattr(dispatch, name, timed.plain)


def _references(function: Call) -> list[tuple[Any, str]]:
    """Returns every (module of the core, name) that refers to the function.

    Searching for references is needed, since calls through one replaceable reference would slow every dispatch down.
    """
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "dtbench_core"
        for name, value in list(vars(module).items())
        if value is function
    ]


def _timed_run(kind: type[OpPlan], log: Log) -> Call:
    """Returns the `run` method of this kind of plan, with a stopwatch around the local op that is passed to it."""
    run = kind.run
    timed_op = stopwatch(lambda call: stopwatch(call, "local op", log), BOOKKEEPING, log)

    def timed_run(
        self: OpPlan, cls: Any, call: Any, args: Any, options: Any, locals_: Any, kwargs: Any
    ) -> Any:
        return run(self, cls, timed_op(call), args, options, locals_, kwargs)

    return timed_run
