"""Sharding rules, one file per family of ops; importing the package registers them all.

base      what a rule is (PlacementRow, Strategy, OpCall) and the table of rules
labels    rows from labels of dims, batch dims, broadcasting
choose    picks one row per mesh dim
pointwise elementwise ops, copies, casts, *_like
linear    products, by einsum labels; the linear layer: entry, autograd, its ops forward and backward
reduce    sums, means, extrema
moments   variances, norms, logsumexp over sharded dims
view      dims split, joined, moved, cut, stacked
batch     softmax, sorts, transforms, batches of matrices: some dims whole, the rest a batch
norm      layer norm, group norm, weight norm, distances
batch_norm batch norm, over all ranks' batch
index     embedding, gather
attention scaled dot-product attention
conv      convolutions
pool      pooling, resizing, padding, sampling of planes
loss      losses, reduced over all ranks' elements
cross_entropy cross entropy over sharded classes: entry, autograd, its four ops
compare   ops that answer with a Python value
foreach   lists of tensors, fused optimizer steps, loss scaling
random    fills, *_like, dropout: drawn for the whole tensor
forward_ad  tangents
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
    """The rule for `op`: its own, else the pointwise one where torch tags it so, else None."""
    own = rules_by_op.get(op)
    return own if own is not None or not pointwise.is_pointwise(op) else pointwise.pointwise
