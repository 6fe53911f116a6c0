"""Cases of the products, of linear algebra in batches and of the Fourier transforms."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op, values

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
