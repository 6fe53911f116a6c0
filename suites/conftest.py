"""The suites under pytest: which cases, in which world, and who writes.

    pytest suites                                          the simulated suites, in this process
    torchrun --nproc-per-node 4 -m pytest suites           all suites, on 4 ranks
    pytest suites --dtbench-gate --dtbench-base rev:main -k relu    judged by `dtbench gate`, a test per verdict

The cases and the world are those of `dtbench run`; sampling and files are pytest-benchmark's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dtbench.bench.options import RunOptions, Task, list_tasks, parse_dtypes, parse_sizes
from dtbench.bench.sampling import Ranks
from dtbench.machine.device import DEFAULT_CPU_RANKS, choose_device
from dtbench.model.errors import complain
from dtbench.model.mesh import parse_mesh
from dtbench.model.suites import load
from dtbench.world.failure import ActiveCase, Diagnosis
from dtbench.world.place import Place, find_place
from dtbench.world.rank import Rank, quiet_torch
from dtbench.world.ranks import AloneRanks, LiveWorld, device_of, simulated_world

if TYPE_CHECKING:
    from dtbench.gate.gate import GateOptions
    from dtbench.records.gate import Gate

TESTS = Path(__file__).parent / "tests"
# Seconds for which a collective may hang before its group gives up.
TIMEOUT_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dtbench", "what the suites measure; as for `dtbench run`")
    group.addoption("--quick", action="store_true", help="Fewer cases, sizes and rounds.")
    group.addoption("--mesh", type=parse_mesh, metavar="DIMS", help="Mesh dims, outermost first: dp=2,tp=2.")
    group.addoption("--size", type=parse_sizes, metavar="SIZES", help="1KiB:16MiB:4x, or a comma list.")
    group.addoption("--dtype", type=parse_dtypes, default=("float32",), metavar="LIST", help="Comma list.")
    group.addoption(
        "--dtbench-gate", action="store_true", help="Judge by `dtbench gate` instead of timing here."
    )
    group.addoption(
        "--dtbench-base", metavar="ARM", help="What is compared with: rev:REVISION, python:PATH, env:..."
    )
    group.addoption(
        "--dtbench-head", metavar="ARM", default="env:", help="What is judged [default: this checkout]."
    )
    group.addoption("--dtbench-budget", metavar="TIME", help="At most so long: 5m.")
    group.addoption("--rounds", type=int, metavar="N", help="Samples per benchmark [default: 20, quick: 5].")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest suites` measures; the tests of the suites are for `pytest suites/tests`."""
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if collection_path == TESTS and not any(path.is_relative_to(TESTS) for path in asked):
        return True
    return None


# ----------------------------------------------------------------------------- one rank writes


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-benchmark reads its options: only rank 0 has anything to save or to compare with."""
    if config.option.dtbench_gate:
        config.pluginmanager.register(GateTests(config), "dtbench-gate")
    place = find_place()
    if place is None or place.rank == 0:
        return
    for name in ("json", "save", "autosave", "save_data", "compare", "compare_fail", "histogram"):
        setattr(config.option, f"benchmark_{name}", None)
    config.option.benchmark_cprofile_dump = None
    config.option.benchmark_quiet = True
    config.option.verbose = -10  # no header either


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The other ranks are silent: their reports say what rank 0's say."""
    place = find_place()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if place is not None and place.rank != 0 and reporter is not None:
        session.config.pluginmanager.unregister(reporter)
        session.config.pluginmanager.register(OtherRank(place.rank))


class OtherRank:
    """What a silent rank still says: a failure that rank 0 may not have seen."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sys.__stderr__.write(f"rank {self.rank}: {report.nodeid}\n{report.longreprtext}\n")  # type: ignore[union-attr]


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: object, output_json: dict[str, object]
) -> None:
    """Says whose figures these are."""
    import dtbench
    from dtbench.model import SCHEMA

    output_json["dtbench"] = {"version": dtbench.__version__, "schema": SCHEMA}


# ----------------------------------------------------------------------------- cases and worlds


class Up(NamedTuple):
    """A world, its ranks' votes and their barrier."""

    world: LiveWorld
    ranks: Ranks
    barrier: Callable[[], None]


