"""The pages of docs/ and the README: commands of the start page run, options exist, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from packaging.utils import canonicalize_name

from dtbench.cli.program import _COMMANDS, _HIDDEN, cli
from dtbench.reporting.html.parts import PARTS
from dtbench.reporting.html.section import Part
from dtbench.tests import answers

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
TEXTS = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *PAGES]
START = ROOT / "docs" / "pages" / "start.md"
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(language, file it is to be saved as, text) of each block of code."""
    for match in _FENCE.finditer(page.read_text()):
        yield match[1], match[2] or "", match[3]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_options_that_pages_give_exist(page: Path) -> None:
    parts = [part for command, _, _ in _outputs(page) for part in re.split(r"[;|]| -- ", command)]
    for words in (shlex.split(part, comments=True) for part in parts):
        if "dtbench" in words:
            _check_options(words[words.index("dtbench") + 1 :])


@pytest.mark.parametrize("part", [part for part in PARTS if part.missing], ids=lambda part: part.id)
def test_commands_that_the_report_names_exist(part: Part) -> None:
    for words in part.missing.split(", or "):
        _check_options(words.split()[1:])


def _check_options(words: list[str]) -> None:
    """Checks that a command exists, has the options that are given, and is given the options that it requires."""
    name, *arguments = words
    command = cli.get_command(click.Context(cli), name)
    if isinstance(command, click.Group):
        command = command.get_command(click.Context(command), arguments.pop(0))
    assert command is not None, f"{words}: no command {name}"
    names = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    names |= {"--topology", "--mode", "--ops", "--routing"} if name == "run" else set()  # of suites
    given = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    assert not given - names, f"{words}: {sorted(given - names)}"
    options = [param for param in command.params if isinstance(param, click.Option) and param.required]
    missing = [option.opts for option in options if not given & {*option.opts}]
    assert not missing or "--help" in given, f"{words}: without {missing}"


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_code_of_pages_compiles_and_links_lead_somewhere(page: Path) -> None:
    for language, name, text in blocks(page):
        if language == "python":
            compile(text, name or _name(page), "exec")
    for target in re.findall(r"(?<!\\)\]\((?!https?:)([^)#\s]+)", _FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{_name(page)}: {target}"


def test_the_workflow_gives_options_that_exist_and_parses() -> None:
    page = ROOT / "docs" / "pages" / "how-to" / "gate.md"
    (workflow,) = [yaml.safe_load(text) for language, _, text in blocks(page) if language == "yaml"]
    commands = [step.get("run", "") for step in workflow["jobs"]["gate"]["steps"]]
    (words,) = [shlex.split(command) for command in commands if "dtbench gate" in command]
    gate = cli.get_command(click.Context(cli), "gate")
    assert gate is not None
    options = gate.make_context("gate", words[2:]).params
    assert (options["words"], options["exports"]) == (
        ("benchmarks/my_suite.py",),
        [("bmf", Path("times.json"))],
    )


# Parts of the output that differ between machines and runs.
_VARIES = (
    (r"\s+", " "),
    (r"\d+ without change(, \d+ (slower|faster) \(.*\))*$", "CHANGES"),
    (r"(no change|(slower|faster) by \S+)$", "CHANGE"),
    (r">= ", ""),
    (r"[+-]?\d[\d.,]*(%|x|\b)", "N"),
    (r"\b[kMGT]B/s", "B/s"),  # before the seconds, of which it has one
    (r"\b(ns|µs|ms|s)\b", "T"),
    (r"-( |$)", r"N\1"),
)


def _without_figures(line: str) -> str:
    for pattern, mark in _VARIES:
        line = re.sub(pattern, mark, line)
    return line.strip()


def _outputs(page: Path) -> Iterator[tuple[str, list[str], str]]:
    """Returns each command of a page, the lines shown below it, and the title of its block.

    "..." stands for any number of lines. A title says on which other machine a block runs.
    """
    for language, title, text in blocks(page):
        if language == "console":
            for entry in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
                command, *lines = entry.splitlines()
                yield command, lines, title


def _is_printed(shown: list[str], printed: str) -> bool:
    """Returns whether a command's output is what a page shows; figures may differ."""
    lines = [
        r"(.*\n)*" if line == "..." else re.escape(_without_figures(line)) + r"\n"
        for line in shown
        if line.strip()
    ]
    output = [_without_figures(line) for line in printed.splitlines() if line.strip()]
    return re.fullmatch("".join(lines), "".join(f"{line}\n" for line in output)) is not None


def _run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTEST_ADDOPTS": "-p dtbench.pytest_plugin"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_commands_of_the_start_page_run(tmp_path: Path) -> None:
    for language, name, text in blocks(START):
        if name and language != "console":
            (tmp_path / name).write_text(text)
    commands = [command for command, _, title in _outputs(START) if not title]
    assert len(commands) > 10
    for command in commands:
        _run(command, tmp_path)


def test_readme_shows_what_commands_print(tmp_path: Path) -> None:
    """Figures may differ: here intervals come from fewer fits."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    shown = {command: lines for command, lines, title in _outputs(ROOT / "README.md") if lines and not title}
    assert [command.split()[1] for command in shown] == ["show", "calibrate"]
    for command, lines in shown.items():
        printed = _run(command, tmp_path)
        assert _is_printed(lines, printed), f"{command}\n{printed}"


def test_readme_gives_the_commands_that_measure_and_test_a_fresh_clone() -> None:
    """Both install what they need, and CI passes the tests by the same command."""
    makefile = (ROOT / "Makefile").read_text()
    for command in ("make bench", "make test"):
        assert command in [line.partition("#")[0].strip() for line, _, _ in _outputs(ROOT / "README.md")]
        assert f"\n{command.split()[1]}: install\n" in makefile
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


def test_texts_stay_short() -> None:
    """The README is read on two screens, the docs in an hour; `results/` is cloned in seconds."""
    assert len((ROOT / "README.md").read_text()) <= 8_000
    read = [page for page in PAGES if page.name != "licences.md"]  # a list that .ci/licences writes
    words = [word for page in read for word in page.read_text().split() if word != "|"]  # the bars of tables
    assert len(words) <= 15_000
    git = ["git", "-C", str(ROOT), "ls-files", "results"]
    committed = subprocess.run(git, capture_output=True, text=True).stdout.split()
    assert sum((ROOT / name).stat().st_size for name in committed) <= 6_000_000


def test_the_picture_of_answers_is_drawn_from_committed_data(tmp_path: Path) -> None:
    answers.main(tmp_path / "answers.png")
    assert (tmp_path / "answers.png").stat().st_size > 20_000


def test_python_of_the_api_page_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "pages" / "how-to" / "python.md"
    code = "\n".join(text for language, _, text in blocks(page) if language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "report.html").is_file()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    _run(
        f"NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict -f {ROOT}/docs/mkdocs.yml -d {tmp_path}",
        tmp_path,
    )
    assert "DTensor" in (tmp_path / "reference" / "core.html").read_text()
    commands = (tmp_path / "reference" / "cli.html").read_text()
    assert "<pre><code>dtbench run --budget 3m\ndtbench run dispatch/add my_suite.py\n" in commands


def test_the_reference_groups_commands_as_the_help_does() -> None:
    page = (ROOT / "docs" / "pages" / "reference" / "cli.md").read_text()
    parts = [part.partition("\n") for part in page.split("\n## ")[1:]]
    groups = {title: tuple(re.findall(r":prog_name: dtbench (\S+)", text)) for title, _, text in parts}
    assert groups == {**_COMMANDS, "A suite of your own": _HIDDEN}


def test_the_page_of_licences_has_all_that_is_installed() -> None:
    pins = re.findall(r"^(\S+)==(\S+)(?: ;.*)?$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)
    page = (ROOT / "docs/pages/reference/licences.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page, re.MULTILINE)[1:]
    assert [(name, version) for name, version, _ in rows] == pins, "run .ci/licences"
    assert "not stated" not in {licence for _, _, licence in rows}
    hashed = re.findall(
        r"^(\S+)==(\S+) .*\\\n +--hash=sha256:", (ROOT / ".ci/hashes.txt").read_text(), re.MULTILINE
    )
    plain = [(canonicalize_name(name), version) for name, version in pins if name != "torch"]
    assert sorted(hashed) == sorted(plain), "make .ci/hashes.txt anew, as its head says"
