"""Ops that draw random numbers: each rank draws for the whole tensor and keeps its part (see layout/rng.py).

Here are the ops whose numbers depend on the shape alone. Where they also depend on values (bernoulli or
poisson of a tensor, multinomial, rrelu) only whole inputs give the numbers of one device, which is what
an op without a rule gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtbench_core.layout import rng as random
from dtbench_core.layout.placement import REDUCE_OPS, REPLICATE, Partial, Shard
from dtbench_core.rules.base import OpCall, Placed, Row, Strategy, along, aten, linear_rows, rule
from dtbench_core.rules.pointwise import neutral_term


@rule(
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.bernoulli_.float,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)
def fill(call: OpCall) -> Strategy:
    """In place: the tensor's shard gets its part of the whole."""

    def localize(placed: Placed) -> Callable[..., torch.Tensor]:
        (spec,) = placed.inputs
        neutral = neutral_term(spec)

        def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            drawn = random.draw_like(
                spec, local.device, lambda whole: call.op(whole, *args, **kwargs), kwargs.get("generator")
            )
            return local.copy_(drawn) if neutral is None else local.fill_(neutral)

        return run

    rows = [*along(range(call.inputs[0].ndim), 1, 1), *linear_rows(call, 1, ops=REDUCE_OPS)]
    return Strategy(rows, localize=localize, any_lengths=True)


@rule(
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.bernoulli.p,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
)
@rule(
    aten.rand_like.default,
    aten.rand_like.generator,
    aten.randn_like.default,
    aten.randn_like.generator,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
)
def fresh(call: OpCall) -> Strategy:
    """A new tensor of the input's shape, whose values are not read."""

    def localize(placed: Placed) -> Callable[..., torch.Tensor]:
        (spec,) = placed.inputs

        def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return random.draw_like(
                spec, local.device, lambda whole: call.op(whole, *args, **kwargs), kwargs.get("generator")
            )

        return run

    unread = {p for p in call.inputs[0].placements if p.is_partial()}
    rows = [Row((p,), (REPLICATE,)) for p in sorted(unread, key=str)]
    return Strategy([*along(range(call.inputs[0].ndim), 1, 1), *rows], localize=localize, any_lengths=True)


@rule(aten.native_dropout.default)
def native_dropout(call: OpCall) -> Strategy:
    """(input) -> (output, mask): linear in the input, and the mask depends on its shape alone."""
    p, train = call["p"], call["train"] is not False

    def localize(placed: Placed) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        (spec,) = placed.inputs
        scale = 0.0 if p == 1 else 1 / (1 - p)

        def run(local: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if not train:
                return local.clone(), torch.ones_like(local, dtype=torch.bool)
            mask = random.draw_like(spec, local.device, lambda whole: call.op(whole.zero_(), p, True)[1])
            return local * mask * scale, mask

        return run

    rows = [Row((Shard(d),), (Shard(d), Shard(d))) for d in range(call.inputs[0].ndim)]
    rows += [Row((Partial(op),), (Partial(op), REPLICATE)) for op in ("sum", "avg")]
    return Strategy(rows, localize=localize, any_lengths=True)
