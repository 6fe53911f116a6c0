"""Gives every thread its own rank in torch.distributed, through private names of torch 2.11 to 2.13."""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

# Typed as Any, since the stubs of these modules lack private names.
_c10d: Any = torch._C._distributed_c10d
_device_mesh: Any = device_mesh

_UNSET: Any = None


class RankC10d(distributed_c10d._World):
    """c10d's tables of process groups for one rank.

    torch's class keeps the tables in module globals, behind properties. The attributes of this class override those.

    Args:
        process: the tables of the process, searched for groups that are not the rank's own.
    """

    group_count: Any = 0
    default_pg = _UNSET
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = _UNSET

    def __init__(self, process: Any = None) -> None:
        super().__init__()
        self.ends: dict[dist.ProcessGroup, Any] = {}  # group of the process -> this rank's end of it
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {} if process is None else ChainMap({}, getattr(process, name)))

    def add(self, group: dist.ProcessGroup, end: Any, backend: str) -> None:
        """Registers `end`, this rank's end of a group of the process."""
        self.ends[group] = end
        self.pg_map[end], self.pg_names[end] = (backend, None), end.group_name
        self.pg_group_ranks[end] = {rank: index for index, rank in enumerate(end.ranks)}


class _ByThread:
    """Replaces c10d's `_world`: forwards to the running thread's tables, or else to those of the process."""

    def __init__(self, tables_of_thread: Callable[[], RankC10d | None], process: Any) -> None:
        object.__setattr__(self, "_tables_of_thread", tables_of_thread)
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables_of_thread() or self._process, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tables_of_thread() or self._process, name, value)


@contextmanager
def use_thread_tables(tables_of_thread: Callable[[], RankC10d | None], backend: str) -> Iterator[None]:
    """Context in which each thread uses the process groups in the tables that `tables_of_thread` returns for it.

    Inside it, equal DeviceMeshes of different threads compare unequal, so that torch's caches that are keyed by a mesh
    keep them apart. DeviceMesh does this only for the backend named "threaded", so `backend` is reported by that name.
    """
    process, get_backend = distributed_c10d._world, _device_mesh.get_backend

    def name_of_backend(group: Any = None) -> str:
        name = get_backend(group)
        return "threaded" if name == backend else name

    distributed_c10d._world = cast("Any", _ByThread(tables_of_thread, process))
    _device_mesh.get_backend = name_of_backend
    _c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        distributed_c10d._world = process
        _device_mesh.get_backend = get_backend
        _c10d._set_thread_isolation_mode(False)


@contextmanager
def use_process_tables() -> Iterator[None]:
    """Context in which the process's own groups are used, even inside `use_thread_tables`."""
    outer = distributed_c10d._world
    distributed_c10d._world = getattr(outer, "_process", outer)
    _c10d._set_thread_isolation_mode(False)
    try:
        yield
    finally:
        distributed_c10d._world = outer
        _c10d._set_thread_isolation_mode(isinstance(outer, _ByThread))


def register_backend(name: str, make_group: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Registers `name` as a backend for CPUs and CUDA devices. `make_group(options, None)` makes each group."""
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make_group, extended_api=True, devices=["cpu", "cuda"])


def initialise(backend: str, rank: int, world_size: int) -> None:
    """Calls `init_process_group` for the rank of the calling thread."""
    hook = sys.excepthook  # c10d wraps the hook for every process group, to name the rank of the process
    try:
        dist.init_process_group(backend, store=_c10d.HashStore(), rank=rank, world_size=world_size)
    finally:
        sys.excepthook = hook


def register_group_name(group: Any) -> None:
    """Lets functional collectives of the calling thread, which look groups up by name, find `group`."""
    if not group.is_name_registered:
        _c10d._register_process_group(group.group_name, group)
        group.is_name_registered = True


def register_device_guard() -> None:
    """Works around a dangling pointer in torch 2.11 when a thread that used fake tensors has ended.

    The first FakeTensorMode of the process registers a device guard for CUDA, which torch 2.11 stores in memory of
    the current thread. Once that thread has ended, the next FakeTensorMode reads freed memory. Call this in a thread
    that outlives all others, before they start.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        torch._C._ensureCUDADeviceGuardSet()


def destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
