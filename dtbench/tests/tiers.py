"""Marks tests as slow, with the reason; all others are fast. `make test` runs the fast tier, `make test-all` both.

Each conftest imports the hook from here. Patterns are those of fnmatch, except that `[` is literal.
"""

import fnmatch
from collections.abc import Iterable, Sequence

import hypothesis
import pytest

# No test may fail because a machine is busy: hypothesis gives an example 200 ms otherwise.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SLOW = {
    "dtbench/tests/test_damaged_files.py::*[*-400]": "hundreds of damaged files of each kind",
    "dtbench/tests/test_job_cli.py::test_page_with_the_most_lanes*": "a page at its largest",
    # Tests that need programs or rights of the machine.
    "dtbench/tests/test_page_in_browser.py::*": "a browser",
    "dtbench/tests/test_lab_hosts.py::*": "network namespaces and their links",
    "dtbench/tests/test_docs.py::test_commands*": "every command of the start page",
    "dtbench/tests/test_export_profile.py::test_compiled_function*": "ranks that import torch and compile",
    "dtbench/tests/test_docs.py::test_python_of*": "a measurement in ranks of its own",
    "dtbench/tests/test_api.py::test_*_in_ranks": "ranks that each import torch",
    "dtbench/tests/test_docs.py::test_the_site*": "MkDocs and all pages",
    # Fresh starts of the program and its launchers, each with an import of torch per rank.
    "suites/tests/test_runs.py::*": "all suites and examples on ranks, under the command line, torchrun and pytest",
    "suites/tests/test_fsdp.py::test_run_on_gloo_ranks*": "two ranks that import torch",
    "dtbench/tests/test_profile.py::test_profile_of_two_ranks*": "ranks of a real profile",
    "dtbench/tests/test_profile.py::test_profile_splits*": "a real profile of both libraries",
    "dtbench/tests/test_pytest_plugin.py::test_plugin_measures*": "pytest sessions that import torch",
    "dtbench/tests/test_pytest_plugin.py::test_suite_file*": "pytest sessions that import torch",
    "dtbench/tests/test_pytest_plugin.py::test_session*": "pytest sessions that import torch",
    "dtbench/tests/test_preflight.py::test_real_ranks*": "four ranks that are examined",
    "dtbench/tests/test_preflight.py::test_under_torchrun*": "torchrun",
    "dtbench/tests/test_runs.py::test_*killed*": "launchers and ranks that are killed",
    "dtbench/tests/test_joining.py::test_under_*": "ranks of other launchers, which each import torch",
    "dtbench/tests/test_recording.py::test_in_a_rank_*": "a job that imports torch",
    "dtbench/tests/test_recording.py::test_under_*": "torchrun",
    "dtbench/tests/test_runs.py::test_under_*": "torchrun and Slurm",
    "dtbench/tests/test_options.py::test_real_ranks*": "sweeps of real ranks in two launches",
    "core/tests/test_compile*.py::*": "graphs, of which each compilation takes a second",
    "core/tests/test_coverage_tool.py::test_workers_*": "processes that judge ops, of which one is waited for",
    "core/tests/test_with_pytorch.py::test_*_of_torchs_database*": "hundreds of options of modules and optimizers",
    # The gate's launches are such starts, too; the fast tier judges made-up ones.
    "dtbench/tests/test_bisect.py::test_bisection_with_real_gates*": "three gates with real launches",
    "dtbench/tests/test_gate_runs.py::test_real_launches*": "four launches that import torch",
    "dtbench/tests/test_gate_runs.py::test_real_arms*": "six processes that load torch",
    "dtbench/tests/test_gate_runs.py::test_real_revisions*": "four of them",
    "dtbench/tests/test_gate_runs.py::test_compared_launches*": "five of them",
    "dtbench/tests/test_gate_runs.py::test_arms_load_apart*": "three of them",
    "dtbench/tests/test_gate_runs.py::test_benchmark_that_kills_a_launch*": "three of them",
    "dtbench/tests/test_gate_runs.py::test_an_interpreter_that_cannot*": "one of them",
    "dtbench/tests/gpu/test_gpu.py::test_checks_of_two_ranks*": "two ranks that import torch, per check",
    "dtbench/tests/gpu/test_gpu.py::test_pair_tells*": "two ranks that import torch, twice",
    "dtbench/tests/gpu/test_gpu.py::test_a_killed_check*": "a step that imports torch and is killed",
    "core/tests/*[gloo*": "real gloo ranks, where simulated ones run the same program",
}

# Fast exceptions from the patterns above, one of each kind.
FAST = (
    "core/tests/test_compile.py::test_compiled[block-2-aot_eager]",
    "core/tests/test_compile.py::test_graphs_do_not_ask_other_ranks",
    "core/tests/test_compile_kinds.py::test_export*",
    "core/tests/test_compile_writes.py::test_write_to_a_result_shows_*[base and copied view-False]",
    "core/tests/test_compile_writes.py::test_write_to_a_result_shows_*[copied view of the argument-False]",
)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks each test `fast` or `slow`; called by every conftest that imports it, so once per test counts."""
    for item in items:
        if not {mark.name for mark in item.iter_markers()} & {"fast", "slow"}:
            item.add_marker(pytest.mark.slow if _is_slow(item) else pytest.mark.fast)


def _is_slow(item: pytest.Item) -> bool:
    # Real ranks are processes that wait for each other; the fast tier has ranks in threads.
    if "gloo_ranks" in getattr(item, "fixturenames", ()):
        return True
    return _is_of(item, SLOW) and not _is_of(item, FAST)


def _is_of(item: pytest.Item, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(item.nodeid, pattern.replace("[", "[[]")) for pattern in patterns)
