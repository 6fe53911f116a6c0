"""What the compile suite compiles: ops over DTensors, and the parts of a transformer cut by columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench_suites import data
from dtbench_suites.data import placement, shard_of
from dtbench_suites.tensor_parallel import MODELS, parallelize

# Of each rank's part: no arithmetic worth speaking of, as the call is what is measured.
ROWS, COLS = 4, 8
# batch, positions, width for each rank: one head each
BATCH, SEQ, WIDTH = 2, 8, 16

Shapes = tuple[tuple[int, ...], ...]
Function = Callable[..., Any]


class Place(data.Place):
    """Of this rank; for "local" each tensor is its plain part."""

    @property
    def ranks(self) -> int:
        return int(self.mesh.size())

    def part(self, full: Tensor, text: str) -> Tensor:
        return shard_of(full, text, self.mesh.get_local_rank(), self.ranks).clone()

    def put(self, full: Tensor, text: str) -> Tensor:
        if self.impl == "local":
            return self.part(full, text)
        placed: Tensor = self.api.distribute_tensor(full, self.mesh, [placement(self.api, text)])
        return placed

    def mover(self, text: str) -> Function:
        """A change of placement; of a plain part, a copy of it."""
        if self.impl == "local":
            return lambda x: x.clone()
        to = [placement(self.api, text)]
        return lambda x: x.redistribute(placements=to)

    def crossing(self, text: str, fn: Function) -> Function:
        """from_local, then `fn`, then to_local."""
        if self.impl == "local":
            return fn
        from_local, mesh, at = self.api.DTensor.from_local, self.mesh, [placement(self.api, text)]
        return lambda x: fn(from_local(x, mesh, at, run_check=False)).to_local()


@dataclass(frozen=True)
class Op:
    """placements: of the inputs, and after "->" of what comes out where that tells it apart.

    shapes: of the full inputs for n ranks and so many rows in each part. make: the function for a place.
    plain: the same on full tensors. other: the placements that it is compiled for before a recompilation.
    crosses: plain parts go in and come out, placed as the first input.
    """

    name: str
    placements: str
    shapes: Callable[[int, int], Shapes]
    make: Callable[[Place], Function]
    plain: Function
    other: str
    crosses: bool = False


def by_rows(inputs: int) -> Callable[[int, int], Shapes]:
    return lambda n, k: ((n * k, n * COLS),) * inputs


def same(fn: Function) -> tuple[Callable[[Place], Function], Function]:
    return lambda place: fn, fn


def chain(x: Tensor) -> Tensor:
    return (((x * 2 + 1) * x).sin() * x + x) * 0.5


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def reduced(to: Function) -> Function:
    """A product whose terms are pending, and then not."""
    return lambda x, y: to(x @ y)


OPS = (
    Op("add", "S(0),S(0)", by_rows(2), *same(torch.add), "S(1),S(1)"),
    Op("mul_chain", "S(0)", by_rows(1), *same(chain), "S(1)"),
    Op("softmax", "S(0)", by_rows(1), *same(lambda x: x.softmax(1)), "R"),
    Op("softmax", "S(1)", by_rows(1), *same(lambda x: x.softmax(1)), "S(0)"),
    Op("layer_norm", "S(0),R,R", lambda n, k: ((n * k, COLS), (COLS,), (COLS,)), *same(norm), "R,R,R"),
    Op("mm", "R,S(1)", lambda n, k: ((n * k, COLS), (COLS, n * COLS)), *same(torch.mm), "S(0),R"),
    Op(
        "linear",
        "R,S(0),S(0)",
        lambda n, k: ((2, n * k, COLS), (n * COLS, COLS), (n * COLS,)),
        *same(F.linear),
        "S(1),R,R",
    ),
    Op(
        "mm_reduced",
        "S(1),S(0)",
        lambda n, k: ((k, n * COLS), (n * COLS, COLS)),
        lambda place: reduced(place.mover("R")),
        torch.mm,
        "R,R",
    ),
    Op("redistribute", "S(0)->R", by_rows(1), lambda place: place.mover("R"), torch.clone, "S(1)"),
    Op("redistribute", "S(0)->S(1)", by_rows(1), lambda place: place.mover("S(1)"), torch.clone, "R"),
    Op("from_to_local", "S(0)", by_rows(1), lambda p: p.crossing("S(0)", chain), chain, "", crosses=True),
)
BLOCKS = ("mlp", "attention")
COLUMNS, ROWWISE = ("up", "wq", "wk", "wv"), ("down", "wo")


@dataclass(frozen=True)
class Ready:
    """A function, the tensors it is called with, those whose gradients are wanted, and the right answers.

    expected: the output and gradients on full tensors, or for plain parts on the parts. part: how to read the
    placement of what is plain (None: it is whole).
    """

    fn: Function
    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    expected: Callable[[bool], list[Tensor]]
    names: tuple[str, ...]
    plain_part: str = "R"


def values(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Full tensors, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def answers(fn: Function, inputs: Sequence[Tensor], wanted: Sequence[Tensor], backward: bool) -> list[Tensor]:
    out = fn(*inputs)
    return [out, *(torch.autograd.grad(out, wanted, cotangent_of(out)) if backward else ())]


def cotangent_of(out: Tensor) -> Tensor:
    """Of ones, whatever it is placed as: every rank's part of a whole of ones."""
    return torch.ones_like(out.detach())


def op_ready(op: Op, place: Place, rows: int = ROWS, placements: str = "") -> Ready:
    full = values(op.shapes(place.ranks, rows), place.device)
    texts = (placements or op.placements).split("->")[0].split(",")
    local = place.impl == "local"
    if op.crosses:
        inputs = [place.part(t, text) for t, text in zip(full, texts, strict=True)]
    else:
        inputs = [place.put(t, text) for t, text in zip(full, texts, strict=True)]
    inputs = [t.detach().requires_grad_() for t in inputs]
    whole = [t.requires_grad_() for t in ([t.detach().clone() for t in inputs] if local else full)]
    names = ("the output", *(f"the gradient of input {i}" for i in range(len(inputs))))
    expected = lambda backward: answers(op.plain, whole, whole, backward)  # noqa: E731
    part = texts[0] if op.crosses and not local else "R"
    return Ready(op.make(place), tuple(inputs), tuple(inputs), expected, names, part)


def block_ready(name: str, place: Place, batch: int = BATCH) -> Ready:
    """A block cut over the ranks; for "local" the part of each weight that this rank would hold, no communication."""
    n, device = place.ranks, place.device
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        model, whole = (MODELS[name](n * WIDTH, n) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    (x,) = values([(batch, SEQ, n * WIDTH)], device)
    if place.impl == "local":
        keep_parts(model, place)
        keep_parts(whole, place)
    cut: nn.Module = parallelize(place.impl, model, place.mesh)
    given, reference = (x.clone().requires_grad_() for _ in range(2))
    names = (
        "the output",
        "the gradient of x",
        *(f"the gradient of {n}" for n, _ in whole.named_parameters()),
    )
    expected = lambda backward: answers(whole, [reference], [reference, *whole.parameters()], backward)  # noqa: E731
    return Ready(lambda x: cut(x), (given,), (given, *cut.parameters()), expected, names)


def keep_parts(model: nn.Module, place: Place) -> None:
    """Replaces each weight by this rank's part of it."""
    for name, module in model.named_children():
        for kind in ("weight", "bias") if name in COLUMNS else ("weight",):
            parameter = getattr(module, kind)
            if parameter is not None:
                part = place.part(parameter.detach(), "S(0)" if name in COLUMNS else "S(1)")
                setattr(module, kind, nn.Parameter(part))
