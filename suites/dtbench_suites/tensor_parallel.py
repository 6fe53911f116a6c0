"""Tensor parallelism: a layer, the blocks of a transformer and the loss behind it, each cut over the ranks.

    core    dtbench_core.parallel        the model cut over the ranks of one mesh dim
    torch   torch.distributed.tensor.parallel
    whole   the whole model on one rank, without communication: no floor, as it does all ranks' work

    addmm       bias + x @ weight, the weight by columns: one op on DTensors, and nothing is sent
    mlp         Colwise, then Rowwise: one all-reduce forward, one backward
    attention   the heads shared out
    block       norm, attention, norm, MLP: between them the activations are cut along the sequence
    loss        norm, the head over the vocabulary and its cross entropy, the logits sharded by class

addmm and mlp are what torch's first tensor-parallel API was measured by. Outputs and gradients are compared
with the whole model's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench.suite.case import WHOLE
from dtbench_suites import SUITES
from dtbench_suites.data import (
    dtensor_api,
    mismatch,
    parallel_api,
    refuse_gathers_of_cuda_on_gloo,
    shared_dims,
    torch_dtype,
)

# batch, seq, d_model, heads. On a GPU a layer of Llama-2-7B (arXiv 2307.09288, table 1: 4096 wide, 32
# heads, sequences of 4096, half of it here); on a CPU as much as keeps one pass within milliseconds.
SHAPES = {"cpu": (2, 64, 256, 8), "cuda": (1, 2048, 4096, 32)}
# Sums of thousands of products in another order: some roundings (eps) of the largest value.
ROUNDINGS = 64
# Classes per unit of width: Llama-2-7B has 32000 for 4096.
CLASSES_PER_WIDTH = 8

# Of an output the gradient that comes back to it.
Cotangent = Callable[[Tensor], Tensor]


class ParallelModel(nn.Module):
    """A model that can be cut. `plan` names the styles, made by the library whose modules it is given."""

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        raise NotImplementedError

    def place(self, x: Tensor, tensors: Any, mesh: Any) -> Tensor:
        """The input as the cut model takes it: whole and plain."""
        return x


class AddMM(ParallelModel):
    """The op that a Linear of 2-D inputs runs."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_model, 4 * d_model) / d_model**0.5)
        self.bias = nn.Parameter(torch.randn(4 * d_model))

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        class ByColumns(api.ParallelStyle):  # type: ignore[misc]
            def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
                for name, dim in (("weight", 1), ("bias", 0)):
                    whole = getattr(module, name).detach()
                    cut = tensors.distribute_tensor(whole, mesh, [tensors.Shard(dim)])
                    module.register_parameter(name, nn.Parameter(cut))
                return module

        return {"": ByColumns()}

    def place(self, x: Tensor, tensors: Any, mesh: Any) -> Tensor:
        placed: Tensor = tensors.DTensor.from_local(x.flatten(0, 1), mesh, [tensors.Replicate()])
        return placed

    def forward(self, x: Tensor) -> Tensor:  # (batch * seq, d) -> (batch * seq, 4 d)
        return torch.addmm(self.bias, x if x.ndim == 2 else x.flatten(0, 1), self.weight)


class FeedForward(ParallelModel):
    """d -> 4d -> d with a GELU between (Vaswani et al., arXiv 1706.03762, section 3.3, with ReLU)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        return {"up": api.ColwiseParallel(), "down": api.RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class SelfAttention(ParallelModel):
    """Causal self-attention; a rank that holds 1/n of wq, wk, wv works on heads / n heads."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.d_head = d_model // heads
        # Without a bias for the keys: it shifts all scores of a query alike, so that its gradient is mere rounding.
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(d_model, d_model, bias=name != "wk") for name in ("wq", "wk", "wv", "wo")
        )

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        return {**{name: api.ColwiseParallel() for name in ("wq", "wk", "wv")}, "wo": api.RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        # (batch, seq, d / n) -> (batch, heads / n, seq, d_head)
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(ParallelModel):
    """A transformer block with a norm before each half (Korthikanti et al., arXiv 2205.05198, figure 5)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d_model), SelfAttention(d_model, heads)
        self.norm2, self.mlp = nn.LayerNorm(d_model), FeedForward(d_model, heads)

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        whole, cut = tensors.Replicate(), tensors.Shard(1)
        along: dict[str, Any] = {"output_layouts": cut, "use_local_output": False}
        gathered = partial(api.PrepareModuleInput, input_layouts=cut, desired_input_layouts=whole)
        return {
            "": api.PrepareModuleInputOutput(
                input_layouts=whole,
                desired_input_layouts=cut,
                output_layouts=cut,
                desired_output_layouts=whole,
            ),
            "norm1": api.SequenceParallel(),
            "norm2": api.SequenceParallel(),
            "attention": gathered(),
            **{f"attention.w{name}": api.ColwiseParallel() for name in "qkv"},
            "attention.wo": api.RowwiseParallel(**along),
            "mlp": gathered(),
            "mlp.up": api.ColwiseParallel(),
            "mlp.down": api.RowwiseParallel(**along),
        }

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Loss(ParallelModel):
    """The last norm, d -> 8 d classes, and the cross entropy of every position."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, CLASSES_PER_WIDTH * d_model, bias=False)

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        return {"head": api.ColwiseParallel(use_local_output=False)}

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> ()
        logits = self.head(self.norm(x)).flatten(0, 1)  # (batch * seq, classes)
        target = torch.arange(logits.shape[0], device=x.device) * 7 % logits.shape[1]
        loss: Any = F.cross_entropy(logits, target)
        whole: Tensor = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return whole


MODELS: dict[str, type[ParallelModel]] = {
    "addmm": AddMM,
    "mlp": FeedForward,
    "attention": SelfAttention,
    "block": TransformerBlock,
    "loss": Loss,
}
FORWARD, BOTH = "forward", "forward+backward"
EACH = (FORWARD, BOTH)
PASSES = {"addmm": (FORWARD,), "mlp": EACH, "attention": EACH, "block": (BOTH,), "loss": (BOTH,)}
QUICK = ("addmm", "mlp", "block", "loss")


def parallelize(impl: str, model: ParallelModel, mesh: Any) -> nn.Module:
    """The model cut over `mesh` by the library of `impl`; itself for "whole"."""
    if impl == WHOLE:
        return model
    api = parallel_api(impl)
    cut: nn.Module = api.parallelize_module(model, mesh, model.plan(api, dtensor_api(impl)))
    return cut


def one_pass(
    fn: Callable[..., Any], inputs: Sequence[Tensor], wanted: Sequence[Tensor], cotangent: Cotangent | None
) -> list[Tensor]:
    """The output, and with a cotangent the gradients of `wanted`."""
    if cotangent is None:
        with torch.no_grad():
            return [finished(fn(*inputs))]
    out = finished(fn(*inputs))
    return [out, *map(finished, torch.autograd.grad(out, wanted, cotangent(out)))]


def finished(tensor: Tensor) -> Tensor:
    """The tensor once its collective has ended: both libraries may hand it out before."""
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "wait"):
        local.wait()
    return tensor


