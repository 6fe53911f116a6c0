"""All that the core keeps between calls: what the process shares, and what each rank has for itself.

`process` holds what is learnt once for everybody. `current()` is the `Runtime` of the rank that runs: the
process' only one, unless ranks are simulated. A simulated rank runs inside `entered(its own)`, on its thread:
no other thread sees that.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh

    from dtbench_core.comm import CommCount
    from dtbench_core.cost.mesh_topology import MeshTopoInfo
    from dtbench_core.cost.topology import Topology
    from dtbench_core.dispatch.op_info import OpInfo
    from dtbench_core.dispatch.plan import Plan
    from dtbench_core.layout.mesh import MeshInfo
    from dtbench_core.layout.rng import Region
    from dtbench_core.layout.spec import DTensorSpec
    from dtbench_core.parallel.region import TensorParallelRNG
    from dtbench_core.redistribute.route import Route
    from dtbench_core.simulate.local_mode import LocalTensorMode

Key = tuple[Any, ...]
# A plan is about 1 KB; the bound keeps a program that never repeats a shape at some megabytes.
MAX_PLANS = 8192


def remember(cache: dict[Key, Any], key: Key, value: Any) -> None:
    """Puts it into the cache, which forgets its oldest entries at the bound."""
    while len(cache) >= MAX_PLANS:
        del cache[next(iter(cache))]
    cache[key] = value


@dataclass(slots=True, eq=False)
class Process:
    """What all ranks share that run in this process: their specs, which the keys hold, tell them apart.

    Attributes:
        ops, by_type, judged: what is known of ops and of Python functions (dispatch/entry.py); the keys of calls of
            those in `by_type` hold the types of numbers alone.
        plans, functions: the plans of ops, and of functions that are one op.
        default_dtype: the one that those plans hold for.
        routes, requests: the plans of redistributions (redistribute/route.py).
        even_specs: the specs of DTensors made of local tensors (layout/shard_layout.py).
        topology: the measured constants in use; `mesh_constants` are those of meshes.
        mode: the LocalTensorMode that is active, of which there is one at a time.
    """

    ops: dict[OpOverload, OpInfo] = field(default_factory=dict)
    by_type: set[Callable[..., Any]] = field(default_factory=set)
    judged: set[Callable[..., Any]] = field(default_factory=set)
    plans: dict[Key, Plan | None] = field(default_factory=dict)
    functions: dict[Key, Plan | None] = field(default_factory=dict)
    default_dtype: torch.dtype | None = None
    routes: dict[Key, Route] = field(default_factory=dict)
    requests: dict[Key, Route] = field(default_factory=dict)
    even_specs: dict[Key, DTensorSpec | None] = field(default_factory=dict)
    topology: Topology | None = None
    mesh_constants: dict[DeviceMesh, MeshTopoInfo] = field(default_factory=dict)
    mode: LocalTensorMode | None = None

    def clear_caches(self) -> None:
        """Forgets all plans, of ops and of redistributions."""
        for cache in (self.plans, self.functions, self.routes, self.requests, self.even_specs):
            cache.clear()

    def forget_op(self, op: OpOverload) -> None:
        """`op` got another rule: what was learnt of it, and of functions that come to it, may be wrong."""
        self.ops.pop(op, None)
        self.by_type.clear()
        self.judged.clear()
        self.clear_caches()


@dataclass(slots=True, eq=False)
class Runtime:
    """What a rank has for itself. `dataclasses.replace` makes one that shares what it is not given.

    Attributes:
        meshes, equal_meshes: what is known of meshes, by object and by value (layout/mesh.py).
        counters: of the `count_collectives()` that are entered.
        regions: what draws for the DTensors of a mesh, where it is not the default generator (layout/rng.py).
        streams: of the tensor-parallel regions, switched on or off (parallel/region.py).
        in_step: meshes whose ranks' generators were brought into one state.
        fallbacks, warned: how often ops ran on replicated inputs, and which of them warned.
        watched: what torch_dispatch has run since torch_function began to watch a call, as (plan, args, kwargs,
            result); the plan is None for an op that ran without one. None while nobody watches.
    """

    meshes: dict[int, tuple[weakref.ref[DeviceMesh], MeshInfo]] = field(default_factory=dict)
    equal_meshes: dict[DeviceMesh, MeshInfo] = field(default_factory=dict)
    counters: list[CommCount] = field(default_factory=list)
    regions: dict[DeviceMesh, Region] = field(default_factory=dict)
    streams: dict[DeviceMesh, TensorParallelRNG] = field(default_factory=dict)
    in_step: weakref.WeakSet[MeshInfo] = field(default_factory=weakref.WeakSet)
    fallbacks: Counter[OpOverload] = field(default_factory=Counter)
    warned: set[OpOverload] = field(default_factory=set)
    watched: list[tuple[Plan | None, Sequence[Any], dict[str, Any], Any]] | None = None


process = Process()
_current: ContextVar[Runtime] = ContextVar("dtbench_core.runtime", default=Runtime())  # noqa: B039 - the process'
# The running rank's. Bound to the method: a function around it would cost as much again.
current = _current.get


@contextmanager
def entered(runtime: Runtime) -> Iterator[Runtime]:
    """Inside, `runtime` is this thread's."""
    outer = _current.get()
    _current.set(runtime)
    try:
        yield runtime
    finally:
        _current.set(outer)
