"""What a suite is, and how suites are found: ours by name, a user's by the path of a file.

A suite is a function of the options that yields cases:

    @suite("hello", world="ranks", help="an all-reduce per mesh dim, dtype and size")
    def hello(options: RunOptions) -> Iterator[Case]:
        for at in sweep(options):
            yield Case("all_reduce", at.params, build={"c10d": lambda world, at=at: ...})
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from dtbench.errors import UsageError, describe, nearest, place_in
from dtbench.file_kinds import how_to_profile, refuse_job, refuse_program
from dtbench.suite.case import Case, Param, RunOptions

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# The package whose modules are the built-in suites, its SUITES. Named, not imported: they load torch.
BUILTIN_PACKAGE = "dtbench_suites"

WorldKind = Literal["ranks", "simulated"]


@dataclass(frozen=True)
class Refinement:
    """How a suite of ranks measures more where its sweep turns out too coarse (`--refine`).

    wanted: given the options, what the first launch measured of the listed cases and what it has measured
        beyond them, the (name, params) of cases to measure too. Called again with their results until it
        wants nothing new. Only rank 0 calls it.
    case: the case of such a name and params, the same on every rank; it may adjust the params (trim a
        size) as long as those of its own cases stay as they are.
    """

    wanted: Callable[[RunOptions, Sequence[Any], Sequence[Any]], Iterable[tuple[str, Mapping[str, Param]]]]
    case: Callable[[RunOptions, str, Mapping[str, Param]], Case]


@dataclass(frozen=True)
class SweepPoint:
    """One of the combinations of a sweep. ranks: of the mesh dim; dtype: its name in torch."""

    mesh_dim: str
    ranks: int
    dtype: str
    size_bytes: int

    @property
    def params(self) -> dict[str, Param]:
        """For the case that is measured there."""
        return {"mesh_dim": self.mesh_dim, "ranks": self.ranks, "dtype": self.dtype, "size": self.size_bytes}


def sweep(
    options: RunOptions,
    dims: Iterable[tuple[str, int]] | None = None,
    dtypes: Iterable[str] | None = None,
    sizes: Iterable[int] | None = None,
) -> Iterator[SweepPoint]:
    """Every mesh dim of several ranks with every dtype and size of the run, dims outermost.

    dims: (name, ranks) in their place. dtypes: names of torch's in place of `--dtype`. sizes: bytes, where the user
    chose none with `--size`.
    """
    shared = tuple(dim for dim in options.mesh if dim[1] > 1)
    sizes_bytes = options.sizes_bytes if sizes is None or options.sizes_chosen else sizes
    axes = shared if dims is None else dims, options.dtypes if dtypes is None else dtypes, sizes_bytes
    for (mesh_dim, ranks), dtype, size_bytes in itertools.product(*axes):
        yield SweepPoint(mesh_dim, ranks, dtype, size_bytes)


class World(Protocol):
    """What a case's builder is given: this rank's place in a live process group.

    In a "ranks" suite the group is real and `mesh` is the run's mesh. In a "simulated" suite it is
    torch's fake group of 8 ranks seen from rank 0, and `mesh` is one-dimensional.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def mesh_of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """A mesh of all ranks in another shape, made once per world."""
        ...


@dataclass(frozen=True)
class Suite:
    """world: where the cases run: on real ranks, or on simulated ones in one process.
    options: name -> help of the options of `dtbench run` that are this suite's; the values stand as text
        in `RunOptions.options`, and the suite checks them. by_default: whether it runs when no suite is named.
    refinement: what to measure beyond the cases, found while measuring. budget_priority: the cases of which --budget
        measures three sizes before it comes to the others; without it all that have a sweep. impl_s: about how long an
        impl of a case takes, set-up and checks included, beside the bytes that it sends; and with --quick.
    """

    name: str
    cases: Callable[[RunOptions], Iterator[Case]]
    world: WorldKind
    help: str
    options: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True
    refinement: Refinement | None = None
    budget_priority: Callable[[Case], bool] | None = None
    impl_s: tuple[float, float] = (0.1, 0.06)

    def __post_init__(self) -> None:
        if self.world not in get_args(WorldKind):
            raise ValueError(
                f"the suite {self.name} has world={self.world!r}, expected one of {', '.join(get_args(WorldKind))}"
            )
        seconds = self.impl_s if isinstance(self.impl_s, tuple) else ()
        if len(seconds) != 2 or not all(isinstance(s, int | float) and s > 0 for s in seconds):
            raise ValueError(
                f"the suite {self.name} has impl_s={self.impl_s!r}, expected two numbers of seconds above 0: of a full "
                "run, and with --quick"
            )


