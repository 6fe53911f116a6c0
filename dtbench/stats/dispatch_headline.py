"""The kinds of calls that the dispatch suite times, and the single ops that stand for them at the head of a report.

The head is the same few ops in every run, so that it does not follow from what else was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import median

from dtbench.suite.case import FLOOR, Param

# Op -> placements of its inputs: what a transformer's layers call forward, with nothing to communicate.
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
# A mean or median of fewer cases is that of the cases which happened to be measured.
FEWEST_CASES = 5

_MOVES = ("redistribute", "full_tensor", "distribute_tensor")
# Values of the param `pass`: a mean over all of them would hide that a call costs more once autograd records it.
_PASSES: dict[Param | None, str] = {
    "forward+requires_grad": " on tensors that require gradients",
    "forward+backward": " with their backward",
}
_MANY_OPS = re.compile(r".*_x\d+|tp_mlp")


def is_headline(name: str, params: Mapping[str, Param]) -> bool:
    """Whether the case is one of `SINGLE_OPS`, as they are measured for the head."""
    return (
        SINGLE_OPS.get(name, "-") == params.get("placements") and SINGLE_OP_PARAMS.items() <= params.items()
    )


def kind_of(name: str, params: Mapping[str, Param]) -> str:
    """What a call of the suite is: one op, several, or none; means go over one kind alone."""
    if params.get("call") in ("first", "busy"):
        return "first calls" if params["call"] == "first" else "calls while the GPU is at earlier work"
    if name in _MOVES:
        source, _, target = str(params.get("placements")).partition("->")
        return "redistributions to the same placement" if source == target else "redistributions"
    if _MANY_OPS.fullmatch(name):
        return "optimizer steps, clipping and other calls of many ops"
    return f"single ops{_PASSES.get(params.get('pass'), '')}"


def added_times(
    cases: Iterable[tuple[str, Mapping[str, Param], Mapping[str, float]]],
) -> tuple[dict[str, float], list[str]]:
    """What torch, then the core, adds to a single op: impl -> seconds beyond the floor, the median over ops, and these;
    nothing where there are fewer than `FEWEST_CASES`. cases: name, params and seconds by impl."""
    ops = {name: times for name, params, times in cases if FLOOR in times and is_headline(name, params)}
    added = {i: [of[i] - of[FLOOR] for of in ops.values() if i in of] for i in ("torch", "core")}
    return {i: median(of) for i, of in added.items() if len(of) >= FEWEST_CASES}, list(ops)
