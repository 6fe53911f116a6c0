"""What the dispatch suite times besides single ops: calls that move data, draw numbers, or are many ops.

Each program is written once against the DTensor API and runs on dtbench_core and on
torch.distributed.tensor. The simulated group moves no data, so results are checked by global shape and
dtype alone; the values are checked where ranks are real (the redistribute and tensor_parallel suites).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.suite import Workload
from dtbench_suites.data import Place, parallel_api

WORLD = 8  # of the simulated process group, as in dispatch.py
ROWS, HEADS, IMAGES = (WORLD * 4, 4), (2, WORLD * 2, 4, 4), (WORLD * 2, 2, 4, 4)  # global shapes
LISTED = 10  # tensors of a foreach call and of an optimizer step

Call = Callable[[], Any]
# What a case times: a call, one that autograd records, or one and its gradients. The values of the param `pass`.
FORWARD, REQUIRES_GRAD, BACKWARD = "forward", "forward+requires_grad", "forward+backward"
EVERY_PASS = (FORWARD, REQUIRES_GRAD, BACKWARD)


@dataclass(frozen=True)
class TimedProgram:
    """A call to time. build: makes it, given the place and the pass.

    result: the global shape of what it gives, or None for what is no tensor. local: whether plain torch
    has a counterpart, the floor. flat: 1-D meshes only. quick: part of quick runs.
    """

    name: str
    placements: str
    build: Callable[[Place, str], Call]
    result: tuple[int, ...] | None
    passes: tuple[str, ...] = (FORWARD,)
    local: bool = True
    flat: bool = False
    quick: bool = True


def ones(place: Place, shape: tuple[int, ...], text: str, grad: bool = False) -> Any:
    """Ones of that global shape, placed as `text` says on every mesh dim."""
    return place.put(torch.ones(shape, device=place.device), text).requires_grad_(grad)


def rows(place: Place, text: str = "S(0)", grad: bool = False) -> Any:
    return ones(place, ROWS, text, grad)


# ---- moving ----


def moved(source: str, target: str) -> TimedProgram:
    """redistribute from one placement to another, on every mesh dim."""

    def build(place: Place, pass_: str) -> Call:
        tensor, wanted = rows(place, source, pass_ != FORWARD), place.on_all(target)
        return differentiated(lambda: tensor.redistribute(placements=wanted), [tensor], pass_)

    return TimedProgram("redistribute", f"{source}->{target}", build, ROWS, EVERY_PASS, local=False)


def full_tensor(place: Place, pass_: str) -> Call:
    tensor = rows(place)
    return lambda: tensor.full_tensor()


def distribute(place: Place, pass_: str) -> Call:
    whole, wanted = torch.ones(ROWS, device=place.device), place.on_all("S(0)")
    return lambda: place.api.distribute_tensor(whole, place.mesh, wanted)


# ---- ops with more to them ----


def op(
    name: str,
    placements: str,
    shapes: Sequence[tuple[int, ...]],
    fn: Callable[..., Any],
    result: tuple[int, ...] | None,
    floor: str = "",
    **about: Any,
) -> TimedProgram:
    """`fn` of inputs of these global shapes. floor: the placements whose shards the plain op takes, where they
    are others."""

    def build(place: Place, pass_: str) -> Call:
        texts = ((floor if place.impl == "local" else "") or placements).split(",")
        inputs = [
            ones(place, shape, text, pass_ != FORWARD) for shape, text in zip(shapes, texts, strict=True)
        ]
        return differentiated(partial(fn, *inputs), inputs, pass_)

    return TimedProgram(name, placements, build, result, **about)


def embedding(place: Place, pass_: str) -> Call:
    """A table cut by rows; every rank looks up all indices."""
    table, index = rows(place, "S(0)", pass_ != FORWARD), place.put(torch.arange(4, device=place.device), "R")
    return differentiated(lambda: F.embedding(index, table), [table], pass_)


def foreach_add(place: Place, pass_: str) -> Call:
    xs, ys = ([rows(place) for _ in range(LISTED)] for _ in range(2))

    def call() -> Any:
        torch._foreach_add_(xs, ys)
        return xs[0]

    return call


def training(
    name: str, make: Callable[[list[nn.Parameter]], Callable[[], object]], count: int = LISTED
) -> TimedProgram:
    """What `make` gives, of `count` parameters with gradients."""

    def build(place: Place, pass_: str) -> Call:
        parameters = [nn.Parameter(rows(place)) for _ in range(count)]
        for one in parameters:
            one.grad = rows(place)
        act = make(parameters)

        def call() -> Any:
            act()
            return parameters[0]

        return call

    return TimedProgram(f"{name}_x{count}", "S(0)", build, ROWS, quick=count == LISTED)


def step(
    name: str, make: Callable[..., torch.optim.Optimizer], count: int = LISTED, **form: bool
) -> TimedProgram:
    """A step of an optimizer. form: how it runs, `foreach` or `fused`."""
    return training(name, lambda parameters: make(parameters, lr=1e-3, **form).step, count)


def clipping(count: int = LISTED) -> TimedProgram:
    """The gradients' norm, which is large, and their division by it."""
    return training("clip_grad_norm", lambda of: partial(nn.utils.clip_grad_norm_, of, 1.0), count)


