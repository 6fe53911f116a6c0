"""Which cases to profile: `suite`, `suite/case`, and a text to narrow them by."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dtbench.bench.options import Task
from dtbench.errors import UsageError

# A profile is read case by case; each takes seconds to measure and some hundred events to draw.
MOST_CASES = 24
_SHOWN = 8


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """The tasks of that case (all where it is ""), of those whose label holds the text.

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
    found = [task for task in named if filter_text.lower() in task.label.lower()]
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
