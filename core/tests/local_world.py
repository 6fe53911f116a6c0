"""Simulated ranks for tests: threads that take turns, or one run of the function in a LocalTensorMode."""

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
    """Ranks as LocalTensors. Has the interface of `gloo_world.Worlds`, for functions that a LocalTensorMode can run."""

    def __call__(
        self, fn: Callable[..., Any], *args: Any, world_size: int = WORLD_SIZE, **kwargs: Any
    ) -> list[Any]:
        """Runs `fn(*args, **kwargs)` once; returns the result of each rank."""
        forget_meshes()  # the meshes of this thread belong to destroyed worlds
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        try:
            with LocalTensorMode(world_size):
                result = inspect.unwrap(fn)(*args, **kwargs)
            return per_rank(result, range(world_size))
        except Exception as error:
            raise RankError(f"simulated ranks in {fn.__qualname__}: {error}") from error
        finally:
            dist.destroy_process_group()
            forget_meshes()
            clear_caches()


class ThreadWorlds:
    """Ranks that are threads of this process. The threads are reused by later calls."""

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
        """Runs `fn(*args, **kwargs)` on every rank; returns the results by rank.

        Args:
            timeout_s: ignored, since a hang of threads is detected immediately.

        Raises:
            RankError: a rank raised. Its exception is the cause.
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
        raise RankError(message.strip()) from failed[0].error

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


AnyWorlds = Worlds | ThreadWorlds | LocalWorlds
