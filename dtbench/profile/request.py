"""What a profile is asked for, and which cases those are: `suite`, `suite/case`, and a text to narrow them by.

Validated as far as that needs no ranks. No torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.engine.options import RunRequest, Task, matcher, prepare, split_target
from dtbench.engine.place import OUTPUT
from dtbench.machine.device import choose_device
from dtbench.suite import DeviceType
from dtbench.suite.errors import UsageError

# A profile is read case by case; each takes seconds to measure and some hundred events to draw.
MOST_CASES = 24
_SHOWN = 8
TRACE_NAME, FLAME_NAME = "trace.json.gz", "flame.svg"
TABLE_NAME, DATA_NAME = "table.txt", "table.json"


@dataclass(frozen=True)
class Request:
    """`dtbench profile`: options as `dtbench run` has them (its `suites` is the one of the target), the
    case's name ("": all of the suite), the folder to make, and whether to push NVTX ranges."""

    options: RunRequest
    case: str
    folder: Path
    nvtx: bool = False
    filter_text: str = ""

    def device_type(self) -> DeviceType:
        """
        Raises:
            UsageError: a GPU is asked for where there is none.
        """
        device_type = choose_device(self.options.device)
        if self.nvtx and device_type != "cuda":
            raise UsageError(
                "--nvtx marks ranges for NVIDIA's tools, and this profile runs on a CPU: leave --nvtx out, "
                "or profile where torch finds a GPU"
            )
        return device_type

    def tasks(self, device_type: DeviceType, world_size: int) -> list[Task]:
        """The cases to profile, in the order of the suite; the same on every rank.

        Raises:
            UsageError: no such suite or case, or too many.
        """
        # The filter comes after the case's name, so that a message can name the nearest.
        listed = prepare(self.options, device_type, world_size)
        return choose(listed.tasks, self.case, self.filter_text)


def make_request(
    target: str, filter_text: str, output: Path | None, nvtx: bool, options: RunRequest
) -> Request:
    """From the command line. `options` has everything but the suite; without -o the folder is named by
    the time, and ranks take the name that their launcher chose.

    Raises:
        UsageError: a target that is none.
    """
    suite, case = split_target(target)
    chosen = dataclasses.replace(options, suites=(suite,), filter="")
    named = os.environ.get(OUTPUT) or time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())
    return Request(chosen, case, output or Path(named), nvtx, filter_text)


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """The tasks of that case (all where it is ""), of those that the text matches.

    Raises:
        UsageError: none, with the names that come nearest; or more than a profile can show.
    """
    suite = tasks[0].suite.name
    named = [task for task in tasks if not case or task.case.name == case]
    if not named:
        names = sorted({task.case.name for task in tasks})
        near = difflib.get_close_matches(case, names, n=5, cutoff=0.5)
        near += [
            n for n in names if n not in near and (case.lower() in n.lower() or n.lower() in case.lower())
        ]
        hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(names[:_SHOWN])}"
        raise UsageError(f"{suite} has no case {case!r}: {hint}; `dtbench list {suite}` shows all")
    matches = matcher(filter_text)
    found = [task for task in named if matches(task.label)]
    if not found:
        raise UsageError(
            f"--filter {filter_text!r} matches none of the {len(named)} cases of {suite}: "
            f"they are such as {_some(named)}"
        )
    suites = list(dict.fromkeys(task.suite.name for task in found))
    if len({task.suite.world for task in found}) > 1:
        raise UsageError(
            f"cases of {' and '.join(suites)} match, of which one needs ranks and one does not: name a case of one"
        )
    if len(found) > MOST_CASES:
        raise UsageError(
            f"{len(found)} cases match, a profile shows at most {MOST_CASES}: name one, as in "
            f"{suite}/{found[0].case.name}, or narrow them with --filter; they are such as {_some(found)}"
        )
    return found


def _some(tasks: Sequence[Task]) -> str:
    """One of each name first, so that the choice is seen."""
    firsts = {task.case.name: task.label for task in reversed(tasks)}
    labels = list(dict.fromkeys([*sorted(firsts.values()), *(task.label for task in tasks)]))
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return "; ".join(labels[:_SHOWN]) + more