def zero_grad(parameters: list[nn.Parameter]) -> Callable[[], object]:
    return partial(torch.optim.SGD(parameters, lr=1e-3, foreach=True).zero_grad, set_to_none=False)


def unscaling(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """What GradScaler does to the gradients before a step."""
    optimizer, device = torch.optim.SGD(parameters, lr=1e-3), parameters[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))

    def unscale() -> None:
        scaler.unscale_(optimizer)
        scaler.update(1.0)

    return unscale


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, WORLD * 8), nn.Linear(WORLD * 8, 16)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, 16) -> (batch, seq, 16)
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def mlp(place: Place, pass_: str) -> Call:
    """Colwise, ReLU, Rowwise; on a mesh with more dims over the last one. The floor is rank 0's share."""
    with torch.random.fork_rng(devices=[]), place.device:
        model = TwoLinears()
        x = torch.ones(4, 2, 16, requires_grad=pass_ != FORWARD)
    if place.impl == "local":
        model.up, model.down = nn.Linear(16, 8, device=place.device), nn.Linear(8, 16, device=place.device)
    else:
        styles = parallel_api(place.impl)
        mesh = place.mesh if place.mesh.ndim == 1 else place.mesh[place.mesh.mesh_dim_names[-1]]  # type: ignore[index]
        plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
        styles.parallelize_module(model, mesh, plan)
    return differentiated(lambda: model(x), [x, *model.parameters()], pass_)


def differentiated(call: Call, inputs: list[Any], pass_: str) -> Call:
    """The call, or the call and the gradients of its inputs."""
    if pass_ != BACKWARD:
        return call
    cotangent = torch.ones_like(call())

    def both() -> Any:
        out = call()
        torch.autograd.grad(out, inputs, cotangent)
        return out

    return both


PROGRAMS = (
    moved("S(0)", "S(0)"),
    moved("S(0)", "R"),
    moved("R", "S(0)"),
    moved("S(0)", "S(1)"),
    moved("P", "R"),
    moved("P", "S(0)"),
    TimedProgram("full_tensor", "S(0)", full_tensor, ROWS, local=False),
    TimedProgram("distribute_tensor", "S(0)", distribute, ROWS, local=False),
    # One of the two has to move first: from columns to rows, or back.
    op("add", "S(0),S(1)", [(WORLD, WORLD)] * 2, torch.add, (WORLD, WORLD), floor="S(0),S(0)"),
    op("add_out", "S(0),S(0),S(0)", [ROWS] * 3, lambda x, y, out: torch.add(x, y, out=out), ROWS),
    # forward alone: torch has no rule for the backward of CPU attention. Its first call takes torch half a
    # minute, which tries its decomposition over every combination of placements.
    # Batch 2, 2 heads a rank, 4 tokens, 4 wide; sharded by heads.
    op("attention", "S(1),S(1),S(1)", [HEADS] * 3, F.scaled_dot_product_attention, HEADS, quick=False),
    TimedProgram("embedding", "R,S(0)", embedding, (4, 4), EVERY_PASS),
    # torch's convolution refuses a batch that two mesh dims shard.
    op(
        "conv2d",
        "S(0),R",
        [IMAGES, (2, 2, 3, 3)],
        F.conv2d,
        (WORLD * 2, 2, 2, 2),
        passes=EVERY_PASS,
        flat=True,
    ),
    op("dropout", "S(0)", [ROWS], F.dropout, ROWS, passes=EVERY_PASS),
    op("dropout", "R", [ROWS], F.dropout, ROWS, passes=EVERY_PASS),
    op("argmax_dim1", "S(0)", [ROWS], lambda x: x.argmax(1), ROWS[:1]),
    op("equal", "S(0),S(0)", [ROWS] * 2, torch.equal, None),
    TimedProgram("foreach_add_x10", "S(0),S(0)", foreach_add, ROWS),
    step("adamw_step", torch.optim.AdamW),
    *(
        step(f"{name}_step_{form}", make, count, **{form: True})
        for count in (LISTED, 10 * LISTED)
        for name, make in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD))
        for form in ("foreach", "fused")
        if (name, form) != ("sgd", "fused")  # torch has no rule for it
    ),
    clipping(),
    clipping(10 * LISTED),
    training("zero_grad", zero_grad),
    training("grad_scaler", unscaling),
    TimedProgram("tp_mlp", "Colwise,Rowwise", mlp, (4, 2, 16), EVERY_PASS),
)


def wrong_result(program: TimedProgram, place: Place, pass_: str, call: Call) -> str | None:
    got = call()
    if pass_ != FORWARD and not got.requires_grad:
        return f"{program.name} gave a tensor that requires no gradient, of inputs that do"
    if program.result is None:
        return None if got is True else f"{program.name} gave {got!r}, expected True"
    wrong = not got.dtype.is_floating_point and program.name != "argmax_dim1"
    if place.impl != "local" and (wrong or tuple(got.shape) != program.result):
        return f"{program.name} gave {got.dtype} {tuple(got.shape)}, expected {program.result}"
    return None


def build_program(program: TimedProgram, place: Place, pass_: str) -> Workload:
    call = program.build(place, pass_)
    return Workload(run=call, check=partial(wrong_result, program, place, pass_, call))
