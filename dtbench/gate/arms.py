"""The two sides of a gate: a git revision, an interpreter, or a set of variables.

    rev:origin/main            that commit's core, suites and other sources, checked out beside the repository
    python:/opt/t/bin/python   another interpreter, to compare two builds of torch
    env:NCCL_ALGO=Ring,A=b     other variables; `env:` alone changes nothing

Every arm works on a snapshot of the sources, so that edits during a gate do not get into it. The harness
is that of the running gate in all arms.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dtbench.engine.workers import scratch
from dtbench.errors import ArmError, UsageError, last_line, plain
from dtbench.file_kinds import refuse_job
from dtbench.gate.benchmark import Selection
from dtbench.machine.git import run_git
from dtbench.text.masking import mask, mask_options

_GIT_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 300.0
# Of these a revision brings its own; `dtbench` stays the gate's.
_OF_REVISIONS = {"dtbench_core": "core/dtbench_core", "dtbench_suites": "suites/dtbench_suites"}
# An arm that set these would not measure what it says.
_OWN_VARIABLES = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables that no library reads while it loads: arms that differ in them alone load the same.
_OF_SUITES = "DTBENCH_"
# Loads what launches load before they are forked, then the suites; its arguments are the folders of an arm. Of suites
# that end the process while they are loaded, only the first line is printed.
_PROBE = """
import contextlib, json, os, platform, sys
from dtbench.gate import worker
worker.load()
import torch
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
homes = {os.path.dirname(file.removesuffix(os.sep + "__init__.py")) for file in files}
gpus = torch.cuda.device_count()
facts = [platform.python_version(), torch.__version__, gpus, bool(homes & {*sys.argv[1:]})]
print(json.dumps([*facts, []]), flush=True)
if asked := sys.stdin.buffer.read():
    with contextlib.redirect_stdout(sys.stderr):
        problems = worker.problems_of(asked, gpus)
    print(json.dumps([*facts, problems]))
"""


@dataclass(frozen=True)
class Arm:
    """What a launch of one side is started with.

    text: as the user gave it, and note, what was built: both without secrets, which `env` alone holds. path: the
    folders of PYTHONPATH, the snapshot first. root: where it is started, and where a revision's files lie. alone: it
    brings modules that launches load before they are forked, so that it shares no process with an arm of another path.
    top: of the repository, for a revision.
    problems: why a selection has no benchmark, one for each, "" where it has some.
    """

    text: str
    note: str
    python: str
    path: tuple[str, ...]
    env: Mapping[str, str]
    root: Path
    revision: str = ""
    python_version: str = ""
    torch_version: str = ""
    gpus: int = 0
    alone: bool = False
    problems: tuple[str, ...] = ()
    top: Path | None = None

    @property
    def env_for_loading(self) -> dict[str, str]:
        """Its variables that a library may read while it loads."""
        return {name: value for name, value in self.env.items() if not name.startswith(_OF_SUITES)}

    @property
    def loads_as(self) -> object:
        """Launches of arms that agree in this are forked off one process."""
        return self.python, tuple(sorted(self.env_for_loading.items())), self.path[1:] if self.alone else ()

    def explain(self, problem: str) -> str:
        """A problem of its suites, without the path of its checkout."""
        hint = "; a revision has committed files alone" if " suite file " in problem else ""
        return problem.replace(f"{self.root}{os.sep}", "") + hint if self.revision else problem

    def selections(self, wanted: Sequence[Selection]) -> tuple[Selection, ...]:
        """The selections for this arm: a suite file of the repository is the revision's own."""
        own = []
        for suite, text in wanted:
            path = Path(suite).resolve() if suite.endswith(".py") else Path(suite)
            if self.top is not None and path.is_relative_to(self.top):
                path = self.root / path.relative_to(self.top)
            own.append(Selection(str(path), text))
        return tuple(own)


@contextlib.contextmanager
def open_arms(
    base: str,
    head: str,
    say: Callable[[str], None] = lambda _text: None,
    asked: Callable[[Arm], bytes] = lambda _arm: b"",
) -> Iterator[tuple[Arm, Arm]]:
    """Both arms, built; what was built for them is removed in the end.

    asked: the options of a gate, with the selections for an arm, whose problems are then looked for.

    Raises:
        UsageError: a text that names no arm, or a revision that git does not know.
        ArmError: an arm that cannot be built.
    """
    with scratch() as folder:
        built = [_built(text, folder / f"arm{n}") for n, text in enumerate((base, head))]
        with ThreadPoolExecutor() as pool:  # each loads torch
            old, new = pool.map(_probed, built, map(asked, built))
        for role, arm in (("base", old), ("head", new)):
            say(f"{role} {arm.text}: {arm.note}")
        yield old, new


