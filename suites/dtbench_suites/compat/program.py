"""What a program is given, and the table of all programs.

A program is a function of `Given`. It is called twice: with plain tensors, and on each of four ranks with
DTensors; what it returns (a pytree) must be the same. Where a call has no plain counterpart, `Given.known` says
what it must come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtbench_suites.data import dtensor_api, parallel_api, placement

RANKS = 4
Program = Callable[["Given"], Any]


@dataclass
class Given:
    """impl: "core", "torch", or "plain", where places are ignored and all functions give what they are given."""

    impl: str
    backend: str = ""
    _meshes: dict[int, DeviceMesh] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return self.impl == "plain"

    @property
    def api(self) -> Any:
        """The library: DTensor, Shard, distribute_tensor, ..."""
        return dtensor_api("torch" if self.plain else self.impl)

    @property
    def parallel(self) -> Any:
        return parallel_api("torch" if self.plain else self.impl)

    @property
    def mesh(self) -> DeviceMesh:
        """(4,)"""
        return self.mesh_of(1)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def mesh_of(self, ndim: int) -> DeviceMesh:
        """(4,) or (2, 2)"""
        if ndim not in self._meshes:
            self._meshes[ndim] = init_device_mesh("cpu", (RANKS,) if ndim == 1 else (2, 2))
        return self._meshes[ndim]

    def placements(self, places: Sequence[str]) -> list[Any]:
        return [placement(self.api, place) for place in places]

    # ---- tensors ----

    def place(self, full: torch.Tensor, *places: str, grad: bool = False) -> torch.Tensor:
        """A leaf that holds `full`, placed as `S(0)`, `R`: one word per mesh dim."""
        made = full.detach().clone()
        if not self.plain:
            mesh = self.mesh_of(len(places))
            made = self.api.distribute_tensor(made, mesh, self.placements(places), src_data_rank=None)
        return made.requires_grad_(grad)

    def enter(self, *places: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """from_local."""
        if self.plain:
            return lambda local: local
        make, mesh, placements = (
            self.api.DTensor.from_local,
            self.mesh_of(len(places)),
            self.placements(places),
        )
        return lambda local: make(local, mesh, placements, run_check=False)

    def leave(self) -> Callable[[Any], torch.Tensor]:
        """to_local."""
        return (lambda t: t) if self.plain else (lambda t: t.to_local())

    def move(self, *places: str) -> Callable[[Any], torch.Tensor]:
        """redistribute."""
        if self.plain:
            return lambda t: t
        mesh, placements = self.mesh_of(len(places)), self.placements(places)
        return lambda t: t.redistribute(mesh, placements)

    def gather(self) -> Callable[[Any], torch.Tensor]:
        """full_tensor."""
        return (lambda t: t) if self.plain else (lambda t: t.full_tensor())

    def part(self, full: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a full tensor whose rows divide by four; plain: all of them."""
        return full.clone() if self.plain else full.chunk(RANKS, dim)[self.rank].clone()

    def known(self, got: Any, wanted: Any) -> Any:
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

    def compile(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """torch.compile with the program's backend, as one graph; plain tensors run as they are."""
        if self.plain:
            return fn
        compiled: Callable[..., Any] = torch.compile(
            fn, backend=self.backend, **{"fullgraph": True, **options}
        )
        return compiled


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17))


@dataclass(frozen=True)
class Entry:
    """name: in words. backend: of torch.compile, where the program has one."""

    name: str
    topic: str
    run: Program
    backend: str = ""


_programs: dict[str, Entry] = {}


def program(topic: str, *backends: str) -> Callable[[Program], Program]:
    """Registers a function of `Given` under its name in words, once per backend."""

    def register(run: Program) -> Program:
        words = getattr(run, "__name__", "").replace("_", " ")
        for backend in backends or ("",):
            name = f"{words} [{backend}]" if backend else words
            if name in _programs:
                raise ValueError(f"two programs are called {name!r}: rename one")
            _programs[name] = Entry(name, topic, run, backend)
        return run

    return register


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


def grads(*tensors: Any) -> list[Any]:
    return [t.grad for t in tensors]
