"""Tensor parallelism on an MLP and an attention block: Colwise, then Rowwise, one all-reduce.

    core    dtbench_core.parallel        the model cut over the ranks of one mesh dim
    torch   torch.distributed.tensor.parallel
    local   the whole model on every rank, without communication

Outputs and gradients are compared with the whole model's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.model import Case, Param, Plan, Workload
from dtbench.registry import World, suite
from dtbench_suites.data import mismatch, shared_dims, torch_dtype

PARALLEL_MODULES = {"core": "dtbench_core.parallel", "torch": "torch.distributed.tensor.parallel"}

# batch, seq, d_model, heads. On a GPU a layer of Llama-2-7B (arXiv 2307.09288, table 1: 4096 wide, 32
# heads, sequences of 4096, half of it here); on a CPU as much as keeps one pass within milliseconds.
SHAPES = {"cpu": (2, 64, 256, 8), "cuda": (1, 2048, 4096, 32)}
# Sums of thousands of products in another order: some roundings (eps) of the largest value.
ROUNDINGS = 64


class MLP(nn.Module):
    """d -> 4d -> d with a GELU between (Vaswani et al., arXiv 1706.03762, section 3.3, with ReLU)."""

    styles: ClassVar = {"up": "ColwiseParallel", "down": "RowwiseParallel"}

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Attention(nn.Module):
    """Causal self-attention; a rank that holds 1/n of wq, wk, wv works on heads / n heads."""

    styles: ClassVar = {
        "wq": "ColwiseParallel",
        "wk": "ColwiseParallel",
        "wv": "ColwiseParallel",
        "wo": "RowwiseParallel",
    }

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.d_head = d_model // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, d) -> (batch, seq, d)
        # (batch, seq, d / n) -> (batch, heads / n, seq, d_head)
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


MODELS: dict[str, type[MLP] | type[Attention]] = {"mlp": MLP, "attention": Attention}


def parallelize(impl: str, model: MLP | Attention, mesh: Any) -> nn.Module:
    """The model cut over `mesh` by the library of `impl`; itself for "local"."""
    if impl == "local":
        return model
    api = importlib.import_module(PARALLEL_MODULES[impl])
    styles = {name: getattr(api, style)() for name, style in model.styles.items()}
    cut: nn.Module = api.parallelize_module(model, mesh, styles)
    return cut


def forward(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [finished(model(x))]


def forward_backward(model: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """The output, then the gradients of x and of the parameters."""
    y = finished(model(x))
    return [y, *map(finished, torch.autograd.grad(y, [x, *model.parameters()], cotangent))]


def finished(tensor: Tensor) -> Tensor:
    """The tensor once its collective has ended: both libraries may hand it out before."""
    local = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(local, "wait", None)
    if wait is not None:
        wait()
    return tensor


def compare(names: Sequence[str], got: list[Tensor], want: list[Tensor]) -> str | None:
    """What differs from the whole model's tensors, or None; all ranks together."""
    wholes = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
    rtol = ROUNDINGS * torch.finfo(want[0].dtype).eps
    wrong = (mismatch(g, w, name, rtol) for name, g, w in zip(names, wholes, want, strict=True))
    return next((text for text in wrong if text), None)


def build_impl(
    block: str,
    mesh_dim: str,
    passes: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    backward = passes == "forward+backward"
    batch, seq, d_model, heads = shape
    with torch.random.fork_rng(devices=[]), world.device:
        torch.manual_seed(0)  # the same model and data on all ranks
        model, whole = (MODELS[block](d_model, heads).to(dtype) for _ in range(2))
        x, cotangent = (torch.randn(batch, seq, d_model).to(dtype) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    x.requires_grad_(backward)
    names = [
        "the output",
        "the gradient of x",
        *(f"the gradient of {name}" for name, _ in whole.named_parameters()),
    ]
    step: Callable[[nn.Module], list[Tensor]] = partial(forward, x=x)
    if backward:
        step = partial(forward_backward, x=x, cotangent=cotangent)
    cut = parallelize(impl, model, world.mesh[mesh_dim])

    def check() -> str | None:
        return compare(names if backward else names[:1], step(cut), step(whole))

    return Workload(run=partial(step, cut), check=check)


def shape_for(plan: Plan, n: int) -> tuple[int, int, int, int]:
    """(batch, seq, d_model, heads) with heads that n ranks can share evenly, d_model as it comes."""
    batch, seq, d_model, heads = SHAPES[plan.device_type]
    d_head, shared = d_model // heads, -(-heads // n) * n
    return batch, seq, d_head * shared, shared


@suite("tensor_parallel", world="ranks", help="an MLP and an attention block, cut over one mesh dim")
def tensor_parallel(plan: Plan) -> Iterator[Case]:
    for mesh_dim, n in shared_dims(plan):
        shape = shape_for(plan, n)
        sizes = dict(zip(("batch", "seq", "d_model", "heads"), shape, strict=True))
        for dtype in plan.dtypes:
            for block in MODELS:
                for passes in "forward", "forward+backward":
                    where: dict[str, Param] = {
                        "mesh_dim": mesh_dim,
                        "ranks": n,
                        "pass": passes,
                        "dtype": dtype,
                    }
                    build = partial(build_impl, block, mesh_dim, passes, shape, torch_dtype(dtype))
                    yield Case(
                        name=block,
                        params=where | sizes,
                        build={impl: partial(build, impl) for impl in ("core", "torch", "local")},
                    )
