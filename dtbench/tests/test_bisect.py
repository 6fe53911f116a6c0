"""`git bisect run` with the script of docs/pages/how-to/gate.md, on given exit codes and on real gates."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "pages" / "how-to" / "gate.md"
SUITE = """
from dtbench.suite import Case, Workload, suite
from library import total


@suite("mine", world="simulated", help="a sum")
def mine(options):
    yield Case("total", {}, build={"python": lambda world: Workload(run=lambda: total(8000))}, floor_s=60e-6)
"""
PLAIN = "def total(n):\n    return sum(range(n))\n"
MORE_CALLS = "def total(n):\n    return subtotal(n)\n\n\ndef subtotal(n):\n    return sum(range(n))\n"
FASTER = MORE_CALLS.replace("range(n)", "range(n - n // 10)")
SLOWER = MORE_CALLS.replace("range(n))", "range(n)) + sum(range(n + n // 2))")
BROKEN = "import a_module_that_is_missing\n"
# The good commit and the eight after it. git tries number 4 first, and skips it.
COMMITS = {
    "good": PLAIN,
    "1: a comment": f"{PLAIN}# A comment\n",
    "2: one more Python call": MORE_CALLS,
    "3: another comment": f"{MORE_CALLS}# Another comment\n",
    "4: fails to import": BROKEN,
    "5: imports again": MORE_CALLS,
    "6: slightly faster": FASTER,
    "7: more than twice as slow": SLOWER,
    "8: still slow": f"{SLOWER}# A comment\n",
}
BROKEN_COMMIT, SLOW_COMMIT = "4: fails to import", "7: more than twice as slow"

# A program with the exit codes of gates of these commits, which lists the commits.
GIVEN_CODES = """
git log -1 --format=%s >> ../heads
grep -q missing library.py && exit 4
grep -q "n + n" library.py && exit 1
exit 0
"""
# log2(8), and up to two more for the skipped commit.
MOST_STEPS = 5
# Time for a gate to end its processes after the budget, on a busy machine, seconds.
ENDING_S = 30

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a repository of the commits. Beside it are the script of the page and the suite."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (script,) = [(name, text) for language, name, text in blocks(PAGE) if language == "sh"]
    (tmp_path / script[0]).write_text(script[1])
    (tmp_path / "my_suite.py").write_text(SUITE)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
        # A commit that replaces a skipped one depends on hashes, and so on dates.
        monkeypatch.setenv(f"GIT_{name}_DATE", "2026-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run_command(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    run_command("git", "init", "-q")
    for message, text in COMMITS.items():
        (folder / "library.py").write_text(text)
        run_command("git", "add", "-A")
        assert run_command("git", "commit", "-qm", message).returncode == 0
    run_command("git", "tag", "v1.2", f"HEAD~{len(COMMITS) - 1}")
    return run_command


def use_program(tmp_path: Path, text: str) -> None:
    """Makes a shell program the `dtbench` that the script finds."""
    program = tmp_path / "dtbench"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def bisect(run: Run) -> subprocess.CompletedProcess[str]:
    """Runs the page's commands that bisect."""
    (text,) = [text for language, _, text in blocks(PAGE) if language == "console" and "git bisect" in text]
    (command,) = [line[2:] for line in text.splitlines() if line.startswith("$ git bisect start")]
    return run("sh", "-c", command)


def first_bad(run: Run, done: subprocess.CompletedProcess[str]) -> str:
    """Returns the message of the commit that git names."""
    assert done.returncode == 0 and " is the first bad commit" in done.stdout, done.stdout + done.stderr
    return run("git", "log", "-1", "--format=%s", "refs/bisect/bad").stdout.strip()


@pytest.mark.parametrize(
    ("gate", "script"),
    [(0, 0), (1, 1), (2, 255), (3, 125), (4, 125), (5, 125), (70, 255), (127, 255), (130, 255)],
)
def test_script_translates_the_exit_codes_of_a_gate(run: Run, tmp_path: Path, gate: int, script: int) -> None:
    use_program(tmp_path, f"exit {gate}")
    assert run("sh", "../slower.sh").returncode == script


def test_bisection_with_given_exit_codes_names_the_slow_commit_and_skips(run: Run, tmp_path: Path) -> None:
    use_program(tmp_path, GIVEN_CODES)
    done = bisect(run)
    heads = (tmp_path / "heads").read_text().splitlines()
    assert first_bad(run, done) == SLOW_COMMIT
    assert heads[0] == BROKEN_COMMIT and len(heads) <= MOST_STEPS


def test_bisection_stops_at_wrong_usage_and_continues(run: Run, tmp_path: Path) -> None:
    use_program(tmp_path, "exit 2")
    done = bisect(run)
    assert done.returncode != 0 and "bisect run failed" in done.stdout + done.stderr
    assert "good" not in run("git", "bisect", "log").stdout.partition("git bisect start")[2]
    use_program(tmp_path, GIVEN_CODES)
    assert first_bad(run, run("git", "bisect", "run", "sh", "../slower.sh")) == SLOW_COMMIT


def test_bisection_with_real_gates_names_the_slow_commit_in_the_announced_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit 6 makes more Python calls than v1.2 and is not slower, so only times find commit 7."""
    use_program(tmp_path, f'exec "{sys.executable}" -P -m dtbench "$@"')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / name) for name in ("", "core", "suites")))
    done = bisect(run)
    assert first_bad(run, done) == SLOW_COMMIT, done.stdout + done.stderr
    gates = [json.loads(file.read_text()) for file in tmp_path.glob("*/gate.json")]
    assert {gate["exit_code"] for gate in gates} == {0, 1, 4} and len(gates) <= MOST_STEPS
    announced = re.findall(r"--budget ends it after about (\d+) min in all", done.stdout + done.stderr)
    assert len(announced) == len(gates) - 1  # commit 4 is not timed
    for gate in gates:
        assert gate["duration_s"] <= 60 * int(announced[0]) + ENDING_S, "the budget did not end the gate"
