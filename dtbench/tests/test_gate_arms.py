"""Arms: revisions of a small repository, interpreters, variables; and what an order of launches is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtbench.errors import UsageError
from dtbench.gate import arms
from dtbench.gate.arms import open_arms, parse_variables
from dtbench.gate.benchmark import SuiteSelection
from dtbench.gate.process import environment_of
from dtbench.machine import provenance
from dtbench.tests.made_up_arm import made_up_arm


def git(*words: str) -> str:
    names = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(["git", *names, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits; the second one's suite and core differ. Interpreters are not started."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(arms, "_probed", lambda arm, _asked: arm)
    git("init", "-q")
    core = folder / "core" / "dtbench_core"
    core.mkdir(parents=True)
    for number in (1, 2):
        (core / "__init__.py").write_text(f"NUMBER = {number}\n")
        (folder / "my_suite.py").write_text(f"NUMBER = {number}\n")
        git("add", "-A")
        git("commit", "-qm", f"number {number}")
    return folder


def test_a_revision_has_its_own_core_and_the_harness_of_the_gate(repository: Path) -> None:
    with open_arms("rev:HEAD~1", "rev:HEAD") as (base, head):
        for arm, number in ((base, 1), (head, 2)):
            sources = Path(arm.path[0])
            assert (sources / "dtbench_core" / "__init__.py").read_text() == f"NUMBER = {number}\n"
            assert (sources / "dtbench" / "gate" / "worker.py").is_file()
            assert (sources / "dtbench_suites" / "dispatch.py").is_file()
            assert not (sources / "dtbench" / "tests").exists()
            assert arm.python == sys.executable
            suite = arm.selections([SuiteSelection("my_suite.py"), SuiteSelection("dispatch", "add")])
            assert Path(suite[0].suite).read_text() == f"NUMBER = {number}\n"
            assert suite[1] == SuiteSelection("dispatch", "add")
        assert base.revision == git("rev-parse", "HEAD~1")
        roots = [Path(arm.root) for arm in (base, head)]
        assert all(root.is_dir() for root in roots)
        # Even a gate that is killed now leaves the repository as it was.
        assert git("status", "--porcelain") == "" and not Path(".git/worktrees").exists()
        assert git("ls-files", "--stage") == git(
            "ls-tree", "-r", "--format=%(objectmode) %(objectname) 0%x09%(path)", "HEAD"
        )
    assert not any(root.exists() for root in roots)


def test_other_arms_take_the_sources_of_the_gate_as_they_were(repository: Path) -> None:
    with open_arms("env:", "env:A=1") as (base, head):
        for arm in (base, head):
            assert Path(arm.path[0], "dtbench_core", "comm.py").is_file()
            assert not Path(arm.path[0]).is_relative_to(repository)
        assert environment_of({}, head.env, head.path)["A"] == "1" and "A" not in base.env


def test_nothing_that_a_repository_names_is_started(repository: Path, tmp_path: Path) -> None:
    """Hooks, a file system monitor, filters, an external diff: each would leave a mark. Files are as committed."""
    mark = tmp_path / "mark"
    command = f"sh -c 'touch {mark}; cat'"
    hooks = repository / ".git" / "hooks"
    for name in ("post-index-change", "post-checkout", "fsmonitor-watchman", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
    (repository / ".gitattributes").write_text("*.py filter=a.b=c diff=d\nmy_suite.py filter=lfs\n")
    git("-c", "core.hooksPath=/dev/null", "add", "-A")
    git("-c", "core.hooksPath=/dev/null", "commit", "-qm", "attributes")
    for filter_name in ("a.b=c", "lfs"):
        for kind in ("clean", "smudge", "process"):
            git("config", f"filter.{filter_name}.{kind}", command)
        git("config", f"filter.{filter_name}.required", "true")
    git("config", "core.fsmonitor", str(hooks / "fsmonitor-watchman"))
    for name in ("diff.external", "diff.d.command", "diff.d.textconv"):
        git("config", name, command)
    mark.unlink(missing_ok=True)
    with open_arms("env:", "rev:HEAD") as (_, head):
        assert (head.root / "my_suite.py").read_text() == "NUMBER = 2\n"
    (repository / "my_suite.py").touch()
    assert provenance._checkout(repository).dirty is False
    (repository / "my_suite.py").write_text("NUMBER = 3\n")
    assert provenance._checkout(repository).dirty is True
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["rev:https://x:hunter2@h", "python:/opt/token=hunter2/python", "env:A --api-key hunter2"]
)
def test_errors_echo_no_secret(repository: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught, open_arms("env:", text):
        pass
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("A=x,y,B=,C=1=2", {"A": "x,y", "B": "", "C": "1=2"}),
        *((text, None) for text in ("A", "=1", "1A=2", "PYTHONPATH=x", "A=\0", "DTBENCH_GATE_CONTROL=x")),
    ],
)
def test_variables(text: str, variables: dict[str, str] | None) -> None:
    if variables is not None:
        assert parse_variables(text) == variables
        return
    with pytest.raises(UsageError):
        parse_variables(text)


def test_a_launch_gets_nothing_of_the_job_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST", "DTBENCH_LAUNCH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("KEPT", "1")
    arm = made_up_arm(tmp_path, SLOW="2")
    env = environment_of({"C": "3"}, arm.env, arm.path)
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST", "DTBENCH_LAUNCH"} & set(env)
    assert (env["KEPT"], env["SLOW"], env["C"]) == ("1", "2", "3")
    assert env["PYTHONPATH"] == os.pathsep.join(arm.path)


def folders_of(arm: arms.Arm, *names: str) -> list[str]:
    return [str(arm.root / name) if name else str(arm.root) for name in names]


def test_revision_imports_its_own_copies_of_the_folders_on_pythonpath(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("lib", "built", "../outside", "linked"):
        Path(folder).mkdir()
    Path("lib/helper.py").touch()
    Path("linked/helper.py").touch()
    git("add", "lib", "linked")
    git("commit", "-qm", "lib")
    Path("built/helper.py").touch()
    outside = tmp_path / "outside"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(["lib", str(repository / "built"), str(outside), "lib", ""])
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(repository / "linked")])  # as a .pth file adds it
    with open_arms("rev:HEAD", "env:") as (base, head):
        assert [*base.path[1:]] == [*folders_of(base, "", "lib", "linked"), str(outside)]
        assert f"without {repository / 'built'} of PYTHONPATH, which the commit lacks: commit it" in base.note
        assert base.note.endswith(f"with the folders of PYTHONPATH outside the repository: {outside}")
        assert [*head.path[1:]] == [*map(str, (repository / "lib", repository / "built", outside))]
        assert "PYTHONPATH" not in head.note


def test_interpreter_keeps_its_torch_where_pythonpath_has_another(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build" / "torch").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    paths = [str(tmp_path / name) for name in ("build", "lib")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with open_arms(f"python:{sys.executable}", "env:") as (base, head):
        assert [*base.path[1:]] == paths[1:] and [*head.path[1:]] == paths
        assert f"without {paths[0]} of PYTHONPATH, whose torch would hide the interpreter's" in base.note


def test_problem_of_a_revision_names_the_file_in_the_repository(repository: Path) -> None:
    with open_arms("rev:HEAD", "env:") as (base, head):
        problem = f"no suite file at {base.root}/bench/new.py: expected one"
        assert base.explain(problem) == (
            "no suite file at bench/new.py: expected one; a revision has committed files alone"
        )
        assert head.explain(problem) == problem


@pytest.mark.parametrize(
    ("text", "such"),
    [
        ("main", "rev:main"),
        ("NCCL_ALGO=Ring", "env:NCCL_ALGO=Ring"),
        (sys.executable, f"python:{sys.executable}"),
    ],
)
def test_arm_without_its_kind_is_refused_with_the_kind_that_is_meant(text: str, such: str) -> None:
    with pytest.raises(UsageError, match=f"is not an arm: .*, such as {re.escape(such)}$"):
        arms.check_text(text)
