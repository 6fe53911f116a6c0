"""Defines suites and loads them: built-in suites by name, a user's suites by the path of a file.

A suite is a generator of cases for the options of a run:

    @suite("hello", world="ranks", help="an all-reduce per mesh dim, dtype and size")
    def hello(options: RunOptions) -> Iterator[Case]:
        for point in sweep(options):
            yield Case("all_reduce", point.params, build={"c10d": lambda world, point=point: ...})
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
from typing import TYPE_CHECKING, Any, Protocol, get_args

from dtbench.errors import UsageError, describe, format_location, nearest
from dtbench.file_kinds import profile_hint, refuse_non_suite, refuse_other_kind
from dtbench.suite.case import Case, Param, RunOptions, WorldKind

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# The package of the built-in suites. Its SUITES maps their names to help texts. Suites are imported late, since they
# import torch.
BUILTIN_PACKAGE = "dtbench_suites"


@dataclass(frozen=True)
class Refinement:
    """How a suite on real ranks adds cases where its sweep is too coarse (`--refine`).

    Attributes:
        wanted: returns name and params of cases to add. Its arguments are the options, and the first launch's results
            of the listed cases and of the added cases. Rank 0 calls it again until it returns nothing new.
        case: returns the case with this name and params, the same on every rank. It may adjust the params (such as a
            size). The params of a case that it has returned must stay as they are.
    """

    wanted: Callable[[RunOptions, Sequence[Any], Sequence[Any]], Iterable[tuple[str, Mapping[str, Param]]]]
    case: Callable[[RunOptions, str, Mapping[str, Param]], Case]


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep.

    Attributes:
        mesh_dim: name of the mesh dim.
        ranks: number of ranks of the mesh dim.
        dtype: name of torch's dtype.
        size_bytes: payload, bytes.
    """

    mesh_dim: str
    ranks: int
    dtype: str
    size_bytes: int

    @property
    def params(self) -> dict[str, Param]:
        """The params of the case at this point."""
        return {"mesh_dim": self.mesh_dim, "ranks": self.ranks, "dtype": self.dtype, "size": self.size_bytes}


def sweep(
    options: RunOptions,
    dims: Iterable[tuple[str, int]] | None = None,
    dtypes: Iterable[str] | None = None,
    sizes: Iterable[int] | None = None,
) -> Iterator[SweepPoint]:
    """Yields every combination of mesh dim, dtype and size of the run, in this order of nesting.

    By default, mesh dims of a single rank are left out.

    Args:
        options: the options of the run.
        dims: (name, ranks) of each mesh dim, instead of the run's mesh dims.
        dtypes: names of torch's dtypes instead of --dtype.
        sizes: bytes, used unless the user chose sizes with --size.
    """
    shared = tuple(dim for dim in options.mesh if dim[1] > 1)
    sizes_bytes = options.sizes_bytes if sizes is None or options.sizes_chosen else sizes
    for (mesh_dim, ranks), dtype, size_bytes in itertools.product(
        shared if dims is None else dims, options.dtypes if dtypes is None else dtypes, sizes_bytes
    ):
        yield SweepPoint(mesh_dim, ranks, dtype, size_bytes)


class World(Protocol):
    """This rank and its process group, the argument of a case's builder.

    In a "ranks" suite the group is real and `mesh` is the run's mesh. In a "simulated" suite it is torch's fake group
    of 8 ranks, seen from rank 0, and `mesh` is one-dimensional.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def mesh_of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Returns a mesh of all ranks in another shape. Calls with equal shapes return the same mesh.

        In a "simulated" suite, a one-dimensional shape may have more ranks: (256,) is a fake group of 256 ranks, beside
        the group of 8.
        """


@dataclass(frozen=True)
class Suite:
    """A named generator of cases, and how to run them.

    Attributes:
        name: the suite's name.
        cases: yields the cases for the options of a run.
        world: "ranks" for real ranks, "simulated" for simulated ranks in one process. A case may name the other one.
        help: what the suite measures.
        options: name -> help of the suite's own options of `dtbench run`. Their values are text in
            `RunOptions.options`, which the suite checks.
        by_default: whether `dtbench run` measures it if no suite is named.
        refinement: how to add cases while measuring.
        budget_priority: for a case: whether --budget measures three sizes of its curve before the suite's other cases;
            None for a case that comes last and for which the suite gets no share of the time. Default: every case with
            several sizes.
        impl_s: estimated seconds per impl of a case, in a full run and with --quick. They include set-up and checks but
            not the time for sending bytes.
    """

    name: str
    cases: Callable[[RunOptions], Iterator[Case]]
    world: WorldKind
    help: str
    options: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True
    refinement: Refinement | None = None
    budget_priority: Callable[[Case], bool | None] | None = None
    impl_s: tuple[float, float] = (0.1, 0.06)

    def __post_init__(self) -> None:
        if self.world not in get_args(WorldKind):
            raise ValueError(
                f"the suite {self.name} has world={self.world!r}, expected one of {', '.join(get_args(WorldKind))}"
            )
        seconds = self.impl_s if isinstance(self.impl_s, tuple) else ()
        if len(seconds) != 2 or not all(isinstance(s, int | float) and s > 0 for s in seconds):
            raise ValueError(
                f"the suite {self.name} has impl_s={self.impl_s!r}, expected two numbers of seconds above 0: for a "
                "full run, and with --quick"
            )


