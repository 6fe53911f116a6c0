"""The two sides of a gate: a git revision, an interpreter, a set of variables, or a backend.

    rev:origin/main            that commit's core, suites and other sources, checked out into a temporary folder
    python:/opt/t/bin/python   another interpreter, to compare two builds of torch
    env:NCCL_ALGO=Ring,A=b     environment variables; `env:` alone changes nothing
    backend:nccl-legacy        a backend of process groups, as in `dtbench run --backend`

Every arm runs a snapshot of the sources, so that edits during a gate have no effect. In all arms, `dtbench` itself is
the gate's copy.
"""

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
from dtbench.file_kinds import refuse_other_kind
from dtbench.gate.benchmark import SuiteSelection
from dtbench.machine.backends import parse_backend
from dtbench.machine.git import run_git
from dtbench.text.masking import mask, mask_options
from dtbench.text.units import plural

_GIT_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 300.0
# Packages of which a revision has its own version; `dtbench` is always the gate's.
_REVISION_PACKAGES = {"dtbench_core": "core/dtbench_core", "dtbench_suites": "suites/dtbench_suites"}
# The gate sets these in every launch, so an arm may not.
_RESERVED_VARIABLES = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Prefix of variables that no library reads on import. Arms that differ only in these can share a loader,
# the process that imports torch and forks the launches.
_SUITE_PREFIX = "DTBENCH_"
# Prints facts about an arm's interpreter as JSON, then again with the problems of the selections. The first line comes
# before the suites are imported, in case a suite ends the process. The arguments are the import folders of the arm.
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
if options := sys.stdin.buffer.read():
    with contextlib.redirect_stdout(sys.stderr):
        problems = worker.selection_problems(options, gpus)
    print(json.dumps([*facts, problems]))
"""


@dataclass(frozen=True)
class Arm:
    """A side of a gate, ready to be launched.

    Attributes:
        text: the arm as the user gave it, secrets masked.
        note: how it was built, secrets masked.
        python: path of the interpreter.
        path: folders of PYTHONPATH, the snapshot first.
        env: environment variables, secrets included.
        root: working directory of launches; holds the checkout of a revision.
        revision: commit, "" for other kinds of arms.
        python_version: version of that interpreter.
        torch_version: version of its torch.
        gpus: number of GPUs that its torch finds.
        backend: the backend of its process groups.
        loads_own_modules: whether loading imports modules from the arm's folders. Such an arm cannot share a loader.
        problems: for each selection, the reason why it has no benchmark; "" if it has some.
        top: top folder of the repository, for a revision.
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
    backend: str = "auto"
    loads_own_modules: bool = False
    problems: tuple[str, ...] = ()
    top: Path | None = None

    @property
    def env_for_loading(self) -> dict[str, str]:
        """Returns the variables that a library may read while it loads."""
        return {name: value for name, value in self.env.items() if not name.startswith(_SUITE_PREFIX)}

    @property
    def loader_key(self) -> object:
        """Key of the loader: arms with equal keys share one."""
        return (
            self.python,
            tuple(sorted(self.env_for_loading.items())),
            self.path[1:] if self.loads_own_modules else (),
        )

    def explain(self, problem: str) -> str:
        """Returns the text of a problem with paths inside the repository instead of the checkout, and a hint."""
        hint = "; a revision contains only committed files" if " suite file " in problem else ""
        return problem.replace(f"{self.root}{os.sep}", "") + hint if self.revision else problem

    def selections(self, selections: Sequence[SuiteSelection]) -> tuple[SuiteSelection, ...]:
        """Returns the selections, with suite files of the repository replaced by the revision's version."""
        revised = []
        for suite, text in selections:
            path = Path(suite).resolve() if suite.endswith(".py") else Path(suite)
            if self.top is not None and path.is_relative_to(self.top):
                path = self.root / path.relative_to(self.top)
            revised.append(SuiteSelection(str(path), text))
        return tuple(revised)


