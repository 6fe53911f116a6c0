"""Which tests are slow, and why; every other one is fast. `make test` runs the fast tier, `make test-all` both.

A test file's conftest takes the hook from here. Tests are named as pytest prints them, by patterns of fnmatch
in which `[` stands for itself.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import hypothesis
import pytest

# No test may fail because a machine is busy: hypothesis gives an example 200 ms otherwise.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SLOW = {
    "dtbench/tests/faults/test_random_*.py::*[?000*": "thousands of commands",
    "dtbench/tests/test_damaged_files.py::*[*-400]": "hundreds of damaged files of each kind",
    # What of a user's machine it takes.
    "dtbench/tests/test_page_in_browser.py::*": "a browser",
    "dtbench/tests/test_lab_hosts.py::*": "network namespaces and their links",
    "dtbench/tests/test_docs.py::test_commands*": "every command of six pages",
    "dtbench/tests/test_docs.py::test_python_of*": "a measurement in ranks of its own",
    "dtbench/tests/test_api.py::test_*_in_ranks": "ranks that each import torch",
    "dtbench/tests/test_docs.py::test_the_site*": "MkDocs and all pages",
    # Fresh starts of the program and its launchers, each with an import of torch per rank.
    "suites/tests/test_examples.py::*": "the examples, as their users start them",
    "suites/tests/test_compile_suite.py::*": "two ranks that compile",
    "suites/tests/test_runs.py::*": "all suites on four ranks, and under torchrun and pytest",
    "dtbench/tests/test_profile.py::test_two_ranks_in_one_trace": "ranks of a real profile",
    "dtbench/tests/test_preflight.py::test_real_ranks*": "four ranks that are examined",
    "dtbench/tests/test_preflight.py::test_under_torchrun*": "torchrun",
    "dtbench/tests/test_runs.py::test_*killed*": "launchers and ranks that are killed",
    "dtbench/tests/test_runs.py::test_under_*": "torchrun and Slurm",
    "dtbench/tests/test_refine.py::test_real_ranks*": "sweeps of real ranks in two launches",
    "suites/tests/test_ways.py::test_every_way_is_right_on_real_ranks": "all ways of a redistribution on four ranks",
    "core/tests/test_compile.py::test_inductor*": "code that inductor makes and a compiler builds",
    "core/tests/test_compile_from_local.py::test_inductor*": "the same of other graphs",
    "core/tests/test_compile_from_local.py::test_what*[leaves]": "some twenty graphs",
    "core/tests/test_same_graph.py::*[budget]": "a hundred graphs",
    "core/tests/test_same_graph.py::*[inductor]": "a hundred graphs",
    "core/tests/test_compile_kinds.py::test_graphs_in_pieces*": "many graphs, compiled piece by piece",
    # Workers that die or hang are waited for.
    "core/tests/test_coverage_tool.py::test_a_worker_*": "a worker that dies, and one that is waited for",
    "core/tests/test_with_pytorch.py::test_*_of_torchs_database*": "hundreds of options of modules and optimizers",
    # The gate's launches are such starts, too; the fast tier judges made-up ones.
    "dtbench/tests/test_gate_runs.py::test_real_launches*": "four launches that import torch",
    "dtbench/tests/test_gate_runs.py::test_compared_launches*": "five of them",
    "dtbench/tests/test_gate_runs.py::test_arms_load_apart*": "three of them",
    "dtbench/tests/test_gate_runs.py::test_an_arm_that_brings*": "two of them",
    "dtbench/tests/test_gate_runs.py::test_what_is_launched_again*": "three of them",
    "core/tests/test_state_dicts.py::test_torchs_functions_learn*": "which of two a fresh process imports first",
    "core/tests/test_gloo_world.py::test_broken_world*": "ranks of the tests' own worlds that die",
    # The fast tier runs these on simulated ranks: as LocalTensors, or threads.
    "core/tests/test_*.py::test_*_on_gloo*": "real gloo ranks",
    "core/tests/*[gloo*": "real gloo ranks, where simulated ones run the same program",
}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks each test `fast` or `slow`; called by every conftest that imports it, so once per test counts."""
    for item in items:
        if not {mark.name for mark in item.iter_markers()} & {"fast", "slow"}:
            slow = any(fnmatch.fnmatchcase(item.nodeid, pattern.replace("[", "[[]")) for pattern in SLOW)
            item.add_marker(pytest.mark.slow if slow else pytest.mark.fast)
