"""The two sides of a gate: a git revision, an interpreter, or a set of variables.

    rev:origin/main        that commit's core, suites and other sources, checked out beside the repository
    python:/opt/t/bin/python   another interpreter, to compare two builds of torch
    env:NCCL_ALGO=Ring,A=b other variables; `env:` alone changes nothing

Every arm works on a snapshot of the sources, so that edits during a gate do not get into it. The harness
is that of the running gate in all arms.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dtbench.engine.workers import scratch
from dtbench.gate.benchmark import Selection
from dtbench.machine.git import run_git
from dtbench.suite.errors import ArmError, UsageError, last_line, plain
from dtbench.text.masking import mask, mask_variables
from dtbench.text.variables import masked_list, parse_variables

_GIT_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 120.0
_INSTALL_TIMEOUT_S = 1800.0
# Of these a revision brings its own; `dtbench` stays the gate's.
_OF_REVISIONS = {"dtbench_core": "core/dtbench_core", "dtbench_suites": "suites/dtbench_suites"}
_PROBE = (
    "import json, platform, numpy, click, msgspec, torch; "
    "print(json.dumps([platform.python_version(), torch.__version__, torch.cuda.device_count()]))"
)


@dataclass(frozen=True)
class Arm:
    """What a launch of one side is started with.

    text: as the user gave it, identity and note: all without secrets, which `env` alone holds.
    identity: what it resolved to, the same when a gate goes on. note: what was built, in words. path: the
    folders of PYTHONPATH. root: where it is started, and where a revision's files lie.
    """

    text: str
    identity: str
    note: str
    python: str
    path: tuple[str, ...]
    env: Mapping[str, str]
    root: Path
    revision: str = ""
    python_version: str = ""
    torch_version: str = ""
    gpus: int = 0

    def selections(self, wanted: Sequence[Selection], top: Path | None) -> list[Selection]:
        """The selections as this arm finds them: a suite file of the repository is the revision's own."""
        found = []
        for selection in wanted:
            path = Path(selection.suite)
            if selection.suite.endswith(".py"):
                path = path.resolve()
                if self.revision and top is not None and path.is_relative_to(top):
                    path = self.root / path.relative_to(top)
            found.append(Selection(str(path), selection.text))
        return found


@contextlib.contextmanager
def open_arms(
    base: str, head: str, say: Callable[[str], None] = lambda _text: None
) -> Iterator[tuple[Arm, Arm]]:
    """Both arms, built; what was built for them is removed in the end (environments are kept).

    Raises:
        UsageError: a text that names no arm, or a revision that git does not know.
        ArmError: an arm that cannot be built.
    """
    for text in (base, head):
        check_text(text)
    with scratch() as folder:
        made = [_open(text, folder / f"arm{n}") for n, text in enumerate((base, head))]
        with ThreadPoolExecutor() as pool:  # each loads torch
            old, new = pool.map(_answered, made)
        for role, arm in (("base", old), ("head", new)):
            say(f"{role} {arm.text}: {arm.note}")
        yield old, new


def check_text(text: str) -> tuple[str, str]:
    """The kind and the rest of an arm's text.

    Raises:
        UsageError: no arm.
    """
    kind, found, rest = text.partition(":")
    if not found or kind not in ("rev", "python", "env") or (not rest and kind != "env"):
        raise UsageError(
            f"{mask(text)!r} is not an arm: expected rev:REVISION, python:PATH or env:NAME=VALUE,..., "
            "such as rev:origin/main"
        )
    if kind == "env":
        parse_variables(rest)
    return kind, rest


def _open(text: str, folder: Path) -> Arm:
    kind, rest = check_text(text)
    folder.mkdir()
    root, revision, note = Path.cwd(), "", ""
    python, variables, extra = sys.executable, {}, []
    sources = _own_sources()
    if kind == "rev":
        revision = commit_of(rest)
        root = _checked_out(revision, folder / "checkout")
        python, note = _interpreter_for(root)
        own = {name: root / path for name, path in _OF_REVISIONS.items() if (root / path).is_dir()}
        sources |= own
        what = f"its own {' and '.join(own)}" if own else "the gate's own core and suites"
        note = f"commit {revision[:12]}, {what}, {note}"
        extra = [str(root), *([str(root / "src")] if (root / "src").is_dir() else [])]
    elif kind == "python":
        python, note = _executable(rest), "another interpreter, with this gate's sources"
    else:
        variables = parse_variables(rest)
        note = f"{len(variables)} variable(s) set, with this gate's sources"
    snapshot = folder / "sources"
    _snapshot(sources, snapshot)
    asked = json.dumps([kind, revision, python, mask_variables(variables)])
    shown = f"env:{masked_list(rest)}" if kind == "env" else mask(text)
    return Arm(shown, asked, note, python, (str(snapshot), *extra), variables, root, revision)


def _answered(arm: Arm) -> Arm:
    """The arm with what its interpreter says."""
    version, torch, gpus = _probe(arm.text, arm.python, arm.path)
    identity = json.dumps([*json.loads(arm.identity), version, torch])
    return replace(arm, identity=identity, python_version=version, torch_version=torch, gpus=gpus)


# --------------------------------------------------------------------------------- sources


def _own_sources() -> dict[str, Path]:
    """The packages of the running gate."""
    found = {}
    for name in ("dtbench", *_OF_REVISIONS):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ArmError(f"the package {name} is not installed beside dtbench: install dtbench whole")
        found[name] = Path(spec.origin).parent
    return found


