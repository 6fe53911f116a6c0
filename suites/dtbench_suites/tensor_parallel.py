"""Tensor parallelism: a layer, transformer blocks and the loss, each sharded over the ranks of one mesh dim.

    core    dtbench_core.parallel
    torch   torch.distributed.tensor.parallel
    whole   the full model on every rank, without communication. This is no floor: each rank does the work of all

    addmm       bias + x @ weight, with the weight sharded by columns: one op on DTensors without communication
    mlp         ColwiseParallel, then RowwiseParallel: one all-reduce forward, one backward
    attention   sharded by heads
    block       norm, attention, norm, MLP; between them, the activations are sharded along the sequence
    loss        norm, output projection to the vocabulary, cross entropy; the logits are sharded by class

addmm and mlp are the benchmarks of torch's first tensor-parallel API. Outputs and gradients are compared with those of
the full model.
"""

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
    dims_with_several_ranks,
    dtensor_api,
    mismatch,
    parallel_api,
    skip_cuda_gathers_on_gloo,
    torch_dtype,
)

# (batch, seq, d_model, heads). On a GPU: a layer of Llama-2-7B (arXiv 2307.09288, table 1: 4096 wide, 32 heads, 4096
# tokens, half of them here). On a CPU: small enough that a pass takes milliseconds.
SHAPES = {"cpu": (2, 64, 256, 8), "cuda": (1, 2048, 4096, 32)}
# Tolerance in units of eps of the largest value: sums of thousands of products are added in different orders.
ROUNDINGS = 64
# Classes per unit of width: Llama-2-7B has 32000 for 4096.
CLASSES_PER_WIDTH = 8

# Output -> the gradient that its backward pass starts from.
Cotangent = Callable[[Tensor], Tensor]


class ParallelModel(nn.Module):
    """A model that can be parallelized."""

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        """Returns the parallelize plan: submodule name -> parallel style.

        Args:
            api: the library's module of parallel styles.
            tensors: the library's module of DTensor and its placements.
        """
        raise NotImplementedError

    def place(self, x: Tensor, tensors: Any, mesh: Any) -> Tensor:
        """Returns the input in the form that the parallel model takes; by default the plain tensor."""
        return x


class AddMM(ParallelModel):
    """A linear layer of 2-D inputs as a single addmm."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_model, 4 * d_model) / d_model**0.5)
        self.bias = nn.Parameter(torch.randn(4 * d_model))

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        class ByColumns(api.ParallelStyle):  # type: ignore[misc]
            def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
                for name, dim in (("weight", 1), ("bias", 0)):
                    cut = tensors.distribute_tensor(
                        getattr(module, name).detach(), mesh, [tensors.Shard(dim)]
                    )
                    module.register_parameter(name, nn.Parameter(cut))
                return module

        return {"": ByColumns()}

    def place(self, x: Tensor, tensors: Any, mesh: Any) -> Tensor:
        return tensors.DTensor.from_local(x.flatten(0, 1), mesh, [tensors.Replicate()])  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:  # (batch * seq, d) -> (batch * seq, 4 d)
        return torch.addmm(self.bias, x if x.ndim == 2 else x.flatten(0, 1), self.weight)


class FeedForward(ParallelModel):
    """An MLP d -> 4d -> d with GELU (Vaswani et al., arXiv 1706.03762, section 3.3, has ReLU)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        return {"up_proj": api.ColwiseParallel(), "down_proj": api.RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        return self.down_proj(F.gelu(self.up_proj(x)))  # type: ignore[no-any-return]


class SelfAttention(ParallelModel):
    """Causal self-attention. A rank that holds 1/n of wq, wk and wv computes heads / n heads."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.d_head = d_model // heads
        # No bias for the keys: it would shift all scores of a query equally, so its gradient would be rounding noise.
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(d_model, d_model, bias=name != "wk") for name in ("wq", "wk", "wv", "wo")
        )

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        return {**{name: api.ColwiseParallel() for name in ("wq", "wk", "wv")}, "wo": api.RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        # (batch, seq, d / n) -> (batch, heads / n, seq, d_head)
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TransformerBlock(ParallelModel):
    """A pre-norm transformer block with sequence parallelism (Korthikanti et al., arXiv 2205.05198, figure 5)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d_model), SelfAttention(d_model, heads)
        self.norm2, self.mlp = nn.LayerNorm(d_model), FeedForward(d_model, heads)

    def plan(self, api: Any, tensors: Any) -> dict[str, Any]:
        replicated, sequence_sharded = tensors.Replicate(), tensors.Shard(1)
        sharded_output: dict[str, Any] = {"output_layouts": sequence_sharded, "use_local_output": False}
        gather_input = partial(
            api.PrepareModuleInput, input_layouts=sequence_sharded, desired_input_layouts=replicated
        )
        return {
            "": api.PrepareModuleInputOutput(
                input_layouts=replicated,
                desired_input_layouts=sequence_sharded,
                output_layouts=sequence_sharded,
                desired_output_layouts=replicated,
            ),
            "norm1": api.SequenceParallel(),
            "norm2": api.SequenceParallel(),
            "attention": gather_input(),
            **{f"attention.w{name}": api.ColwiseParallel() for name in "qkv"},
            "attention.wo": api.RowwiseParallel(**sharded_output),
            "mlp": gather_input(),
            "mlp.up_proj": api.ColwiseParallel(),
            "mlp.down_proj": api.RowwiseParallel(**sharded_output),
        }

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Loss(ParallelModel):
    """The last norm, a projection d -> 8d classes, and the mean cross entropy of all positions."""

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
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss  # type: ignore[no-any-return]


