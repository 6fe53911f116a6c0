"""One program on gloo ranks, each a fresh process, compared with the same program on plain tensors.

pass      the same results, or an error of the class and kind that plain tensors give
refused   the core's own error, or autograd's of a write that gradients could not follow, on every rank
differs   ranks come to different verdicts or errors
hang      ranks wait for another that raised or returned, or nothing ends
died      a process ended
n/a       the variant leaves the program out, or torch.compile fails with plain tensors, too
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import torch
import torch._dynamo  # here, for the ranks to have it when they are forked
import torch._functorch.config
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
from torch._C._distributed_c10d import FileStore
from torch.utils._pytree import tree_flatten

import dtbench_core as core
import dtbench_core.parallel
from dtbench.comparison.op_verdicts import VARIANTS, WRITTEN
from dtbench.engine.signals import how_ended
from dtbench.engine.workers import Fork, left_s, scratch
from dtbench.records.verdicts import NOTHING
from dtbench_suites.compat.program import Entry, Given, Opaque, programs
from dtbench_suites.compat.variants import ranks_of, why_left_out
from dtbench_suites.coverage.judge import LIBRARIES, difference
from dtbench_suites.coverage.verdicts import Case, Job

with warnings.catch_warnings():  # torch's own code calls what it deprecates
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx

# A program that makes code by inductor builds it with a compiler, four ranks on what cores there are.
PROGRAM_TIMEOUT_S = 240.0
# What the others get once a rank has raised: they may be under way to the same error.
_GRACE_S = 15.0
# What autograd says of a write to the part of a tensor that came through a function of its own, as to_local is.
REFUSED_WRITE = "is a view and is being modified inplace"


# What an error is about, by words that stay in torch's messages from version to version; the first found counts.
_KINDS = {
    "write in place": r"in-?place",
    "index": r"out of (bounds|range)|num_classes",
    "mixed tensors": r"mixed torch\.Tensor|plain torch\.Tensor",
    "dtype": r"\bdtype|scalar type|integer tensors",
    "division by zero": r"ZeroDivision|division by zero",
    "not finite": r"\bnan\b|\binf\b|non-?finite",
    "autograd": r"backward|requires? grad|graph",
    "state dict": r"state_dict",
    "shape": r"\bsizes?\b|\bshapes?\b|stride|\bdim",
}


@dataclass(frozen=True)
class Seen:
    """What a rank came to. failure: class and kind of the error that ended the program."""

    verdict: str
    reason: str = ""
    failure: str = ""


# ---- a rank ----


def _run(entry: Entry, impl: str, variant: str) -> object:
    torch.manual_seed(0)
    if variant == "inductor":
        return torch.compile(entry.run, backend="inductor")(Opaque(impl, entry.backend))
    return entry.run(Given(impl, entry.backend, variant))


def _seen(entry: Entry, impl: str, variant: str = WRITTEN) -> Seen:
    """The program on this rank, plain and distributed."""
    as_written = WRITTEN if variant == "inductor" else variant
    wanted, plain_error = _outcome(entry, "plain", as_written, impl)
    seen = _compared(*_outcome(entry, impl, variant, impl), wanted, plain_error, impl)
    if variant == "inductor" and seen.verdict != "pass":
        plain = _compared(*_outcome(entry, "plain", variant, impl), wanted, plain_error, impl)
        if plain.verdict != "pass":
            return Seen(NOTHING, f"torch.compile fails with plain tensors, too: {plain.reason}")
    return seen


def _outcome(entry: Entry, given: str, variant: str, impl: str) -> tuple[list[object], Exception | None]:
    """What the program comes to with plain tensors or an implementation's, or the error that it raises."""
    try:
        return _full(_run(entry, given, variant), impl), None
    except Exception as error:
        return [], error


def _compared(
    got: list[object], error: Exception | None, wanted: list[object], plain_error: Exception | None, impl: str
) -> Seen:
    if error is not None:
        return _of_error(error, plain_error, impl)
    if plain_error is not None:
        return Seen("wrong", f"plain tensors raise {_brief(plain_error)}, DTensors do not")
    if len(got) != len(wanted):
        return Seen("wrong", f"got {len(got)} results, expected {len(wanted)}")
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if problem := difference(one, other):
            return Seen("wrong", f"result {index}: {problem}")
    return Seen("pass")


def _full(results: object, impl: str) -> list[object]:
    """The leaves as plain tensors and numbers."""
    kind = LIBRARIES[impl].DTensor
    leaves = tree_flatten(results)[0]
    full = [leaf.full_tensor() if isinstance(leaf, kind) else leaf for leaf in leaves]
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in full]


def kind_of(error: BaseException) -> str:
    """What the error is about: one of _KINDS, else its words without numbers, names and lists."""
    text = " ".join(str(error).split())
    own = re.sub(r"\d+(\.\d+)?|'[^']*'|\[[^\]]*\]", "", text)
    return next((kind for kind, words in _KINDS.items() if re.search(words, text)), own)