def names_of(model: nn.Module) -> list[str]:
    """Of what a pass gives."""
    return ["the output", "the gradient of x", *(f"the gradient of {n}" for n, _ in model.named_parameters())]


def compare(names: Sequence[str], got: list[Tensor], want: list[Tensor], rtol: float) -> str | None:
    """What differs from the whole model's tensors, or None; all ranks together. names: of as many, or more."""
    # Every rank gathers every tensor, whatever it found before.
    wholes = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
    pairs = zip(names, zip(wholes, want, strict=True), strict=False)
    return next((wrong for name, (g, w) in pairs if (wrong := mismatch(g, w, name, rtol))), None)


def build_impl(
    block: str,
    mesh_dim: str,
    passes: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    backward, mesh = passes == BOTH, world.mesh[mesh_dim]
    if impl == "torch":
        refuse_gathers_of_cuda_on_gloo(mesh)
    batch, seq, d_model, heads = shape
    with torch.random.fork_rng(devices=[]), world.device:
        torch.manual_seed(0)  # the same model and data on all ranks
        model, whole = (MODELS[block](d_model, heads).to(dtype) for _ in range(2))
        x = torch.randn(batch, seq, d_model).to(dtype)
        whole.load_state_dict(model.state_dict())
        with torch.no_grad():
            cotangent = torch.randn(whole(x).shape).to(dtype)
    x.requires_grad_(backward)
    placed = x if impl == WHOLE else model.place(x, dtensor_api(impl), mesh)
    cut = parallelize(impl, model, mesh)
    # Where cross entropy keeps the logits where they are.
    context = nullcontext if block != "loss" or impl == WHOLE else parallel_api(impl).loss_parallel

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        return one_pass(model, [x], [x, *model.parameters()], (lambda _out: cotangent) if backward else None)

    def run() -> list[Tensor]:
        with context():
            return step(cut, placed)

    def check() -> str | None:
        return compare(names_of(whole), run(), step(whole, x), ROUNDINGS * torch.finfo(dtype).eps)

    return Workload(run=run, check=check)


def shape_for(options: RunOptions, n: int) -> tuple[int, int, int, int]:
    """(batch, seq, d_model, heads) with heads and positions that n ranks can share evenly, d_model as it comes."""
    batch, seq, d_model, heads = SHAPES[options.device_type]
    d_head, shared = d_model // heads, -(-heads // n) * n
    return batch, -(-seq // n) * n, d_head * shared, shared


@suite("tensor_parallel", world="ranks", help=SUITES["tensor_parallel"], impl_s=(0.35, 0.23))
def tensor_parallel(options: RunOptions) -> Iterator[Case]:
    for mesh_dim, n in shared_dims(options):
        shape = shape_for(options, n)
        sizes = dict(zip(("batch", "seq", "d_model", "heads"), shape, strict=True))
        for dtype, block in itertools.product(options.dtypes, QUICK if options.quick else MODELS):
            for passes in PASSES[block]:
                build = partial(build_impl, block, mesh_dim, passes, shape, torch_dtype(dtype))
                yield Case(
                    name=block,
                    params={"mesh_dim": mesh_dim, "ranks": n, "pass": passes, "dtype": dtype, **sizes},
                    build={impl: partial(build, impl) for impl in ("core", "torch", WHOLE)},
                )
