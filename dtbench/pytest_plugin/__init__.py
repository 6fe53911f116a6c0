"""A pytest plugin that runs suites as pytest-benchmark tests: one test per case and impl.

Collects the module-level suites of files named on the command line. Suites of test files, and of files found in
folders, are collected if `dtbench_files` in pytest's configuration matches them.

    pytest my_suite.py                                        in this process
    torchrun --nproc-per-node 4 -m pytest my_suite.py         on 4 ranks

Cases and ranks are the same as in `dtbench run`. pytest-benchmark determines the rounds and writes the files. The
fixture `dtbench_run` times functions in tests. Every pytest session loads this plugin, so slow modules are imported
only for a suite or the fixture.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dtbench.engine.rank_env import valid_rank_env

if TYPE_CHECKING:
    from dtbench.api import Function, Results
    from dtbench.suite import Param
    from dtbench.suite.registry import Suite

_Holder = pytest.Module | pytest.Class
# On a test item of a suite: "ranks" or "simulated".
_WORLD: pytest.StashKey[str] = pytest.StashKey()
# On the config: lines with the times of the fixture, for the end of the session.
_TIMED: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "dtbench_files",
        "Glob patterns of files whose suites are collected even if the file is not named on the command line.",
        "linelist",
    )
    group = parser.getgroup("dtbench", "options of suites, like those of `dtbench run`")
    group.addoption("--dtbench-quick", action="store_true", help="Fewer cases, sizes and rounds.")
    group.addoption("--dtbench-mesh", metavar="DIMS", help="Mesh dims, outermost first: dp=2,tp=2.")
    group.addoption("--dtbench-size", metavar="SIZES", help="1KiB:16MiB:4x, or a comma list.")
    group.addoption("--dtbench-dtype", default="float32", metavar="LIST", help="Comma list.")
    group.addoption("--dtbench-rounds", type=int, metavar="N", help="Samples per case [20; quick: 5].")


def pytest_configure(config: pytest.Config) -> None:
    """Disables saving and comparing on all ranks but rank 0, before pytest-benchmark reads its options."""
    place = valid_rank_env()
    if place is None or place.rank == 0 or not config.pluginmanager.hasplugin("benchmark"):
        return
    for name in (
        "json",
        "save",
        "autosave",
        "save_data",
        "compare",
        "compare_fail",
        "histogram",
        "cprofile_dump",
    ):
        setattr(config.option, f"benchmark_{name}", None)
    config.option.benchmark_quiet = True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Silences all ranks but rank 0 early if the command line names files with suites."""
    if any(b"dtbench.suite" in path.read_bytes() for path in _named_files(session.config)):
        silence_other_ranks(session.config)


def _named_files(config: pytest.Config) -> list[Path]:
    """Returns the files named on the command line."""
    paths = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return [path for path in paths if path.is_file()]


def silence_other_ranks(config: pytest.Config) -> None:
    """Silences all ranks but rank 0, whose reports would be the same."""
    place = valid_rank_env()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if place is not None and place.rank != 0 and reporter is not None:
        config.option.verbose = -10  # no header either
        config.pluginmanager.unregister(reporter)
        config.pluginmanager.register(_OtherRank(place.rank))


class _OtherRank:
    """Reports failures of a silenced rank, since rank 0 may not fail in the same test."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sys.__stderr__.write(f"rank {self.rank}: {report.nodeid}\n{report.longreprtext}\n")  # type: ignore[union-attr]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Appends the folder of a file with suites to sys.path, so that the file can import modules beside it."""
    if _holds_suites(parent.config, module_path):
        sys.path.append(str(module_path.resolve().parent))


def pytest_pycollect_makeitem(collector: _Holder, name: str, obj: object) -> list[pytest.Item] | None:
    """Collects a module-level suite: one test per case and impl."""
    suites = sys.modules.get("dtbench.suite.registry")  # loaded by any module that defines a suite
    if (
        suites is None
        or not isinstance(obj, suites.Suite)
        or not _holds_suites(collector.config, collector.path)
    ):
        return None
    return list(_items(collector, obj))


