"""Selects the tests that run on two real ranks of `DTBENCH_TEST_BACKEND`, e.g. on a GPU that two NCCL ranks share.

Tests without ranks say nothing about NCCL and are deselected.
"""

import fnmatch
import itertools

import pytest

from core.tests.gloo_world import BACKEND

RANK_FIXTURES = {"ranks", "gloo_ranks", "worlds"}
# Pattern of a test's name -> why two ranks cannot run it. In a pattern `[` stands for itself.
SKIPPED = {
    "*/test_comm.py::test_objects": "its subgroups have two of four ranks",
    "*/test_bucketer.py::test_groups_have_separate_buckets": "two of its three groups have all ranks",
    "*/test_bucketer.py::test_dtensors_tensors_and_lists*": "its mesh has two dims of two ranks",
    "*/test_redistribute.py::test_any_*": "each example makes worlds and process groups of its own",
    "*/test_redistribute.py::test_pending_conjugations_are_moved*": "its mesh has four ranks",
    "*/test_redistribute.py::test_plan_predicts*": "its mesh has eight ranks",
}
if BACKEND == "nccl":
    SKIPPED["*/test_parallel.py::test_index_outside*"] = "on CUDA an index outside a table ends the process"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps tests that start ranks, and skips those of `SKIPPED`."""
    started = [item for item in items if RANK_FIXTURES & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in started])
    items[:] = started
    for item, (pattern, reason) in itertools.product(items, SKIPPED.items()):
        if fnmatch.fnmatchcase(item.nodeid, pattern.replace("[", "[[]")):
            item.add_marker(pytest.mark.skip(reason=reason))
