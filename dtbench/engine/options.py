"""Parses and validates the options of a run, without torch.

    words of the command line -> RunRequest -> RunOptions for a number of ranks

All functions raise `UsageError` with what was got, what was expected and what to do.
"""

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
_MAX_SIZE_BYTES = 2**40  # 1 TiB: larger than any device's memory, so a typing error
_MAX_SIZES = 200

# The floating-point dtypes that both gloo and NCCL reduce.
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

# Sweeps without --size, from sizes where latency dominates to sizes where bandwidth does: gloo on one machine is flat
# from about 1 MiB, NVLink from about 256 MiB.
_DEFAULT_SIZES: Mapping[tuple[DeviceType, bool], str] = {
    ("cpu", False): "1KiB:16MiB:4x",
    ("cpu", True): "4KiB:1MiB:16x",
    ("cuda", False): "1KiB:1GiB:4x",
    ("cuda", True): "64KiB:64MiB:32x",
}
# The sweep of `--max-size`: its first size, where latency alone counts, and its factor. Interpolation between
# neighbours is then good to a few per cent on a smooth curve; elsewhere the sweep is refined.
PLANNED_FROM_BYTES, PLANNED_FACTOR = 1024, 4
# Launches of a calibration run: the fewest for which an interval over launches is meaningful.
CALIBRATION_LAUNCHES = 5
DEFAULT_TIMEOUT_S = 60.0
# A launch of a gate with many benchmarks takes minutes. One that takes longer hangs.
LAUNCH_TIMEOUT_S = 600.0


def split_target(text: str) -> tuple[str, str]:
    """Splits SUITE/TEXT: `dispatch/add` -> ("dispatch", "add"), `my/suite.py` -> ("my/suite.py", "").

    Raises:
        UsageError: no suite has this name, or the text is missing.
    """
    match = re.fullmatch(r"(.+\.py|[^/]+)(?:/(.+))?", text, re.DOTALL)
    if match is None or not (match[1].endswith(".py") or match[1] in read_builtin()):
        raise no_suite(text)
    return match[1], match[2] or ""


@dataclass(frozen=True)
class RunRequest:
    """The options of `dtbench run`, validated as far as is possible without knowing the machine.

    Attributes:
        suites: targets SUITE[/TEXT]; empty for all default suites.
        impls: the core or torch, or both.
        mesh: the mesh of all ranks, if given.
        nproc: number of ranks, if given.
        sizes_bytes: the sizes of --size, if given.
        filter: lines of words. A case matches if its label contains every word of at least one line, see `matcher`.
        launches: number of times that everything is measured, each time with new ranks.
        timeout_s: limit of a case.
        resume: whether to continue the run in `output`.
        output: the run file; None names it by the time.
        suite_options: options that suites declare, by name.
        max_size_bytes: largest payload of a calibration run.
        refine: whether to refine sweeps; None refines with max_size_bytes.
        budget_s: the time that the whole run may take.
        on_failure: after a case has ended the ranks: "continue" with new ranks, or "stop".
        save_baseline: name of a baseline to save the run as.
        brief: whether to print only counts at the end, for a file that is not kept.
    """

    suites: tuple[str, ...] = ()
    impls: tuple[str, ...] = CHOOSABLE_IMPLS
    mesh: Mesh | None = None
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: str = "auto"
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
    refine: bool | None = None
    budget_s: float | None = None
    on_failure: Literal["continue", "stop"] = "continue"
    save_baseline: str | None = None
    brief: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.output is None:
            raise UsageError("--resume needs -o FILE: the run to continue")
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
        is_calibration = self.launches > 1 or self.refine or self.max_size_bytes is not None
        if self.budget_s is not None and is_calibration:
            raise UsageError(
                "--budget measures in one launch as many cases as fit into a time, while --launches, --max-size and "
                "--refine measure more than the listed cases: leave one or the other out"
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
        """The number of ranks by --nproc or --mesh, if given."""
        return self.nproc or (ranks_of(self.mesh) if self.mesh else None)

    def resolve(self, device_type: DeviceType, world_size: int) -> RunOptions:
        """Returns the options for `world_size` ranks.

        Raises:
            UsageError: --nproc or --mesh has another number of ranks.
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
        planned_sizes: tuple[int, ...] = ()  # 1 KiB to the largest payload by 4x, including that
        if (last := self.max_size_bytes) is not None:
            planned_sizes = tuple(sorted({*_geometric(PLANNED_FROM_BYTES, last, PLANNED_FACTOR), last}))
        return RunOptions(
            mesh,
            self.sizes_bytes or planned_sizes or parse_sizes(_DEFAULT_SIZES[device_type, self.quick]),
            self.dtypes,
            device_type,
            self.impls,
            self.quick,
            self.sizes_bytes is not None,
            dict(self.suite_options),
            bool(planned_sizes) if self.refine is None else self.refine,
        )


def parse_size(text: str) -> int:
    """Parses a size with B (or no unit), KiB, MiB or GiB: `64KiB` -> 65536 bytes."""
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
    """Parses `1KiB:16MiB:4x` (first, last, factor), `64KiB`, or a comma list of both. Returns bytes, ascending."""
    sizes: set[int] = set()
    for part in text.split(","):
        sizes.update(_sweep(part) if ":" in part else [parse_size(part)])
        if len(sizes) > _MAX_SIZES:
            raise UsageError(f"--size {text} gives more than {_MAX_SIZES} sizes: take a larger factor")
    return tuple(sorted(sizes))


def _sweep(text: str) -> Iterator[int]:
    bounds = text.split(":")
    if len(bounds) not in (2, 3):
        raise UsageError(
            f"{text!r} is not a sweep of sizes: expected FIRST:LAST:FACTORx, such as 1KiB:16MiB:4x"
        )
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
    """Parses a duration with s, m or h: `5m` -> 300 seconds. A number without unit is ambiguous and refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match and not match[2]:
        raise UsageError(
            f"{text!r} has no unit: expected s, m or h after it, such as {match[1]}m or {match[1]}s"
        )
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(f"{text!r} is not a duration: expected a number with s, m or h, such as 5m")
    return seconds


def parse_list(
    text: str, allowed: Sequence[str], option: str, short: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Parses a comma list of names in `allowed`. Returns each once, in order.

    Args:
        short: abbreviation -> name.
    """
    names = [short.get(part.strip(), part.strip()) for part in text.split(",")]
    for name in names:
        if name not in allowed:
            raise UsageError(
                f"{option} {text}: {name!r} is unknown; expected one or more of {', '.join(allowed)}"
                f"{nearest(name, allowed)}"
            )
    return tuple(dict.fromkeys(names))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Parses a list of dtypes: `float32,bf16` -> ("float32", "bfloat16")."""
    return parse_list(text, DTYPES, "--dtype", SHORT_DTYPES)


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Splits the words that are not options of `dtbench run` into suites and options of suites.

    `mine.py --mode even --ops=add` -> (("mine.py",), {"mode": "even", "ops": "add"}).

    Raises:
        UsageError: an option given twice.
    """
    suites: list[str] = []
    options: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            suites.append(word)
            continue
        name, has_value, value = word.partition("=")
        if not has_value:
            value = next(remaining, "")
        if name.removeprefix("--") in options:
            raise UsageError(f"{name} is given twice: expected every option once")
        options[name.removeprefix("--")] = value
    return tuple(suites), options
