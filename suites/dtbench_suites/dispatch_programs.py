"""Programs of the dispatch suite besides single ops: redistributions, random ops, optimizer steps, an MLP.

Each program is written once against the DTensor API and runs with dtbench_core and torch.distributed.tensor. The
simulated process group moves no data, so only global shape and dtype of the results are checked. The redistribute and
tensor_parallel suites check the values on real ranks. The cases of pytorch's own benchmarks are also checked against
plain torch, where the process group defines the values.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.stats.dispatch_headline import PYTORCH_CASES
from dtbench.suite import Workload
from dtbench_suites.data import Place, mismatch, parallel_api, shard_of
from dtbench_suites.memory import growth_per_step

WORLD = 8  # ranks of the simulated process group
ROWS, HEADS, IMAGES = (WORLD * 4, 4), (2, WORLD * 2, 4, 4), (WORLD * 2, 2, 4, 4)  # global shapes
FOREACH_TENSORS = 10  # tensors of a foreach op and of an optimizer step
# Steps in a row, fewer in quick runs, and steps whose results are checked.
STEPS, STEPS_QUICK, CHECKED_STEPS = 200, 80, 3
# Ranks and global shape of the cases of pytorch's own benchmarks.
PYTORCH_RANKS, PYTORCH_SHAPE = 256, (10, 10)
# Relative to the largest value of the results. Both sides do the same arithmetic in float32.
RTOL = 1e-5
# Calls whose instructions are counted. pytorch's benchmark_base.py takes the minimum of 5 or, in earlier versions, of
# these 9 after an uncounted one.
COUNTED_CALLS = 9

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
        calls_per_sample: see `Case`; None for the number of the pass.
        check: (place, call) -> error text or None. By default, shape and dtype of the result are checked.
        in_a_row: whether the objects and the memory that many calls keep are counted.
    """

    name: str
    placements: str
    build: Callable[[Place, str], Call]
    result: tuple[int, ...] | None
    passes: tuple[str, ...] = (FORWARD,)
    local: bool = True
    flat: bool = False
    quick: bool = True
    calls_per_sample: int | None = None
    check: Callable[[Place, Call], str | None] | None = None
    in_a_row: bool = False


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


def steps_in_a_row(form: str) -> TimedProgram:
    """Program that runs steps of AdamW, whose gradients are new copies of the parameters. `form`: foreach or fused."""

    def build(place: Place, pass_: str) -> Call:
        values = torch.arange(math.prod(ROWS), device=place.device, dtype=torch.float32).view(ROWS) % 7
        parameters = [nn.Parameter(place.put(values - i, "S(0)")) for i in range(FOREACH_TENSORS)]
        optimizer = torch.optim.AdamW(parameters, foreach=form == "foreach", fused=form == "fused")

        def run_step() -> list[nn.Parameter]:
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            return parameters

        return run_step

    def check(place: Place, call: Call) -> str | None:
        """Compares new parameters after some steps with those of plain torch."""
        step, plain_step = build(place, FORWARD), build(replace(place, impl="local"), FORWARD)
        got, want = ([s() for _ in range(CHECKED_STEPS)][-1] for s in (step, plain_step))
        messages = (
            place.mismatch(p.detach(), "S(0)", ROWS, q.detach(), f"parameter {i}", RTOL)
            for i, (p, q) in enumerate(zip(got, want, strict=True))
        )
        return next(filter(None, messages), None)

    return TimedProgram(
        f"adamw_{form}_steps",
        "S(0)",
        build,
        None,
        flat=True,
        quick=form == "foreach",
        calls_per_sample=1,
        check=check,
        in_a_row=True,
    )


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
    steps_in_a_row("foreach"),
    steps_in_a_row("fused"),
    clipping(),
    clipping(10 * FOREACH_TENSORS),
    training("zero_grad", zero_grad),
    training("grad_scaler", unscaling),
    TimedProgram("tp_mlp", "Colwise,Rowwise", mlp, (4, 2, 16), EVERY_PASS),
)


# ---- pytorch's own DTensor benchmarks ----
# Names, shapes, placements and the work of a call are those of pytorch's file
# benchmarks/dynamo/pr_time_benchmarks/benchmarks/dtensor.py.


def check_with_plain_torch(place: Place, call: Any) -> str | None:
    """Compares the result with that of plain torch for the same values and the same random numbers."""
    inputs = [t if place.impl == "local" else t.to_local() for t in call.args]
    with torch.random.fork_rng(devices=[] if place.device.type == "cpu" else [place.device]):
        want = call.func(*(t.clone() for t in inputs))
    got = call()
    if isinstance(want, Tensor):
        return place.mismatch(got, "R", want.shape, want, "the result")
    return None if got is want else f"the result is {got!r:.80}, expected {want}"


