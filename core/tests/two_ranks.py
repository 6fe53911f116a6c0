"""Which tests run on two real ranks of `DTBENCH_TEST_BACKEND`, and why the others do not.

Used on a GPU that two NCCL ranks share. Tests that start no ranks show nothing of NCCL and are deselected.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import pytest

from core.tests.gloo_world import BACKEND

RANK_FIXTURES = {"ranks", "gloo_ranks", "worlds"}
# Pattern of a test's name -> why two ranks cannot run it. In a pattern `[` stands for itself.
SKIPPED = {
    "*/test_comm.py::test_objects": "its subgroups have two of four ranks",
    "*/test_bucketer.py::test_groups_do_not_mix": "two of its three groups have all ranks",
    "*/test_bucketer.py::test_dtensors_tensors_and_lists*": "its mesh has two dims of two ranks",
    "*/test_redistribute.py::test_any_*": "each example makes worlds and process groups of its own",
    "*/test_redistribute.py::test_pending_conjugations*": "its mesh has four ranks",
    "*/test_redistribute.py::test_a_plan_expects*": "its mesh has eight ranks",
}
if BACKEND == "nccl":
    SKIPPED["*/test_parallel.py::test_index_outside*"] = "on CUDA an index outside a table ends the process"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps tests that start ranks, and skips those of `SKIPPED`."""
    started = [item for item in items if RANK_FIXTURES & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in started])
    items[:] = started
    for item in items:
        for reason in reasons(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


def reasons(name: str) -> Sequence[str]:
    """Why two ranks cannot run the test of this name; empty if they can."""
    return [why for pattern, why in SKIPPED.items() if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))]
