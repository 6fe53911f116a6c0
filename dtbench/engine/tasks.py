"""The tasks of a run: cases of suites with the impls to measure, listed, filtered and labelled."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from dtbench.engine.options import SIZE_UNITS
from dtbench.errors import UsageError, describe, place_in
from dtbench.records.result import Result, ResultKey
from dtbench.suite import Case, RunOptions
from dtbench.suite.registry import Suite
from dtbench.text.masking import mask

# `size=4KiB` and `size=4 KiB`, as people and progress lines write sizes; labels have the bytes.
_SIZE_PARAM = re.compile(r"(?<=\w=)(\d+(?:\.\d+)?) ?(b|kib|mib|gib)(?![\w=])")


@dataclass(frozen=True)
class Task:
    """A case of a suite and those of its impls that are wanted and still to be measured."""

    suite: Suite
    case: Case
    impls: tuple[str, ...]

    @property
    def label(self) -> str:
        """`collectives all_reduce mesh_dim=tp size=1024`: what --filter searches and people read."""
        return label_of(self.suite.name, self.case)

    def key(self, impl: str, launch: int) -> ResultKey:
        params = tuple(sorted(self.case.params.items()))
        return (self.suite.name, self.case.name, impl, params, launch)


def label_of(suite: str, case: Case | Result) -> str:
    """The case in one line, params as key=value."""
    return " ".join([suite, case.name, *(f"{key}={value}" for key, value in case.params.items())])


def matcher(text: str) -> Callable[[str], bool]:
    """Whether a label holds every word of a line of `text`, in any case of letters; what is quoted is one word.

    A value that is given with its name is meant whole: pass=forward is not pass=forward+backward. A size may have
    its unit: size=4KiB is size=4096.
    """
    lines = [
        [f"{word} " if "=" in word[:-1] else word for word in _words(_in_bytes(line))]
        for line in text.lower().split("\n")
    ]
    return lambda label: any(all(word in f"{_in_bytes(label.lower())} " for word in words) for words in lines)


def _in_bytes(line: str) -> str:
    return _SIZE_PARAM.sub(lambda size: f"{float(size[1]) * SIZE_UNITS[size[2].upper()]:.0f}", line)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that nothing closes is one to look for
        return line.split()


def list_tasks(
    suites: Sequence[Suite],
    options: RunOptions,
    text: str = "",
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[Task]:
    """Every case of the suites under the options, simulated worlds first, with the impls it is to be
    measured with; those only that `text` matches, see `matcher`.

    texts: suite -> what its cases have to match instead.

    Raises:
        UsageError: a suite that cannot list its cases or lists one twice, or nothing that matches.
    """
    listed: list[Task] = []
    for suite in sorted(suites, key=lambda s: s.world != "simulated"):
        seen: set[tuple[object, ...]] = set()
        for case in _cases_of(suite, options):
            key = (case.name, *sorted(case.params.items()))
            if key in seen:
                raise UsageError(
                    f"the suite {suite.name} has the case {label_of(suite.name, case)!r} twice: "
                    f"expected params that tell its cases apart"
                )
            seen.add(key)
            if impls := tuple(impl for impl in case.build if options.wants(impl)):
                listed.append(Task(suite, case, impls))
    matches = {suite.name: matcher(texts.get(suite.name, text)) for suite in suites}
    tasks = [task for task in listed if matches[task.suite.name](task.label)]
    if not tasks:
        names, why = ", ".join(s.name for s in suites), "they have no case for these options"
        wanted = ", ".join(dict.fromkeys(" ".join(line.split()) for line in [*texts.values()] or [text]))
        if wanted and listed:
            option = "--filter " if texts else ""
            why = f"{option}{wanted!r} matches none of their {len(listed)} cases{_near(wanted, listed)}"
        raise UsageError(f"nothing to measure in {names}: {why}; `dtbench list SUITE` shows the cases")
    return tasks


def _near(text: str, tasks: Sequence[Task]) -> str:
    """`; expected such as add, n=16`: for each word that no task has, the words of tasks that are spelled like it."""
    known = {word for task in tasks for word in task.label.split()[1:]}
    unknown = [word for word in _words(text.lower()) if not any(map(matcher(shlex.quote(word)), known))]
    near = [name for word in unknown for name in get_close_matches(word, sorted(known), cutoff=0.0)]
    return f"; expected such as {', '.join(dict.fromkeys(near))}" if near else ""


def _cases_of(suite: Suite, options: RunOptions) -> Iterator[Case]:
    try:
        for case in suite.cases(options):
            if not isinstance(case, Case):
                raise TypeError(f"it gave {case!r:.80}, expected a dtbench.suite.Case")
            yield case
    except (UsageError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit, too
        place = place_in(error, suite.cases)
        raise UsageError(
            f"the suite {suite.name} failed to list its cases: {mask(describe(error))}{place}; "
            f"correct the suite or leave it out"
        ) from error


def remaining(tasks: Iterable[Task], done: Container[ResultKey], launch: int) -> list[Task]:
    """The tasks less the impls whose results are there already."""
    left = [(task, tuple(i for i in task.impls if task.key(i, launch) not in done)) for task in tasks]
    return [dataclasses.replace(task, impls=impls) for task, impls in left if impls]


def refinement_tasks(
    suites: Sequence[Suite],
    options: RunOptions,
    texts: Mapping[str, str],
    results: Sequence[Result],
    launch: int,
) -> list[Task]:
    """What to measure beyond the listed cases (`Refinement`), whether that is done already or not.

    results: of the run so far. The first launch decides by them; the others take what it has measured.
    texts: as for `list_tasks`.

    Raises:
        UsageError: a suite that fails to say, or to build what it asked for.
    """

    def named(of: Case | Result) -> tuple[object, ...]:
        return of.name, tuple(sorted(of.params.items()))

    further: dict[ResultKey, Task] = {}
    for suite in suites:
        if suite.refinement is None:
            continue
        matches = matcher(texts.get(suite.name, ""))
        listed = {named(case) for case in _cases_of(suite, options)}
        first = [r for r in results if r.suite == suite.name and r.launch == 0]
        swept = [r for r in first if named(r) in listed]
        added = [r for r in first if named(r) not in listed]
        try:
            wanted = [(r.name, r.params) for r in added]  # a run may have ended between two impls of one
            if launch == 0:
                wanted += suite.refinement.wanted(options, swept, added)
            cases = [suite.refinement.case(options, name, params) for name, params in wanted]
        except Exception as error:
            raise UsageError(
                f"the suite {suite.name} failed to refine its sweep: {type(error).__name__}: {error}; "
                f"correct the suite, or measure without --refine"
            ) from error
        for case in cases:
            task = Task(suite, case, tuple(impl for impl in case.build if options.wants(impl)))
            if named(case) not in listed and task.impls and matches(task.label):
                further.setdefault(task.key("", launch), task)
    return list(further.values())