MODELS: dict[str, type[ParallelModel]] = {
    "addmm": AddMM,
    "mlp": FeedForward,
    "attention": SelfAttention,
    "block": TransformerBlock,
    "loss": Loss,
}
FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
BOTH_PASSES = (FORWARD, FORWARD_BACKWARD)
PASSES = {
    "addmm": (FORWARD,),
    "mlp": BOTH_PASSES,
    "attention": BOTH_PASSES,
    "block": (FORWARD_BACKWARD,),
    "loss": (FORWARD_BACKWARD,),
}
QUICK = ("addmm", "mlp", "block", "loss")


def parallelize(impl: str, model: ParallelModel, mesh: Any) -> nn.Module:
    """Parallelizes the model over `mesh` with the library of `impl`; returns it unchanged for "whole"."""
    if impl == WHOLE:
        return model
    api = parallel_api(impl)
    return api.parallelize_module(model, mesh, model.plan(api, dtensor_api(impl)))  # type: ignore[no-any-return]


def run_pass(
    fn: Callable[..., Any], inputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangent: Cotangent | None
) -> list[Tensor]:
    """Returns the output and, with a cotangent, the gradients of `leaves`."""
    if cotangent is None:
        with torch.no_grad():
            return [wait_for(fn(*inputs))]
    out = wait_for(fn(*inputs))
    return [out, *map(wait_for, torch.autograd.grad(out, leaves, cotangent(out)))]


def wait_for(tensor: Tensor) -> Tensor:
    """Waits for the collective behind a tensor, which both libraries may return before it has finished."""
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "wait"):
        local.wait()
    return tensor


def result_names(model: nn.Module) -> list[str]:
    """Returns the names of the tensors that `run_pass` returns, for messages."""
    return ["the output", "the gradient of x", *(f"the gradient of {n}" for n, _ in model.named_parameters())]


def compare(names: Sequence[str], got: list[Tensor], want: list[Tensor], rtol: float) -> str | None:
    """Returns a message about the first tensor of `got` that differs from `want`, or None.

    All ranks must call it together. `names` may be longer than `got`.
    """
    # All ranks gather all tensors before comparing: full_tensor() is a collective.
    gathered = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
    pairs = zip(names, zip(gathered, want, strict=True), strict=False)
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
    backward, mesh = passes == FORWARD_BACKWARD, world.mesh[mesh_dim]
    if impl == "torch":
        skip_cuda_gathers_on_gloo(mesh)
    batch, seq, d_model, heads = shape
    with torch.random.fork_rng(devices=[]), world.device:
        torch.manual_seed(0)  # the same model and data on all ranks
        model, reference = (MODELS[block](d_model, heads).to(dtype) for _ in range(2))
        x = torch.randn(batch, seq, d_model).to(dtype)
        reference.load_state_dict(model.state_dict())
        with torch.no_grad():
            cotangent = torch.randn(reference(x).shape).to(dtype)
    x.requires_grad_(backward)
    placed = x if impl == WHOLE else model.place(x, dtensor_api(impl), mesh)
    cut = parallelize(impl, model, mesh)
    # loss_parallel computes the cross entropy of sharded logits without gathering them.
    context = nullcontext if block != "loss" or impl == WHOLE else parallel_api(impl).loss_parallel

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        return run_pass(model, [x], [x, *model.parameters()], (lambda _out: cotangent) if backward else None)

    def run() -> list[Tensor]:
        with context():
            return step(cut, placed)

    def check() -> str | None:
        return compare(result_names(reference), run(), step(reference, x), ROUNDINGS * torch.finfo(dtype).eps)

    return Workload(run=run, check=check)


def shape_for(options: RunOptions, n: int) -> tuple[int, int, int, int]:
    """Returns (batch, seq, d_model, heads) with seq and heads rounded up to multiples of n, and d_model accordingly."""
    batch, seq, d_model, heads = SHAPES[options.device_type]
    d_head, shared = d_model // heads, -(-heads // n) * n
    return batch, -(-seq // n) * n, d_head * shared, shared


@suite("tensor_parallel", world="ranks", help=SUITES["tensor_parallel"], impl_s=(0.35, 0.23))
def tensor_parallel(options: RunOptions) -> Iterator[Case]:
    for mesh_dim, n in dims_with_several_ranks(options):
        shape = shape_for(options, n)
        sizes = dict(zip(("batch", "seq", "d_model", "heads"), shape, strict=True))
        for dtype, block in itertools.product(options.dtypes, QUICK if options.quick else MODELS):
            for passes in PASSES[block]:
                yield Case(
                    name=block,
                    params={"mesh_dim": mesh_dim, "ranks": n, "pass": passes, "dtype": dtype, **sizes},
                    build={
                        impl: partial(build_impl, block, mesh_dim, passes, shape, torch_dtype(dtype), impl)
                        for impl in ("core", "torch", WHOLE)
                    },
                )
