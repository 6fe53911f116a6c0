"""One op in one mode: run on four simulated ranks, compared with the plain op on full tensors.

A case is a sample, a placement of each of its tensors, a mode and a library. Compared are, on every rank, the number,
shape and dtype of the results, their values gathered by `full_tensor`, and (but in-place and with out=) the gradients
of the inputs for a fixed random cotangent. Strides and whether a result is a view are not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

import dtbench_core as core
from core.tests.coverage.samples import (
    RANKS,
    SEED,
    OpSample,
    Places,
    database,
    has_mode,
    places_of,
    samples_of,
    stepped,
)
from dtbench_core.simulate import ThreadWorld
from dtbench_core.simulate.threads import diverged

LIBRARIES: dict[str, Any] = {"core": core, "torch": torch_tensor}

# Worst first; an op has the worst of its cases. wrong: a value, shape, dtype or gradient differs; hang: a rank raised
# or diverged while others waited; error: every rank raised; no rule: to say that there is no sharding rule; random
# differs: other random numbers than the plain op's; refused: the core's PlacementError; n/a: nothing to compare.
VERDICTS = ("wrong", "hang", "error", "no rule", "random differs", "refused", "pass")

# Ops that return uninitialized memory: only shape and dtype can be compared.
_UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# The database lists them for the CPU; their kernels are compiled for a GPU when they are called.
_NEED_A_GPU = "jiterator_"

# float32 has 24 bits (6e-8). A reduction of up to some thousand terms in another order, and the cancellation in a
# formula of several steps, lose some of them: 1e-4 of the largest value of a result is allowed besides 1e-4 of the
# value itself, torch's own scale for float32 comparisons of op implementations (op_db's overrides lie between 1e-5 and
# 1e-3), and 1e-6 where the result is nought but for cancellation. Wrong placements are off by factors.
_RTOL, _ATOL = 1e-4, 1e-6
# Where a result depends on its inputs so strongly that float32 cannot say more (the gradient of a norm of nearly equal
# values), it may differ by some times what the plain op itself changes by when its inputs change in their last bits;
# never by more than 1e-3 of the largest value, or 1e-4.
_NUDGE, _NUDGE_FACTOR = 2.0**-22, 8.0
_MOST_RTOL, _MOST_ATOL = 1e-3, 1e-4


@dataclass
class OpOutcome:
    """The outcome of an op in a mode.

    Attributes:
        cases: number of cases per verdict.
        reasons: verdict -> the reason of its first case.
        fallbacks: number of calls that the core ran on replicated inputs.
    """

    cases: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    fallbacks: int = 0

    @classmethod
    def of(cls, verdict: str, reason: str) -> OpOutcome:
        return cls(Counter([verdict]), {verdict: reason})

    @property
    def verdict(self) -> str:
        return next((v for v in VERDICTS if self.cases[v]), "n/a")


def judge_op(world: ThreadWorld, impl: str, name: str, mode: str) -> OpOutcome:
    """Runs all cases of an op in a mode."""
    outcome = OpOutcome()
    if not has_mode(name, mode) or name.startswith(_NEED_A_GPU):
        return outcome
    before = sum(core.fallbacks().values())
    for index, sample in enumerate(samples_of(name, mode)):
        if (plain := _reference(name, mode, sample)) is None:
            continue
        for placed in places_of([*sample.values, *plain.outs], mode, f"{name} {index}"):
            verdict, reason = _judge_case(world, impl, name, mode, sample, placed, plain)
            outcome.cases[verdict] += 1
            outcome.reasons.setdefault(
                verdict, f"sample {index}, {' | '.join(map(','.join, placed))}: {reason}"
            )
    outcome.fallbacks = (sum(core.fallbacks().values()) - before) // RANKS
    return outcome


# ---- the plain op ----


@dataclass(frozen=True)
class OpReference:
    """The results of the plain op.

    Attributes:
        processed: the parts of the results that are determined.
        grads: per input; None if the op has no gradients to compare.
        nudged: `processed` for inputs that differ in their last bits.
        nudged_grads: `grads` for inputs that differ in their last bits.
        outs: empty tensors like the results, for out=.
    """

    raw: list[Any]
    processed: list[Any]
    grads: list[Any] | None
    nudged: list[Any]
    nudged_grads: list[Any]
    is_random: bool
    outs: list[torch.Tensor]


def _call(name: str, mode: str, sample: OpSample, tensors: Sequence[Any], outs: Sequence[Any]) -> Any:
    """Calls the op with these tensors instead of the sample's. They require grad like those, unless written to."""
    leaves = list(sample.leaves)
    for index, tensor, grad in zip(sample.tensors, tensors, sample.requires_grad, strict=True):
        leaves[index] = tensor if mode in ("inplace", "out") else tensor.requires_grad_(grad)
    first, args, kwargs = tree_unflatten(leaves, sample.tree)
    if outs:
        kwargs = {**kwargs, "out": outs[0] if len(outs) == 1 else tuple(outs)}
    torch.manual_seed(SEED)
    op = database()[name]
    return (op.inplace_variant if mode == "inplace" else op.op)(first, *args, **kwargs)


