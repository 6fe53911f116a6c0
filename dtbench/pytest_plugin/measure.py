"""Runs one impl of a case as a pytest-benchmark test, on ranks, simulated ranks or a single rank.

A round is one sample as in `dtbench run`: `calls_per_sample` calls, after a barrier if the case times the device. Its
recorded time is the time per call on the slowest rank.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dtbench.engine.clock import clocks_of
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.measure import ImplOutcome, to_result
from dtbench.engine.options import RunRequest, parse_dtypes, parse_sizes
from dtbench.engine.rank import LaunchedRank, silence_torch
from dtbench.engine.rank_env import RankEnv, find_rank_env
from dtbench.engine.rank_votes import (
    AloneRanks,
    LiveWorld,
    RankGroup,
    select_device,
    simulated_world,
    world_of_one,
)
from dtbench.engine.sampling import CollectiveSchedule
from dtbench.engine.tasks import Task, list_tasks
from dtbench.errors import UsageError, print_error
from dtbench.machine.device import DEFAULT_CPU_RANKS, choose_device
from dtbench.suite.mesh import parse_mesh
from dtbench.suite.registry import Suite

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS, QUICK_ROUNDS = 20, 5
TIMEOUT_S = 60.0  # of collectives
_SESSION_WORLD = pytest.StashKey["SessionWorld"]()


class ActiveWorld(NamedTuple):
    """The current world, its ranks and their barrier."""

    world: LiveWorld
    ranks: RankGroup
    barrier: Callable[[], None]


class SessionWorld:
    """Creates and replaces the pytest session's process group: real or simulated ranks, one kind at a time.

    Args:
        place: this process's rank under a launcher, else None.
        options: the options on pytest's command line.
        show: stops capturing output, so that messages are shown.
    """

    def __init__(self, place: RankEnv | None, options: RunRequest, show: Callable[[], None]) -> None:
        self._show, self._kind = show, ""
        self._active: ActiveWorld
        self._world, self._life = contextlib.ExitStack(), contextlib.ExitStack()
        silence_torch()
        self.rank = LaunchedRank(place, self._report) if place and place.world_size > 1 else None
        if self.rank is not None:
            self._life.enter_context(self.rank)
        self.device_type = choose_device(options.device)
        self.options = options.resolve(
            self.device_type, place.world_size if place else (options.ranks or DEFAULT_CPU_RANKS)
        )
        # Without a launcher, a suite for real ranks runs on one rank if that does not change its cases.
        self._single = None if self.rank or options.mesh else options.resolve(self.device_type, 1)

    def runs_alone(self, suite: Suite, tasks: Sequence[Task]) -> bool:
        """Whether a suite for real ranks has the same cases on one rank, and no launcher started this process."""
        with contextlib.suppress(UsageError):
            single = [] if self._single is None else list_tasks([suite], self._single)
            return [task.label for task in single] == [task.label for task in tasks]
        return False

    def enter(self, kind: str, *, single_rank: bool = False) -> ActiveWorld:
        """Returns a world of this kind, after closing one of another kind. Skips the test if it needs a launcher.

        Args:
            kind: "ranks" or "simulated".
            single_rank: whether one rank suffices.
        """
        if kind == "ranks" and self.rank is None:
            if not single_rank:
                pytest.skip(
                    "needs several ranks: torchrun --nproc-per-node 4 -m pytest, with the same arguments"
                )
            kind = "alone"
        if kind != self._kind:
            self._world.close()
            self._active = self._make(kind)
            self._kind = kind
        if kind == "simulated" and self.rank is not None and self.rank.env.rank != 0:
            pytest.skip("rank 0 measures alone")
        return self._active

    def _make(self, kind: str) -> ActiveWorld:
        device = select_device(self.device_type, self.rank.env.local_rank if self.rank else 0)
        if kind == "alone":
            world, barrier = self._world.enter_context(world_of_one(device))
            return ActiveWorld(world, AloneRanks(), barrier)
        if kind == "simulated" or self.rank is None:
            return ActiveWorld(self._world.enter_context(simulated_world(device)), AloneRanks(), lambda: None)
        if not self.rank.joined:
            try:
                self.rank.join(self.device_type)
            except Exception as error:  # as in a run: prints one line and ends this process
                self._show()
                self.rank.__exit__(type(error), error, error.__traceback__)
        world, barrier = self._world.enter_context(self.rank.process_group(self.options.mesh, TIMEOUT_S))
        return ActiveWorld(world, self.rank.ranks, barrier)

    def _report(self, diagnosis: Diagnosis, _case: ActiveCase) -> None:
        """Prints the diagnosis. Called on the lowest living rank, in a helper thread, before this process ends."""
        self._show()
        print_error(diagnosis.message)

    def leave(self) -> None:
        """Closes the current world. `enter` creates a new one."""
        self._world.close()
        self._kind = ""

    def close(self) -> None:
        self.leave()
        self._life.close()


def session_world(config: pytest.Config) -> SessionWorld:
    """Returns the session's world, which the first call creates.

    Raises:
        UsageError: invalid options.
    """
    if _SESSION_WORLD not in config.stash:
        # By default each rank has one thread per core, so ranks would compete for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        option = config.option
        options = RunRequest(
            mesh=parse_mesh(option.dtbench_mesh) if option.dtbench_mesh else None,
            sizes_bytes=parse_sizes(option.dtbench_size) if option.dtbench_size else None,
            dtypes=parse_dtypes(option.dtbench_dtype),
            quick=option.dtbench_quick,
        )
        capture = config.pluginmanager.get_plugin("capturemanager")
        config.stash[_SESSION_WORLD] = SessionWorld(
            find_rank_env(), options, capture.suspend_global_capture if capture else lambda: None
        )
        config.add_cleanup(config.stash[_SESSION_WORLD].close)
    return config.stash[_SESSION_WORLD]


def test_of(task: Task, impl: str, *, single_rank: bool) -> Callable[..., None]:
    """Returns the test function of one impl.

    Args:
        task: the case.
        impl: name of the impl.
        single_rank: whether a suite for real ranks runs on a single rank.
    """

    def test(request: pytest.FixtureRequest, benchmark: "BenchmarkFixture") -> None:
        option = request.config.option
        rounds = option.dtbench_rounds or (QUICK_ROUNDS if option.dtbench_quick else ROUNDS)
        active = session_world(request.config).enter(task.world, single_rank=single_rank)
        bad = Rounds(benchmark, (task, impl), active, rounds).run(active.world).get(impl)
        if bad is None:
            return
        if benchmark.stats is not None:  # drops the rounds that were timed before the failure
            benchmark.has_error = True
            benchmark.stats.stats.data.clear()
        if bad.status == "skipped" or active.ranks.rank != 0:
            pytest.skip(bad.reason)
        pytest.fail(f"{bad.status} on rank {bad.rank}: {bad.reason}", pytrace=False)

    return test


class Rounds(CollectiveSchedule):
    """The schedule of one impl under pytest-benchmark: a number of rounds on all ranks.

    pytest-benchmark counts the rounds. The case's clock times them, as in `dtbench run`.
    """

    def __init__(
        self, benchmark: "BenchmarkFixture", task: tuple[Task, str], active: ActiveWorld, rounds: int
    ) -> None:
        self.task, self.impl = task
        super().__init__(self.task.case, [self.impl], active.ranks, ActiveCase())
        self.benchmark, self.barrier, self.rounds = benchmark, active.barrier, rounds
        self.clock = clocks_of(active.world.device)[self.case.instrument]
        self.subject = self.live[self.impl]
        self.samples: list[float] = []

    def agree(self) -> None:
        """Synchronises the ranks, so that a failure on one stops all."""
        self.vote(None, lambda _votes: None)

    warm_up = agree

    def sample(self) -> None:
        self.agree()
        self.subject.attempt(self.time_rounds)
        self.agree()

    def time_rounds(self) -> None:
        calls = self.case.calls_per_sample

        def setup() -> None:
            self.subject.prepare()
            self.clock.settle()
            if self.case.clock == "device":
                self.barrier()

        def sample() -> None:
            self.samples.append(self.clock.measure(self.subject.workload.run, calls))

        self.benchmark.pedantic(
            sample, setup=setup, rounds=self.rounds, warmup_rounds=-(-self.case.warmup_calls // calls)
        )

    def finish(self) -> None:
        """Replaces this rank's times by the slowest rank's, and records bandwidths and counters."""
        workload, case, stats = self.subject.workload, self.case, self.benchmark.stats
        counters = self.subject.counters()
        rank_samples = self.samples[-self.rounds :] if stats is not None and workload.participates else None
        agreed = self.vote(rank_samples, slowest)
        if stats is None:  # --benchmark-disable
            return
        stats.stats.data[:] = agreed
        stats.iterations = case.calls_per_sample
        # One table per case, with a row per impl.
        stats.group = " ".join([self.task.suite.name, case.name, *map(str, case.params.values())])
        stats.name = self.impl
        result = to_result(self.task, self.impl, ImplOutcome("ok", samples_s=tuple(agreed)))
        info = {
            "suite": result.suite,
            "impl": self.impl,
            "params": dict(case.params),
            "size_bytes": result.size_bytes,
            "algbw_Bps": result.algbw_Bps,
            "busbw_Bps": result.busbw_Bps,
            "counters": counters or None,
        }
        self.benchmark.extra_info |= {name: value for name, value in info.items() if value is not None}


def slowest(votes: list[list[float] | None]) -> list[float]:
    """Returns the time of the slowest participating rank for each round."""
    return [max(samples) for samples in zip(*(v for v in votes if v is not None), strict=True)]
