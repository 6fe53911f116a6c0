"""Fourier transforms: dims that are not transformed may be sharded; linear."""

from __future__ import annotations

from dtbench_core.rules.base import OpCall, Strategy, along_others, aten, linear_rows, rule


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def transform(call: OpCall) -> Strategy:
    """Transforms of the dims in `dim`."""
    transformed = {d % call.inputs[0].ndim for d in call["dim"]}
    return Strategy([*along_others(call, transformed), *linear_rows(call, 1)])
