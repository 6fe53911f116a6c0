"""The worlds in which a session's cases run: one of ranks, simulated ranks, or one rank alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.options import RunRequest, Task, list_tasks
from dtbench.engine.place import RankPlace, find_place
from dtbench.engine.rank import LaunchedRank, quiet_torch
from dtbench.engine.ranks import AloneRanks, LiveWorld, device_of, simulated_world, world_of_one
from dtbench.engine.sampling import RankGroup
from dtbench.machine.device import DEFAULT_CPU_RANKS, choose_device
from dtbench.suite.errors import UsageError, complain
from dtbench.suite.suites import Suite

# Seconds for which a collective may hang before its group gives up.
TIMEOUT_S = 60.0
_LIVE: pytest.StashKey[Live] = pytest.StashKey()


class Up(NamedTuple):
    """A world, its ranks' votes and their barrier."""

    world: LiveWorld
    ranks: RankGroup
    barrier: Callable[[], None]


class Live:
    """The world that is up, of one kind at a time: first the simulated one, then the ranks'."""

    def __init__(self, place: RankPlace | None, options: RunRequest, show: Callable[[], None]) -> None:
        self._show = show
        self._kind = ""
        self._up: Up
        self._world = contextlib.ExitStack()
        self._life = contextlib.ExitStack()
        quiet_torch()
        self.rank = LaunchedRank(place, self._report) if place and place.world_size > 1 else None
        if self.rank is not None:
            self._life.enter_context(self.rank)
        self.device_type = choose_device(options.device)
        size = options.ranks or DEFAULT_CPU_RANKS
        self.plan = options.resolve(self.device_type, place.world_size if place else size)
        # Without a launcher, suites of ranks whose cases do not follow from the number of ranks run on one.
        self._single = None if self.rank or options.mesh else options.resolve(self.device_type, 1)

    def tasks(self, suite: Suite) -> list[Task]:
        """The cases of a suite.

        Raises:
            UsageError: a suite that cannot list them.
        """
        return list_tasks([suite], self.plan)

    def runs_alone(self, suite: Suite) -> bool:
        """Whether a suite of ranks has the same cases on one rank."""
        if self._single is None:
            return False
        try:
            single = [task.label for task in list_tasks([suite], self._single)]
        except UsageError:
            return False
        return single == [task.label for task in self.tasks(suite)]

    def enter(self, kind: str, *, alone: bool = False) -> Up:
        """The world of this kind; makes it where another one is up. alone: one rank will do.

        Raises:
            pytest.skip.Exception: a suite of ranks, and there is one process only; a simulated one, and this is
                not rank 0, which measures alone.
        """
        if kind == "ranks" and self.rank is None:
            if not alone:
                pytest.skip(
                    "needs several ranks: torchrun --nproc-per-node 4 -m pytest, with the same arguments"
                )
            kind = "alone"
        if kind != self._kind:
            self._world.close()
            self._up = self._make(kind)
            self._kind = kind
        if kind == "simulated" and self.rank is not None and self.rank.place.rank != 0:
            pytest.skip("rank 0 measures alone")
        return self._up

    def _make(self, kind: str) -> Up:
        device = device_of(self.device_type, self.rank.place.local_rank if self.rank else 0)
        if kind == "alone":
            world, barrier = self._world.enter_context(world_of_one(device))
            return Up(world, AloneRanks(), barrier)
        if kind == "simulated" or self.rank is None:
            return Up(self._world.enter_context(simulated_world(device)), AloneRanks(), lambda: None)
        if not self.rank.joined:
            self.rank.join(self.device_type)
        world, barrier = self._world.enter_context(self.rank.process_group(self.plan.mesh, TIMEOUT_S))
        return Up(world, self.rank.ranks, barrier)

    def _report(self, diagnosis: Diagnosis, _case: ActiveCase) -> None:
        """On the lowest living rank, in a helper thread, before this process ends."""
        self._show()
        complain(diagnosis.sentence)

    def leave(self) -> None:
        """The world that is up; the next to enter one makes it again."""
        self._world.close()
        self._kind = ""

    def close(self) -> None:
        self.leave()
        self._life.close()


def live_of(config: pytest.Config) -> Live:
    """Made once per session."""
    if _LIVE not in config.stash:
        # RankGroup that share cores and each start a thread per core would measure the fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        option = config.option
        options = RunRequest(
            mesh=option.dtbench_mesh,
            sizes_bytes=option.dtbench_size,
            dtypes=option.dtbench_dtype,
            quick=option.dtbench_quick,
        )
        capture = config.pluginmanager.get_plugin("capturemanager")
        show = capture.suspend_global_capture if capture else lambda: None
        config.stash[_LIVE] = Live(find_place(), options, show)
    return config.stash[_LIVE]


def close(config: pytest.Config) -> None:
    """Leaves the world, if there is one."""
    if _LIVE in config.stash:
        config.stash[_LIVE].close()