def _holds_suites(config: pytest.Config, path: Path) -> bool:
    """Whether the suites of a file are collected. Test files may define suites for other purposes."""
    if any(path.match(pattern) for pattern in config.getini("dtbench_files")):
        return True
    return path.resolve() in _named_files(config) and not any(
        path.match(pattern) for pattern in config.getini("python_files")
    )


def _items(collector: _Holder, suite: Suite) -> Iterator[pytest.Item]:
    from dtbench.engine.tasks import list_tasks
    from dtbench.errors import DtbenchError
    from dtbench.pytest_plugin.measure import session_world, test_of

    if not collector.config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            f"the suite {suite.name} is measured with pytest-benchmark: pip install 'dtbench[pytest]'"
        )
    silence_other_ranks(collector.config)
    try:
        world = session_world(collector.config)
        tasks = list_tasks([suite], world.options)
    except DtbenchError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    single_rank = any(task.world == "ranks" for task in tasks) and world.runs_alone(suite, tasks)
    name_counts: dict[str, int] = {}
    for task in tasks:
        for impl in task.impls:
            name = f"{suite.name}[{id_of(task.case.name, task.case.params, impl)}]"
            name_counts[name] = name_counts.get(name, 0) + 1
            if name_counts[name] > 1:
                name = f"{name[:-1]}-{name_counts[name]}]"
            item: pytest.Function = pytest.Function.from_parent(
                collector, name=name, callobj=test_of(task, impl, single_rank=single_rank)
            )
            # pytest-benchmark would also warn about an impl that fails before its rounds.
            item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))
            item.stash[_WORLD] = task.world
            yield item


def id_of(name: str, params: Mapping[str, Param], impl: str) -> str:
    """Returns a test id that -k can match, without = and brackets, e.g. `add-placements:S0-S0-mesh:8-core`."""
    return "-".join(
        re.sub(r"[^\w:+./]+", "-", re.sub(r"[()\[\]]", "", word)).strip("-")
        for word in [name, *(f"{key}:{value}" for key, value in params.items()), impl]
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves simulated suites first, since only one kind of world exists at a time and ranks join only once."""
    places = [place for place, item in enumerate(items) if _WORLD in item.stash]
    ordered = sorted((items[place] for place in places), key=lambda item: item.stash[_WORLD] == "ranks")
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Closes the process group after a test of a suite if the next test is not of a suite."""
    if _WORLD in item.stash and (nextitem is None or _WORLD not in nextitem.stash):
        from dtbench.pytest_plugin.measure import session_world

        session_world(item.config).leave()


@pytest.fixture
def dtbench_run(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Times functions like `dtbench.run` and returns the results. The test fails if a function fails.

    The times are also listed at the end of the session.

        def test_a_step(dtbench_run):
            results = dtbench_run({"step": lambda: step(x), "plain": lambda: plain_step(y)})
            times = dtbench.cases_frame(results)["estimate_s"]
    """

    def run(target: Function | Mapping[str, Function] | Suite, **options: Any) -> Results:
        import dtbench
        from dtbench.engine.progress import format_result

        results = dtbench.run(target, progress=False, **options)
        request.config.stash.setdefault(_TIMED, []).extend(
            f"{request.node.nodeid}: {format_result(r).partition(' | ')[2]}" for r in results.results
        )
        bad = [f"{r.impl} {r.status}: {r.reason}" for r in results.results if r.status != "ok"]
        if bad:
            pytest.fail("; ".join(bad), pytrace=False)
        return results

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lists the times of the fixture, and how many cases need several ranks. pytest shows that only with -rs."""
    lines = [*config.stash.setdefault(_TIMED, [])]
    skipped = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])]
    if skipped_for_ranks := [reason for reason in skipped if "needs several ranks" in reason]:
        lines.append(f"{len(skipped_for_ranks)} skipped: {skipped_for_ranks[0].removeprefix('Skipped: ')}")
    if lines:
        terminalreporter.section("dtbench")
        for line in lines:
            terminalreporter.write_line(line)
