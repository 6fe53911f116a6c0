"""The measurement of one case, with fake clocks and ranks that are threads: no process group, no time."""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from torch.distributed import HashStore

from dtbench.engine.budget import Deadlines
from dtbench.engine.failure import ActiveCase
from dtbench.engine.measure import Subject
from dtbench.engine.rank_votes import StoreRanks
from dtbench.engine.sampling import Adaptive, Budget, ImplOutcome, Instruments, combine_ranks, measure_tasks
from dtbench.engine.tasks import Task
from dtbench.records.result import Result
from dtbench.suite import Case, Skip, Workload
from dtbench.suite.registry import Suite

BUDGET = Budget(samples_s=0.1, min_samples=5, max_samples=100, warmup_s=0.1)
CHEAP = 1e-3


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """A measurement collects garbage first; here it need not look at all that pytest has loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class FakeClock:
    """A call takes as many seconds as it returns, and time is what calls have taken."""

    def __init__(self, overhead_s: float = 0.0) -> None:
        self.now = 0.0
        self.overhead_s = overhead_s  # of a sample, however many calls it has
        self.started_ns: int | None = None
        self.error_ns = 0.0
        self.settled: list[bool] = []

    def settle(self, *, cold: bool = False) -> None:
        self.settled.append(cold)

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self.started_ns = round(self.now * 1e9)
        took = [run() for _ in range(calls)]
        assert all(isinstance(t, float) for t in took)
        took_s = self.overhead_s + sum(took)  # type: ignore[arg-type]
        self.now += took_s
        return took_s / calls


class Trial:
    """A case measured on threads; what happened on each rank is kept for the test."""

    def __init__(self, size: int = 1, timeout_s: float = 60.0, boot_id: str | None = None) -> None:
        self.size = size
        self.boot_id = boot_id
        self.timeout_s = timeout_s
        self.clocks = [FakeClock() for _ in range(size)]
        self.barriers = [0] * size
        self.calls: list[list[str]] = [[] for _ in range(size)]
        self.closed: list[str] = []
        self.store = HashStore()
        self.states: list[Any] = [None, None]

    def run(self, case: Case) -> list[dict[str, ImplOutcome]]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: self._on(rank, case), range(self.size)))

    def _on(self, rank: int, case: Case) -> dict[str, ImplOutcome]:
        now = ActiveCase()
        schedule = Adaptive(case, list(case.build), self.ranks(rank), self.tools(rank), now, self.timeout_s)
        return schedule.run(rank)

    def ranks(self, rank: int) -> StoreRanks:
        return StoreRanks(self.store, rank, self.size, lambda _reason: None)

    def tools(self, rank: int) -> Instruments:
        def barrier() -> None:
            self.barriers[rank] += 1

        states = itertools.cycle(self.states)
        return Instruments(
            clocks={"host": self.clocks[rank], "device": self.clocks[rank]},
            barrier=barrier,
            budget=BUDGET,
            boot_id=self.boot_id,
            gpu_state=lambda: next(states),
            monotonic=lambda: self.clocks[rank].now,
        )

    def impl(
        self, name: str, took: float | Callable[[int, int], float] = CHEAP, **more: Any
    ) -> Callable[[int], Workload]:
        """A builder whose call number i on rank r takes `took(r, i)` seconds."""

        def build(rank: int) -> Workload:
            def call() -> float:
                number = self.calls[rank].count(name)
                self.calls[rank].append(name)
                return took(rank, number) if callable(took) else took

            return Workload(call, close=lambda: self.closed.append(name), **more)

        return build


def case_of(build: Mapping[str, Callable[[Any], Workload]], **more: Any) -> Case:
    return Case("case", {}, build, **more)


@pytest.mark.parametrize(
    ("took", "count", "options"),
    [(0.01, 10, {}), (1.0, 5, {}), (1e-5, 100, {}), (1.0, 3, {"samples": 3})],
)
def test_counts_follow_the_budget_within_their_bounds(
    took: float, count: int, options: dict[str, int]
) -> None:
    trial = Trial()
    (outcome,) = trial.run(case_of({"core": trial.impl("core", took)}, **options))
    assert outcome["core"].samples_s == pytest.approx([took] * count)


def test_all_ranks_make_the_same_calls_and_the_slowest_counts() -> None:
    trial = Trial(size=3)
    core = trial.impl("core", lambda rank, i: 0.001 * (rank + 1))
    outcome = trial.run(case_of({"core": core}))[0]["core"]
    assert len({len(calls) for calls in trial.calls}) == 1
    assert outcome.samples_s == pytest.approx([0.003] * 33)  # 0.1 s at the slowest rank's speed
    assert list(outcome.rank_samples_s) == ["0", "1", "2"]
    assert list(outcome.rank_samples_s.values()) == [
        pytest.approx([seconds] * 33) for seconds in (0.001, 0.002, 0.003)
    ]
    assert outcome.counters["skew_s"] == pytest.approx(0.002)


@pytest.mark.parametrize("call_s", [1e-6, 3e-5, 1e-3, 2e-2])
def test_samples_of_a_length_hold_so_many_calls_that_their_overhead_vanishes(call_s: float) -> None:
    trial = Trial(size=2, boot_id="k")
    for clock in trial.clocks:
        clock.overhead_s = 2e-5  # of a barrier, of reading the clock
    # Rank 1 is slower, and the first call, which loads code, by far.
    core = trial.impl("core", lambda rank, i: call_s * (1 + rank) * (1 if i else 100))
    outcome = trial.run(case_of({"core": core}, sample_s=2e-3))[0]["core"]
    assert outcome.samples_s == pytest.approx([2 * call_s] * len(outcome.samples_s), rel=0.02)
    calls = outcome.counters["calls_per_sample"]
    assert calls == 1 or 2e-3 <= calls * 2 * call_s < 3e-3
    assert trial.barriers[0] == trial.barriers[1]  # the slowest rank's pace is everyone's
    assert set(trial.clocks[0].settled) == {False}
    first, second, *_ = outcome.rank_arrivals_s["1"]  # per call, as the samples are
    assert second - first == pytest.approx(call_s, rel=0.02)


def test_impls_take_turns_and_each_round_starts_with_another() -> None:
    trial = Trial()
    trial.run(case_of({n: trial.impl(n) for n in ["a", "b", "c"]}, samples=4))
    assert "".join(trial.calls[0])[-12:] == "abcbcacababc"


@pytest.mark.parametrize(
    ("call_s", "calls"),
    [
        (lambda i: 0.001, 1 + 4 + 4 + 1),  # first call, two blocks that agree, the sample
        # The fastest times of the blocks are 1/2, 1/4, 1/8 and 1/8 ms.
        (lambda i: 0.001 * max(0.5 ** (i // 4), 1 / 8), 1 + 4 * 4 + 1),
        (lambda i: 1.0 / (i + 1), 1 + 4 + 1),  # the seconds for warming up are spent
    ],
)
def test_warm_up_goes_on_while_calls_get_faster(call_s: Callable[[int], float], calls: int) -> None:
    trial = Trial()
    trial.run(case_of({"core": trial.impl("core", lambda _rank, i: call_s(i))}, samples=1, warmup_calls=5))
    assert len(trial.calls[0]) == calls


@pytest.mark.parametrize(
    ("options", "barriers", "calls", "cold"),
    [({}, 10, 10, True), ({"clock": "host"}, 0, 10, False), ({"calls_per_sample": 2}, 10, 15, False)],
    ids=["isolated", "host", "back to back"],
)
def test_device_cases_meet_before_each_sample_and_host_cases_do_not(
    options: dict[str, Any], barriers: int, calls: int, cold: bool
) -> None:
    trial = Trial()
    trial.run(case_of({"core": trial.impl("core")}, samples=5, **options))
    assert (trial.barriers[0], len(trial.calls[0])) == (barriers, calls)
    assert set(trial.clocks[0].settled) == {cold}


@pytest.mark.parametrize("at", [0, 2, 9])
def test_an_impl_that_raises_on_one_rank_fails_for_all_and_the_rest_goes_on(at: int) -> None:
    def sometimes(rank: int, number: int) -> float:
        if rank == 1 and number == at:
            raise RuntimeError("boom")
        return CHEAP

    trial = Trial(size=2)
    builders = {"bad": trial.impl("bad", sometimes), "core": trial.impl("core")}
    outcome, _ = trial.run(case_of(builders, samples=8))
    assert (outcome["bad"].status, outcome["bad"].rank) == ("failed", 1)
    assert outcome["bad"].reason.startswith("RuntimeError: boom (test_sampling.py:")
    assert outcome["core"].samples_s == pytest.approx([CHEAP] * 8)
    assert trial.calls[0].count("core") == trial.calls[1].count("core")


@pytest.mark.parametrize(("right_for", "when"), [(0, "after the warm-up"), (1, "after the samples")])
def test_wrong_data_is_found_after_the_warm_up_and_after_the_samples(right_for: int, when: str) -> None:
    def build(rank: int) -> Workload:
        checks = iter(range(10))
        return Workload(
            lambda: CHEAP, check=lambda: "is 3" if rank == 1 and next(checks) >= right_for else None
        )

    outcome = Trial(size=2).run(case_of({"core": build}))[0]["core"]
    assert (outcome.status, outcome.reason, outcome.rank, outcome.samples_s) == (
        "wrong",
        f"is 3 ({when})",
        1,
        (),
    )


def test_a_case_too_slow_for_its_timeout_is_given_up_between_calls() -> None:
    trial = Trial(timeout_s=10.0)
    (outcome,) = trial.run(case_of({"core": trial.impl("core", 6.0), "torch": trial.impl("torch")}))
    assert trial.calls[0] == ["core"]
    assert {o.status for o in outcome.values()} == {"failed"}
    assert "does not fit into --timeout 10 s (per call: core 6 s)" in outcome["core"].reason


def test_a_slow_case_gets_fewer_samples_rather_than_none() -> None:
    trial = Trial(timeout_s=20.0)
    (outcome,) = trial.run(case_of({"core": trial.impl("core", 2.0)}))
    assert 2 <= len(outcome["core"].samples_s) <= 5
    assert outcome["core"].status == "ok" and trial.clocks[0].now <= 20.0


def test_throttling_marks_the_result() -> None:
    trial = Trial()
    trial.states = [{"throttled_by": []}, {"throttled_by": ["hw_slowdown"]}]
    outcome = trial.run(case_of({"core": trial.impl("core")}))[0]["core"]
    assert (outcome.status, outcome.counters["throttled"], outcome.reason) == (
        "ok",
        1,
        "the GPU of rank 0 was throttled: hw_slowdown",
    )


def test_garbage_is_not_collected_while_sampling() -> None:
    seen: list[bool] = []
    trial = Trial()

    def took(_rank: int, _call: int) -> float:
        seen.append(gc.isenabled())
        return CHEAP

    assert gc.isenabled()
    trial.run(case_of({"core": trial.impl("core", took)}))
    assert set(seen) == {False} and gc.isenabled()


def test_cases_of_several_passes_come_first_in_turn_and_keep_all_samples() -> None:
    trial, order = Trial(), list[str]()
    active_case = ActiveCase()

    def task(name: str, passes: int, build: Callable[[Any], Workload]) -> Task:
        case = Case(name, {}, {"core": build}, passes=passes)
        return Task(Suite("s", lambda plan: iter(()), "simulated", ""), case, ("core",))

    def fails(_world: object) -> Workload:
        raise Skip("not here")

    # 1, 2 and 3 ms in the first, second and third pass: the fastest is of one pass alone.
    slower = trial.impl("core", lambda _rank, _call: 1e-3 * order.count("steady"))
    tasks = [task("once", 1, trial.impl("other")), task("steady", 3, slower), task("bad", 3, fails)]
    results = list[Result]()
    measure_tasks(
        tasks,
        0,
        trial.ranks(0),
        trial.tools(0),
        launch=0,
        timeout_s=60.0,
        active_case=active_case,
        record=results.append,
        around_case=lambda: nullcontext(order.append(active_case.name)),
    )
    assert order == ["steady", "bad"] * 3 + ["once"]
    assert [result.status for result in results] == ["ok", "skipped", "ok"]
    # 0.1 s of each pass.
    assert Counter(round(s * 1e3) for s in results[0].samples_s) == {1: 100, 2: 50, 3: 33}
    assert results[0].time_s is not None and results[0].time_s.min == pytest.approx(1e-3)


def test_suite_of_several_passes_is_completed_before_the_next_uses_its_share_of_a_budget() -> None:
    trial, order = Trial(), list[str]()
    active_case = ActiveCase()
    tasks = [
        Task(
            Suite(suite, lambda plan: iter(()), "simulated", ""),
            Case(f"{suite}{number}", {}, {"core": trial.impl("core")}, passes=passes),
            ("core",),
        )
        for suite, number, passes in (("a", 0, 1), ("a", 1, 1), ("b", 0, 3), ("b", 1, 1))
    ]
    measure_tasks(
        tasks,
        0,
        trial.ranks(0),
        trial.tools(0),
        launch=0,
        timeout_s=60.0,
        active_case=active_case,
        record=lambda result: None,
        around_case=lambda: nullcontext(order.append(active_case.name)),
        deadlines=Deadlines(tasks, time.monotonic() + 3600.0, False),
    )
    assert order == ["b0", "b0", "b0", "b1", "a0", "a1"]


def test_combining_leaves_out_rounds_that_a_rank_missed() -> None:
    def part(*samples: float | None) -> dict[str, Any]:
        return {
            "samples": list(samples),
            "started": [None if s is None else 10**18 + round(s * 1e9) for s in samples],
            "boot_id": "k",
            "offset": None,
            "error_ns": 0.0,
            "counters": {"n": 1},
            "throttled": None,
        }

    outcome = combine_ranks([part(1.0, 2.0, 5.0), part(4.0, None, 3.0)])
    assert (outcome.samples_s, outcome.counters) == ((4.0, 5.0), {"n": 1, "skew_s": 2.5})
    assert outcome.rank_samples_s == {"0": (1.0, 5.0), "1": (4.0, 3.0)}
    assert outcome.rank_arrivals_s == {"0": (0.0, 2.0), "1": (3.0, 0.0)}
    assert combine_ranks([part(1.0), part(4.0)], calls=3).rank_arrivals_s == {"0": (0.0,), "1": (1.0,)}
    lost = {"samples": None, "counters": {}, "throttled": None}
    assert {combine_ranks(parts).status for parts in ([part(None), part(1.0)], [lost])} == {"failed"}


def test_failure_reason_is_masked() -> None:
    def fail(_world: object) -> Workload:
        raise OSError("no answer from https://me:hunter2@host to --api-key hunter2")

    subject = Subject(Case("a", {}, {"core": fail}), "core")
    subject.attempt(lambda: subject.build(None))  # type: ignore[arg-type]
    assert subject.failure is not None and subject.failure[1].startswith(
        "OSError: no answer from https://***@host to --api-key *** (test_sampling.py:"
    )
