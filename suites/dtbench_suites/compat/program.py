"""What a program is given, and the table of all programs.

A program is a function of `Given`. It is called twice: with plain tensors, and on each of four ranks with
DTensors; what it returns (a pytree) must be the same. Where a call has no plain counterpart, `Given.expected` says
what it must come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench.comparison.op_verdicts import WRITTEN
from dtbench_suites.compat.variants import grid, laid_out, ranks_of, shard_of
from dtbench_suites.data import dtensor_api, parallel_api, placement

# A tensor of either library, or a plain one: what DTensor adds to torch.Tensor, each library declares for itself.
AnyTensor = Any
Program = Callable[["Given"], object]


@dataclass
class Given:
    """impl: "core", "torch", or "plain", where places are ignored and all functions give what they are given.

    variant: see variants.py.
    """

    impl: str
    backend: str = ""
    variant: str = WRITTEN
    _meshes: dict[int, DeviceMesh] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return self.impl == "plain"

    @property
    def api(self) -> AnyTensor:
        """The library: DTensor, Shard, distribute_tensor, ..."""
        return dtensor_api("torch" if self.plain else self.impl)

    @property
    def parallel(self) -> AnyTensor:
        return parallel_api("torch" if self.plain else self.impl)

    @property
    def mesh(self) -> DeviceMesh:
        """(ranks,)"""
        return self.mesh_of(1)

    @property
    def ranks(self) -> int:
        return ranks_of(self.variant)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def mesh_of(self, ndim: int) -> DeviceMesh:
        """Of four ranks (4,) or (2, 2), of three (3,) or (3, 1)."""
        if ndim not in self._meshes:
            self._meshes[ndim] = DeviceMesh("cpu", grid(self.variant, ndim))
        return self._meshes[ndim]

    def placements(self, places: Sequence[str]) -> list[Any]:
        return [placement(self.api, place) for place in places]

    # ---- tensors ----

    def place(self, full: torch.Tensor, *places: str, grad: bool = False) -> torch.Tensor:
        """A leaf that holds `full`, placed as `S(0)`, `R`: one word per mesh dim."""
        made = laid_out(full, self.variant)
        if not self.plain:
            mesh, placements = self.mesh_of(len(places)), self.placements(places)
            if self.variant == "from_local":
                made = self._from_own_part(made, places)
            else:
                made = self.api.distribute_tensor(made, mesh, placements, src_data_rank=None)
        return made.requires_grad_(grad)

    def _from_own_part(self, full: torch.Tensor, places: Sequence[str]) -> torch.Tensor:
        """The DTensor of the part of `full` that this rank holds, a tensor of its own that lies like `full`."""
        mesh, part = self.mesh_of(len(places)), full
        for mesh_dim, place in enumerate(places):
            if place.startswith("S"):
                part = shard_of(part, int(place[2:-1]), mesh.size(mesh_dim), _index_in(mesh, mesh_dim))
        made: torch.Tensor = self.api.DTensor.from_local(
            laid_out(part, self.variant),
            mesh,
            self.placements(places),
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        return made

    def rows(self, *places: str, grad: bool = False) -> torch.Tensor:
        """(8, 4), its rows sharded unless `places` say otherwise."""
        return self.place(randn(8, 4), *(places or ("S(0)",)), grad=grad)

    def leaf(self, *places: str) -> torch.Tensor:
        """As `rows`, with a gradient to come."""
        return self.rows(*places, grad=True)

    def backward(self, out: AnyTensor, *leaves: Any, power: int = 2) -> list[object]:
        """The result, and the gradients of the leaves, or of a module's parameters, of the sum of its powers."""
        out.pow(power).sum().backward()
        each = [grads_of(leaf) if isinstance(leaf, nn.Module) else [leaf.grad] for leaf in leaves]
        return [out, *(grad for own in each for grad in own)]

    def on(self, fn: Callable[[AnyTensor], object], *places: str, grad: bool = False) -> object:
        """The function of `rows`."""
        return fn(self.rows(*places, grad=grad))

    def written(self, fn: Callable[[AnyTensor], object], *places: str) -> object:
        """The `rows` after the function wrote to them."""
        x = self.rows(*places)
        fn(x)
        return x

    def through(self, fn: Callable[[AnyTensor], object], *places: str, power: int = 2) -> object:
        """Forward through the function of a leaf, and backward."""
        x = self.leaf(*places)
        return self.backward(fn(x), x, power=power)

    def from_local(self, *places: str) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.plain:
            return lambda local: local
        make, mesh, placements = (
            self.api.DTensor.from_local,
            self.mesh_of(len(places)),
            self.placements(places),
        )
        return lambda local: make(local, mesh, placements, run_check=False)

    def to_local(self) -> Callable[[AnyTensor], torch.Tensor]:
        return (lambda t: t) if self.plain else (lambda t: t.to_local())

    def move(self, *places: str) -> Callable[[AnyTensor], torch.Tensor]:
        """redistribute."""
        if self.plain:
            return lambda t: t
        mesh, placements = self.mesh_of(len(places)), self.placements(places)
        return lambda t: t.redistribute(mesh, placements)

    def gather(self) -> Callable[[AnyTensor], torch.Tensor]:
        """full_tensor."""
        return (lambda t: t) if self.plain else (lambda t: t.full_tensor())

    def part(self, full: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a full tensor, in the order of the mesh; plain: all of them."""
        if self.plain:
            return full.clone()
        return shard_of(full, dim, self.ranks, _index_in(self.mesh)).clone()

    def expected(self, got: Any, wanted: Any) -> AnyTensor:
        """Of a call that plain tensors do not have: what it must come to."""
        return wanted if self.plain else got

    # ---- modules ----

    def parallelize(self, module: nn.Module, styles: Mapping[str, str]) -> nn.Module:
        """The module cut in place. styles: name of a submodule -> "col" or "row"."""
        if self.plain:
            return module
        made = {"col": self.parallel.ColwiseParallel, "row": self.parallel.RowwiseParallel}
        plan = {name: made[style]() for name, style in styles.items()}
        cut: nn.Module = self.parallel.parallelize_module(module, self.mesh, plan)
        return cut

    def shard(self, module: nn.Module, *places: str) -> nn.Module:
        """Every parameter a DTensor placed so (in its dim 0 where S(0))."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                placed = nn.Parameter(self.place(parameter, *places), requires_grad=parameter.requires_grad)
                setattr(owner, name, placed)
        return module

    def seeded(self, make: Callable[[], nn.Module], *places: str) -> AnyTensor:
        """The module, initialised alike on every rank, its parameters placed so."""
        torch.manual_seed(1)
        return self.shard(make(), *places)

    def block(self, width: int = 4) -> AnyTensor:
        """Two linear layers, the first cut by columns and the second by rows."""
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        return self.parallelize(net, {"0": "col", "2": "row"})

    def replicate_buffers(self, module: nn.Module) -> None:
        for owner in module.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, self.place(buffer, "R"))

    def compile(self, fn: Callable[..., AnyTensor], **options: Any) -> Callable[..., AnyTensor]:
        """torch.compile with the program's backend, as one graph; plain tensors run as they are."""
        if self.plain:
            return fn
        compiled: Callable[..., AnyTensor] = torch.compile(
            fn, backend=self.backend, **{"fullgraph": True, **options}
        )
        return compiled


