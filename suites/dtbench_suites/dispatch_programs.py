"""Programs of the dispatch suite besides single ops: redistributions, random ops, optimizer steps, an MLP.

Each program is written once against the DTensor API and runs with dtbench_core and torch.distributed.tensor. The
simulated process group moves no data, so only global shape and dtype of the results are checked. The redistribute and
tensor_parallel suites check the values on real ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.suite import Workload
from dtbench_suites.data import Place, parallel_api

WORLD = 8  # ranks of the simulated process group
ROWS, HEADS, IMAGES = (WORLD * 4, 4), (2, WORLD * 2, 4, 4), (WORLD * 2, 2, 4, 4)  # global shapes
FOREACH_TENSORS = 10  # tensors of a foreach op and of an optimizer step

Call = Callable[[], Any]
# The values of the param `pass`: a plain call, a call that autograd records, a call and its gradients.
FORWARD, REQUIRES_GRAD, BACKWARD = "forward", "forward+requires_grad", "forward+backward"
EVERY_PASS = (FORWARD, REQUIRES_GRAD, BACKWARD)


@dataclass(frozen=True)
class TimedProgram:
    """A call to time.

    Attributes:
        build: (place, pass) -> the call.
        result: the global shape of the result, or None if it is no tensor.
        local: whether the impl "local" exists, which needs a counterpart in plain torch.
        flat: whether it is measured on the 1-D mesh only.
        quick: whether it is part of quick runs.
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
    """Returns ones of that global shape with the placement `text` on every mesh dim."""
    return place.put(torch.ones(shape, device=place.device), text).requires_grad_(grad)


def rows(place: Place, text: str = "S(0)", grad: bool = False) -> Any:
    return ones(place, ROWS, text, grad)


# ---- redistribution ----


def redistribution(source: str, target: str) -> TimedProgram:
    """Program that redistributes from one placement to another on every mesh dim."""

    def build(place: Place, pass_: str) -> Call:
        tensor, target_placements = rows(place, source, pass_ != FORWARD), place.placements(target)
        return with_gradients(lambda: tensor.redistribute(placements=target_placements), [tensor], pass_)

    return TimedProgram("redistribute", f"{source}->{target}", build, ROWS, EVERY_PASS, local=False)


def full_tensor(place: Place, pass_: str) -> Call:
    tensor = rows(place)
    return lambda: tensor.full_tensor()


def distribute(place: Place, pass_: str) -> Call:
    full, placements = torch.ones(ROWS, device=place.device), place.placements("S(0)")
    return lambda: place.api.distribute_tensor(full, place.mesh, placements)


# ---- ops, optimizer steps, a model ----


def op(
    name: str,
    placements: str,
    shapes: Sequence[tuple[int, ...]],
    fn: Callable[..., Any],
    result: tuple[int, ...] | None,
    floor: str = "",
    **about: Any,
) -> TimedProgram:
    """Program that calls `fn` on inputs of these global shapes.

    Args:
        floor: placements of the inputs for the impl "local", if they differ from those of the DTensors.
        about: further fields of the TimedProgram.
    """

    def build(place: Place, pass_: str) -> Call:
        texts = ((floor if place.impl == "local" else "") or placements).split(",")
        inputs = [
            ones(place, shape, text, pass_ != FORWARD) for shape, text in zip(shapes, texts, strict=True)
        ]
        return with_gradients(partial(fn, *inputs), inputs, pass_)

    return TimedProgram(name, placements, build, result, **about)


def embedding(place: Place, pass_: str) -> Call:
    """Lookup of replicated indices in a table sharded by rows."""
    table, index = rows(place, "S(0)", pass_ != FORWARD), place.put(torch.arange(4, device=place.device), "R")
    return with_gradients(lambda: F.embedding(index, table), [table], pass_)


def foreach_add(place: Place, pass_: str) -> Call:
    xs, ys = ([rows(place) for _ in range(FOREACH_TENSORS)] for _ in range(2))

    def call() -> Any:
        torch._foreach_add_(xs, ys)
        return xs[0]

    return call