_registered: dict[str, Suite] = {}
_folders: set[Path] = set()  # of the suites' files that were loaded
# What a suite's file may import.
_IMPORTABLE = (
    "; as with `python FILE`, it can import what lies beside it (`import helper`, not `from . import helper`), what is "
    "installed and what lies in a folder of PYTHONPATH"
)


def suite(
    name: str,
    *,
    world: WorldKind,
    help: str,
    options: Mapping[str, str] | None = None,
    by_default: bool = True,
    refinement: Refinement | None = None,
    budget_priority: Callable[[Case], bool] | None = None,
    impl_s: tuple[float, float] = (0.1, 0.06),
) -> Callable[[Callable[[RunOptions], Iterator[Case]]], Suite]:
    """Registers a generator of cases as the suite `name`; see `Suite` for the arguments."""

    def register(cases: Callable[[RunOptions], Iterator[Case]]) -> Suite:
        _registered[name] = registered = Suite(
            name, cases, world, help, options or {}, by_default, refinement, budget_priority, impl_s
        )
        return registered

    return register


def read_builtin() -> Mapping[str, str]:
    """The built-in suites, name -> what it measures, without importing them."""
    builtin: Mapping[str, str] = importlib.import_module(BUILTIN_PACKAGE).SUITES
    return builtin


def load(names: Iterable[str] = ()) -> list[Suite]:
    """The suites asked for, in the order of the question; when none is named, the built-in ones that run
    by default.

    A name that ends in .py is a user's file.

    Raises:
        UsageError: a name that no suite has, a file that cannot be loaded or that registers nothing.
    """
    builtin = read_builtin()
    chosen: list[Suite] = []
    for name in names:
        if name.endswith(".py"):
            chosen += _load_file(Path(name))
        elif name in builtin:
            chosen.append(_builtin(name))
        elif name in _registered:
            chosen.append(_registered[name])
        else:
            raise no_suite(name)
    return chosen or [s for s in map(_builtin, builtin) if s.by_default]


def no_suite(name: str) -> UsageError:
    """The error of a name that no suite has: says what lies there, or which name is near.

    Raises:
        UnreadableRunError: a file of another kind lies there.
    """
    refuse_job(Path(name), "a suite")
    files = [path for path in (Path(f"{name}.py"), *sorted(Path(name).glob("*.py"))) if path.is_file()]
    suites = [str(path) for path in files if b"dtbench" in path.read_bytes()]
    near = nearest(name.partition("/")[0], read_builtin())
    return UsageError(
        f"no suite is called {name!r}: the suites are {', '.join(read_builtin())}, or give the path of a .py file"
        f"{f'. Did you mean {suites[0]!r}?' if suites else near}"
    )


def _builtin(name: str) -> Suite:
    """Imports that suite alone: one of them loads all of torch.distributed.tensor, which takes 0.6 s."""
    module = importlib.import_module(f"{BUILTIN_PACKAGE}.{name}")
    suites = [s for s in vars(module).values() if isinstance(s, Suite) and s.name == name]
    return suites[0] if suites else _registered[name]


def _is_builtin(suite: Suite) -> bool:
    """Whether it came with a built-in module that a user's file imports."""
    return str(getattr(suite.cases, "__module__", "")).startswith(f"{BUILTIN_PACKAGE}.")


def _load_file(path: Path) -> list[Suite]:
    refuse_job(path, "a suite")
    before = dict(_registered)
    spec = importlib.util.spec_from_file_location(f"dtbench_user_suite_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):  # noqa: PTH113 - Path's raises where a name is too long
        raise UsageError(f"no suite file at {path}: expected a Python file that uses @dtbench.suite.suite")
    refuse_program(path)
    folder = path.resolve().parent  # first on sys.path meanwhile, as `python FILE` has it
    beside = (file for other in _folders - {folder} for file in other.glob("*") if file.stem in sys.modules)
    if clash := next((file for file in beside if (folder / file.name).exists()), None):
        raise UsageError(
            f"{path} lies beside another {clash.name} than {clash}, which a suite of this run has imported: "
            "run the two suites one after the other, or rename one of the modules"
        )
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, too: its code would be taken for one of dtbench's
        why = describe(error) + place_in(error, spec.origin) + _IMPORTABLE * isinstance(error, ImportError)
        raise UsageError(f"the suite file {path} failed to load: {why}") from error
    finally:  # what dtbench imports later is not looked for there first
        sys.path[:] = [*(entry for entry in sys.path if entry != str(folder)), str(folder)]
    new = [s for name, s in _registered.items() if before.get(name) is not s and not _is_builtin(s)]
    if not new:
        raise UsageError(
            f"{path} registers no suite: decorate a function of the options with @dtbench.suite.suite; "
            f"{how_to_profile(path)}"
        )
    return new
