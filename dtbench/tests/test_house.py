"""House rules of CONTRIBUTING.md: lengths of files and functions, the first screen of help, one meaning per option."""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dtbench.cli.program import _HIDDEN, cli
from dtbench.tests.made_up import Cli

ROOT = Path(__file__).parents[2]
# Beside the tests: what is shipped, and what runs the suites under pytest.
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("dtbench", "core/dtbench_core", "suites")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.parts
}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}
OURS = {"dtbench", "dtbench_core", "dtbench_suites", "suites", "conftest"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ANY_AT_MOST = 850  # 825 were counted when this was written; a change may lower it


def _code_lines(name: str) -> list[int]:
    """Returns per line of a file 0 for docstrings and comments, 1 for other lines."""
    counts = [0 if line.lstrip().startswith("#") else 1 for line in SOURCES[name].splitlines()]
    for node in ast.walk(TREES[name]):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            for number in range(node.body[0].lineno - 1, node.body[0].end_lineno):
                counts[number] = 0
    return counts


def test_files_and_functions_stay_readable() -> None:
    """At most 600 lines per file and 60 per function, docstrings and comments left out."""
    assert len(SOURCES) > 300
    for name, tree in TREES.items():
        counts = _code_lines(name)
        functions = {
            node.name: sum(counts[node.lineno - 1 : node.end_lineno])
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert (sum(counts) <= 600, {f: n for f, n in functions.items() if n > 60}) == (True, {}), name


def test_a_class_name_is_defined_once() -> None:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(node.name for node in nodes).items() if count > 1] == []


def test_any_stays_rare() -> None:
    """mypy checks nothing of what is Any: `object`, a TypeVar, a Protocol or a named alias says more."""
    assert sum(len(re.findall(r"\bAny\b", text)) for text in SOURCES.values()) <= ANY_AT_MOST


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for sub in command.commands:
            yield from _commands(f"{name} {sub}", command.commands[sub])


def _all_commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    commands = [(name, cli.get_command(context, name)) for name in [*cli.list_commands(context), *_HIDDEN]]
    return {path: sub for name, command in commands if command for path, sub in _commands(name, command)}


def test_help_fits_one_screen(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = dtbench("--help")[1].splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert len(cli.list_commands(click.Context(cli))) <= 13


# An option that takes something else in one command, and why.
DIFFERS = {
    "--base": "runs and tables are files, what a gate compares is a revision, a Python or variables",
}


def test_an_option_takes_the_same_in_every_command() -> None:
    takes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in _all_commands().items():
        for option in command.params:
            if isinstance(option, click.Option):
                parse = getattr(option.type, "func", None)
                kind = getattr(parse, "__qualname__", "") or option.type.to_info_dict()["param_type"]
                for spelled in option.opts:
                    takes[spelled][kind.removesuffix("Range")].append(name)
    differing = {option: dict(uses) for option, uses in takes.items() if len(uses) > 1}
    assert differing.keys() == DIFFERS.keys(), differing


def test_imported_packages_are_declared() -> None:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OURS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["pytest"]]
    declared = {canonicalize_name(Requirement(text).name) for text in wanted}
    packages = packages_distributions()
    assert {"torch", "markupsafe", "pytest"} <= foreign
    assert [
        name for name in foreign if declared.isdisjoint(map(canonicalize_name, packages.get(name, ())))
    ] == []


def test_programs_of_ci_and_hooks_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["ci"]["steps"][-1]["run"] == "bash .ci/run" and (ROOT / ".ci/run").is_file()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = [hook["entry"].split()[0] for hook in hooks]
    assert len(tools) == 4 and all(tool.startswith(".venv/bin/") for tool in tools)
    assert all((Path(sys.executable).parent / Path(tool).name).exists() for tool in tools)