class Opaque(Given):
    """For a program that is compiled whole: how its tensors are made stays outside the graphs."""

    place = torch._dynamo.disable(Given.place)
    part = torch._dynamo.disable(Given.part)
    parallelize = torch._dynamo.disable(Given.parallelize)
    shard = torch._dynamo.disable(Given.shard)
    mesh_of = torch._dynamo.disable(Given.mesh_of)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17))


def _index_in(mesh: DeviceMesh, mesh_dim: int = 0) -> int:
    """This rank's place on the mesh dim; its rank in the group is another one where ranks do not ascend."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[mesh_dim]


def grads_of(module: nn.Module) -> list[AnyTensor]:
    return [p.grad for p in module.parameters()]


# Programs of one expression, by name.
Cases = Mapping[str, Callable[[AnyTensor], object]]


@dataclass(frozen=True)
class Entry:
    """name: in words. backend: of torch.compile, where the program has one. make: what it is given."""

    name: str
    topic: str
    run: Callable[[AnyTensor], object]
    backend: str = ""
    make: type[Given] = Given


_programs: dict[str, Entry] = {}


class Programs(Given):
    """The programs of a topic: each public method, under its name in words, and each of `cases`; once per backend."""

    topic: ClassVar[str]
    backends: ClassVar[tuple[str, ...]] = ("",)
    cases: ClassVar[Cases] = {}

    def __init_subclass__(cls) -> None:
        methods = {
            name.replace("_", " "): method
            for name, method in vars(cls).items()
            if callable(method) and not name.startswith("_")
        }
        for words, run in {**cls.cases, **methods}.items():
            for backend in cls.backends:
                name = f"{words} [{backend}]" if backend else words
                if name in _programs:
                    raise ValueError(f"two programs are called {name!r}: rename one")
                _programs[name] = Entry(name, cls.topic, run, backend, cls)


def programs() -> Mapping[str, Entry]:
    """All, by name."""
    from dtbench_suites.compat import (  # noqa: F401 - they register
        compiled_models,
        compiling,
        differentiating,
        memory,
        modules,
        optimizers,
        state,
        tools,
        training,
        values,
    )

    return _programs
