"""Where the microseconds of a dispatch go: the core's own counters.

`StageTimer` puts a stopwatch around the functions that a dispatch is made of and takes it away again. The
functions themselves hold no switch, so nothing is slower without one. A stopwatch costs some
0.3 us per call, more than some of the stages: what is read off must be corrected for it (dtbench's
`profile` does, and says how well that adds up).
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from dtbench_core import comm
from dtbench_core.dispatch import cache_key, make_plan
from dtbench_core.dispatch import entry as dispatch
from dtbench_core.dispatch.op_plan import CALLING, Moving, OpPlan
from dtbench_core.layout import shard_layout as layout
from dtbench_core.layout import wrapper
from dtbench_core.op_types import Call
from dtbench_core.redistribute import autograd, routes
from dtbench_core.tensor import dtensor as tensor
from dtbench_core.tensor.dtensor import DTensor

# Stage -> what it holds. Time between the functions of a stage belongs to the caller's stage.
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
BOOKKEEPING = "stopwatch"  # time of the stopwatches themselves, which belongs to no stage
NAMES = (*STAGES, BOOKKEEPING)

# Module-level functions by stage, and methods.
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
_CACHES = ("plans", "functions")  # of dispatch

# What is recorded: NAME INDEX, START NS ... END NS, -1, as brackets.
Log = list[int]
_Swap = tuple[Any, str, Any]  # owner, attribute, what it is while timed
END = -1


def stopwatch(function: Call, stage: str, log: Log) -> Call:
    """`function`, with a bracket in the log around each call. stage: one of `NAMES`."""
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
    """A copy of a cache whose `get` is timed; all else is the dict's."""

    get: Call

    def __init__(self, plain: dict[Any, Any], log: Log) -> None:
        super().__init__(plain)
        self.plain = plain
        self.get = stopwatch(super().get, "cache", log)


class StageTimer:
    """Entered, every dispatch of this process is written into `log`; left, nothing is. Any number of times.

    Not for several threads at once: their brackets would cross.
    """

    def __init__(self) -> None:
        self.log: Log = []
        self._swaps: list[_Swap] = []
        self._was: list[Any] = []
        for stage, functions in _FUNCTIONS.items():
            for function in functions:
                timed = stopwatch(function, stage, self.log)
                self._swaps += [(owner, name, timed) for owner, name in _holders(function)]
        for entry in (dispatch.torch_function, dispatch.torch_dispatch):
            timed = stopwatch(entry, "glue", self.log)
            self._swaps.append((dispatch, entry.__name__, timed))
            self._swaps.append((DTensor, f"__{entry.__name__}__", classmethod(timed)))
        for owner, name, stage in _METHODS:
            self._swaps.append((owner, name, stopwatch(vars(owner)[name], stage, self.log)))
        self._swaps += [(kind, "run", _timed_run(kind, self.log)) for kind in CALLING]

    def __enter__(self) -> Log:
        self.log.clear()
        self._was = [vars(owner)[name] for owner, name, _ in self._swaps]
        for owner, name, timed in self._swaps:
            setattr(owner, name, timed)
        for name in _CACHES:
            setattr(dispatch, name, _TimedCache(getattr(dispatch, name), self.log))
        return self.log

    def __exit__(self, *_: object) -> None:
        for (owner, name, _timed), was in zip(self._swaps, self._was, strict=True):
            setattr(owner, name, was)
        for name in _CACHES:
            timed = getattr(dispatch, name)
            timed.plain.clear()
            timed.plain.update(timed)  # with what was learnt meanwhile
            setattr(dispatch, name, timed.plain)


def _holders(function: Call) -> list[tuple[Any, str]]:
    """Every module of the core that holds the function, and under which name.

    Looked for, because a call through one place that could be switched would cost every dispatch.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "dtbench_core"]
    return [(m, name) for m in modules for name, held in list(vars(m).items()) if held is function]


def _timed_run(kind: type[OpPlan], log: Log) -> Call:
    """`run` of this kind of plan, with a stopwatch around the local op that it is given."""
    run = kind.run
    timed_op = stopwatch(lambda call: stopwatch(call, "local op", log), BOOKKEEPING, log)

    def timed_run(
        self: OpPlan, cls: Any, call: Any, args: Any, options: Any, locals_: Any, kwargs: Any
    ) -> Any:
        return run(self, cls, timed_op(call), args, options, locals_, kwargs)

    return timed_run
