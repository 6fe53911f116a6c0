"""Sharding rules, one file per family of ops; importing the package registers them all.

base      what a rule is (Row, Strategy, OpCall) and the table of rules
labels    rows from labels of dims, batch dims, broadcasting
choose    picks one row per mesh dim
pointwise elementwise ops, copies, casts, *_like
matmul    products with contracted dims, by einsum labels
reduce    sums, means, extrema, norms
view      dims split, joined, moved, cut, stacked
norm      softmax, layer norm, scans: one dim whole, the rest a batch
index     embedding, gather
attention scaled dot-product attention
conv      convolutions
loss      losses, reduced over all ranks' elements
compare   ops that answer with a Python value
random    fills, *_like, dropout: drawn for the whole tensor
"""

from torch._ops import OpOverload

from dtbench_core.rules import (
    attention,
    compare,
    conv,
    index,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    reduce,
    view,
)
from dtbench_core.rules.base import OpCall, Row, Rule, Strategy, decomposition_of, rule, rule_of
from dtbench_core.rules.choose import choose

__all__ = [
    "OpCall",
    "Row",
    "Rule",
    "Strategy",
    "attention",
    "choose",
    "compare",
    "conv",
    "decomposition_of",
    "find",
    "index",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "random",
    "reduce",
    "rule",
    "rule_of",
    "view",
]


def find(op: OpOverload) -> Rule | None:
    """The rule for `op`: its own, else the pointwise one where torch tags it so, else None."""
    own = rule_of(op)
    return own if own is not None or not pointwise.is_pointwise(op) else pointwise.pointwise
