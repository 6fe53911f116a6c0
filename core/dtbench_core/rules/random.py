"""Ops that draw random numbers: each rank draws for the global tensor and keeps its part (see layout/random.py).

This file has the ops whose numbers depend on the shape alone. If they also depend on values (bernoulli or poisson of a
tensor, multinomial, rrelu), only replicated inputs give the same numbers as on one device. Ops without a rule get
replicated inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtbench_core.layout import random
from dtbench_core.layout.placement import REDUCE_OPS, REPLICATE, Partial
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Value
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    linear_rows,
    ops_named,
    rule,
    shard_rows,
)
from dtbench_core.rules.pointwise import neutral_term, new_like


def _draw_part(call: OpCall, spec: DTensorSpec) -> Callable[..., torch.Tensor]:
    """Returns the op for a shard of `spec`: it returns this rank's part of the numbers for the global tensor."""

    def run(local: torch.Tensor, *args: Value, **kwargs: Value) -> torch.Tensor:
        return random.draw_like(
            spec, local.device, lambda full: call.op(full, *args, **kwargs), kwargs.get("generator")
        )

    return run


IN_PLACE = """
    uniform_ normal_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_.float
    random_ random_.to random_.from
"""
FRESH = """
    uniform normal_functional exponential geometric cauchy log_normal bernoulli.p random random.to random.from
    rand_like rand_like.generator randn_like randn_like.generator
    randint_like randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype
"""


@rule(*ops_named(IN_PLACE))
def fill(call: OpCall) -> Strategy:
    """Fills the shard with its part of the numbers for the global tensor."""

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor]:
        (spec,) = placed.inputs
        draw, neutral = _draw_part(call, spec), neutral_term(spec)

        def run(local: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            # Always, so that the generators of all ranks advance equally.
            drawn = draw(local, *args, **kwargs)
            return local.copy_(drawn) if neutral is None else local.fill_(neutral)

        return run

    return Strategy(
        [*shard_rows(range(call.inputs[0].ndim), 1, 1), *linear_rows(call, 1, ops=REDUCE_OPS)],
        localize=localize,
        any_lengths=True,
    )


@rule(*ops_named(FRESH))
def new_random(call: OpCall) -> Strategy:
    """Returns a new tensor in the shape of the input, whose values are not read."""
    return Strategy(
        new_like(call).rows, localize=lambda placed: _draw_part(call, placed.inputs[0]), any_lengths=True
    )


@rule(aten.native_dropout.default)
def native_dropout(call: OpCall) -> Strategy:
    """(input) -> (output, mask). Linear in the input; the mask depends only on its shape."""
    p, train = call["p"], call["train"] is not False

    def localize(placed: PlacedSpecs) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        (spec,) = placed.inputs
        scale = 0.0 if p == 1 else 1 / (1 - p)

        def run(local: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
            if not train:
                return local.clone(), torch.ones_like(local, dtype=torch.bool)
            mask = random.draw_like(spec, local.device, lambda full: call.op(full.zero_(), p, True)[1])
            return local * mask * scale, mask

        return run

    rows = [
        *shard_rows(range(call.inputs[0].ndim), 1, 2),
        *(PlacementRow((Partial(op),), (Partial(op), REPLICATE)) for op in ("sum", "avg")),
    ]
    return Strategy(rows, localize=localize, any_lengths=True)