def _plain(name: str, mode: str, sample: OpSample, outs: Sequence[Any], copy: Any) -> tuple[Any, list[Any]]:
    """Runs the plain op on copies of the sample's tensors; returns (results, inputs)."""
    tensors = [copy(value) for value in sample.values]
    return _call(name, mode, sample, tensors, [out.clone() for out in outs]), tensors


def _nudge(value: torch.Tensor) -> torch.Tensor:
    """Returns the values with their last bits changed, some up and some down."""
    if not value.is_floating_point():
        return value.clone()
    up = torch.rand(value.shape, generator=torch.Generator().manual_seed(SEED)) > 0.5
    return value * torch.where(up, 1 + _NUDGE, 1 - _NUDGE)


def _reference(name: str, mode: str, sample: OpSample) -> OpReference | None:
    """Runs the plain op. Returns None if it raises or nothing can be compared."""
    outs: list[torch.Tensor] = []
    copy = stepped if mode == "from_local" else torch.clone
    try:
        if mode == "out":
            leaves = tree_flatten(_plain(name, "even", sample, (), torch.clone)[0])[0]
            if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                return None
            outs = [torch.empty_like(leaf.detach()) for leaf in leaves]
        result, inputs = _plain(name, mode, sample, outs, copy)
        with _other_seeds():
            again = tree_flatten(_plain(name, mode, sample, outs, copy)[0])[0]
        raw, processed = tree_flatten(result)[0], tree_flatten(sample.process(result))[0]
    except Exception:
        return None
    tensors = [leaf for leaf in raw if isinstance(leaf, torch.Tensor)]
    if any(t.layout is not torch.strided for t in tensors) or not (
        tensors or any(isinstance(leaf, bool | int | float | complex) for leaf in raw)
    ):
        return None
    grads: list[Any] | None = None
    nudged: tuple[list[Any], list[Any]] = [], []
    with contextlib.suppress(Exception):  # some ops have no gradient
        grads = _gradients(processed, inputs)
    with contextlib.suppress(Exception):  # or take no other values
        result, inputs = _plain(name, mode, sample, outs, _nudge)
        other = tree_flatten(sample.process(result))[0]
        nudged = other, (_gradients(other, inputs) or []) if grads is not None else []
    is_random = name not in _UNINITIALISED and any(map(difference, raw, again))
    raw, processed = (
        [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaves in (raw, processed)
    )
    return OpReference(raw, processed, grads, *nudged, is_random, outs)


@contextlib.contextmanager
def _other_seeds() -> Iterator[None]:
    """Lets `torch.manual_seed` set a different seed, because some ops of the database seed by themselves."""
    original = torch.manual_seed
    torch.manual_seed = lambda seed: original(seed + 1)
    try:
        yield
    finally:
        torch.manual_seed = original


def _gradients(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any] | None:
    """Returns the gradient of each input that requires grad, for fixed random cotangents; None if there is none."""
    tensors = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    if not tensors or not wanted:
        return None
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]
    grads = torch.autograd.grad(tensors, wanted, cotangents, allow_unused=True)
    return [
        torch.zeros(i.shape, dtype=i.dtype) if g is None else g for i, g in zip(wanted, grads, strict=True)
    ]


