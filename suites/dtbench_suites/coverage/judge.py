"""One case of an op: run on four simulated ranks, compared with the plain op on full tensors.

A case is a sample, a placement of each of its tensors, a mode and an implementation. What is compared,
on every rank: the number, shape and dtype of the results, their values gathered by `full_tensor`, and
(but in-place and with out=) the gradients of the inputs for a fixed random cotangent that enters through
`full_tensor`. Strides and whether a result is a view are not.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

import dtbench_core as core
from dtbench.records.verdicts import NOT_JUDGED
from dtbench_core.simulate import ThreadWorld
from dtbench_core.simulate.threads import diverged
from dtbench_suites.coverage.samples import (
    SEED,
    Sample,
    database,
    has_mode,
    places_of,
    samples_of,
    stepped,
)
from dtbench_suites.coverage.verdicts import RANKS, Case, Job, Places
from dtbench_suites.data import placement

LIBRARIES: dict[str, Any] = {"core": core, "torch": torch_tensor}

# What they return is whatever lay in memory: shape and dtype are all there is to compare.
UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)

# The database lists them for the CPU; their kernels are compiled for a GPU when they are called.
NEED_A_GPU = "jiterator_"

# float32 has 24 bits (6e-8). A reduction of up to some thousand terms in another order, and the
# cancellation in a formula of several steps, lose some of them: 1e-4 of the largest value of a result
# is allowed besides 1e-4 of the value itself, which is torch's own scale for float32 comparisons of
# op implementations (op_db's overrides lie between 1e-5 and 1e-3), and 1e-6 where the result is nought
# but for cancellation (torch.testing allows 1e-5). Wrong placements are off by factors.
_RTOL, _ATOL = 1e-4, 1e-6

# Where a result depends on its inputs so strongly that float32 cannot say more (the gradient of a norm of
# nearly equal values), it may differ by some times what the plain op itself changes by when its inputs
# change in their last bits; never by more than 1e-3 of the largest value, or 1e-4.
_NUDGE, _NUDGE_FACTOR = 2.0**-22, 8.0
_MOST_RTOL, _MOST_ATOL = 1e-3, 1e-4


# ---- the plain op ----


@dataclass(frozen=True)
class Reference:
    """What the plain op gives. grads: per input, or None where the op has none to compare.

    gradient_raises: why there are none to compare although there should be.
    """

    raw: list[Any]  # the results themselves
    processed: list[Any]  # what of them is determined
    grads: list[torch.Tensor | None] | None
    is_random: bool
    outs: list[torch.Tensor]  # for out=: empty tensors like the results
    # processed and grads for inputs that differ in their last bits, made when it is needed.
    nudged: Callable[[], tuple[list[Any], list[torch.Tensor | None]]]
    gradient_raises: str = ""


class NotJudgedError(Exception):
    """The plain op raised: there is nothing to judge by."""


def _call(name: str, mode: str, sample: Sample, tensors: Sequence[Any], outs: Sequence[Any]) -> Any:
    """The op on these tensors in the place of the sample's."""
    leaves = list(sample.leaves)
    for index, tensor in zip(sample.tensors, tensors, strict=True):
        leaves[index] = tensor
    first, args, kwargs = tree_unflatten(leaves, sample.tree)
    op = database()[name]
    if outs:
        kwargs = {**kwargs, "out": outs[0] if len(outs) == 1 else tuple(outs)}
    torch.manual_seed(SEED)
    return (op.inplace_variant if mode == "inplace" else op.op)(first, *args, **kwargs)


def _differentiates(mode: str) -> bool:
    return mode not in ("inplace", "out")


