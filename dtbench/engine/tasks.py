"""The tasks of a run: cases of suites with the impls to measure, listed, filtered and labelled."""

import dataclasses
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from dtbench.engine.options import SIZE_UNITS
from dtbench.errors import UsageError, describe, format_location
from dtbench.records.result import Result, ResultKey
from dtbench.suite import Case, RunOptions
from dtbench.suite.case import WorldKind
from dtbench.suite.registry import Suite
from dtbench.text.masking import mask

# Users and progress lines write `size=4KiB` or `size=4 KiB`; labels have bytes.
_SIZE_PARAM = re.compile(r"(?<=\w=)(\d+(?:\.\d+)?) ?(b|kib|mib|gib)(?![\w=])")


@dataclass(frozen=True)
class Task:
    """A case of a suite, and the impls of it to measure."""

    suite: Suite
    case: Case
    impls: tuple[str, ...]

    @property
    def label(self) -> str:
        """The case in one line, which --filter searches: `collectives all_reduce mesh_dim=tp size=1024`."""
        return label_of(self.suite.name, self.case)

    @property
    def world(self) -> WorldKind:
        """Where the case is measured: on real ranks or on simulated ones."""
        return self.case.world or self.suite.world

    def key(self, impl: str, launch: int) -> ResultKey:
        return (self.suite.name, self.case.name, impl, tuple(sorted(self.case.params.items())), launch)


def label_of(suite: str, case: Case | Result) -> str:
    """Returns the case in one line, with params as key=value."""
    return " ".join([suite, case.name, *(f"{key}={value}" for key, value in case.params.items())])


def matcher(text: str) -> Callable[[str], bool]:
    """Returns a predicate: whether a label contains every word of at least one line of `text`, ignoring case.

    A quoted text is one word. The value in NAME=VALUE has to match entirely: pass=forward does not match
    pass=forward+backward. A size may have a unit: size=4KiB matches size=4096.
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
    except ValueError:  # an unclosed quote is part of the word
        return line.split()


def list_tasks(
    suites: Sequence[Suite],
    options: RunOptions,
    text: str = "",
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[Task]:
    """Lists the cases of the suites and the impls to measure, simulated suites first.

    Args:
        text: the text that the labels of the cases have to match, see `matcher`.
        texts: suite name -> the text for its cases, instead of `text`.

    Raises:
        UsageError: a suite cannot list its cases or lists one twice, or no case matches.
    """
    listed: list[Task] = []
    for suite in sorted(suites, key=lambda s: s.world != "simulated"):
        keys: set[tuple[object, ...]] = set()
        for case in _cases_of(suite, options):
            key = (case.name, *sorted(case.params.items()))
            if key in keys:
                raise UsageError(
                    f"the suite {suite.name} has the case {label_of(suite.name, case)!r} twice: "
                    f"expected cases that differ in name or params"
                )
            keys.add(key)
            if impls := tuple(impl for impl in case.build if options.wants(impl)):
                listed.append(Task(suite, case, impls))
    matches = {suite.name: matcher(texts.get(suite.name, text)) for suite in suites}
    tasks = [task for task in listed if matches[task.suite.name](task.label)]
    if not tasks:
        names, reason = ", ".join(s.name for s in suites), "they have no case for these options"
        searched = ", ".join(dict.fromkeys(" ".join(line.split()) for line in [*texts.values()] or [text]))
        if searched and listed:
            reason = (
                f"{'--filter ' if texts else ''}{searched!r} matches none of their {len(listed)} cases"
                f"{_suggest(searched, listed)}"
            )
        raise UsageError(f"nothing to measure in {names}: {reason}; `dtbench list SUITE` shows the cases")
    return tasks


def _suggest(text: str, tasks: Sequence[Task]) -> str:
    """Suggests words of the labels for the words of `text` that no label has: `; the nearest are add, n=16`."""
    words = {word for task in tasks for word in task.label.split()[1:]}
    unknown = [word for word in _words(text.lower()) if not any(map(matcher(shlex.quote(word)), words))]
    near = [name for word in unknown for name in get_close_matches(word, sorted(words), cutoff=0.0)]
    return f"; the nearest are {', '.join(dict.fromkeys(near))}" if near else ""


def _cases_of(suite: Suite, options: RunOptions) -> Iterator[Case]:
    try:
        for case in suite.cases(options):
            if not isinstance(case, Case):
                raise TypeError(f"it yielded {case!r:.80}, expected a dtbench.suite.Case")
            yield case
    except (UsageError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # including sys.exit
        raise UsageError(
            f"the suite {suite.name} failed to list its cases: {mask(describe(error))}"
            f"{format_location(error, suite.cases)}; correct the suite or leave it out"
        ) from error


def remaining(tasks: Iterable[Task], measured: Container[ResultKey], launch: int) -> list[Task]:
    """Returns the tasks without the impls that have a result already."""
    pairs = [
        (task, tuple(impl for impl in task.impls if task.key(impl, launch) not in measured)) for task in tasks
    ]
    return [dataclasses.replace(task, impls=impls) for task, impls in pairs if impls]


def refinement_tasks(
    suites: Sequence[Suite],
    options: RunOptions,
    texts: Mapping[str, str],
    results: Sequence[Result],
    launch: int,
) -> list[Task]:
    """Returns the tasks that refine the suites' sweeps (`Refinement`), including those that are measured already.

    The first launch chooses them by its results; the other launches repeat what the first has measured.

    Args:
        texts: as for `list_tasks`.
        results: the run's results so far.

    Raises:
        UsageError: a suite fails to refine its sweep.
    """

    def key_of(item: Case | Result) -> tuple[object, ...]:
        return item.name, tuple(sorted(item.params.items()))

    tasks: dict[ResultKey, Task] = {}
    for suite in suites:
        if suite.refinement is None:
            continue
        matches = matcher(texts.get(suite.name, ""))
        listed = {key_of(case) for case in _cases_of(suite, options)}
        first = [r for r in results if r.suite == suite.name and r.launch == 0]
        swept = [r for r in first if key_of(r) in listed]
        added = [r for r in first if key_of(r) not in listed]
        try:
            # A run may have ended between two impls of a case.
            requested = [(r.name, r.params) for r in added]
            if launch == 0:
                requested += suite.refinement.wanted(options, swept, added)
            cases = [suite.refinement.case(options, name, params) for name, params in requested]
        except Exception as error:
            raise UsageError(
                f"the suite {suite.name} failed to refine its sweep: {type(error).__name__}: {error}; "
                f"correct the suite, or measure without --refine"
            ) from error
        for case in cases:
            task = Task(suite, case, tuple(impl for impl in case.build if options.wants(impl)))
            if key_of(case) not in listed and task.impls and matches(task.label):
                tasks.setdefault(task.key("", launch), task)
    return list(tasks.values())