def check_text(text: str) -> tuple[str, str]:
    """The kind and the rest of an arm's text.

    Raises:
        UsageError: no arm.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("rev", "python", "env") or (not rest and kind != "env"):
        expected = "rev:REVISION, python:PATH or env:NAME=VALUE,..."
        refuse_job(Path(text), f"an arm, {expected}")
        meant = "env" if "=" in text else "python" if os.access(text, os.X_OK) else "rev"
        such = f"{meant}:{mask(text)}" if text and not colon else "rev:origin/main"
        raise UsageError(f"{mask(text)!r} is not an arm: expected {expected}, such as {such}")
    if kind == "env":
        parse_variables(rest)
    return kind, rest


def parse_variables(text: str) -> dict[str, str]:
    """`A=1,B=x,y` -> {"A": "1", "B": "x,y"}: a comma begins a variable where a name and = follow.

    Raises:
        UsageError: no list of variables, or one that every launch sets itself, or one twice.
    """
    if not text:
        return {}
    variables: dict[str, str] = {}
    for part in re.split(r",(?=[A-Za-z_]\w*=)", text):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", part, re.DOTALL)
        if match is None or "\0" in part:
            raise UsageError(f"{mask(part)!r} is no variable: expected NAME=VALUE")
        if match[1] in _OWN_VARIABLES or match[1].startswith("DTBENCH_GATE"):
            raise UsageError(f"the list sets {match[1]}, which every launch sets itself: leave it out")
        if match[1] in variables:
            raise UsageError(f"the list sets {match[1]} twice: give it once")
        variables[match[1]] = match[2]
    return variables


def _built(text: str, folder: Path) -> Arm:
    kind, rest = check_text(text)
    folder.mkdir()
    root, revision, python = Path.cwd(), "", sys.executable
    variables: dict[str, str] = {}
    sources, top = _own_sources(), repository() if kind == "rev" else None
    if kind == "rev":
        revision = commit_of(rest)
        root = _checked_out(revision, folder / "checkout")
        own = {name: root / path for name, path in _OF_REVISIONS.items() if (root / path).is_dir()}
        sources |= own
        what = f"its own {' and '.join(own)}" if own else "the gate's own core and suites"
        note = f"commit {revision[:12]}, {what}"
    elif kind == "python":
        python, note = _executable(rest), "another interpreter, with this gate's sources"
    else:
        variables = parse_variables(rest)
        note = f"{len(variables)} variable(s) set, with this gate's sources"
    snapshot = folder / "sources"
    for name, source in sources.items():
        try:
            shutil.copytree(source, snapshot / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        except (OSError, shutil.Error) as error:
            raise ArmError(f"cannot copy {source} to {snapshot}: {error}; is there space?") from error
    shown = mask(text)
    if kind == "env":
        shown = "env:" + ",".join(f"{name}={value}" for name, value in mask_options(variables).items())
    folders, notes = _import_folders(kind, root, top)
    return Arm(
        text=shown,
        note=", ".join([note, *notes]),
        python=python,
        path=tuple(dict.fromkeys([str(snapshot), *folders])),
        env=variables,
        root=root,
        revision=revision,
        top=top,
    )


def _import_folders(kind: str, root: Path, top: Path | None) -> tuple[list[str], list[str]]:
    """The folders from which an arm imports beside the snapshot, and what its note says of PYTHONPATH.

    They are those of PYTHONPATH. In their place a revision has its own copies of the folders of the repository from
    which this process imports: both revisions would load the same files otherwise.

    top: of the repository, for a revision.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    chosen = list(dict.fromkeys(Path(entry).resolve() for entry in entries))
    imported = (
        [] if top is None else [top, top / "src", *chosen, *(Path(entry).resolve() for entry in sys.path)]
    )
    copies = {path: root / path.relative_to(top) for path in imported if top and path.is_relative_to(top)}
    lacks = {
        path: "which the commit lacks: commit it, or move it"
        for path in copies
        if not any(copies[path].glob("*"))
    } | {
        path: "whose torch would hide the interpreter's: install it there"
        for path in chosen
        if kind == "python" and (path / "torch").is_dir()
    }
    notes = [f"without {path} of PYTHONPATH, {lacks[path]}" for path in chosen if path in lacks]
    if same := [str(path) for path in chosen if top is not None and path not in (lacks | copies)]:
        notes.append(f"with what PYTHONPATH has outside the repository: {os.pathsep.join(same)}")
    return [str(copies.get(path, path)) for path in (*copies, *chosen) if path not in lacks], notes


def _own_sources() -> dict[str, Path]:
    """The packages of the running gate."""
    sources = {}
    for name in ("dtbench", *_OF_REVISIONS):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ArmError(f"the package {name} is not installed beside dtbench: install dtbench whole")
        sources[name] = Path(spec.origin).parent
    return sources


def _probed(arm: Arm, asked: bytes) -> Arm:
    """The arm with what its interpreter reports."""
    try:
        done = subprocess.run(
            [arm.python, "-P", "-c", _PROBE, *arm.path[1:]],
            input=asked,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            cwd=arm.root,
            env={**os.environ, **arm.env, "PYTHONPATH": os.pathsep.join(arm.path)},
        )
        version, torch, gpus, alone, problems = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        late = f"no answer after {_PROBE_TIMEOUT_S:g} s; torch, or a suite, hangs while it is loaded"
        why = str(error) if isinstance(error, OSError) else late
        raise ArmError(f"{arm.text}: {mask(arm.python)} does not answer: {why}") from error
    except (ValueError, IndexError) as error:
        why = last_line(done.stderr.decode("utf-8", "replace"))
        raise ArmError(
            f"{arm.text}: {mask(arm.python)} cannot run the harness: {why}; "
            "expected Python 3.11 or newer with torch and dtbench's other requirements"
        ) from error
    return replace(
        arm,
        python_version=version,
        torch_version=torch,
        gpus=gpus,
        alone=alone,
        problems=tuple(problem and arm.explain(problem) for problem in problems),
    )


def _executable(text: str) -> str:
    path = Path(text).expanduser().absolute()  # not resolved: a link in bin/ is what makes an environment
    if not os.path.isfile(path) or not os.access(path, os.X_OK):  # noqa: PTH113 - Path's raises where a name is too long
        raise UsageError(
            f"python:{mask(text)}: no program lies there; expected the path of a Python interpreter"
        )
    return str(path)


def _git(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return run_git(*arguments, cwd=cwd, env=env, timeout_s=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        words, why = mask(" ".join(arguments)), mask(str(error))
        raise ArmError(f"a rev: arm needs git, and `git {words}` cannot be run: {why}") from error


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
