"""The second flavour of a test's ranks: its function run once, for all of them, in a LocalTensorMode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests.gloo_world import WORLD_SIZE, RankError, Worlds, mesh_of
from dtbench_core import clear_caches
from dtbench_core.simulate import LocalTensorMode, per_rank


class LocalWorlds:
    """Called as `gloo_world.Worlds` is, with functions that a LocalTensorMode can follow."""

    def __call__(
        self, fn: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE, **kwargs: Any
    ) -> list[Any]:
        """`fn(*args, **kwargs)` once; its result as each rank has it."""
        mesh_of.cache_clear()  # its meshes belong to worlds that are gone
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        try:
            with LocalTensorMode(world_size):
                result = inspect.unwrap(fn)(*args, **kwargs)
            return per_rank(result, range(world_size))
        except Exception as error:
            raise RankError(f"simulated ranks in {fn.__qualname__}: {error}", {}) from error
        finally:
            dist.destroy_process_group()
            mesh_of.cache_clear()
            clear_caches()


AnyWorlds = Worlds | LocalWorlds
