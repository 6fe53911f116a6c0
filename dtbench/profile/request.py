"""The cases that `dtbench profile SUITE[/CASE]` profiles, and the folder it writes."""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.engine.options import RunRequest, split_target
from dtbench.engine.selection import select
from dtbench.engine.tasks import Task, matcher
from dtbench.errors import UsageError
from dtbench.suite import DeviceType

# A profile is read case by case; each takes seconds to measure and some hundred events to draw.
MOST_CASES = 24
_SHOWN = 8


@dataclass(frozen=True)
class ProfileRequest:
    """`dtbench profile`: options as `dtbench run` has them, the case's name ("": all of the suite), the folder."""

    options: RunRequest
    case: str
    folder: Path
    filter_text: str = ""

    def tasks(self, device_type: DeviceType, world_size: int) -> list[Task]:
        """The cases to profile, the same on every rank; raises UsageError as `choose` does, or for no such suite."""
        # The filter comes after the case's name, so that a message can name the nearest.
        return choose(select(self.options, device_type, world_size).tasks, self.case, self.filter_text)


def make_request(target: str, filter_text: str, output: Path | None, options: RunRequest) -> ProfileRequest:
    """From the command line. `options` has everything but the suite; without -o the folder is named by
    the time.

    Raises:
        UsageError: a target that is none.
    """
    suite, case = split_target(target)
    return ProfileRequest(
        options=dataclasses.replace(options, suites=(suite,), filter=""),
        case=case,
        folder=output or Path(time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())),
        filter_text=filter_text,
    )


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """The tasks of that case (all where it is ""), of those that the text matches.

    Raises:
        UsageError: none, with the names that come nearest; or more than a profile can show.
    """
    suite, matches = tasks[0].suite.name, matcher(filter_text)
    named = [task for task in tasks if case in ("", task.case.name)]
    chosen = [task for task in named if matches(task.label)]
    labels = "; ".join([task.label for task in chosen or named][:_SHOWN])
    if not named:
        near = difflib.get_close_matches(case, {task.case.name for task in tasks}, cutoff=0.0)
        raise UsageError(
            f"{suite} has no case {case!r}: the nearest are {', '.join(near)}; `dtbench list {suite}` shows all"
        )
    if not chosen:
        raise UsageError(
            f"--filter {filter_text!r} matches none of the {len(named)} cases of {suite}, such as {labels}"
        )
    if len({task.suite.world for task in chosen}) > 1:
        raise UsageError(f"of these cases some need ranks and some do not, name some of one kind: {labels}")
    if len(chosen) > MOST_CASES:
        raise UsageError(
            f"{len(chosen)} cases match, a profile shows at most {MOST_CASES}: name one, as in "
            f"{suite}/{chosen[0].case.name}, or narrow them with --filter; they are such as {labels}"
        )
    return chosen
