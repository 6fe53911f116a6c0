"""Linear algebra on batches of matrices: the leading dims may be sharded, the matrices are whole.

Left to replication are the ops that refuse values, such as a matrix that is not positive definite or holds
NaN (cholesky, svd, eigh, eig, lstsq, lu_unpack): a rank with such a matrix would raise alone and leave the
others waiting. The `_ex` forms report in a tensor instead, and linalg's wrappers then check that tensor
whole, on all ranks alike.
"""

from __future__ import annotations

from dtbench_core.rules.base import OpCall, Row, Strategy, aten, rule
from dtbench_core.rules.labels import batch_rows


@rule(aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten.linalg_lu_factor_ex.default)
@rule(aten.linalg_ldl_factor_ex.default, aten._linalg_solve_ex.default)
def reporting(call: OpCall) -> Strategy:
    """Ops that report in `info` which matrices they could not treat, unless they are told to raise."""
    return Strategy([] if call["check_errors"] else _batch(call))


@rule(aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_lu.default)
@rule(aten.linalg_lu_solve.default, aten.linalg_qr.default, aten.linalg_matrix_exp.default)
@rule(aten.linalg_householder_product.default, aten.linalg_solve_triangular.default)
@rule(aten.linalg_ldl_solve.default, aten.ormqr.default)
@rule(aten.triangular_solve.default, aten.cholesky_inverse.default, aten.cholesky_solve.default)
def batched(call: OpCall) -> Strategy:
    return Strategy(_batch(call))


@rule(aten._linalg_check_errors.default)
def verdict(call: OpCall) -> Strategy:
    """Raises on what `info` says: read whole, so that all ranks raise alike."""
    return Strategy([])


def _batch(call: OpCall) -> list[Row]:
    return batch_rows(call, max(spec.ndim for spec in call.inputs) - 2)
