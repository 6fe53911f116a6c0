"""Runs every case of every built-in suite as a pytest-benchmark test: `pytest suites`; see `dtbench.pytest_plugin`."""

from dtbench.suite.registry import load

globals().update({suite.name: suite for suite in load()})