def _plain(
    name: str, mode: str, sample: Sample, outs: Sequence[torch.Tensor], nudged: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """(results, inputs) of the plain op on copies of the sample's tensors."""
    tensors = [_nudged(value) if nudged else _copy(value, mode) for value in sample.values]
    if _differentiates(mode):
        for tensor, wanted in zip(tensors, sample.requires_grad, strict=True):
            tensor.requires_grad_(wanted)
    return _call(name, mode, sample, tensors, [out.clone() for out in outs]), tensors


def _copy(value: torch.Tensor, mode: str) -> torch.Tensor:
    return stepped(value) if mode == "from_local" else value.clone()


def _nudged(value: torch.Tensor) -> torch.Tensor:
    """The values changed in their last bits, some up and some down."""
    if not value.is_floating_point():
        return value.clone()
    up = torch.rand(value.shape, generator=torch.Generator().manual_seed(SEED)) > 0.5
    return value * torch.where(up, 1 + _NUDGE, 1 - _NUDGE)


def reference(name: str, mode: str, sample: Sample) -> Reference | None:
    """What the plain op gives, or None where that is nothing that could be compared.

    Raises:
        NotJudgedError: it raises, with these arguments or in the sizes and copies that the judge gives it.
    """
    outs: list[torch.Tensor] = []
    try:
        if mode == "out":
            functional, _ = _plain(name, "even", sample, ())
            leaves = tree_flatten(functional)[0]
            if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                return None
            outs = [torch.empty_like(leaf.detach()) for leaf in leaves]
        result, inputs = _plain(name, mode, sample, outs)
        with _other_seeds():
            again, _ = _plain(name, mode, sample, outs)
        raw = tree_flatten(result)[0]
        processed = tree_flatten(sample.process(result))[0]
    except Exception as error:
        raise NotJudgedError(f"the plain op raises {_brief(error)}") from error
    if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in raw):
        return None
    if not any(isinstance(leaf, torch.Tensor | bool | int | float | complex) for leaf in raw):
        return None
    random = name not in UNINITIALISED and any(
        difference(a, b) for a, b in zip(raw, tree_flatten(again)[0], strict=True)
    )
    grads, gradient_raises = None, ""
    if _differentiates(mode):
        try:
            grads = gradients(processed, inputs)
        except Exception as error:
            gradient_raises = f"the plain gradient raises {_brief(error)}"

    @functools.cache
    def nudged() -> tuple[list[Any], list[torch.Tensor | None]]:
        try:
            result, inputs = _plain(name, mode, sample, outs, nudged=True)
            processed = tree_flatten(sample.process(result))[0]
            return processed, (gradients(processed, inputs) or []) if grads is not None else []
        except Exception:
            return [], []

    return Reference(_detached(raw), _detached(processed), grads, random, outs, nudged, gradient_raises)


def _detached(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@contextlib.contextmanager
def _other_seeds() -> Iterator[None]:
    """Inside, `torch.manual_seed` sets another seed: some ops of the database set one themselves."""
    original = torch.manual_seed
    torch.manual_seed = lambda seed: original(seed + 1)
    try:
        yield
    finally:
        torch.manual_seed = original


def gradients(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any] | None:
    """Per input that requires grad, the gradient (or None) for fixed random cotangents; None without any."""
    tensors = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    if not tensors or not wanted:
        return None
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]
    return list(torch.autograd.grad(tensors, wanted, cotangents, allow_unused=True))


# ---- comparing ----


def layout_difference(got: Any, wanted: Any) -> str:
    """What is different about a result, but for a tensor's values, or ""."""
    if not isinstance(wanted, torch.Tensor):
        if isinstance(got, torch.Tensor):
            return f"got a tensor, expected {type(wanted).__name__}"
        same = got == wanted or (isinstance(wanted, float) and math.isnan(wanted) and math.isnan(got))
        return "" if same else f"got {got!r}, expected {wanted!r}"
    if not isinstance(got, torch.Tensor):
        return f"got {type(got).__name__}, expected a tensor"
    if got.shape != wanted.shape:
        return f"got shape {list(got.shape)}, expected {list(wanted.shape)}"
    return "" if got.dtype == wanted.dtype else f"got {got.dtype}, expected {wanted.dtype}"


