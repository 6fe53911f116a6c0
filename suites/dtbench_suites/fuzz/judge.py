"""A program's text on four ranks against plain tensors: eager on threads, with compiled parts on forked processes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import dtbench_core as core
from dtbench.records.verdicts import NOT_JUDGED
from dtbench_core.errors import SimulationError
from dtbench_core.simulate import ThreadWorld
from dtbench_core.simulate.threads import diverged
from dtbench_suites.compat import judge as compat
from dtbench_suites.compat.program import AnyTensor, Entry, Given
from dtbench_suites.coverage.judge import difference, quiet
from dtbench_suites.coverage.verdicts import RANKS, Case, Job
from dtbench_suites.data import placement

# A Job's mode is "eager", or the backend of torch.compile.
EAGER = "eager"
# What torch.compile says of unsqueeze_ and the like of any tensor.
_NO_GRAPH = "Getting an inplace view on a graph input is not supported"
_of_thread = threading.local()  # .meshes of the rank


def names(given: Given, leaves: list[Any]) -> dict[str, Any]:
    """What a program's text may use. leaves: takes the inputs that get gradients, as functions that give them."""
    used: list[DeviceMesh | None] = [None]

    def mesh(ranks: Any) -> None:
        used[0] = None if given.plain else _mesh(ranks)

    def tensor(shape: tuple[int, ...], *places: str, seed: int, dtype: str = "float64", **how: Any) -> Any:
        full = values(shape, seed, getattr(torch, dtype), how.get("strides", ""))
        return _input(full, used[0], [placement(core, p) for p in places], leaves, **how)

    def move(x: Any, *places: str) -> Any:
        """A copy, placed so: whether a redistribution shares memory depends on where the tensor was."""
        return (
            x.clone()
            if given.plain
            else x.redistribute(placements=[placement(core, p) for p in places]).clone()
        )

    def index(*at: int) -> Any:
        """Replicated, in a way that a compiled function may call, too."""
        made = torch.tensor(at)
        return made if given.plain else core.DTensor.from_local(made, used[0])

    return {
        "index": index,
        "torch": torch,
        "F": F,
        "mesh": mesh,
        "tensor": tensor,
        "move": move,
        "refused": refused,
        "compiled": given.compile,
    }


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Around what plain tensors refuse."""
    try:
        yield
    except SimulationError:  # ranks that are no longer in step
        raise
    except Exception:
        return
    raise AssertionError("not refused")


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, strides: str) -> torch.Tensor:
    """Multiples of 1/8, whose sums are exact in any order. strides: "" (contiguous), "transposed" or "stepped"."""
    made = shape[::-1] if strides == "transposed" else shape
    if strides == "stepped" and shape:
        made = (*shape[:-1], 2 * shape[-1])
    drawn = torch.randint(-12, 13, made, generator=torch.Generator().manual_seed(seed))
    full = (drawn / 8 if dtype.is_floating_point else drawn).to(dtype)
    if strides == "transposed":
        return full.permute(tuple(range(full.ndim)[::-1]))
    return full[..., ::2] if strides == "stepped" and shape else full


def _mesh(ranks: Any) -> DeviceMesh:
    meshes: dict[str, DeviceMesh] = _of_thread.__dict__.setdefault("meshes", {})
    if str(ranks) not in meshes:
        meshes[str(ranks)] = DeviceMesh("cpu", ranks)
    return meshes[str(ranks)]


def _input(
    full: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Any],
    leaves: list[Any],
    *,
    grad: bool = False,
    made: str = "distribute_tensor",
    strides: str = "",
) -> Any:
    """An input of a program. made: by distribute_tensor, which copies gaps away, or by from_local of this rank's part,
    strided as `full` is."""
    whole = full.clone()
    if made == "from_local":
        whole = torch.empty_strided(full.shape, full.stride(), dtype=full.dtype).copy_(full)
    if mesh is None:
        leaf = whole.requires_grad_(grad)
        leaves.extend([lambda: leaf.grad] if grad else [])
        return leaf * 1 if grad and made == "from_local" else leaf
    x = core.distribute_tensor(whole, mesh, placements, src_data_rank=None)
    if made == "distribute_tensor":
        x.requires_grad_(grad)
        leaves.extend([lambda: x.grad] if grad else [])
        return x
    wrap = functools.partial(
        core.DTensor.from_local, device_mesh=mesh, shape=full.shape, stride=full.stride()
    )
    local = x.to_local().detach().clone()
    if strides == "transposed":
        backwards = tuple(range(local.ndim)[::-1])
        local = local.permute(backwards).contiguous().permute(backwards)
    elif strides == "stepped" and local.ndim:
        local = local.repeat_interleave(2, -1)[..., ::2]
    if not grad:
        return wrap(local, placements=placements)
    local.requires_grad_()
    # The gradient of a term of a sum is that of the sum.
    whole_grads = [core.Replicate() if p.is_partial() else p for p in placements]
    leaves.append(lambda: None if local.grad is None else wrap(local.grad, placements=whole_grads))
    return wrap(local * 1, placements=placements)


def results(text: str, given: Given) -> list[Any]:
    """Every tensor that the program has at its end, whole, then its inputs' gradients; of both times it is executed."""
    found = []
    for _ in range(2):
        leaves: list[Any] = []
        space = names(given, leaves)
        # As text: of one code object Dynamo would take what it compiled for the globals of the first time.
        exec(text, space)
        tensors = [value for name, value in sorted(space.items()) if isinstance(value, torch.Tensor)]
        squares = [(t * t).sum() for t in tensors if t.requires_grad]
        if squares:
            functools.reduce(torch.add, squares).backward()
        for tensor in [*tensors, *(leaf() for leaf in leaves)]:
            whole = tensor.full_tensor() if isinstance(tensor, core.DTensor) else tensor
            found.append(None if whole is None else whole.detach().clone())
    return found


