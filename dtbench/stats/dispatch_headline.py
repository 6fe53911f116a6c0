"""Kinds of calls in the dispatch suite, and the ops that summarize the suite at the top of a report.

The summary uses the same ops in every run, so that it does not depend on which other cases were measured.
"""

import re
from collections.abc import Iterable, Mapping
from statistics import median

from dtbench.suite.case import FLOOR, Param

# Op -> placements of its inputs. These are ops of a transformer's forward pass, with placements that need no
# communication.
SINGLE_OPS = {
    "add": "S(0),S(0)",
    "mul_scalar": "S(0)",
    "relu": "S(0)",
    "mm": "R,S(1)",
    "addmm": "R,S(0),R",
    "linear_3d": "S(0),R,R",
    "softmax": "S(0)",
    "layer_norm": "S(0),R,R",
    "cat": "S(0),S(0)",
    "sum_dim0": "S(0)",
    "view": "S(0)",
    "transpose": "S(0)",
}
SINGLE_OP_PARAMS = {"mesh": "8", "pass": "forward", "call": "cached"}
# With fewer cases, a mean or median depends too much on which cases were measured.
FEWEST_CASES = 5

# Prefix of the cases that pytorch's own benchmarks measure under the same names: benchmarks/dynamo/pr_time_benchmarks.
PYTORCH_CASES = "dtensor_dispatch_"
_MOVES = ("redistribute", "full_tensor", "distribute_tensor")
# Value of the param `pass` -> suffix of the kind. Kinds differ by pass, since a call costs more once autograd records
# it.
_PASSES: dict[Param | None, str] = {
    "forward+requires_grad": " on tensors that require gradients",
    "forward+backward": " with their backward",
}
# Value of the param `call` -> kind. Other calls are cached.
_CALLS: dict[Param | None, str] = {
    "first": "first calls",
    "second": "second calls",
    "busy": "calls while the GPU is at earlier work",
    "repeated": "optimizer steps in a row",
}
_MANY_OPS = re.compile(r".*_x\d+|tp_mlp")


def is_headline(name: str, params: Mapping[str, Param]) -> bool:
    """Whether the case is one of the ops that summarize the suite."""
    return (
        SINGLE_OPS.get(name, "-") == params.get("placements") and SINGLE_OP_PARAMS.items() <= params.items()
    )


def is_cached(params: Mapping[str, Param]) -> bool:
    """Whether the calls reuse the decision of an earlier call, on an idle device."""
    return params.get("call") not in _CALLS


def kind_of(name: str, params: Mapping[str, Param]) -> str:
    """Returns the kind of a case, in words. Means are taken over cases of one kind only."""
    if (kind := _CALLS.get(params.get("call"))) is not None:
        return kind
    if name.startswith(PYTORCH_CASES):
        return "calls of pytorch's own DTensor benchmarks"
    if name in _MOVES:
        source, _, target = str(params.get("placements")).partition("->")
        return "redistributions to the same placement" if source == target else "redistributions"
    if _MANY_OPS.fullmatch(name):
        return "optimizer steps, clipping and other calls of many ops"
    return f"single ops{_PASSES.get(params.get('pass'), '')}"


def added_times(
    cases: Iterable[tuple[str, Mapping[str, Param], Mapping[str, float]]],
) -> tuple[dict[str, float], list[str]]:
    """Computes the time that each implementation adds to a single op of plain torch.

    Args:
        cases: name, params and seconds by implementation.

    Returns:
        ("torch" or "core" -> median over the ops of the added seconds, the ops). An implementation with fewer than
        `FEWEST_CASES` ops is left out.
    """
    ops = {name: times for name, params, times in cases if FLOOR in times and is_headline(name, params)}
    added = {
        impl: [times[impl] - times[FLOOR] for times in ops.values() if impl in times]
        for impl in ("torch", "core")
    }
    return {impl: median(times) for impl, times in added.items() if len(times) >= FEWEST_CASES}, list(ops)