def training(
    name: str, make: Callable[[list[nn.Parameter]], Callable[[], object]], count: int = FOREACH_TENSORS
) -> TimedProgram:
    """Program that runs the call which `make` returns for `count` parameters with gradients."""

    def build(place: Place, pass_: str) -> Call:
        parameters = [nn.Parameter(rows(place)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = rows(place)
        run_step = make(parameters)

        def call() -> Any:
            run_step()
            return parameters[0]

        return call

    return TimedProgram(f"{name}_x{count}", "S(0)", build, ROWS, quick=count == FOREACH_TENSORS)


def step(
    name: str, make: Callable[..., torch.optim.Optimizer], count: int = FOREACH_TENSORS, **form: bool
) -> TimedProgram:
    """Program that runs an optimizer step. `form`: foreach=True or fused=True."""
    return training(name, lambda parameters: make(parameters, lr=1e-3, **form).step, count)


def clipping(count: int = FOREACH_TENSORS) -> TimedProgram:
    """Program that clips gradients by their norm, which exceeds the limit."""
    return training(
        "clip_grad_norm", lambda parameters: partial(nn.utils.clip_grad_norm_, parameters, 1.0), count
    )


def zero_grad(parameters: list[nn.Parameter]) -> Callable[[], object]:
    return partial(torch.optim.SGD(parameters, lr=1e-3, foreach=True).zero_grad, set_to_none=False)


def unscaling(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Returns GradScaler's work on the gradients before an optimizer step."""
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
        self.up_proj, self.down_proj = nn.Linear(16, WORLD * 8), nn.Linear(WORLD * 8, 16)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, 16) -> (batch, seq, 16)
        return self.down_proj(torch.relu(self.up_proj(x)))  # type: ignore[no-any-return]


def mlp(place: Place, pass_: str) -> Call:
    """ColwiseParallel, ReLU, RowwiseParallel over the last mesh dim; for "local", rank 0's share of the width."""
    with torch.random.fork_rng(devices=[]), place.device:
        model = TwoLinears()
        x = torch.ones(4, 2, 16, requires_grad=pass_ != FORWARD)
    if place.impl == "local":
        model.up_proj, model.down_proj = (
            nn.Linear(16, 8, device=place.device),
            nn.Linear(8, 16, device=place.device),
        )
    else:
        styles = parallel_api(place.impl)
        mesh = place.mesh if place.mesh.ndim == 1 else place.mesh[place.mesh.mesh_dim_names[-1]]  # type: ignore[index]
        styles.parallelize_module(
            model, mesh, {"up_proj": styles.ColwiseParallel(), "down_proj": styles.RowwiseParallel()}
        )
    return with_gradients(lambda: model(x), [x, *model.parameters()], pass_)


def with_gradients(call: Call, inputs: list[Any], pass_: str) -> Call:
    """Returns the call; in a forward+backward pass, one that also computes the gradients of `inputs`."""
    if pass_ != BACKWARD:
        return call
    cotangent = torch.ones_like(call())

    def both() -> Any:
        out = call()
        torch.autograd.grad(out, inputs, cotangent)
        return out

    return both


PROGRAMS = (
    redistribution("S(0)", "S(0)"),
    redistribution("S(0)", "R"),
    redistribution("R", "S(0)"),
    redistribution("S(0)", "S(1)"),
    redistribution("P", "R"),
    redistribution("P", "S(0)"),
    TimedProgram("full_tensor", "S(0)", full_tensor, ROWS, local=False),
    TimedProgram("distribute_tensor", "S(0)", distribute, ROWS, local=False),
    # The inputs differ in placement, so the op must first redistribute one.
    op("add", "S(0),S(1)", [(WORLD, WORLD)] * 2, torch.add, (WORLD, WORLD), floor="S(0),S(0)"),
    op("add_out", "S(0),S(0),S(0)", [ROWS] * 3, lambda x, y, out: torch.add(x, y, out=out), ROWS),
    # Sharded by heads. Forward only: torch has no rule for the backward of CPU attention. The first call takes torch
    # half a minute because it tries the decomposition on every combination of placements.
    op("attention", "S(1),S(1),S(1)", [HEADS] * 3, F.scaled_dot_product_attention, HEADS, quick=False),
    TimedProgram("embedding", "R,S(0)", embedding, (4, 4), EVERY_PASS),
    # torch's convolution does not support a batch that is sharded on two mesh dims.
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
        for count in (FOREACH_TENSORS, 10 * FOREACH_TENSORS)
        for name, make in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD))
        for form in ("foreach", "fused")
        if (name, form) != ("sgd", "fused")  # torch has no rule for it
    ),
    clipping(),
    clipping(10 * FOREACH_TENSORS),
    training("zero_grad", zero_grad),
    training("grad_scaler", unscaling),
    TimedProgram("tp_mlp", "Colwise,Rowwise", mlp, (4, 2, 16), EVERY_PASS),
)


def check_result(program: TimedProgram, place: Place, pass_: str, call: Call) -> str | None:
    got = call()
    if pass_ != FORWARD and not got.requires_grad:
        return f"{program.name} returned a tensor that requires no gradient, although its inputs do"
    if program.result is None:
        return None if got is True else f"{program.name} returned {got!r}, expected True"
    wrong = not got.dtype.is_floating_point and program.name != "argmax_dim1"
    if place.impl != "local" and (wrong or tuple(got.shape) != program.result):
        return f"{program.name} returned {got.dtype} {tuple(got.shape)}, expected {program.result}"
    return None


def build_program(program: TimedProgram, place: Place, pass_: str) -> Workload:
    call = program.build(place, pass_)
    return Workload(run=call, check=partial(check_result, program, place, pass_, call))