def _of_error(error: Exception, plain: Exception | None, impl: str) -> Seen:
    failure = f"{type(error).__name__}, {kind_of(error)}"
    chain = list(_causes(error))
    if plain is not None and any(isinstance(e, type(plain)) and kind_of(e) == kind_of(plain) for e in chain):
        return Seen("pass", f"refused as with plain tensors: {_brief(error)}", failure)
    said = next((e for e in chain if _is_refusal(e, impl)), None)
    if said is not None:
        return Seen("refused", _brief(said), failure)
    return Seen("error", _brief(error), failure)


def _is_refusal(error: BaseException, impl: str) -> bool:
    return (impl == "core" and isinstance(error, core.CoreError)) or REFUSED_WRITE in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it was raised from: compilers and checkpoints wrap what a program raises."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _brief(error: BaseException) -> str:
    words = re.sub(r"/\S*/(?=\w+\.py)", "", " ".join(str(error).split()))  # files without their folders
    return f"{type(error).__name__}: {words[:300]}"


def _be_rank(rank: int, folder: str, entry: Entry, impl: str, variant: str, answers: Connection) -> int:
    ranks = ranks_of(variant)
    store = FileStore(f"{folder}/store", ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PROGRAM_TIMEOUT_S)
    )
    answers.send(_seen(entry, impl, variant))
    answers.recv()  # stays until it is killed: others that wait for it shall be seen to wait
    return 0


# ---- the ranks together ----


def judge_program(
    entry: Entry, impl: str, timeout_s: float = PROGRAM_TIMEOUT_S, variant: str = WRITTEN
) -> Case:
    """Forks the ranks and waits for what they come to."""
    if why := why_left_out(variant, entry.topic, entry.name):
        return Case(None, (), NOTHING, "", why)
    forks, ends = [], []
    with scratch() as folder:
        try:
            for rank in range(ranks_of(variant)):
                ours, theirs = Pipe()
                forks.append(Fork(partial(_be_rank, rank, str(folder), entry, impl, variant, theirs)))
                theirs.close()
                ends.append(ours)
            found = _answers(ends, timeout_s)
        finally:
            codes = [fork.end() for fork in forks]
            for end in ends:
                end.close()
    verdict, reason = together(found, codes, timeout_s)
    return Case(None, (), verdict, "", reason)


def _answers(ends: Sequence[Connection], timeout_s: float) -> list[Seen | str | None]:
    """Per rank: what it saw, "died", or None when it did not answer in time."""
    found: list[Seen | str | None] = [None] * len(ends)
    deadline = time.monotonic() + timeout_s
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting and (ready := wait(list(waiting), left_s(deadline))):
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                found[rank] = end.recv()
            except EOFError:
                found[rank] = "died"
            seen = found[rank]
            if not isinstance(seen, Seen) or seen.verdict != "pass":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return found


def together(
    found: Sequence[Seen | str | None], codes: Sequence[int], timeout_s: float = PROGRAM_TIMEOUT_S
) -> tuple[str, str]:
    """(verdict, reason) of what the ranks came to; see `_answers`."""
    if "died" in found:
        rank = found.index("died")
        return "died", f"rank {rank} {how_ended(codes[rank])}"
    seen = {rank: one for rank, one in enumerate(found) if isinstance(one, Seen)}
    wrong = [rank for rank, one in seen.items() if one.verdict == "wrong"]
    if wrong:
        return "wrong", f"{seen[wrong[0]].reason} (rank {wrong[0]})"
    late = [rank for rank in range(len(found)) if rank not in seen]
    if late:
        raised = next(((r, s) for r, s in seen.items() if s.failure), None)
        what = (
            f"rank {raised[0]} raised {raised[1].reason}" if raised else f"no answer within {timeout_s:.0f} s"
        )
        return "hang", f"{what} while ranks {', '.join(map(str, late))} waited" if raised else what
    if len({(one.verdict, one.failure) for one in seen.values()}) > 1:
        return "differs", "; ".join(f"rank {rank}: {one.reason or one.verdict}" for rank, one in seen.items())
    return seen[0].verdict, seen[0].reason


def _warm_up() -> None:
    """Compiles something, for the ranks to be forked with what inductor loads and works out at its first use.

    Without a gradient: a process that has entered autograd's engine, as a trace of a backward graph does, leaves it to
    its forks in a state that torch refuses to start threads from, as a backward within a backward needs.
    """
    torch.compile(lambda t: (t * 2).softmax(0))(torch.ones(8, 4))
    torch._dynamo.reset()


@contextlib.contextmanager
def judging() -> Iterator[Callable[[Job], Iterator[Case | int]]]:
    """What a worker does; see the pool."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)
    # It would hand over graphs that another state of the library had traced.
    torch._functorch.config.enable_autograd_cache = False
    table = programs()
    _warm_up()

    def judge(job: Job) -> Iterator[Case | int]:
        variant = job.mode if job.mode in VARIANTS else WRITTEN
        yield judge_program(table[job.op], job.impl, variant=variant)
        yield 0

    yield judge
