"""The private names of torch.distributed through which every thread can be a rank (torch 2.11 to 2.13)."""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

# Modules as Any: their stubs lack what is private in them.
_c10d: Any = torch._C._distributed_c10d
_device_mesh: Any = device_mesh

_UNSET: Any = None


class RankC10d(distributed_c10d._World):
    """One rank's tables of process groups.

    torch's class keeps them in module globals behind properties; these attributes stand before them.

    Args:
        process: tables in which groups are looked up that are not the rank's own.
    """

    group_count: Any = 0
    default_pg = _UNSET
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = _UNSET

    def __init__(self, process: Any = None) -> None:
        super().__init__()
        self.ends: dict[dist.ProcessGroup, Any] = {}  # of the process' groups
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {} if process is None else ChainMap({}, getattr(process, name)))

    def add(self, group: dist.ProcessGroup, end: Any, backend: str) -> None:
        """Registers `end`, the rank's end of a group of the process."""
        self.ends[group] = end
        self.pg_map[end], self.pg_names[end] = (backend, None), end.group_name
        self.pg_group_ranks[end] = {rank: at for at, rank in enumerate(end.ranks)}


class _ByThread:
    """In place of c10d's `_world`: the running thread's tables, or the process'."""

    def __init__(self, of_thread: Callable[[], RankC10d | None], process: Any) -> None:
        object.__setattr__(self, "_of_thread", of_thread)
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_thread() or self._process, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of_thread() or self._process, name, value)


@contextmanager
def per_thread(of_thread: Callable[[], RankC10d | None], backend: str) -> Iterator[None]:
    """Inside, each thread has groups of its own, where `of_thread` gives it tables.

    DeviceMesh tells the meshes of threads apart (in `==`, and so in every cache of torch keyed by a
    mesh) for one backend, known to it by name: `backend` answers to that name.
    """
    process, get_backend = distributed_c10d._world, _device_mesh.get_backend

    def name_of_backend(group: Any = None) -> str:
        name = get_backend(group)
        return "threaded" if name == backend else name

    distributed_c10d._world = cast("Any", _ByThread(of_thread, process))
    _device_mesh.get_backend = name_of_backend
    _c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        distributed_c10d._world = process
        _device_mesh.get_backend = get_backend
        _c10d._set_thread_isolation_mode(False)


@contextmanager
def of_process() -> Iterator[None]:
    """Inside, also where each thread has groups of its own, those of the process."""
    outer = distributed_c10d._world
    distributed_c10d._world = getattr(outer, "_process", outer)
    _c10d._set_thread_isolation_mode(False)
    try:
        yield
    finally:
        distributed_c10d._world = outer
        _c10d._set_thread_isolation_mode(isinstance(outer, _ByThread))


def register_backend(name: str, make_group: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Registers `name` as a backend on CPUs and CUDA devices; `make_group(options, None)` makes each group."""
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make_group, extended_api=True, devices=["cpu", "cuda"])


def initialise(backend: str, rank: int, world_size: int) -> None:
    """`init_process_group` of the calling thread's rank."""
    hook = sys.excepthook  # c10d puts a wrapper around it per process group, to name the process' rank
    try:
        dist.init_process_group(backend, store=_c10d.HashStore(), rank=rank, world_size=world_size)
    finally:
        sys.excepthook = hook


def name_group(group: Any) -> None:
    """Functional collectives of the calling thread that name `group` call it: of a thread with groups of its own."""
    if not group.named:
        _c10d._register_process_group(group.group_name, group)
        group.named = True


def register_device_guard() -> None:
    """Call before threads start that will use fake tensors, in a thread that outlives them.

    The process' first FakeTensorMode registers a device guard for CUDA, which torch 2.11 keeps in that
    thread's memory: once the thread has ended, the next FakeTensorMode reads what was freed.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        torch._C._ensureCUDADeviceGuardSet()


def destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
