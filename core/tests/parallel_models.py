"""Models for the tests of tensor parallelism, and comparisons with the plain models."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from core.tests.on_device import DEVICE_TYPE, torch
from core.tests.placing import full

BATCH, SEQ, WIDTH, HIDDEN, HEADS, VOCAB = 2, 3, 8, 16, 4, 24


class MLP(nn.Module):
    def __init__(self, bias: bool = True, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., WIDTH] -> [..., WIDTH]
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal self-attention. A rank has as many heads as fit the width of its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [BATCH, SEQ, WIDTH] -> the same
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, WIDTH] -> the same
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, sequence] -> [batch, sequence, VOCAB]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(*args).to(DEVICE_TYPE)


def assert_same_parameters(parallel: nn.Module, plain: nn.Module, grads: bool = True) -> None:
    got, expected = (
        {name: full((p.detach(), p.grad if grads else None)) for name, p in model.named_parameters()}
        for model in (parallel, plain)
    )
    torch.testing.assert_close(got, expected)


def assert_trains_alike(plain: nn.Module, parallel: nn.Module, inputs: Tensor, **options: Any) -> None:
    """Asserts that a forward and backward pass on the same input gives equal outputs and gradients."""
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected, got = plain(x), parallel(y)
    torch.testing.assert_close(got, expected, **options)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(parallel, plain)