@contextlib.contextmanager
def open_arms(
    base: str,
    head: str,
    say: Callable[[str], None] = lambda _text: None,
    encode_options: Callable[[Arm], bytes] = lambda _arm: b"",
    limit_s: float = _PROBE_TIMEOUT_S,
) -> Iterator[tuple[Arm, Arm]]:
    """Builds both arms; removes their files at the end.

    Args:
        base: text of the arm base, such as "rev:origin/main".
        head: text of the arm head.
        say: prints a progress line.
        encode_options: returns the gate's options for an arm, as JSON, to check its selections. b"": no check.
        limit_s: limit on loading torch and the suites, seconds.

    Raises:
        UsageError: the text does not name an arm, git does not know the revision, or an arm refuses the options.
        ArmError: an arm cannot be built.
    """
    with scratch() as folder:
        built = [_built(text, folder / f"arm{n}") for n, text in enumerate((base, head))]
        with ThreadPoolExecutor() as pool:  # in parallel: each imports torch
            base_arm, head_arm = pool.map(lambda arm: _probed(arm, encode_options(arm), limit_s), built)
        for role, arm in (("base", base_arm), ("head", head_arm)):
            say(f"{role} {arm.text}: {arm.note}")
        yield base_arm, head_arm


def check_text(text: str) -> tuple[str, str]:
    """Splits the text of an arm into its kind and its value.

    Raises:
        UsageError: it is not an arm.
    """
    kind, colon, value = text.partition(":")
    if not colon or kind not in ("rev", "python", "env", "backend") or (not value and kind != "env"):
        expected = "rev:REVISION, python:PATH, env:NAME=VALUE,... or backend:NAME"
        refuse_other_kind(Path(text), f"an arm, {expected}")
        likely_kind = "env" if "=" in text else "python" if os.access(text, os.X_OK) else "rev"
        example = f"{likely_kind}:{mask(text)}" if text and not colon else "rev:origin/main"
        raise UsageError(f"{mask(text)!r} is not an arm: expected {expected}, such as {example}")
    {"env": parse_variables, "backend": parse_backend}.get(kind, str)(value)
    return kind, value


def parse_variables(text: str) -> dict[str, str]:
    """Parses `A=1,B=x,y` into {"A": "1", "B": "x,y"}. A comma before `NAME=` starts a new variable.

    Raises:
        UsageError: the text is no list of variables, or names a reserved variable, or one variable twice.
    """
    variables: dict[str, str] = {}
    for part in re.split(r",(?=[A-Za-z_]\w*=)", text) if text else ():
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", part, re.DOTALL)
        if match is None or "\0" in part:
            raise UsageError(f"{mask(part)!r} is not a variable: expected NAME=VALUE")
        if match[1] in _RESERVED_VARIABLES or match[1].startswith("DTBENCH_GATE"):
            raise UsageError(f"{match[1]} is set by every launch: leave it out of the list")
        if match[1] in variables:
            raise UsageError(f"{match[1]} is set twice: give it once")
        variables[match[1]] = match[2]
    return variables


