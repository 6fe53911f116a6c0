"""Cases of random ops: the numbers of one device, seeded before each call."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op, flat, values

aten = torch.ops.aten
A4, U4 = ((4, 8, 2, 4),), ((3, 5, 2, 1),)


def _seeded(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        torch.manual_seed(7)
        return fn(*inputs)

    return run


def _fills(a: Any) -> Any:
    """In place, on a's placement."""
    how = {"uniform_": (-1, 2), "normal_": (1, 2), "exponential_": (0.5,), "geometric_": (0.3,)}
    how |= {"cauchy_": (), "log_normal_": (0, 0.5), "bernoulli_": (0.3,)}
    outs = [getattr(a.exp(), name)(*args) for name, args in how.items()]
    outs += [a.exp().random_() / 2**53, a.exp().random_(9), a.exp().random_(2, 9)]
    return flat([*outs, a.exp().t().normal_()])


def _fresh(a: Any) -> Any:
    """New tensors of a's shape, also of a transposed one."""
    functional = (aten.uniform, aten.normal_functional, aten.exponential, aten.cauchy, aten.log_normal)
    how = {"generator": torch.Generator().manual_seed(3)}
    outs = [op(t) for op in functional for t in (a, a.t())]
    outs += [aten.geometric(a, 0.3), aten.bernoulli.p(a, 0.3), aten.random(a) / 2**53, aten.random.to(a, 9)]
    outs += [getattr(aten.random, "from")(a, 2, 9), torch.rand_like(a), torch.randint_like(a, 9)]
    outs += [torch.randn_like(a.t(), dtype=torch.float32), torch.randint_like(a, 2, 9)]
    outs += [aten.rand_like.generator(a, **how), aten.randn_like.generator(a, **how)]
    outs += [aten.randint_like.generator(a, 9, **how)]
    return flat([*outs, aten.randint_like.low_generator_dtype(a, 2, 9, **how)])


def _native_dropout(a: Any) -> Any:
    drawn, mask = torch.native_dropout(a, 0.4, True)
    kept, ones = torch.native_dropout(a, 0.4, False)
    return drawn + mask + kept * ones + torch.native_dropout(a, 1.0, True)[0]


OPS: dict[str, Op] = {
    "fills": values(_seeded(_fills)),
    "fresh": values(_seeded(_fresh)),
    "native_dropout": Op(_seeded(_native_dropout)),
    "dropout": Op(_seeded(lambda a: F.dropout(a, 0.3))),
    "dropout_in_place": Op(_seeded(lambda a: F.dropout(a * 1, 0.3, inplace=True))),
    "dropout2d": Op(_seeded(lambda a: F.dropout2d(a, 0.3)), A4, U4),
    "alpha_dropout": Op(_seeded(lambda a: F.alpha_dropout(a, 0.3, training=True))),
    "feature_alpha_dropout": Op(_seeded(lambda a: F.feature_alpha_dropout(a, 0.3, training=True)), A4, U4),
}
