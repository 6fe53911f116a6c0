"""The collectives that `plan --mesh` expects, against those that torch calls for a small transformer.

One rank of a fake process group of 8 trains it under torch's own tensor parallelism and FSDP2; every
collective it calls is noted with its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtbench.cost.plan.communication import Setup, communication
from dtbench.cost.plan.models import Model
from dtbench.tests.made_up_topology import made_dim, made_topology

SEQUENCE_LENGTH, HIDDEN, LAYERS, HEADS, HEAD_DIM, FFN, VOCAB = 24, 32, 3, 8, 4, 80, 64
MODEL = Model("small", HIDDEN, LAYERS, HEADS, HEADS, HEAD_DIM, FFN, VOCAB)
# Ops by what they are named after: with the functional API (DTensor) and with c10d's own (FSDP2).
NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_DIM
        self.q, self.k, self.v = (nn.Linear(HIDDEN, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, sequence, hidden)
        q, k, v = (
            y.view(*y.shape[:2], -1, HEAD_DIM).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        out: torch.Tensor = self.o(scores.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.norm1, self.norm2 = (nn.RMSNorm(HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Noting(TorchDispatchMode):
    """Counts (collective, S in bytes) of every collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes here next
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d") and (name := func._opname.strip("_")) in NAMES:
            sizes = [a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor)]
            alone = len(sizes) == 1 and NAMES[name] == "all_gather"  # the gathered tensor is not among them
            whole = sizes[0] * self.ranks if alone else max(sizes)
            self.seen[NAMES[name], whole] += 1
        return out


@pytest.fixture(autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def train(model: nn.Module, ranks: int, *, loss_cut: bool) -> Counter[tuple[str, int]]:
    """The collectives of one step on one sequence."""
    tokens = torch.zeros(1, SEQUENCE_LENGTH, dtype=torch.long)
    noting = Noting(ranks)
    with noting:
        logits = model(tokens).flatten(0, 1)
        if loss_cut:
            with loss_parallel():
                F.cross_entropy(logits, tokens.flatten()).backward()
        else:
            F.cross_entropy(logits, tokens.flatten()).backward()
        for (
            parameter
        ) in model.parameters():  # a gradient that is still a sum over ranks is reduced for the optimizer
            grad = parameter.grad
            if grad is not None and hasattr(grad, "redistribute"):
                grad.redistribute(placements=parameter.placements).to_local()
    return noting.seen


def expected(scheme: str, mesh: dict[str, int]) -> Counter[tuple[str, int]]:
    """What `plan --mesh` counts for one step in float32."""
    dims = [made_dim(name, ranks, 1.0, 1.0) for name, ranks in mesh.items()]
    setup = Setup(MODEL, tuple(mesh.items()), SEQUENCE_LENGTH, "float32", "float32", {})
    found: Counter[tuple[str, int]] = Counter()
    for p in communication(made_topology(*dims), setup).collectives:
        if p.scheme == scheme:
            layers = LAYERS if p.where == "layer" else 1
            found[p.collective, p.size_bytes] += p.count * layers
    return found


def cut(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    """As torch's tutorial on tensor parallelism cuts a Llama."""
    outside = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(LAYERS):
        for block in ("attention", "mlp"):
            styles[f"layers.{i}.{block}"] = PrepareModuleInput(
                input_layouts=(outside,), desired_input_layouts=(Replicate(),)
            )
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            styles[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "mlp.down"):
            styles[f"layers.{i}.{name}"] = RowwiseParallel(output_layouts=outside)
    if sequence:
        norms = ["norm", *(f"layers.{i}.norm{j}" for i in range(LAYERS) for j in (1, 2))]
        styles |= {name: SequenceParallel() for name in norms}
    return parallelize_module(model, mesh, styles)


@pytest.mark.parametrize("scheme", ["tensor parallel", "sequence parallel"])
def test_tensor_parallelism_calls_what_is_predicted(scheme: str) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = cut(Transformer(), mesh, sequence=scheme == "sequence parallel")
    assert train(model, 8, loss_cut=True) == expected(scheme, {"tp": 8})


@pytest.mark.parametrize("scheme", ["FSDP", "ZeRO-2"])
def test_sharded_data_parallelism_calls_what_is_predicted(scheme: str) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=scheme == "FSDP")
    fully_shard(model, mesh=mesh)
    assert train(model, 8, loss_cut=False) == expected(scheme, {"dp": 8})
