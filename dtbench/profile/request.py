"""Options of `dtbench profile SUITE[/CASE]`: the cases to profile and the folder to write."""

import difflib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtbench.engine.options import RunRequest, split_target
from dtbench.engine.selection import select
from dtbench.engine.tasks import Task, matcher
from dtbench.errors import UsageError

# A case takes seconds to measure and hundreds of events to draw, and users look at one case at a time.
MAX_CASES = 24
_MAX_LISTED = 8


@dataclass(frozen=True)
class ProfileRequest:
    """Options of a profile.

    Attributes:
        options: the options shared with `dtbench run`.
        case: name of a case; "" for all cases of the suite.
        folder: the folder to write.
        filter_text: the value of --filter.
    """

    options: RunRequest
    case: str
    folder: Path
    filter_text: str = ""

    def tasks(self, world_size: int) -> list[Task]:
        """Returns the cases to profile, the same on every rank.

        Raises:
            UsageError: there is no such suite or case, or too many cases match.
        """
        # --filter is applied after the case's name, so that a message can list similar names.
        return choose(select(self.options, world_size).tasks, self.case, self.filter_text)


def make_request(target: str, filter_text: str, output: Path | None, options: RunRequest) -> ProfileRequest:
    """Builds the request from the command line.

    Args:
        target: SUITE[/CASE].
        filter_text: the value of --filter.
        output: the folder to write; None for a name with the current time.
        options: the options shared with `dtbench run`, without suite and filter.

    Raises:
        UsageError: the target is malformed.
    """
    suite, case = split_target(target)
    return ProfileRequest(
        options=replace(options, suites=(suite,), filter=""),
        case=case,
        folder=output or Path(time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())),
        filter_text=filter_text,
    )


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """Selects tasks by the name of a case ("" for all) and the text of --filter.

    Raises:
        UsageError: no task matches, tasks of different kinds match, or more than a profile can show.
    """
    suite, matches = tasks[0].suite.name, matcher(filter_text)
    of_case = [task for task in tasks if case in ("", task.case.name)]
    chosen = [task for task in of_case if matches(task.label)]
    labels = "; ".join([task.label for task in chosen or of_case][:_MAX_LISTED])
    if not of_case:
        near = difflib.get_close_matches(case, {task.case.name for task in tasks}, cutoff=0.0)
        raise UsageError(
            f"{suite} has no case {case!r}: the nearest are {', '.join(near)}; `dtbench list {suite}` shows all"
        )
    if not chosen:
        raise UsageError(
            f"--filter {filter_text!r} matches none of the {len(of_case)} cases of {suite}, such as {labels}"
        )
    if len({task.world for task in chosen}) > 1:
        raise UsageError(
            f"some of the selected cases need ranks and some do not: select cases of one kind; the first are {labels}"
        )
    if len(chosen) > MAX_CASES:
        raise UsageError(
            f"{len(chosen)} cases match, a profile shows at most {MAX_CASES}: name one, as in "
            f"{suite}/{chosen[0].case.name}, or select some with --filter; the first are {labels}"
        )
    return chosen