def _snapshot(sources: Mapping[str, Path], folder: Path) -> None:
    for name, source in sources.items():
        try:
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        except (OSError, shutil.Error) as error:
            raise ArmError(f"cannot copy {source} to {folder}: {error}; is there space?") from error


# --------------------------------------------------------------------------------- revisions


def _git(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return run_git(*arguments, cwd=cwd, env=env, timeout_s=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ArmError(
            f"a rev: arm needs git, and `git {mask(' '.join(arguments))}` cannot be run: {mask(str(error))}"
        ) from error


def _ran(
    command: Sequence[str],
    timeout_s: float,
    failed: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The program, once it has ended. failed: what to say where it does not."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise ArmError(f"{failed}: no end after {timeout_s:g} s") from error
    except OSError as error:
        raise ArmError(f"{failed}: {error}") from error


def repository() -> Path | None:
    """The top folder of the checkout that the gate is started in."""
    done = _git("rev-parse", "--show-toplevel")
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def commit_of(revision: str) -> str:
    """The commit that a revision names.

    Raises:
        UsageError: git knows none of that name.
    """
    done = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode != 0:
        # Of a name that it does not know, --quiet has it say nothing; what it says is another reason.
        why = plain(mask(done.stderr.strip().partition("\n")[0]))
        remedy = "fetch it first (a shallow clone of CI lacks it: fetch-depth: 0), or start the gate in the checkout"
        raise UsageError(
            f"rev:{mask(revision)}: git knows no such commit in {Path.cwd()}{f': {why}' if why else f'; {remedy}'}"
        )
    return done.stdout.strip()


def _checked_out(commit: str, folder: Path) -> Path:
    """The files of a commit in a new folder. The index is the folder's own: nothing of the repository changes."""
    folder.mkdir()
    env = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    for words in (("read-tree", commit), (f"--work-tree={folder}", "checkout-index", "--all", "--force")):
        done = _git(*words, cwd=repository(), env=env)
        if done.returncode != 0:
            raise ArmError(f"git cannot check out {commit[:12]}: {last_line(done.stderr)}")
    return folder


def _interpreter_for(root: Path) -> tuple[str, str]:
    """The running interpreter where it has what the revision requires, else an environment of its own."""
    wanted = _dependencies(root / "pyproject.toml")
    missing = [text for text in wanted if not _is_installed(text)]
    if not missing:
        return sys.executable, "in this environment, which has what it requires"
    made = _environment([*wanted, *_of_the_harness(wanted)])
    return made, f"in an environment of its own, since this one lacks {', '.join(missing)}"


def _of_the_harness(wanted: Sequence[str]) -> list[str]:
    """What the harness requires and the revision does not name."""
    from packaging.requirements import Requirement

    named = {Requirement(text).name.lower() for text in wanted}
    own = importlib.metadata.requires("dtbench") or []
    return [text for text in own if "extra ==" not in text and Requirement(text).name.lower() not in named]


def _dependencies(pyproject: Path) -> list[str]:
    if not pyproject.is_file():
        return []
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        wanted = project.get("dependencies", []) if isinstance(project, dict) else None
        if not isinstance(wanted, list) or not all(isinstance(text, str) for text in wanted):
            raise ValueError("project.dependencies is no list of strings")
    except RecursionError as error:
        raise ArmError(
            "the revision's pyproject.toml cannot be read: its arrays are nested too deep"
        ) from error
    except (OSError, ValueError) as error:
        raise ArmError(f"the revision's pyproject.toml cannot be read: {error}") from error
    return wanted


def _is_installed(text: str) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            return True
        version = importlib.metadata.version(requirement.name)
    except InvalidRequirement as error:
        raise ArmError(f"the revision requires {text!r}, which is no requirement: {error}") from error
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _environment(wanted: Sequence[str]) -> str:
    """A virtual environment with these packages, made once and kept."""
    name = hashlib.sha256(json.dumps([sys.version, sorted(wanted)]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtbench" / "environments"
    folder = cache / name
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)  # venv makes the folders around it
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--", *wanted],
    ):
        done = _ran(command, _INSTALL_TIMEOUT_S, f"the environment {folder} cannot be made")
        if done.returncode != 0:
            raise ArmError(
                f"the environment of the revision cannot be made: {last_line(done.stderr or done.stdout)}; "
                f"install what it requires here ({', '.join(wanted)}), or see to the network"
            )
    (folder / "complete").touch()
    return str(python)


# --------------------------------------------------------------------------------- interpreters


def _executable(text: str) -> str:
    path = Path(text).expanduser().absolute()  # not resolved: a link in bin/ is what makes an environment
    if not os.path.isfile(path) or not os.access(path, os.X_OK):  # noqa: PTH113 - Path's raises where a name is too long
        raise UsageError(
            f"python:{mask(text)}: no program lies there; expected the path of a Python interpreter"
        )
    return str(path)


def _probe(text: str, python: str, path: Sequence[str]) -> tuple[str, str, int]:
    """Python's version, torch's, and how many GPUs it sees, as the arm's interpreter says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = _ran(
        [python, "-P", "-c", _PROBE], _PROBE_TIMEOUT_S, f"{text}: {mask(python)} does not answer", env=env
    )
    try:
        version, torch, gpus = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ArmError(
            f"{text}: {mask(python)} cannot run the harness: {last_line(done.stderr)}; expected Python 3.11 or newer "
            "with torch and dtbench's other requirements"
        ) from error
    return str(version), str(torch), int(gpus)
