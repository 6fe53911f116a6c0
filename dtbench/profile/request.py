"""What a profile is to take apart: the cases of a suite, by name and by a text. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.engine.job import prepare
from dtbench.engine.launch import OUTPUT
from dtbench.engine.options import RunOptions, Task, matcher, split_target
from dtbench.suite import DeviceType
from dtbench.suite.errors import UsageError
from dtbench.suite.suites import load

# A profile is read case by case; each takes seconds to measure and some hundred events to draw.
MOST_CASES = 24
_SHOWN = 8


@dataclass(frozen=True)
class ProfileRequest:
    """`dtbench profile`: options as `dtbench run` has them, the case's name ("": all of the suite), the folder."""

    options: RunOptions
    case: str
    folder: Path
    filter_text: str = ""

    def tasks(self, device_type: DeviceType, world_size: int) -> list[Task]:
        """The cases to profile, in the order of the suite; the same on every rank.

        Raises:
            UsageError: no such suite or case, or too many.
        """
        for suite in load(self.options.suites):
            if suite.world == "own":
                raise UsageError(
                    f"{suite.name} times nothing that a profile could take apart: name another suite"
                )
        # The filter comes after the case's name, so that a message can name the nearest.
        return choose(prepare(self.options, device_type, world_size).tasks, self.case, self.filter_text)


def make_request(target: str, filter_text: str, output: Path | None, options: RunOptions) -> ProfileRequest:
    """From the command line. `options` has everything but the suite; without -o the folder is named by
    the time, and ranks take the name that their launcher chose.

    Raises:
        UsageError: a target that is none.
    """
    suite, case = split_target(target)
    chosen = dataclasses.replace(options, suites=(suite,), filter="")
    named = os.environ.get(OUTPUT) or time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())
    return ProfileRequest(chosen, case, output or Path(named), filter_text)


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """The tasks of that case (all where it is ""), of those that the text matches.

    Raises:
        UsageError: none, with the names that come nearest; or more than a profile can show.
    """
    suite = tasks[0].suite.name
    named = [task for task in tasks if not case or task.case.name == case]
    if not named:
        names = sorted({task.case.name for task in tasks})
        near = difflib.get_close_matches(case, names, n=5, cutoff=0.5) or names[:_SHOWN]
        raise UsageError(
            f"{suite} has no case {case!r}: the nearest are {', '.join(near)}; `dtbench list {suite}` shows all"
        )
    matches = matcher(filter_text)
    chosen = [task for task in named if matches(task.label)]
    if not chosen:
        raise UsageError(
            f"--filter {filter_text!r} matches none of the {len(named)} cases of {suite}: "
            f"they are such as {_some(named)}"
        )
    if len({task.suite.world for task in chosen}) > 1:
        suites = dict.fromkeys(task.suite.name for task in chosen)
        raise UsageError(
            f"cases of {' and '.join(suites)} match, of which one needs ranks and one does not: name a case of one"
        )
    if len(chosen) > MOST_CASES:
        raise UsageError(
            f"{len(chosen)} cases match, a profile shows at most {MOST_CASES}: name one, as in "
            f"{suite}/{chosen[0].case.name}, or narrow them with --filter; they are such as {_some(chosen)}"
        )
    return chosen


def _some(tasks: Sequence[Task]) -> str:
    return "; ".join(list(dict.fromkeys(task.label for task in tasks))[:_SHOWN])