_registered: dict[str, Suite] = {}
_folders: set[Path] = set()  # folders of the loaded suite files
# Hint about imports, for messages about a suite file that failed to import a module.
_IMPORTABLE = (
    "; as with `python FILE`, it can import modules of its folder (`import helper`, not `from . import helper`), "
    "installed packages, and modules in a folder of PYTHONPATH"
)


def suite(
    name: str,
    *,
    world: WorldKind,
    help: str,
    options: Mapping[str, str] | None = None,
    by_default: bool = True,
    refinement: Refinement | None = None,
    budget_priority: Callable[[Case], bool | None] | None = None,
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
    """Returns the built-in suites, name -> help, without importing them."""
    return dict(importlib.import_module(BUILTIN_PACKAGE).SUITES)


def load(names: Iterable[str] = ()) -> list[Suite]:
    """Returns the suites of the names, in order; without names, the built-in suites that run by default.

    Args:
        names: names of suites, or paths of suite files, which end with .py.

    Raises:
        UsageError: no suite has the name, or a file cannot be loaded or registers no suite.
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
    """Returns the error for an unknown suite name, with a file or name that may be meant.

    Raises:
        UnreadableRunError: the name is a file of another kind.
    """
    refuse_other_kind(Path(name), "a suite")
    files = [path for path in (Path(f"{name}.py"), *sorted(Path(name).glob("*.py"))) if path.is_file()]
    suites = [str(path) for path in files if b"dtbench" in path.read_bytes()]
    return UsageError(
        f"no suite is called {name!r}: the suites are {', '.join(read_builtin())}, or give the path of a .py file"
        f"{f'. Did you mean {suites[0]!r}?' if suites else nearest(name.partition('/')[0], read_builtin())}"
    )


def _builtin(name: str) -> Suite:
    """Imports one built-in suite. Others may import torch.distributed.tensor, which takes 0.6 s."""
    members = vars(importlib.import_module(f"{BUILTIN_PACKAGE}.{name}")).values()
    return next((s for s in members if isinstance(s, Suite) and s.name == name), None) or _registered[name]


def _load_file(path: Path) -> list[Suite]:
    refuse_other_kind(path, "a suite")
    registered_before = dict(_registered)
    spec = importlib.util.spec_from_file_location(f"dtbench_user_suite_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises if a name is too long
        raise UsageError(f"no suite file at {path}: expected a Python file that uses @dtbench.suite.suite")
    refuse_non_suite(path)
    folder = path.resolve().parent  # first on sys.path while it loads, as with `python FILE`
    imported = (
        file for loaded in _folders - {folder} for file in loaded.glob("*") if file.stem in sys.modules
    )
    if clash := next((file for file in imported if (folder / file.name).exists()), None):
        raise UsageError(
            f"the folder of {path} has a {clash.name}, but a suite of this run has imported {clash}: "
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
    except BaseException as error:  # including sys.exit, whose code would look like an exit code of dtbench
        raise UsageError(
            f"the suite file {path} failed to load: {describe(error)}{format_location(error, spec.origin)}"
            f"{_IMPORTABLE if isinstance(error, ImportError) else ''}"
        ) from error
    finally:  # last on sys.path for dtbench's later imports
        sys.path[:] = [*(entry for entry in sys.path if entry != str(folder)), str(folder)]
    # A user's file may import built-in modules, which register their own suites.
    new = [
        suite
        for name, suite in _registered.items()
        if registered_before.get(name) is not suite
        and not str(getattr(suite.cases, "__module__", "")).startswith(f"{BUILTIN_PACKAGE}.")
    ]
    if not new:
        raise UsageError(
            f"{path} registers no suite: decorate a function of the options with @dtbench.suite.suite; "
            f"{profile_hint(path)}"
        )
    return new
