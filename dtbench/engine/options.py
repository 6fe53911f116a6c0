"""The options of a run, parsed, validated and turned into what there is to measure, before anything is. No torch.

    words of the command line -> RunRequest -> RunOptions on a world, suites, tasks: a RunJob

Everything here raises `UsageError` with what was got, what was expected and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dtbench.errors import UsageError, nearest
from dtbench.suite import CHOOSABLE_IMPLS, DeviceType, RunOptions
from dtbench.suite.mesh import Mesh, default_mesh, format_mesh, ranks_of
from dtbench.suite.registry import no_suite, read_builtin

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
SIZE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_MAX_SIZE_BYTES = 2**40  # 1 TiB: beyond any device's memory, so a typing error
_MAX_SIZES = 200

# The floating types that both gloo and NCCL reduce.
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

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
    factor = SIZE_UNITS.get(match[2].upper()) if match else None
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