def difference(got: Any, wanted: Any, nudged: Callable[[], Any] = lambda: None) -> str:
    """What is different about a result, or "". NaN equals NaN. `nudged`: see _NUDGE."""
    problem = layout_difference(got, wanted)
    if problem or not isinstance(wanted, torch.Tensor):
        return problem
    got, wanted = got.detach(), wanted.detach()
    if got.dtype is torch.complex32:  # which few ops take, comparisons not among them
        got, wanted = got.to(torch.complex64), wanted.to(torch.complex64)
    if got.numel() == 0 or torch.equal(got, wanted):
        return ""
    if not (got.is_floating_point() or got.is_complex()):
        return f"{int((got != wanted).sum())} of {got.numel()} elements differ"
    real = not got.is_complex()
    if not real:
        got, wanted = torch.view_as_real(got.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    close = torch.isclose(got, wanted, rtol=_RTOL, atol=max(_RTOL * scale, _ATOL), equal_nan=True)
    if bool(close.all()):
        return ""
    if real and (other := nudged()) is not None and other.shape == wanted.shape:
        change = float((other.detach() - wanted).abs().nan_to_num(0.0, 0.0, 0.0).max()) * _NUDGE_FACTOR
        most = max(_MOST_RTOL * scale, _MOST_ATOL)
        close |= torch.isclose(got, wanted, rtol=_RTOL, atol=min(change, most), equal_nan=True)
        if bool(close.all()):
            return ""
    bad = ~close
    worst = (got - wanted).abs()[bad].nan_to_num(math.inf).max()
    return f"{int(bad.sum())} of {got.numel()} elements differ, by up to {float(worst):.3g} at a scale of {scale:.3g}"


# ---- the op on ranks ----

_of_thread = threading.local()  # .meshes of the rank


def _mesh(mode: str) -> DeviceMesh:
    grids = {"mesh2x2": [[0, 1], [2, 3]], "order": [[3, 1], [0, 2]]}
    ranks = torch.tensor(grids[mode]) if mode in grids else torch.arange(RANKS)
    name = str(ranks.tolist())
    meshes: dict[str, DeviceMesh] = getattr(_of_thread, "meshes", None) or {}
    if name not in meshes:
        meshes[name] = DeviceMesh("cpu", ranks)
        _of_thread.meshes = meshes
    return meshes[name]


def _distribute(library: Any, full: torch.Tensor, mesh: DeviceMesh, places: Sequence[str], mode: str) -> Any:
    """A rank's DTensor of `full`, whose storage no other rank sees."""
    placements = [placement(library, place) for place in places]
    if mode == "from_local":
        # What lies elsewhere does not matter: a shard is cut from the whole, with its gaps.
        whole, dim = stepped(full.detach()), next((int(p[2:-1]) for p in places if p.startswith("S")), None)
        local = (
            whole
            if dim is None
            else (*whole.chunk(RANKS, dim), *[whole.narrow(dim, 0, 0)] * RANKS)[dist.get_rank()]
        )
        return library.DTensor.from_local(
            stepped(local), mesh, placements, run_check=False, shape=full.shape, stride=whole.stride()
        )
    full = full.detach().clone()
    if places[0].startswith("P"):
        local = _part(full, places[0][2:-1], dist.get_rank())
        return library.DTensor.from_local(local, mesh, placements, run_check=False)
    return library.distribute_tensor(full, mesh, placements, src_data_rank=None)


def _part(full: torch.Tensor, op: str, rank: int) -> torch.Tensor:
    """This rank's part of a Partial tensor. The parts differ, and reduced in order give `full` exactly."""
    if op == "max":
        return full if rank == 1 else full - 1.0 - rank
    # The high bits, the low bits, and twice what cancels. What has no double does not: rank 0 has it.
    high = full.bfloat16().to(full.dtype)
    part = (high, full - high, full, -full)[rank]
    doubles = full.abs() < torch.finfo(full.dtype).max / (4 * RANKS)
    part = torch.where(doubles, part, full if rank == 0 else torch.zeros_like(full))
    return part * RANKS if op == "avg" else part


def _on_rank(
    library: Any, name: str, mode: str, sample: Sample, places: Places, wanted: Reference, stages: list[str]
) -> tuple[str, str]:
    """("", "") or (what is wrong: "wrong" or "random differs", the reason), as this rank sees it."""
    mesh, rank = _mesh(mode), dist.get_rank()
    given = [*sample.values, *wanted.outs]
    tensors = [_distribute(library, v, mesh, p, mode) for v, p in zip(given, places, strict=True)]
    inputs, outs = tensors[: len(sample.values)], tensors[len(sample.values) :]
    if _differentiates(mode):
        for tensor, requires_grad in zip(inputs, sample.requires_grad, strict=True):
            tensor.requires_grad_(requires_grad)
    leaves, tree = tree_flatten(_call(name, mode, sample, inputs, outs))
    full = [leaf.full_tensor() if isinstance(leaf, library.DTensor) else leaf for leaf in leaves]
    if len(full) != len(wanted.raw):
        return "wrong", f"got {len(full)} results, expected {len(wanted.raw)}"
    problem = _first(layout_difference, full, wanted.raw, "result")
    if problem or name in UNINITIALISED:
        return ("wrong" if problem else ""), problem
    processed = tree_flatten(sample.process(tree_unflatten(full, tree)))[0]
    problem = _first(difference, processed, wanted.processed, "result", lambda: wanted.nudged()[0])
    if not problem and mode == "inplace":
        problem = _first(difference, [inputs[0].full_tensor()], wanted.raw[:1], "the written tensor, result")
    if not problem and mode == "out":
        problem = _first(difference, [out.full_tensor() for out in outs], wanted.raw, "out")
    if problem:
        return ("random differs" if wanted.is_random else "wrong"), problem
    if wanted.grads is None:
        return "", ""
    stages[rank] = "backward"
    found = gradients(processed, inputs)
    if found is None or len(found) != len(wanted.grads):
        return "wrong", "no result requires grad"
    grads = [g.full_tensor() if isinstance(g, library.DTensor) else g for g in found]
    what = "the gradient of input"
    problem = _first(_grad_difference, grads, wanted.grads, what, lambda: wanted.nudged()[1])
    return ("wrong" if problem else ""), problem


def _first(
    compare: Callable[..., str],
    got: Sequence[Any],
    wanted: Sequence[Any],
    what: str,
    nudged: Callable[[], Sequence[Any]] | None = None,
) -> str:
    """The first difference. nudged: what the plain op gives for nudged inputs, as far as it gives something."""
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        near = () if nudged is None else (lambda i=index: next(iter(nudged()[i : i + 1]), None),)
        if problem := compare(one, other, *near):
            return f"{what} {index}: {problem}"
    return ""


def _grad_difference(got: Any, wanted: torch.Tensor | None, nudged: Callable[[], Any]) -> str:
    if wanted is None:  # an input that does not matter has no gradient, or zeros
        return "" if got is None or not bool(got.any()) else "got a gradient, expected none"
    if got is None:
        return "got no gradient" if bool(wanted.any()) else ""
    return difference(got, wanted, nudged)


# ---- verdicts ----

Verdict = tuple[str, str, str]  # the verdict, the stage, the reason


def _verdict_of_error(error: BaseException, impl: str) -> str:
    """What an error says that every rank raised."""
    text = str(error)
    if isinstance(error, NotImplementedError) or "sharding strategy" in text:
        return "no rule"
    if impl == "core" and isinstance(error, core.PlacementError):
        return "refused"
    return "error"


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def judge_case(world: ThreadWorld, job: Job, sample: Sample, places: Places, wanted: Reference) -> Verdict:
    """What comes of one case."""
    stages = ["forward"] * RANKS  # where each rank was when it ended
    library = LIBRARIES[job.impl]
    outcomes = world.outcomes(_on_rank, library, job.op, job.mode, sample, places, wanted, stages)
    apart = diverged(outcomes)
    if apart is not None:
        world.close()  # what the libraries keep per rank and mesh may have gone apart too: start afresh
        # A rank that sees a difference leaves at once, and the others wait for it: that is no hang.
        seen = next((o for o in outcomes if o.error is None and o.value[0]), None)
        if seen is not None and all(o.stopped or o.error is None for o in outcomes):
            return seen.value[0], stages[seen.rank], f"{seen.value[1]} (on rank {seen.rank} alone)"
        own = next((o for o in outcomes if o.error is not None and not o.stopped), outcomes[0])
        return "hang", stages[own.rank], apart
    error = outcomes[0].error
    if error is not None:
        return _verdict_of_error(error, job.impl), stages[0], _brief(error)
    for outcome in outcomes:
        verdict, reason = outcome.value
        if verdict:
            return verdict, stages[outcome.rank], f"{reason} (rank {outcome.rank})"
    return "pass", "", ""


def judge_op(world: ThreadWorld, job: Job) -> Iterator[Case]:
    """The cases of an op, one after the other; none where nothing can be compared.

    Gradients are compared where the plain op has them, in the modes but in-place and out. A sample whose plain op or
    gradient raises is a case that is not judged, of the gradient beside those of its values.
    """
    name, mode, caps = job.op, job.mode, job.caps
    if not has_mode(name, mode) or name.startswith(NEED_A_GPU):
        return
    core.clear_caches()
    samples, ended = samples_of(name, mode, caps.samples)
    if ended:
        yield Case(len(samples), (), NOT_JUDGED, "", f"the samples end with {ended}")
    for index, sample in enumerate(samples):
        try:
            wanted = reference(name, mode, sample)
        except NotJudgedError as error:
            yield Case(index, (), NOT_JUDGED, "", str(error))
            continue
        if wanted is None:
            continue
        if wanted.gradient_raises:
            yield Case(index, (), NOT_JUDGED, "backward", wanted.gradient_raises)
        for places in places_of([*sample.values, *wanted.outs], mode, caps.places, f"{name} {index}"):
            yield Case(index, places, *judge_case(world, job, sample, places, wanted))


@contextlib.contextmanager
def judging() -> Iterator[Callable[[Job], Iterator[Case | int]]]:
    """What a worker does: the cases of a job, then how many calls the core ran by fallback in them."""
    quiet()
    database()
    with ThreadWorld(RANKS) as world:

        def judge(job: Job) -> Iterator[Case | int]:
            before = _count_fallbacks()
            yield from judge_op(world, job)
            yield _count_fallbacks() - before

        yield judge


def _count_fallbacks() -> int:
    """Calls that the core has run on replicated inputs so far, per rank."""
    return sum(core.fallbacks().values()) // RANKS


def quiet() -> None:
    """No warnings from here on: thousands of calls would repeat the libraries' own."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
