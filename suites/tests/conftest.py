"""Marks these tests as fast or slow, see `dtbench.tests.tiers`."""

from dtbench.tests.tiers import pytest_collection_modifyitems  # noqa: F401 - a hook of pytest
