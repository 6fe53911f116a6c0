"""Simulated ranks for tests: threads that take turns, or the test's function run once in a LocalTensorMode."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests.gloo_world import WORLD_SIZE, RankError, Worlds, forget_meshes
from dtbench_core import clear_caches
from dtbench_core.simulate import LocalTensorMode, ThreadWorld, per_rank
from dtbench_core.simulate.threads import diverged


class LocalWorlds:
    """Called as `gloo_world.Worlds` is, with functions that a LocalTensorMode can follow."""

    def __call__(
        self, fn: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE, **kwargs: Any
    ) -> list[Any]:
        """`fn(*args, **kwargs)` once; its result as each rank has it."""
        forget_meshes()  # its meshes belong to worlds that are gone
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        try:
            with LocalTensorMode(world_size):
                result = inspect.unwrap(fn)(*args, **kwargs)
            return per_rank(result, range(world_size))
        except Exception as error:
            raise RankError(f"simulated ranks in {fn.__qualname__}: {error}", {}) from error
        finally:
            dist.destroy_process_group()
            forget_meshes()
            clear_caches()


class ThreadWorlds:
    """Ranks that are threads of this process, kept from call to call."""

    def __init__(self) -> None:
        self._worlds: dict[int, ThreadWorld] = {}

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = WORLD_SIZE,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank: the results, by rank.

        timeout_s: of processes; threads that hang are seen at once.

        Raises:
            RankError: a rank raised (its exception is the cause); `failures` has those that were not merely stopped
                because they waited for it.
        """
        if world_size not in self._worlds:
            self._worlds[world_size] = ThreadWorld(world_size)
        outcomes = self._worlds[world_size].outcomes(inspect.unwrap(fn), *args, **kwargs)
        failed = sorted((o for o in outcomes if o.error or o.stopped), key=lambda o: (o.stopped, o.rank))
        if not failed:
            return [o.value for o in outcomes]
        lines = {o.rank: "".join(traceback.format_exception_only(o.error)).strip() for o in failed}
        why = diverged(outcomes) or ""
        message = "\n".join([why, *(f"rank {r} in {fn.__qualname__}: {line}" for r, line in lines.items())])
        own = {o.rank: lines[o.rank] for o in failed if not o.stopped}
        raise RankError(message.strip(), own) from failed[0].error

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


AnyWorlds = Worlds | ThreadWorlds | LocalWorlds
