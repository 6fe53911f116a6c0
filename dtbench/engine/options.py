"""The options of a run, parsed, validated and turned into what there is to measure, before anything is. No torch.

    words of the command line -> RunRequest -> RunOptions on a world, suites, tasks: a RunJob

Everything here raises `UsageError` with what was got, what was expected and what to do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dtbench.engine import budget
from dtbench.errors import UnknownOptionError, UsageError, describe, nearest, place_in
from dtbench.records.result import Header, Result, ResultKey
from dtbench.suite import CHOOSABLE_IMPLS, Case, DeviceType, RunOptions
from dtbench.suite.mesh import Mesh, default_mesh, format_mesh, ranks_of
from dtbench.suite.suites import Suite, load, no_suite, read_builtin
from dtbench.text.masking import mask, mask_options

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_MAX_SIZE_BYTES = 2**40  # 1 TiB: beyond any device's memory, so a typing error
_MAX_SIZES = 200

# The floating types that both gloo and NCCL reduce.
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# `size=4KiB` and `size=4 KiB`, as people and progress lines write sizes; labels have the bytes.
_SIZE_PARAM = re.compile(r"(?<=\w=)(\d+(?:\.\d+)?) ?(b|kib|mib|gib)(?![\w=])")

# Sweeps when --size is not given. From where latency rules to where bandwidth does: gloo on one
# machine is flat from about 1 MiB, NVLink from about 256 MiB.
_DEFAULT_SIZES: Mapping[tuple[DeviceType, bool], str] = {
    ("cpu", False): "1KiB:16MiB:4x",
    ("cpu", True): "4KiB:1MiB:16x",
    ("cuda", False): "1KiB:1GiB:4x",
    ("cuda", True): "64KiB:64MiB:32x",
}
# `--max-size`: from where latency alone counts, by the factor at which log-log interpolation between
# neighbours is good to some per cent on a smooth curve; where it is not, the sweep is refined.
PLANNED_FROM_BYTES, PLANNED_FACTOR = 1024, 4
# Launches of a run to calibrate with: the fewest for which an interval over launches means something.
CALIBRATION_LAUNCHES = 5
DEFAULT_TIMEOUT_S = 60.0
# A launch of a gate with a large selection takes minutes; one that takes longer hangs.
LAUNCH_TIMEOUT_S = 600.0


def split_target(text: str) -> tuple[str, str]:
    """`dispatch/add` -> ("dispatch", "add"), `my/suite.py/add` -> ("my/suite.py", "add"); "" for no case.

    Raises:
        UsageError: what stands before the slash is no suite, or nothing stands behind it.
    """
    match = re.fullmatch(r"(.+\.py|[^/]+)(?:/(.+))?", text, re.DOTALL)
    if match is None or not (match[1].endswith(".py") or match[1] in read_builtin()):
        raise no_suite(text)
    return match[1], match[2] or ""


@dataclass(frozen=True)
class RunRequest:
    """`dtbench run`, validated as far as is possible without knowing the machine."""

    suites: tuple[str, ...] = ()
    impls: tuple[str, ...] = CHOOSABLE_IMPLS
    mesh: Mesh | None = None
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo"] = "auto"
    sizes_bytes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    filter: str = ""
    quick: bool = False
    launches: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    resume: bool = False
    output: Path | None = None
    suite_options: Mapping[str, str] = field(default_factory=dict)
    max_size_bytes: int | None = None
    refine: bool | None = None  # None: as --max-size is given
    budget_s: float | None = None
    on_failure: Literal["continue", "stop"] = "continue"  # where a case has cost the run its ranks
    save_baseline: str | None = None  # the name to keep the run under
    brief: bool = False  # of a trial: end with the counts alone, of a file that is not kept

    def __post_init__(self) -> None:
        if self.resume and self.output is None:
            raise UsageError("--resume needs -o FILE: the run to go on with")
        if self.max_size_bytes is not None and self.sizes_bytes is not None:
            raise UsageError(
                "--max-size and --size both say what to sweep: give --max-size for a sweep up to the largest "
                "payload you plan, or --size for sizes of your own (and --refine)"
            )
        if self.max_size_bytes is not None and self.max_size_bytes < PLANNED_FROM_BYTES:
            raise UsageError(
                f"--max-size {self.max_size_bytes}: the sweep starts at 1 KiB, expected that or more; "
                f"give --size for smaller payloads"
            )
        asks_for_more = self.launches > 1 or self.refine or self.max_size_bytes is not None
        if self.budget_s is not None and asks_for_more:
            raise UsageError(
                "--budget measures in one launch what fits into a time, while --launches, --max-size and --refine "
                "ask for more than the listed cases: leave one or the other out"
            )
        if self.launches < 1:
            raise UsageError(f"--launches {self.launches}: expected 1 or more")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise UsageError(f"--timeout {self.timeout_s}: expected seconds above 0")
        if self.nproc is not None and self.nproc < 1:
            raise UsageError(f"--nproc {self.nproc}: expected 1 or more")
        if self.mesh is not None and self.nproc not in (None, ranks_of(self.mesh)):
            raise UsageError(
                f"--mesh {format_mesh(self.mesh)} has {ranks_of(self.mesh)} ranks, --nproc asks for "
                f"{self.nproc}: make them agree, or leave --nproc out"
            )

    @property
    def ranks(self) -> int | None:
        """How many are asked for, by --nproc or --mesh."""
        return self.nproc or (ranks_of(self.mesh) if self.mesh else None)

    def resolve(self, device_type: DeviceType, world_size: int) -> RunOptions:
        """The options of a run in a world of `world_size` ranks.

        Raises:
            UsageError: another number of ranks is asked for.
        """
        if self.nproc not in (None, world_size):
            raise UsageError(
                f"--nproc {self.nproc}: the launcher has started {world_size} ranks already; leave --nproc out"
            )
        mesh = self.mesh or default_mesh(world_size)
        if ranks_of(mesh) != world_size:
            raise UsageError(
                f"--mesh {format_mesh(mesh)} has {ranks_of(mesh)} ranks, the world has {world_size}: "
                f"give a mesh of {world_size}, for example --mesh {format_mesh(default_mesh(world_size))}"
            )
        planned: tuple[int, ...] = ()  # 1 KiB to the largest payload by 4x, that included
        if (last := self.max_size_bytes) is not None:
            planned = tuple(sorted({*_geometric(PLANNED_FROM_BYTES, last, PLANNED_FACTOR), last}))
        return RunOptions(
            mesh,
            self.sizes_bytes or planned or parse_sizes(_DEFAULT_SIZES[device_type, self.quick]),
            self.dtypes,
            device_type,
            self.impls,
            self.quick,
            self.sizes_bytes is not None,
            dict(self.suite_options),
            bool(planned) if self.refine is None else self.refine,
        )


def parse_size(text: str) -> int:
    """`64KiB` -> 65536 bytes. Units: B (or none), KiB, MiB, GiB."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{text!r} is not a size: expected a number with B, KiB, MiB or GiB, such as 64KiB "
            f"(1 KiB = 1024 bytes)"
        )
    size = float(match[1]) * factor
    if size != int(size) or not 1 <= size <= _MAX_SIZE_BYTES:
        raise UsageError(f"{text!r} is {size:g} bytes: expected a whole number of bytes from 1 to 2^40")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1KiB:16MiB:4x` (first, last, factor), `64KiB`, or a comma list of either; ascending, in bytes."""
    sizes: set[int] = set()
    for part in text.split(","):
        sizes.update(_sweep(part) if ":" in part else [parse_size(part)])
        if len(sizes) > _MAX_SIZES:
            raise UsageError(f"--size {text} gives more than {_MAX_SIZES} sizes: take a larger factor")
    return tuple(sorted(sizes))


def _sweep(text: str) -> Iterator[int]:
    bounds = text.split(":")
    if len(bounds) not in (2, 3):
        expected = "FIRST:LAST:FACTORx, such as 1KiB:16MiB:4x"
        raise UsageError(f"{text!r} is not a sweep of sizes: expected {expected}")
    first, last = parse_size(bounds[0]), parse_size(bounds[1])
    step = bounds[2].strip() if len(bounds) == 3 else "2x"
    factor = re.fullmatch(r"(\d+)x", step)
    if factor is None or int(factor[1]) < 2:
        raise UsageError(f"{step!r} in --size {text} is not a factor: expected 2x or more, such as 4x")
    if first > last:
        raise UsageError(f"--size {text}: the first size is above the last; swap them")
    return _geometric(first, last, int(factor[1]))


def _geometric(size: int, last: int, factor: int) -> Iterator[int]:
    while size <= last:
        yield size
        size *= factor


def parse_duration(text: str) -> float:
    """`5m` -> 300 seconds. Units: s, m, h; a bare number may mean any of them and is refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match and not match[2]:
        such = f"such as {match[1]}m or {match[1]}s"
        raise UsageError(f"{text!r} has no unit: expected s, m or h after it, {such}")
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(f"{text!r} is no duration: expected a number with s, m or h, such as 5m")
    return seconds


def parse_list(
    text: str, allowed: Sequence[str], option: str, short: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """A comma list of names that must all be in `allowed`; each once, in the order given. short: other names."""
    names = [short.get(part.strip(), part.strip()) for part in text.split(",")]
    for name in names:
        if name not in allowed:
            expected = f"expected one or more of {', '.join(allowed)}{nearest(name, allowed)}"
            raise UsageError(f"{option} {text}: {name!r} is not known; {expected}")
    return tuple(dict.fromkeys(names))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """`float32,bf16` -> ("float32", "bfloat16")."""
    return parse_list(text, DTYPES, "--dtype", SHORT_DTYPES)


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words of `dtbench run` that are none of its own options: (suites, options of suites).

    `mine.py --mode even --ops=add` -> (("mine.py",), {"mode": "even", "ops": "add"}).

    Raises:
        UsageError: an option given twice.
    """
    suites: list[str] = []
    options: dict[str, str] = {}
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            suites.append(word)
            continue
        name, has_value, value = word.partition("=")
        if not has_value:
            value = next(left, "")
        if name.removeprefix("--") in options:
            raise UsageError(f"{name} is given twice: expected every option once")
        options[name.removeprefix("--")] = value
    return tuple(suites), options


def refuse_foreign_options(suites: Sequence[Suite], chosen: Mapping[str, str]) -> None:
    """Checks that each option belongs to a suite of the run.

    Raises:
        UsageError: an option that none declares.
    """
    declared = {option for suite in suites for option in suite.options}
    for name, value in chosen.items():
        if name not in declared:
            dashed = name if name.startswith("-") else f"--{name}"
            of_suites = "".join(f", {s.name} has --{', --'.join(s.options)}" for s in suites if s.options)
            raise UnknownOptionError(
                dashed,
                [f"--{option}" for option in declared],
                f"No such option '{dashed}'; `dtbench run --help` lists the options{of_suites}",
            )
        if not value or value.startswith("--"):
            raise UsageError(f"--{name} needs a value: expected --{name} VALUE")


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
    return _SIZE_PARAM.sub(lambda size: f"{float(size[1]) * _UNITS[size[2].upper()]:.0f}", line)


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


def further_tasks(
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


@dataclass(frozen=True)
class RunJob:
    """What a run is to do, the same on every rank and in the launcher."""

    request: RunRequest
    options: RunOptions
    suites: tuple[Suite, ...]
    tasks: tuple[Task, ...]  # to measure, in this order; under --budget as far as time allows
    texts: Mapping[str, str]  # suite -> what the lines of its cases match

    @property
    def suite_names(self) -> list[str]:
        return [suite.name for suite in self.suites]

    @property
    def simulated(self) -> bool:
        """Whether one process measures all of it, which simulates its ranks."""
        return all(task.suite.world == "simulated" for task in self.tasks)

    @property
    def processes(self) -> int:
        """How many measure."""
        return 1 if self.simulated else self.options.world_size

    def expected(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Those of the tasks that --budget holds by estimate; without it all."""
        limit_s = self.request.budget_s
        return tasks if limit_s is None else budget.choose(tasks, limit_s, self.options.quick, self.processes)


def prepare(request: RunRequest, device_type: DeviceType, world_size: int) -> RunJob:
    """Validates all that can be validated before ranks exist.

    Raises:
        UsageError: options that cannot be followed.
    """
    options = request.resolve(device_type, world_size)
    targets = [(load([name]), text) for name, text in map(split_target, request.suites)] or [(load(), "")]
    suites = tuple({suite.name: suite for loaded, _ in targets for suite in loaded}.values())
    refuse_foreign_options(suites, request.suite_options)
    texts: dict[str, str] = {}
    for loaded, text in targets:
        if text:
            list_tasks(loaded, options, text)  # a target that matches nothing is an error
        lines = "\n".join(f"{text} {line}" for line in request.filter.split("\n"))
        for suite in loaded:
            texts[suite.name] = f"{texts[suite.name]}\n{lines}" if suite.name in texts else lines
    tasks = list_tasks(suites, options, request.filter, texts)
    if request.budget_s is not None:
        tasks = budget.by_importance(tasks)
    return RunJob(request, options, suites, tuple(tasks), texts)


def same_on_all_ranks(job: RunJob) -> dict[str, str]:
    """What ranks have to agree in, by the names that users know; else they would wait in different collectives, or
    measure different things."""
    request, options = job.request, job.options
    codes = (getattr(suite.cases, "__code__", None) for suite in job.suites)
    files = {Path(code.co_filename) for code in codes if code}
    listed = [f"{task.label} {','.join(task.impls)}" for task in job.tasks]
    return {
        "suites": " ".join(job.suite_names),
        "--mesh": format_mesh(options.mesh),
        "--device": options.device_type,
        "--size": ",".join(map(str, options.sizes_bytes)),
        "--refine": str(options.refine),
        **{
            f"--{name}": str(getattr(request, name))
            for name in ("backend", "filter", "quick", "launches", "resume")
        },
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
    header: Header, options: RunOptions, suites: Sequence[str], launches: int, path: Path
) -> None:
    """Checks that the run to resume asks for the same as the options do.

    Raises:
        UsageError: with the first difference, as the file has it and as the options have it.
    """
    was: dict[str, object] = {"options": {}, "refine": False} | header.plan
    requested = dataclasses.asdict(options) | {"options": mask_options(options.options)}
    now: dict[str, object] = json.loads(json.dumps(requested))
    was |= {"suites": list(header.suites), "launches": header.launches}
    now |= {"suites": list(suites), "launches": launches}
    for name in now:
        if was.get(name) != now[name]:
            raise UsageError(
                f"cannot resume {path}: its {name} is {_shown(name, was.get(name))}, the options ask for "
                f"{_shown(name, now[name])}; give the options of the first run, or another -o"
            )


def _shown(name: str, value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return format_mesh(value) if name == "mesh" else ",".join(map(str, value))
