"""Ops that need some dims unsharded and treat the others as a batch.

These are softmax, sorts, cumulative ops, flips, Fourier transforms, and linear algebra on batches of matrices.

Ops that reject values stay replicated, as for a matrix that is not positive definite or contains NaN (cholesky, svd,
eigh, eig, lstsq, lu_unpack). A rank with such a matrix would raise alone, and the other ranks would wait for it. The
`_ex` ops report errors in a tensor, which the wrappers in torch.linalg then check on all ranks. For cholesky_inverse,
the ranks exchange whether one of them must raise (dispatch/value_check.py).
"""

from __future__ import annotations

from dtbench_core.layout.placement import REDUCE_OPS
from dtbench_core.rules.base import (
    OpCall,
    Strategy,
    aten,
    linear_rows,
    ops_named,
    rule,
    shard_rows,
    shard_rows_except,
)
from dtbench_core.rules.labels import batch_rows

ALONG_ONE_DIM = """
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data
    cumprod cumprod_ logcumsumexp _logcumsumexp cummax cummin sort sort.stable topk
"""
REPORTING = """
    linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_solve_ex
"""
MATRICES = """
    _linalg_det _linalg_slogdet linalg_lu linalg_lu_solve linalg_qr linalg_matrix_exp linalg_householder_product
    linalg_solve_triangular linalg_ldl_solve ormqr triangular_solve cholesky_inverse cholesky_solve
"""


@rule(*ops_named(ALONG_ONE_DIM))
def along_one_dim(call: OpCall) -> Strategy:
    return Strategy(shard_rows_except(call, [call.dim()], len(call.inputs), len(call.outputs)))


@rule(aten.renorm.default, aten.renorm_.default)
def renorm(call: OpCall) -> Strategy:
    """Each slice along `dim` is scaled by its own norm."""
    return Strategy(shard_rows([call.dim()], 1, 1))


@rule(aten.cumsum.default, aten.cumsum_.default)
def cumsum(call: OpCall) -> Strategy:
    """Linear, unless floating-point terms are summed in integers, which truncates each term."""
    source, meta = call.inputs[0].dtype, call.outputs[0]
    truncates = source.is_floating_point and meta is not None and not meta.dtype.is_floating_point
    return Strategy([*shard_rows_except(call, [call.dim()]), *([] if truncates else linear_rows(call, 1))])


@rule(aten.flip.default)
def flip(call: OpCall) -> Strategy:
    return Strategy(
        [
            *shard_rows_except(call, [d % max(call.inputs[0].ndim, 1) for d in call["dims"]]),
            *linear_rows(call, 1, ops=REDUCE_OPS),
        ]
    )


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fourier(call: OpCall) -> Strategy:
    return Strategy(
        [*shard_rows_except(call, {d % call.inputs[0].ndim for d in call["dim"]}), *linear_rows(call, 1)]
    )


@rule(*ops_named(REPORTING + MATRICES))
def matrices(call: OpCall) -> Strategy:
    """`_ex` ops report in `info` the matrices for which they failed, unless they are asked to raise."""
    raises = call.arguments().get("check_errors")
    return Strategy([] if raises else batch_rows(call, max(spec.ndim for spec in call.inputs) - 2))
