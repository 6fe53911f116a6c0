"""Sharding rules, one file per family of ops. Importing the package registers all rules.

base        PlacementRow, Strategy, OpCall, and the tables of rules and decompositions
labels      rows from labelled dims, batch dims, broadcasting
choose      choice of one row per mesh dim
pointwise   elementwise ops, copies, casts, *_like
linear      products by einsum labels; the linear layer: entry, autograd, forward and backward op
reduce      sums, means, extrema; variances, norms and logsumexp over sharded dims
view        ops that split, join, move, cut or stack dims
batch       ops that need some dims unsharded: softmax, sorts, transforms, linear algebra
norm        layer norm, group norm, weight norm, distances
batch_norm  batch norm with statistics over all ranks' batch
index       lookups and writes by index
attention   scaled dot-product attention
conv        convolutions
pool        pooling, resizing, padding, sampling
loss        losses, reduced over all ranks' elements
cross_entropy  cross entropy over sharded classes: entry, autograd, its four ops
compare     ops that return a Python value; tangents of forward AD
foreach     lists of tensors, fused optimizer steps, loss scaling
random      fills, *_like and dropout with random numbers
register    rules of users
"""

import importlib
import pkgutil

from torch._ops import OpOverload

from dtbench_core.rules import pointwise
from dtbench_core.rules.base import Rule, decompositions, rules_by_op
from dtbench_core.rules.choose import choose_rows

__all__ = ["choose_rows", "decompositions", "find_rule", "pointwise"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)


def find_rule(op: OpOverload) -> Rule | None:
    """Returns the rule of `op`: its own, otherwise the pointwise rule if torch tags it so, otherwise None."""
    own_rule = rules_by_op.get(op)
    return own_rule if own_rule is not None or not pointwise.is_pointwise(op) else pointwise.pointwise
