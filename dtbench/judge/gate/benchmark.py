"""What a gate judges: the benchmarks (case and impl) that a selection names, as an arm lists them. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.files.schema import BadFieldError, loads, shown
from dtbench.model import Param

Key = tuple[str, str, str, tuple[tuple[str, Param], ...]]  # as `Result.case_key`

# The largest slowdown that a PASS has to exclude, unless the benchmark says otherwise. Process-to-process
# noise of 1.5 to 2% makes 5% the least that five pairs of launches exclude most of the time.
DEFAULT_TOLERANCE = 0.05
# Beside the counters of a counting launch: what a call took, seconds, roughly; base's says how both arms sample.
CALL_S = "call_s"
MAX_LISTING_BYTES = 256 * 2**20
_MODULE = re.compile(r"torch(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class Selection:
    """Cases of one suite: suite is a name or the path of a .py file, text what the case's line holds."""

    suite: str
    text: str = ""


def parse_selection(word: str) -> Selection:
    """`dispatch` -> all of a suite; `dispatch/add` -> the cases whose line in `list` holds "add";
    `my_suite.py/add` -> the same of a file.

    Raises:
        UsageError: no name of a suite.
    """
    head, found, text = word.partition(".py/")
    if found:
        return Selection(f"{head}.py", text)
    if word.endswith(".py"):
        return Selection(word)
    suite, _, text = word.partition("/")
    if not suite:
        raise UsageError(f"{word!r} names no suite: expected SUITE, SUITE/TEXT or FILE.py/TEXT")
    return Selection(suite, text)


@dataclass(frozen=True)
class Benchmark:
    """One impl of a case, and how its launches are judged.

    label: the case's line in `list` and the impl. estimator: the order statistic that stands for a
    launch. tolerance: the largest slowdown that a PASS has to exclude. floor_s: smaller changes are none.
    """

    key: Key
    label: str
    world: Literal["simulated", "ranks"]
    estimator: Literal["min", "p25"]
    tolerance: float = DEFAULT_TOLERANCE
    floor_s: float = 0.0


@dataclass(frozen=True)
class Listing:
    """An arm's benchmarks, and why a selection has none. python: its version, "3.11". loaded: by the label of a
    benchmark, the modules of torch that it was the first to load; by "", those that the suites load.
    """

    benchmarks: tuple[Benchmark, ...]
    problems: tuple[str, ...]
    python: str
    torch: str
    loaded: Mapping[str, Sequence[str]] = field(default_factory=dict)


def to_json(benchmark: Benchmark) -> dict[str, Any]:
    """A line of a listing."""
    suite, name, impl, params = benchmark.key
    return {
        "suite": suite,
        "name": name,
        "impl": impl,
        "params": dict(params),
        "label": benchmark.label,
        "world": benchmark.world,
        "estimator": benchmark.estimator,
        "tolerance": benchmark.tolerance,
        "floor_s": benchmark.floor_s,
    }


def from_json(line: Mapping[str, Any]) -> Benchmark:
    """The benchmark of a listing's line.

    Raises:
        BadFieldError: a field of the wrong type or range.
    """
    texts = {name: line.get(name) for name in ("suite", "name", "impl", "label")}
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise BadFieldError(f"{name} is {shown(value)}, expected a name")
    params = line.get("params")
    if not isinstance(params, dict) or not all(isinstance(v, str | int | float) for v in params.values()):
        raise BadFieldError(f"params is {shown(params)}, expected an object of scalars")
    world, estimator = line.get("world"), line.get("estimator")
    if world not in ("simulated", "ranks") or estimator not in ("min", "p25"):
        raise BadFieldError(f"world is {shown(world)} and estimator {shown(estimator)}")
    for name in ("tolerance", "floor_s"):
        value = line.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadFieldError(f"{name} is {shown(value)}, expected a number of at least 0")
    key = (str(texts["suite"]), str(texts["name"]), str(texts["impl"]), tuple(sorted(params.items())))
    return Benchmark(key, str(texts["label"]), world, estimator, line["tolerance"], line["floor_s"])


def write_listing(path: Path, listing: Listing) -> None:
    """Writes what `read_listing` reads."""
    lines = [to_json(b) for b in listing.benchmarks]
    body = {
        "kind": "listing",
        "python": listing.python,
        "torch": listing.torch,
        "problems": listing.problems,
        "loaded": dict(listing.loaded),
        "benchmarks": lines,
    }
    written = path.with_suffix(".part")
    written.write_text(json.dumps(body))
    written.replace(path)


def read_listing(path: Path) -> Listing:
    """The listing that a worker wrote.

    Raises:
        UnreadableRunError: no listing, or a damaged one.
    """
    try:
        data = path.read_bytes()
        if len(data) > MAX_LISTING_BYTES:
            raise BadFieldError(f"it has {len(data)} bytes, expected at most {MAX_LISTING_BYTES}")
        body = loads(data)
        problems, lines = body.get("problems"), body.get("benchmarks")
        if body.get("kind") != "listing" or not isinstance(lines, list) or not isinstance(problems, list):
            raise BadFieldError("expected an object of kind listing")
        made = tuple(from_json(line) for line in lines)
        loaded = body.get("loaded", {})
        if not isinstance(loaded, dict) or not all(_are_modules(names) for names in loaded.values()):
            raise BadFieldError(f"loaded is {shown(loaded)}, expected modules of torch by benchmark")
    except (OSError, ValueError, AttributeError) as error:
        raise UnreadableRunError(f"{path} is no listing of an arm: {error}") from error
    versions = str(body.get("python")), str(body.get("torch"))
    return Listing(made, tuple(map(str, problems)), *versions, loaded)


def _are_modules(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(n, str) and _MODULE.fullmatch(n) for n in names)


def by_key(benchmarks: Sequence[Benchmark]) -> dict[Key, Benchmark]:
    """The benchmarks by what names them across arms."""
    return {b.key: b for b in benchmarks}
