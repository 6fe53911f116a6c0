"""The suites and tasks that a request selects, and checks that all ranks and a resumed run select the same."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.engine import budget
from dtbench.engine.options import RunRequest, split_target
from dtbench.engine.rank import silence_torch
from dtbench.engine.tasks import Task, list_tasks
from dtbench.errors import UnknownOptionError, UsageError
from dtbench.machine.backends import check_backend, resolve_backend
from dtbench.machine.device import choose_device, count_ranks
from dtbench.records.result import Header
from dtbench.suite import RunOptions
from dtbench.suite.mesh import format_mesh
from dtbench.suite.registry import Suite, load
from dtbench.text.masking import mask_options


def refuse_foreign_options(suites: Sequence[Suite], chosen: Mapping[str, str]) -> None:
    """Checks that each suite option is declared by a suite of the run, and has a value.

    Raises:
        UsageError: no suite declares the option, or its value is missing.
    """
    declared = {option for suite in suites for option in suite.options}
    for name, value in chosen.items():
        if name not in declared:
            dashed = name if name.startswith("-") else f"--{name}"
            suite_options = "".join(f", {s.name} has --{', --'.join(s.options)}" for s in suites if s.options)
            raise UnknownOptionError(
                dashed,
                [f"--{option}" for option in declared],
                f"No such option '{dashed}'; `dtbench run --help` lists the options{suite_options}",
            )
        if not value or value.startswith("--"):
            raise UsageError(f"--{name} needs a value: expected --{name} VALUE")


@dataclass(frozen=True)
class Selection:
    """The suites and tasks that a request selects; the same on every rank and in the launcher.

    Attributes:
        request: the options of the command line.
        options: the request's options for a device type and number of ranks.
        suites: the suites to measure, in the order of the request.
        tasks: what to measure, in this order; with --budget as far as time allows.
        filters: suite name -> the text that the labels of its tasks match, see `matcher`.
    """

    request: RunRequest
    options: RunOptions
    suites: tuple[Suite, ...]
    tasks: tuple[Task, ...]
    filters: Mapping[str, str]

    @property
    def suite_names(self) -> list[str]:
        return [suite.name for suite in self.suites]

    @property
    def is_simulated(self) -> bool:
        """Whether one process measures all tasks, on simulated ranks."""
        return all(task.world == "simulated" for task in self.tasks)

    @property
    def measuring_processes(self) -> int:
        return 1 if self.is_simulated else self.options.world_size

    def affordable(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Returns the tasks that --budget has time for by estimate; without --budget all."""
        budget_s, quick = self.request.budget_s, self.options.quick
        return tasks if budget_s is None else budget.choose(tasks, budget_s, quick, self.measuring_processes)


def select(request: RunRequest, world_size: int | None = None) -> Selection:
    """Validates the request as far as possible before ranks exist, and lists the tasks.

    Args:
        world_size: number of ranks; None chooses it for ranks of our own on this machine.

    Raises:
        UsageError: an option is refused.
    """
    silence_torch()
    device_type = choose_device(request.device)
    check_backend(device_type, request.backend)
    options = request.resolve(
        device_type, world_size or count_ranks(request.ranks, device_type, request.backend)
    )
    targets = [(load([name]), text) for name, text in map(split_target, request.suites)] or [(load(), "")]
    suites = tuple({suite.name: suite for loaded, _ in targets for suite in loaded}.values())
    refuse_foreign_options(suites, request.suite_options)
    filters: dict[str, str] = {}
    for loaded, text in targets:
        if text:
            list_tasks(loaded, options, text)  # a target that matches nothing is an error
        lines = "\n".join(f"{text} {line}" for line in request.filter.split("\n"))
        for suite in loaded:
            filters[suite.name] = f"{filters[suite.name]}\n{lines}" if suite.name in filters else lines
    tasks = list_tasks(suites, options, request.filter, filters)
    if request.budget_s is not None:
        tasks = budget.by_importance(tasks)
    selection = Selection(request, options, suites, tuple(tasks), filters)
    if world_size is None and request.ranks is None and selection.is_simulated:
        # One process measures simulated ranks. Further ranks would only wait, unless the cases depend on their number.
        single = select(request, 1)
        if [task.label for task in single.tasks] == [task.label for task in tasks]:
            return single
    return selection


def agreement_of(selection: Selection) -> dict[str, str]:
    """Returns the values that must be the same on all ranks, by the names that users know.

    If they differed, ranks would wait in different collectives, or measure different things.
    """
    request, options = selection.request, selection.options
    codes = (getattr(suite.cases, "__code__", None) for suite in selection.suites)
    files = {Path(code.co_filename) for code in codes if code}
    files |= {Path(value) for value in options.options.values() if os.path.isfile(value)}  # noqa: PTH113 - Path.is_file raises if a name is too long
    listed = [f"{task.label} {','.join(task.impls)}" for task in selection.tasks]
    return {
        "suites": " ".join(selection.suite_names),
        "--mesh": format_mesh(options.mesh),
        "--device": options.device_type,
        "--size": ",".join(map(str, options.sizes_bytes)),
        "--refine": str(options.refine),
        "--backend": resolve_backend(options.device_type, request.backend),
        **{f"--{name}": str(getattr(request, name)) for name in ("filter", "quick", "launches", "resume")},
        **{f"--{name}": str(getattr(request, f"{name}_s")) for name in ("budget", "timeout")},
        **{f"--{name}": value for name, value in mask_options(options.options).items()},
        **{f"the file {path.name} with sha256": _digest(path) for path in sorted(files)},
        "a list": f"of {len(listed)} cases, sha256 {hashlib.sha256(repr(listed).encode()).hexdigest()[:12]}",
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "none"


def refuse_other_run(
    header: Header, options: RunOptions, suites: Sequence[str], launches: int, backend: str, path: Path
) -> None:
    """Checks that the run to resume has the same options and backend.

    Raises:
        UsageError: with the first difference.
    """
    recorded: dict[str, object] = {
        "options": {},
        "refine": False,
        **header.options,
        "suites": list(header.suites),
        "launches": header.launches,
        "backend": header.versions.get("backend"),
    }
    current = json.loads(json.dumps(dataclasses.asdict(options))) | {
        "options": mask_options(options.options),
        "suites": list(suites),
        "launches": launches,
        "backend": backend,
    }
    for name in current:
        if recorded.get(name) != current[name]:
            raise UsageError(
                f"cannot resume {path}: its {name} is {_format(name, recorded.get(name))}, the options ask for "
                f"{_format(name, current[name])}; give the options of the first run, or another -o"
            )


def _format(name: str, value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return format_mesh(value) if name == "mesh" else ",".join(map(str, value))
