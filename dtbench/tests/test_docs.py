"""The pages of docs/ and README: what one begins with runs, options of all others exist, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml

from dtbench.cli.program import _COMMANDS, _HIDDEN, cli
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


def _commands(page: Path) -> Iterator[str]:
    for language, _, text in blocks(page):
        if language == "console":
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    yield line[2:]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_options_that_pages_give_exist(page: Path) -> None:
    for command in _commands(page):
        for part in re.split(r"[;|]| -- ", command):
            words = shlex.split(part, comments=True)
            if "dtbench" not in words:
                continue
            name, *arguments = words[words.index("dtbench") + 1 :]
            called = cli.get_command(click.Context(cli), name)
            assert called is not None, f"{command}: no command {name}"
            if isinstance(called, click.Group):
                called = called.get_command(click.Context(called), arguments.pop(0))
                assert called is not None, command
            names = {
                option
                for parameter in called.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            options = {word.partition("=")[0] for word in arguments if word.startswith("-")}
            own = {"--topology", "--mode", "--ops"} if name == "run" else set()  # of suites
            assert options <= names | own, f"{command}: {sorted(options - names)}"


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
    (words,) = [
        shlex.split(step["run"])
        for step in workflow["jobs"]["gate"]["steps"]
        if "dtbench gate" in step.get("run", "")
    ]
    gate = cli.get_command(click.Context(cli), "gate")
    assert gate is not None
    chosen = gate.make_context("gate", words[2:]).params
    assert chosen["words"] == ("benchmarks/my_suite.py",)
    assert chosen["exports"] == [("bmf", Path("times.json"))]


# What differs from machine to machine, and from one run to the next.
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


def _outputs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page with the lines that stand below it; `...` is for any number of lines. A block with a
    title, which says where, is for another machine."""
    for language, title, text in blocks(page):
        if language == "console" and not title:
            command, lines = "", list[str]()
            for line in [*text.replace("\\\n", " ").splitlines(), "$ "]:
                if line.startswith("$ "):
                    if command:
                        yield command, lines
                    command, lines = line[2:], []
                else:
                    lines.append(line)


def differs(shown: list[str], printed: str, of: Callable[[str], str]) -> str:
    """The first line of a page that the command does not print where it should; "" where all are there.

    of: a line without what may differ.
    """
    there, at, gap = [of(line) for line in printed.splitlines() if line.strip()], 0, False
    for line in [line for line in shown if line.strip()]:
        if line == "...":
            gap = True
            continue
        position = there[at:].index(of(line)) if of(line) in there[at:] else -1
        if position < 0 or (position > 0 and not gap):
            return line
        at, gap = at + position + 1, False
    return "" if gap or not shown or at == len(there) else f"(its last line) {there[at]}"


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
    commands = [command for command, _ in _outputs(START)]
    assert len(commands) > 10
    for command in commands:
        _run(command, tmp_path)


def test_what_the_readme_shows_is_what_is_printed(tmp_path: Path) -> None:
    """But for the figures, as intervals follow from fewer fits here."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    shown = [(command, lines) for command, lines in _outputs(ROOT / "README.md") if lines]
    assert [command.split()[1] for command, _ in shown] == ["show", "calibrate"]
    for command, lines in shown:
        printed = _run(command, tmp_path)
        assert not differs(lines, printed, _without_figures), f"{command}\n{printed}"


def test_readme_gives_the_commands_that_measure_and_test_a_fresh_clone() -> None:
    """Both install what they need, and CI passes the tests by the same command."""
    makefile = (ROOT / "Makefile").read_text()
    for command in ("make bench", "make test"):
        assert command in [line.partition("#")[0].strip() for line in _commands(ROOT / "README.md")]
        assert f"\n{command.split()[1]}: install\n" in makefile
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


def test_texts_stay_short() -> None:
    """The README on two screens, the docs in an hour; `results/` a clone in seconds."""
    assert len((ROOT / "README.md").read_text()) <= 8_000
    assert sum(len(page.read_text().split()) for page in PAGES) <= 15_000
    git = ["git", "-C", str(ROOT), "ls-files", "results"]
    committed = subprocess.run(git, capture_output=True, text=True).stdout.split()
    assert sum((ROOT / name).stat().st_size for name in committed) <= 6_000_000


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = "a 1\nb 2\nc 3\n"
    for shown, missing in (
        (["a 7", "...", "c 9"], ""),
        (["a 1", "c 3"], "c 3"),
        (["...", "d 1", "..."], "d 1"),
        (["a 1", "b 2"], "(its last line) c N"),
        ([], ""),
    ):
        assert differs(shown, printed, _without_figures) == missing
    assert _without_figures("core  4.07 µs  +16%  no change") == _without_figures(
        "core  912 ns  +3%  slower by 31%"
    )
    assert _without_figures("c10d [µs]  algbw [MB/s]") == _without_figures("c10d [ms]  algbw [kB/s]")
    assert _without_figures("dp  >= 0.3 (0.1 .. 2)") == _without_figures("dp  8.03 (0.705 .. 75.7)")


def test_the_picture_of_answers_is_drawn_from_committed_data(tmp_path: Path) -> None:
    picture = tmp_path / "answers.png"
    answers.main(picture)
    assert picture.stat().st_size > 20_000


def test_python_of_the_api_page_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "pages" / "how-to" / "python.md"
    code = "\n".join(text for language, _, text in blocks(page) if language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "report.html").is_file()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "-f",
        ROOT / "docs" / "mkdocs.yml",
        "-d",
        tmp_path,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DTensor" in (tmp_path / "reference" / "core.html").read_text()
    commands = (tmp_path / "reference" / "cli.html").read_text()
    assert "<pre><code>dtbench run --budget 3m\ndtbench run dispatch/add my_suite.py\n" in commands


def test_the_reference_groups_commands_as_the_help_does() -> None:
    page = (ROOT / "docs" / "pages" / "reference" / "cli.md").read_text()
    parts = [part.partition("\n") for part in page.split("\n## ")[1:]]
    groups = {title: tuple(re.findall(r":prog_name: dtbench (\S+)", text)) for title, _, text in parts}
    assert groups == {**_COMMANDS, "A suite of your own": _HIDDEN}


def test_the_page_of_licences_has_all_that_is_installed() -> None:
    pins = [
        line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "==" in line
    ]
    page = (ROOT / "docs/pages/reference/licences.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page, re.MULTILINE)[1:]
    assert [[name, version] for name, version, _ in rows] == pins, "run .ci/licences"
    assert not [name for name, _, licence in rows if licence == "not stated"]
    hashes = (ROOT / ".ci/hashes.txt").read_text()
    hashed = re.findall(r"^(\S+)==(\S+) .*\\\n +--hash=sha256:", hashes, re.MULTILINE)
    plain = [[re.sub(r"[-_.]+", "-", name).lower(), version] for name, version in pins if name != "torch"]
    assert sorted(map(list, hashed)) == sorted(plain), "make .ci/hashes.txt anew, as its head says"