def _built(text: str, folder: Path) -> Arm:
    kind, value = check_text(text)
    folder.mkdir()
    root, revision, python = Path.cwd(), "", sys.executable
    variables = parse_variables(value) if kind == "env" else {}
    sources, top = _own_sources(), repository() if kind == "rev" else None
    if kind == "rev":
        revision = commit_of(value)
        root = _checked_out(revision, folder / "checkout")
        revision_packages = {
            name: root / path for name, path in _REVISION_PACKAGES.items() if (root / path).is_dir()
        }
        sources |= revision_packages
        origin = (
            f"its own {' and '.join(revision_packages)}"
            if revision_packages
            else "the gate's own core and suites"
        )
        note = f"commit {revision[:12]}, {origin}"
    elif kind == "python":
        python, note = _executable(value), "another interpreter"
    elif kind == "env":
        note = f"{plural(len(variables), 'variable')} set" if variables else "no changes"
    else:
        note = "process groups of real ranks use it"
    snapshot = folder / "sources"
    for name, source in sources.items():
        try:
            shutil.copytree(source, snapshot / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        except (OSError, shutil.Error) as error:
            raise ArmError(f"cannot copy {source} to {snapshot}: {error}; is there space?") from error
    masked = ",".join(f"{name}={value}" for name, value in mask_options(variables).items())
    folders, notes = _import_folders(kind, root, top)
    return Arm(
        text=f"env:{masked}" if kind == "env" else mask(text),
        note=", ".join([note, *notes]),
        python=python,
        path=tuple(dict.fromkeys([str(snapshot), *folders])),
        env=variables,
        root=root,
        revision=revision,
        backend=value if kind == "backend" else "auto",
        top=top,
    )


def _import_folders(kind: str, root: Path, top: Path | None) -> tuple[list[str], list[str]]:
    """Returns the import folders of an arm besides the snapshot, and notes on PYTHONPATH.

    The folders are those of PYTHONPATH. For a revision, folders of the repository are replaced by their copies in the
    checkout. Otherwise both revisions would import the same files.

    Args:
        top: top folder of the repository, for a revision.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    chosen = list(dict.fromkeys(Path(entry).resolve() for entry in entries))
    imported = (
        [] if top is None else [top, top / "src", *chosen, *(Path(entry).resolve() for entry in sys.path)]
    )
    copies = {path: root / path.relative_to(top) for path in imported if top and path.is_relative_to(top)}
    excluded = {
        path: "the commit does not contain it; commit it, or move it out of the repository"
        for path in copies
        if not any(copies[path].glob("*"))
    } | {
        path: "its torch would hide the interpreter's; install what you need into that interpreter"
        for path in chosen
        if kind == "python" and (path / "torch").is_dir()
    }
    notes = [f"PYTHONPATH entry {path} is left out: {excluded[path]}" for path in chosen if path in excluded]
    if outside := [str(path) for path in chosen if top is not None and path not in (excluded | copies)]:
        notes.append(f"with the folders of PYTHONPATH outside the repository: {os.pathsep.join(outside)}")
    return [str(copies.get(path, path)) for path in (*copies, *chosen) if path not in excluded], notes


def _own_sources() -> dict[str, Path]:
    """Returns the source folders of the packages that this process runs."""
    sources = {}
    for name in ("dtbench", *_REVISION_PACKAGES):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ArmError(
                f"the package {name} is missing although dtbench is installed: reinstall dtbench with all its packages"
            )
        sources[name] = Path(spec.origin).parent
    return sources


def _probed(arm: Arm, options: bytes, limit_s: float) -> Arm:
    """Returns the arm with the facts that its interpreter reports."""
    limit_s = min(limit_s, _PROBE_TIMEOUT_S)
    try:
        done = subprocess.run(
            [arm.python, "-P", "-c", _PROBE, *arm.path[1:]],
            input=options,
            capture_output=True,
            timeout=limit_s,
            check=False,
            cwd=arm.root,
            env={**os.environ, **arm.env, "PYTHONPATH": os.pathsep.join(arm.path)},
        )
        version, torch, gpus, loads_own_modules, problems = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        why = (
            str(error)
            if isinstance(error, OSError)
            else f"no answer after {limit_s:.3g} s; torch or a suite hangs on import"
            f"{', or --budget is too short' if limit_s < _PROBE_TIMEOUT_S else ''}"
        )
        raise ArmError(f"{arm.text}: {mask(arm.python)} does not answer: {why}") from error
    except (ValueError, IndexError) as error:
        why = last_line(done.stderr.decode("utf-8", "replace"))
        raise ArmError(
            f"{arm.text}: {mask(arm.python)} cannot run the harness: {why}; "
            "expected Python 3.11 or newer with torch and dtbench's other requirements"
        ) from error
    if isinstance(problems, str):
        raise UsageError(f"{arm.text}: {problems}")
    return replace(
        arm,
        python_version=version,
        torch_version=torch,
        gpus=gpus,
        loads_own_modules=loads_own_modules,
        problems=tuple(problem and arm.explain(problem) for problem in problems),
    )


def _executable(text: str) -> str:
    path = Path(text).expanduser().absolute()  # links are kept: the interpreter of a venv is a link
    if not os.path.isfile(path) or not os.access(path, os.X_OK):  # noqa: PTH113 - Path.is_file raises if a name is too long
        raise UsageError(f"python:{mask(text)}: not a program; expected the path of a Python interpreter")
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
    """Returns the top folder of the checkout that contains the working directory."""
    done = _git("rev-parse", "--show-toplevel")
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def commit_of(revision: str) -> str:
    """Returns the commit of a revision.

    Raises:
        UsageError: git does not know the revision.
    """
    done = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode != 0:
        # --quiet suppresses the message for unknown names, so any message has another cause.
        why = plain(mask(done.stderr.strip().partition("\n")[0]))
        remedy = "fetch it first (a shallow clone of CI lacks it: fetch-depth: 0), or start the gate in the checkout"
        raise UsageError(
            f"rev:{mask(revision)}: git does not know this commit in {Path.cwd()}{f': {why}' if why else f'; {remedy}'}"
        )
    return done.stdout.strip()


def _checked_out(commit: str, folder: Path) -> Path:
    """Checks out a commit into a new folder. A separate index file leaves the repository unchanged."""
    folder.mkdir()
    env = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    for words in (("read-tree", commit), (f"--work-tree={folder}", "checkout-index", "--all", "--force")):
        done = _git(*words, cwd=repository(), env=env)
        if done.returncode != 0:
            raise ArmError(f"git cannot check out {commit[:12]}: {last_line(done.stderr)}")
    return folder
