"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.tests.gloo_world import Worlds


@pytest.fixture(scope="session")
def ranks() -> Iterator[Worlds]:
    """`ranks(fn, *args, world_size=4)` executes a module-level function on real gloo ranks."""
    worlds = Worlds()
    yield worlds
    worlds.close()
