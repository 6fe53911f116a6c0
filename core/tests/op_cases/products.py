"""Cases of products, linear algebra in batches, Fourier transforms, and random ops (seeded before each call)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op, flat, values

aten = torch.ops.aten
# Batches of square matrices, and of right sides.
M, UM = ((4, 2, 2),), ((5, 3, 3),)
MR, UMR = ((4, 2, 2), (4, 2, 8)), ((5, 3, 3), (5, 3, 2))
C, UC = ((4, 8, 4),), ((3, 5, 2),)


def _regular(a: Any) -> Any:
    """Well conditioned: symmetric, positive."""
    return a @ a.mT + torch.diag_embed(torch.ones_like(a[..., 0]))


def _complex(a: Any) -> Any:
    return torch.view_as_complex(torch.stack([a, a * 0.5], -1))


def _real(a: Any) -> Any:
    return a.abs() + a.angle().cos()


def _int_mm(a: Any, b: Any) -> Any:
    return torch._int_mm((a * 3).to(torch.int8), (b * 3).to(torch.int8))


def _ldl(a: Any) -> Any:
    factors, pivots = torch.linalg.ldl_factor(_regular(a))
    return torch.linalg.ldl_solve(factors, pivots, a)


def _lu_solve(a: Any, b: Any) -> Any:
    factors, pivots = torch.linalg.lu_factor(_regular(a))
    return torch.linalg.lu_solve(factors, pivots, b)


def _reflected(a: Any) -> Any:
    factors, tau = torch.geqrf(a)
    return torch.linalg.householder_product(factors, tau) + torch.ormqr(factors, tau, a)


OPS: dict[str, Op] = {
    "addmm_in_place": values(lambda c, a: (c * 1).addmm_(a, a), ((4, 4), (4, 4)), ((3, 3), (3, 3))),
    "adds_in_place": values(
        lambda c, a, v: c.exp().addmv_(a, v) + v.exp().addmv_(a.t(), c),
        ((8,), (8, 8), (8,)),
        ((5,), (5, 5), (5,)),
    ),
    "batches_in_place": values(
        lambda c, a: (c * 1).baddbmm_(a, a) + c[0].exp().addbmm_(a, a).addr_(a[0, 0], a[0, 1]),
        ((4, 4, 4), (4, 4, 4)),
        ((5, 3, 3), (5, 3, 3)),
    ),
    "addbmm": Op(
        lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2),
        ((1, 8), (4, 4, 4), (4, 4, 8)),
        ((2, 2), (5, 2, 3), (5, 3, 2)),
    ),
    "addr": Op(lambda c, a, b: torch.addr(c, a, b, beta=2), ((8, 4), (8,), (4,)), ((5, 3), (5,), (3,))),
    "vdot": Op(torch.vdot, ((8,), (8,)), ((5,), (5,))),
    "vdot_complex": Op(lambda a, b: _real(torch.vdot(_complex(a), _complex(b))), ((8,), (8,)), ((5,), (5,))),
    "outer": Op(torch.outer, ((8,), (4,)), ((5,), (3,))),
    "int_mm": values(_int_mm, ((8, 4), (4, 8)), ((5, 3), (3, 2))),
    "einsum": Op(
        lambda a, b: torch.einsum("bij,bjk->bki", a, b), ((4, 2, 4), (4, 4, 2)), ((5, 2, 3), (5, 3, 2))
    ),
    "linear_1d": Op(F.linear, ((4,), (8, 4), (8,)), ((3,), (5, 3), (5,))),
    "bilinear": Op(F.bilinear, ((8, 4), (8, 2), (4, 4, 2), (4,)), ((5, 3), (5, 2), (3, 3, 2), (3,))),
    "inv": Op(lambda a: torch.linalg.inv(_regular(a)), M, UM),
    "det": Op(lambda a: torch.linalg.det(_regular(a)), M, UM),
    "slogdet": Op(lambda a: torch.linalg.slogdet(_regular(a)).logabsdet, M, UM),
    "solve": Op(lambda a, b: torch.linalg.solve(_regular(a), b), MR, UMR),
    "cholesky": Op(lambda a: torch.linalg.cholesky(_regular(a)), M, UM),
    "cholesky_solve": Op(lambda a, b: torch.cholesky_solve(b, _regular(a).tril()), MR, UMR),
    "cholesky_inverse": Op(lambda a: torch.cholesky_inverse(_regular(a).tril()), M, UM),
    "lu": Op(lambda a: sum(torch.linalg.lu(_regular(a))), M, UM),
    "lu_solve": Op(_lu_solve, MR, UMR),
    "ldl": values(_ldl, M, UM),
    "qr": Op(lambda a: sum(torch.linalg.qr(_regular(a))), M, UM),
    "reflections": values(_reflected, M, UM),
    "matrix_exp": Op(torch.linalg.matrix_exp, M, UM),
    "solve_triangular": Op(
        lambda a, b: torch.linalg.solve_triangular(_regular(a).triu(), b, upper=True), MR, UMR
    ),
    "triangular_solve": values(lambda a, b: torch.triangular_solve(b, _regular(a)).solution, MR, UMR),
    "svdvals": Op(torch.linalg.svdvals, M, UM),
    "fft": Op(lambda a: _real(torch.fft.fft(a, dim=1)), C, UC),
    "fft_complex": Op(lambda a: _real(torch.fft.ifft(_complex(a), dim=-1)), C, UC),
    "irfft": Op(lambda a: torch.fft.irfft(_complex(a), n=4, dim=0), C, UC),
    "rfft2": Op(lambda a: _real(torch.fft.rfft2(a)), C, UC),
}


# ---- random ops ----


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


OPS |= {
    "fills": values(_seeded(_fills)),
    "fresh": values(_seeded(_fresh)),
    "native_dropout": Op(_seeded(_native_dropout)),
    "dropout": Op(_seeded(lambda a: F.dropout(a, 0.3))),
    "dropout_in_place": Op(_seeded(lambda a: F.dropout(a * 1, 0.3, inplace=True))),
    "dropout2d": Op(_seeded(lambda a: F.dropout2d(a, 0.3)), A4, U4),
    "alpha_dropout": Op(_seeded(lambda a: F.alpha_dropout(a, 0.3, training=True))),
    "feature_alpha_dropout": Op(_seeded(lambda a: F.feature_alpha_dropout(a, 0.3, training=True)), A4, U4),
}