# ---- comparing ----


def difference(got: Any, wanted: Any, nudged: Any = None, values: bool = True) -> str:
    """Returns how a result differs, or "". NaN equals NaN. `nudged`: the result for nudged inputs; see _NUDGE."""
    if isinstance(got, torch.Tensor) != isinstance(wanted, torch.Tensor):
        return f"got a {type(got).__name__}, expected a {type(wanted).__name__}"
    if not isinstance(wanted, torch.Tensor):
        same = got == wanted or (got != got and wanted != wanted)
        return "" if same else f"got {got!r}, expected {wanted!r}"
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"got {got.dtype} of {list(got.shape)}, expected {wanted.dtype} of {list(wanted.shape)}"
    got, wanted = got.detach(), wanted.detach()
    if got.dtype is torch.complex32:  # which few ops take, comparisons not among them
        got, wanted = got.to(torch.complex64), wanted.to(torch.complex64)
    if not values or got.numel() == 0 or torch.equal(got, wanted):
        return ""
    if not (got.is_floating_point() or got.is_complex()):
        return f"{int((got != wanted).sum())} of {got.numel()} elements differ"
    real = not got.is_complex()
    if not real:
        got, wanted = torch.view_as_real(got.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    close = torch.isclose(got, wanted, rtol=_RTOL, atol=max(_RTOL * scale, _ATOL), equal_nan=True)
    if not close.all() and real and nudged is not None and nudged.shape == wanted.shape:
        change = float((nudged.detach() - wanted).abs().nan_to_num(0.0, 0.0, 0.0).max()) * _NUDGE_FACTOR
        most = min(change, max(_MOST_RTOL * scale, _MOST_ATOL))
        close |= torch.isclose(got, wanted, rtol=_RTOL, atol=most, equal_nan=True)
    if close.all():
        return ""
    worst = float((got - wanted).abs()[~close].nan_to_num(math.inf).max())
    return f"{int((~close).sum())} of {got.numel()} elements differ, by up to {worst:.3g} at a scale of {scale:.3g}"


def _first(
    what: str, got: Sequence[Any], wanted: Sequence[Any], nudged: Sequence[Any] = (), **how: Any
) -> str:
    """Returns the first difference."""
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if problem := difference(one, other, next(iter(nudged[index : index + 1]), None), **how):
            return f"{what} {index}: {problem}"
    return ""


# ---- the op on ranks ----

_of_thread = threading.local()  # .meshes of the rank


def _mesh(mode: str) -> DeviceMesh:
    grids: dict[str, Any] = {"mesh2x2": [[0, 1], [2, 3]], "order": [[3, 1], [0, 2]]}
    meshes: dict[str, DeviceMesh] = vars(_of_thread).setdefault("meshes", {})
    if mode not in meshes:
        meshes[mode] = DeviceMesh("cpu", torch.tensor(grids.get(mode, range(RANKS))))
    return meshes[mode]


def _distribute(library: Any, full: torch.Tensor, mesh: DeviceMesh, place: Sequence[str], mode: str) -> Any:
    """Returns this rank's DTensor of `full`, whose storage no other rank shares."""
    kinds = {"S": library.Shard, "P": library.Partial}
    arguments = [one[2:-1] for one in place]
    placements = [
        kinds[one[0]](int(a) if a.isdecimal() else a) if a else library.Replicate()
        for one, a in zip(place, arguments, strict=True)
    ]
    make = functools.partial(library.DTensor.from_local, run_check=False)
    if mode == "from_local":  # each shard is cut from the whole, with its gaps
        whole, dim = stepped(full.detach()), next((int(a) for a in arguments if a), None)
        local = whole
        if dim is not None:
            local = (*whole.chunk(RANKS, dim), *[whole.narrow(dim, 0, 0)] * RANKS)[dist.get_rank()]
        return make(stepped(local), mesh, placements, shape=full.shape, stride=whole.stride())
    full = full.detach().clone()
    if mode == "partial" and arguments[0]:
        return make(_part(full, arguments[0], dist.get_rank()), mesh, placements)
    return library.distribute_tensor(full, mesh, placements, src_data_rank=None)


def _part(full: torch.Tensor, op: str, rank: int) -> torch.Tensor:
    """Returns this rank's part of a Partial tensor. The parts differ; their reduction in order is exactly `full`."""
    if op == "max":
        return full if rank == 1 else full - 1.0 - rank
    # The high bits, the low bits, and twice what cancels. What has no double does not: rank 0 has it.
    high = full.bfloat16().to(full.dtype)
    part = (high, full - high, full, -full)[rank]
    doubles = full.abs() < torch.finfo(full.dtype).max / (4 * RANKS)
    part = torch.where(doubles, part, full if rank == 0 else torch.zeros_like(full))
    return part * RANKS if op == "avg" else part


def _on_rank(
    impl: str, name: str, mode: str, sample: OpSample, placed: Places, wanted: OpReference
) -> tuple[str, str]:
    """Returns ("", ""), or (verdict "wrong" or "random differs", reason) on this rank."""
    library, mesh = LIBRARIES[impl], _mesh(mode)

    def full(tensors: Sequence[Any]) -> list[Any]:
        return [t.full_tensor() if isinstance(t, library.DTensor) else t for t in tensors]

    values = [*sample.values, *wanted.outs]
    tensors = [_distribute(library, v, mesh, p, mode) for v, p in zip(values, placed, strict=True)]
    inputs, outs = tensors[: len(sample.values)], tensors[len(sample.values) :]
    leaves, tree = tree_flatten(_call(name, mode, sample, inputs, outs))
    results = full(leaves)
    if len(results) != len(wanted.raw):
        return "wrong", f"got {len(results)} results, expected {len(wanted.raw)}"
    problem = _first("result", results, wanted.raw, values=False)
    if problem or name in _UNINITIALISED:
        return ("wrong" if problem else ""), problem
    processed = tree_flatten(sample.process(tree_unflatten(results, tree)))[0]
    problem = _first("result", processed, wanted.processed, wanted.nudged)
    if not problem and mode in ("inplace", "out"):
        written = inputs[:1] if mode == "inplace" else outs
        problem = _first("what was written", full(written), wanted.raw[: len(written)])
    if problem:
        return ("random differs" if wanted.is_random else "wrong"), problem
    if wanted.grads is None:
        return "", ""
    grads = _gradients(processed, inputs)
    if grads is None or len(grads) != len(wanted.grads):
        return "wrong", "no result requires grad"
    problem = _first("gradient", full(grads), wanted.grads, wanted.nudged_grads)
    return ("wrong" if problem else ""), problem


def _judge_case(world: ThreadWorld, impl: str, *case: Any) -> tuple[str, str]:
    """Returns (verdict, reason). `case`: the arguments of `_on_rank`."""
    outcomes = world.outcomes(_on_rank, impl, *case)
    if (apart := diverged(outcomes)) is not None:
        # The libraries' state per rank and mesh may differ between ranks now, so start with new ranks.
        world.close()
        core.clear_caches()
        # A rank that sees a difference leaves at once, and the others wait for it: that is no hang.
        seen = next((o for o in outcomes if o.error is None and o.value[0]), None)
        if seen is not None and all(o.stopped or o.error is None for o in outcomes):
            return seen.value[0], f"{seen.value[1]} (on rank {seen.rank} alone)"
        return "hang", apart
    if (error := outcomes[0].error) is not None:
        no_rule = isinstance(error, NotImplementedError) or "sharding strategy" in str(error)
        refused = impl == "core" and isinstance(error, core.PlacementError)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return "no rule" if no_rule else "refused" if refused else "error", reason
    return next((outcome.value for outcome in outcomes if outcome.value[0]), ("pass", ""))