def check_ones(
    texts: Sequence[str], shape_only: Sequence[int], place: Place, call: Callable[[], tuple[Any, ...]]
) -> str | None:
    """Checks that the results have their placements, and that their values are ones.

    Args:
        texts: the placement of each result.
        shape_only: indices of the results whose values are not checked: what the fake process group writes as the
            result of that collective depends on torch's version.
    """
    for index, (got, text) in enumerate(zip(call(), texts, strict=True)):
        if index in shape_only:
            got.to_local().fill_(1.0)
        local = shard_of(torch.ones(PYTORCH_SHAPE, device=place.device), text, 0, PYTORCH_RANKS)
        if wrong := place.mismatch(got, text, PYTORCH_SHAPE, local, f"result {index}"):
            return wrong
    return None


def to_from_local(place: Place, pass_: str) -> Call:
    tensor, mesh, api = ones(place, PYTORCH_SHAPE, "R"), place.mesh, place.api
    return lambda: (api.DTensor.from_local(tensor.to_local(), mesh, [api.Replicate()]),)


def collectives(place: Place, pass_: str) -> Call:
    """A slice, an all-to-all, an all-gather; an all-reduce and a reduce-scatter of pending sums."""
    replicated, pending, api = ones(place, PYTORCH_SHAPE, "R"), ones(place, PYTORCH_SHAPE, "P"), place.api
    return lambda: (
        sliced := replicated.redistribute(placements=[api.Shard(0)]),
        exchanged := sliced.redistribute(placements=[api.Shard(1)]),
        exchanged.redistribute(placements=[api.Replicate()]),
        pending.redistribute(placements=[api.Replicate()]),
        pending.redistribute(placements=[api.Shard(0)]),
    )


def add_backward(place: Place, pass_: str) -> Call:
    """Sum of tensors with different placements, and the gradients of their local tensors, which accumulate."""
    leaves = [torch.ones(s, device=place.device, requires_grad=True) for s in ((2, 512), (512, 2))]
    a, b = (
        place.api.DTensor.from_local(leaf, place.mesh, place.placements(text))
        for leaf, text in zip(leaves, ("S(0)", "S(1)"), strict=True)
    )

    def call() -> list[Tensor]:
        (a + b).sum().backward()
        return leaves

    return call


def check_gradients(place: Place, call: Call) -> str | None:
    """Checks the gradients of the local tensors. Those of a sum are ones, whatever values the fake group moves."""
    for leaf in call():
        leaf.grad = torch.zeros_like(leaf)
    return next(
        filter(None, (mismatch(leaf.grad, torch.ones_like(leaf), "a gradient") for leaf in call())), None
    )


PYTORCH_PROGRAMS = (
    TimedProgram(
        "dtensor_dispatch_to_from_local",
        "R",
        to_from_local,
        None,
        local=False,
        check=partial(check_ones, ["R"], ()),
    ),
    TimedProgram(
        "dtensor_dispatch_collectives",
        "R,P",
        collectives,
        None,
        local=False,
        calls_per_sample=1,  # a call takes milliseconds
        check=partial(check_ones, ["S(0)", "S(1)", "R", "R", "S(0)"], (1, 2, 4)),
    ),
    TimedProgram(
        "dtensor_dispatch_add_backward",
        "S(0),S(1)",
        add_backward,
        None,
        (BACKWARD,),
        local=False,
        check=check_gradients,
    ),
    *(
        op(
            name,
            placements,
            [PYTORCH_SHAPE] * (1 + placements.count(",")),
            fn,
            None,
            check=check_with_plain_torch,
        )
        for name, placements, fn in (
            ("dtensor_dispatch_detach", "R", lambda a: a.detach()),
            ("dtensor_dispatch_inplace", "R,R", lambda a, b: a.add_(b)),
            ("dtensor_dispatch_view", "R", lambda a: a.view(100)),
            ("dtensor_dispatch_random", "R", lambda a: a.uniform_()),
            ("dtensor_dispatch_custom_handler", "R,R", lambda a, b: torch.ops.aten.is_same_size(a, b)),
        )
    ),
)


def count_instructions(call: Call) -> dict[str, float]:
    """Returns the instructions of the cheapest of some calls, or nothing if torch cannot read a hardware counter here.

    torch's counter then prints to stderr from C++ code, and returns 0, or -1 as an unsigned number of 64 bits.
    """
    counter = getattr(torch._C, "_instruction_counter", None)
    if counter is None:
        return {}
    counts, stderr = [], os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        for _ in range(1 + COUNTED_CALLS):
            started = counter.start()
            call()
            counts.append(counter.end(started))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    return {"instructions": min(counts[1:])} if min(counts) > 0 and max(counts) < 2**63 else {}


# ---- workloads ----


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


def build_program(program: TimedProgram, place: Place, pass_: str, quick: bool = False) -> Workload:
    call = program.build(place, pass_)
    counters = partial(count_instructions, call) if program.name.startswith(PYTORCH_CASES) else None
    return Workload(
        run=call,
        # The other impls draw from the same generator. In its next draw, the core compares the states of the ranks,
        # which a program that draws only from DTensors never pays for.
        before=call if program.name == "dtensor_dispatch_random" else None,
        check=partial(program.check, place, call)
        if program.check
        else partial(check_result, program, place, pass_, call),
        counters=partial(growth_per_step, call, STEPS_QUICK if quick else STEPS)
        if program.in_a_row
        else counters,
    )
