"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.tests.gloo_world import Worlds
from core.tests.local_world import AnyWorlds, LocalWorlds


@pytest.fixture(scope="session")
def ranks() -> Iterator[Worlds]:
    """`ranks(fn, *args, world_size=4)` executes a module-level function on real gloo ranks."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(params=["gloo", "local"])
def worlds(request: pytest.FixtureRequest) -> AnyWorlds:
    """As `ranks`, for a test of two flavours: on real gloo ranks, and run once for all ranks as LocalTensors."""
    if request.param == "local":
        return LocalWorlds()
    found: Worlds = request.getfixturevalue("ranks")
    return found
