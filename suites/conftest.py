"""Lets `pytest suites` measure the built-in suites through `dtbench.pytest_plugin`."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("dtbench.pytest_plugin")  # needed if dtbench is not installed


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("dtbench_files", "suites/test_suites.py")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Silences the output of all ranks but rank 0."""
    from dtbench.pytest_plugin import silence_other_ranks

    silence_other_ranks(session.config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores the tests of the suites unless the command line names them, as in `pytest suites/tests`."""
    named = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if collection_path == TESTS and not any(path.is_relative_to(TESTS) for path in named):
        return True
    return None
