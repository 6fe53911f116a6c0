"""`pytest suites` measures the built-in suites, by `dtbench.pytest_plugin`; here are the short names of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtbench.engine.options import parse_dtypes, parse_sizes
from dtbench.engine.place import find_place
from dtbench.suite.mesh import parse_mesh

TESTS = Path(__file__).parent / "tests"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.import_plugin("dtbench.pytest_plugin")  # where dtbench is not installed
    group = parser.getgroup("dtbench")
    group.addoption("--quick", dest="dtbench_quick", action="store_true", help="As --dtbench-quick.")
    group.addoption("--mesh", dest="dtbench_mesh", type=parse_mesh, metavar="DIMS", help="As --dtbench-mesh.")
    group.addoption(
        "--size", dest="dtbench_size", type=parse_sizes, metavar="SIZES", help="As --dtbench-size."
    )
    group.addoption(
        "--dtype",
        dest="dtbench_dtype",
        type=parse_dtypes,
        default=("float32",),
        metavar="LIST",
        help="As --dtbench-dtype.",
    )
    group.addoption("--rounds", dest="dtbench_rounds", type=int, metavar="N", help="As --dtbench-rounds.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("dtbench_files", "suites/test_suites.py")
    place = find_place()
    if place is not None and place.rank != 0:
        config.option.verbose = -10  # no header


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Rank 0 alone prints, also the header."""
    from dtbench.pytest_plugin import silence_others

    silence_others(session.config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest suites` measures; the tests of the suites are for `pytest suites/tests`."""
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if collection_path == TESTS and not any(path.is_relative_to(TESTS) for path in asked):
        return True
    return None