def _compare(text: str, given: Given, wanted: list[Any]) -> str:
    """What is wrong about the program on this rank, or ""."""
    for index, (one, other) in enumerate(zip(results(text, given), wanted, strict=True)):
        if one is None or other is None:  # an input that does not matter has no gradient, or zeros
            problem = "a gradient differs" if any(t is not None and t.any() for t in (one, other)) else ""
        else:
            problem = difference(one, other)
        if problem:
            return f"result {index}: {problem}"
    return ""


def _on_threads(world: ThreadWorld, text: str) -> Case:
    core.clear_caches()
    try:
        wanted = results(text, Given("plain"))
    except Exception as error:
        return _not_judged(error)
    outcomes = world.outcomes(_compare, text, Given("core"), wanted)
    if (apart := diverged(outcomes)) is not None:
        world.close()
        wrong = next((o.value for o in outcomes if o.error is None and o.value), None)
        return Case(None, (), "wrong" if wrong else "hang", "", wrong or apart)
    if (raised := outcomes[0].error) is not None:
        refused = isinstance(raised, core.CoreError) or compat.REFUSED_WRITE in str(raised)
        return Case(None, (), "refused" if refused else "error", "", _brief(raised))
    wrong = next((f"{o.value} (rank {o.rank})" for o in outcomes if o.value), "")
    return Case(None, (), "wrong" if wrong else "pass", "", wrong)


def _not_judged(error: Exception) -> Case:
    return Case(None, (), NOT_JUDGED, "", f"plain tensors raise {_brief(error)}")


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _CompiledPlain(Given):
    """Plain tensors, whose compiled parts are compiled."""

    def compile(self, fn: Callable[..., AnyTensor], **options: AnyTensor) -> Callable[..., AnyTensor]:
        return Given("core", self.backend).compile(fn, **options)


def _plain_results(text: str, given: Given) -> object:
    """Of plain tensors, in the place of distributed ones too: there, compiled."""
    return results(text, given if given.plain else _CompiledPlain("plain", given.backend))


def verdict_on_forks(text: str, backend: str) -> Case:
    case = compat.judge_program(Entry("", "fuzz", functools.partial(results, text), backend), "core")
    if case.reason.startswith("plain tensors raise") or _NO_GRAPH in case.reason:
        return replace(case, verdict=NOT_JUDGED)
    if case.verdict in ("pass", "refused"):
        return case
    plain = compat.judge_program(Entry("", "fuzz", functools.partial(_plain_results, text), backend), "core")
    if plain.verdict == "pass":
        return case
    return replace(
        case, verdict=NOT_JUDGED, reason=f"torch.compile fails with plain tensors, too: {plain.reason}"
    )


@contextlib.contextmanager
def judging() -> Iterator[Callable[[Job], Iterator[Case | int]]]:
    """What a worker does; see the pool. A job's op is the program's text.

    A process judges programs of one kind: threads that differentiate leave autograd in a state that no fork may have.
    """
    with contextlib.ExitStack() as life:
        world = life.enter_context(ThreadWorld(RANKS))

        @functools.cache
        def ready_to_fork() -> None:
            life.enter_context(compat.judging())

        def judge(job: Job) -> Iterator[Case | int]:
            if job.mode == EAGER:
                quiet()
                yield _on_threads(world, job.op)
            else:
                ready_to_fork()
                yield verdict_on_forks(job.op, job.mode)
            yield 0

        yield judge