class Live:
    """The world that is up, of one kind at a time: first the simulated one, then the ranks'."""

    def __init__(self, place: Place | None, options: RunOptions, show: Callable[[], None]) -> None:
        self._show = show
        self._kind = ""
        self._up: Up
        self._world = contextlib.ExitStack()
        self._life = contextlib.ExitStack()
        quiet_torch()
        self.rank = Rank(place, self._report) if place and place.world_size > 1 else None
        if self.rank is not None:
            self._life.enter_context(self.rank)
        self.device_type = choose_device(options.device)
        size = place.world_size if place else DEFAULT_CPU_RANKS
        self.plan = options.plan(self.device_type, size)

    def enter(self, kind: str) -> Up:
        """The world of this kind; makes it where another one is up.

        Raises:
            pytest.skip.Exception: a suite of ranks, and there is one process only; a simulated one, and this is
                not rank 0, which measures alone.
        """
        if kind == "ranks" and self.rank is None:
            pytest.skip("needs several ranks: torchrun --nproc-per-node 4 -m pytest suites")
        if kind != self._kind:
            self._world.close()
            self._up = self._make(kind)
            self._kind = kind
        if kind == "simulated" and self.rank is not None and self.rank.place.rank != 0:
            pytest.skip("rank 0 measures alone")
        return self._up

    def _make(self, kind: str) -> Up:
        if kind == "simulated" or self.rank is None:
            device = device_of(self.device_type, self.rank.place.local_rank if self.rank else 0)
            return Up(self._world.enter_context(simulated_world(device)), AloneRanks(), lambda: None)
        if not self.rank.joined:
            self.rank.join(self.device_type)
        world, barrier = self._world.enter_context(self.rank.process_group(self.plan.mesh, TIMEOUT_S))
        return Up(world, self.rank.ranks, barrier)

    def _report(self, diagnosis: Diagnosis, _case: ActiveCase) -> None:
        """On the lowest living rank, in a helper thread, before this process ends."""
        self._show()
        complain(diagnosis.sentence)

    def close(self) -> None:
        self._world.close()
        self._life.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case and impl."""
    if "task" in metafunc.fixturenames:
        live = live_of(metafunc.config)
        pairs = [(task, impl) for task in list_tasks(load(), live.plan) for impl in task.impls]
        ids = [f"{task.label} {impl}" for task, impl in pairs]
        metafunc.parametrize("task", pairs, ids=ids, indirect=True)


def live_of(config: pytest.Config) -> Live:
    """Made once per session."""
    key = "_dtbench_live"
    if not hasattr(config, key):
        # Ranks that share cores and each start a thread per core would measure the fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options = RunOptions(
            mesh=config.option.mesh,
            sizes_bytes=config.option.size,
            dtypes=config.option.dtype,
            quick=config.option.quick,
        )
        capture = config.pluginmanager.get_plugin("capturemanager")
        setattr(
            config, key, Live(find_place(), options, lambda: capture and capture.suspend_global_capture())
        )
    live: Live = getattr(config, key)
    return live


@pytest.fixture(scope="session")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    made = live_of(request.config)
    yield made
    made.close()


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """The same on every rank: it follows from the command line."""
    given = request.config.option.rounds
    return int(given if given is not None else 5 if request.config.option.quick else 20)


# ----------------------------------------------------------------------------- the gate as tests


class GateTests:
    """`--dtbench-gate`: the chosen tests become the selection of one gate, and each tells its verdict."""

    def __init__(self, config: pytest.Config) -> None:
        if config.option.dtbench_base is None:
            raise pytest.UsageError("--dtbench-gate needs --dtbench-base ARM, such as rev:origin/main")
        self._option = config.option
        self._report: Gate | None = None
        self._whole = True
        self._pairs: list[tuple[Task, str]] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Whether -k and the like left something out; otherwise whole suites are judged, in both arms."""
        self._whole = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is left of the tests after -k is what is judged."""
        self._pairs = [item.callspec.params["task"] for item in session.items if hasattr(item, "callspec")]

    def report(self) -> Gate:
        """The gate, run once."""
        if self._report is None:
            import tempfile

            from dtbench.gate.gate import gate
            from dtbench.model.errors import DtbenchError

            try:
                with tempfile.TemporaryDirectory(prefix="dtbench-gate-") as folder:
                    self._report = gate(self._options(Path(folder)))
            except DtbenchError as error:
                pytest.exit(f"dtbench gate: {error}", returncode=error.exit_code)
        return self._report

    def _options(self, folder: Path) -> GateOptions:
        from dtbench.bench.options import parse_duration
        from dtbench.gate.benchmark import Selection, label_of
        from dtbench.gate.gate import GateOptions

        option = self._option
        suites = dict.fromkeys(task.suite.name for task, _ in self._pairs)
        text = "" if self._whole else "\n".join(dict.fromkeys(task.label for task, _ in self._pairs))
        chosen = [] if self._whole else [label_of(task.label, impl) for task, impl in self._pairs]
        impls = () if self._whole else tuple(dict.fromkeys(impl for _, impl in self._pairs))
        return GateOptions(
            option.dtbench_base,
            option.dtbench_head,
            tuple(Selection(suite, text) for suite in suites),
            impls=impls,
            mesh=option.mesh,
            sizes_bytes=option.size,
            dtypes=option.dtype,
            budget_s=parse_duration(option.dtbench_budget) if option.dtbench_budget else None,
            folder=folder,
            only=frozenset(chosen),
        )

    def judge(self, label: str) -> None:
        """Fails the test unless its benchmark has passed."""
        from dtbench.gate.outputs import words
        from dtbench.records.judged import Verdict

        report = self.report()
        judged = next((j for j in report.benchmarks if j.label == label), None)
        if judged is None:
            pytest.skip("skipped by both arms")
        if judged.verdict not in (Verdict.PASS, Verdict.IMPROVED):
            pytest.fail(f"{judged.verdict.name}: {words(judged)}", pytrace=False)
        if report.trust.reasons:
            pytest.fail(f"UNTRUSTED: {'; '.join(report.trust.reasons)}", pytrace=False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The exit code is the gate's: benchmarks that only base has are no tests here, and count all the same."""
        if self._report is not None:
            session.exitstatus = self._report.exit_code

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The gate's own lines."""
        if self._report is not None:
            from dtbench.gate.outputs import lines

            terminalreporter.section("dtbench gate")
            for line in lines(self._report):
                terminalreporter.write_line(line)


@pytest.fixture
def task(request: pytest.FixtureRequest) -> tuple[Task, str]:
    pair: tuple[Task, str] = request.param
    return pair
