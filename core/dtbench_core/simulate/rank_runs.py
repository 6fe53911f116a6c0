"""Running a function once per simulated rank, with collectives between the runs.

Ranks run one after the other, yet a collective needs all of them. So a rank that comes to one is
stopped there, by an exception, and the next rank runs. Once all ranks of the group stand at the same
collective it is done as maths over what they brought, and the ranks start again from the beginning:
collectives that were done before are answered from memory, so that each gets further. The function
must therefore do the same each time it runs. Its inputs are put back before it starts again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from dtbench_core import comm
from dtbench_core.dispatch import fallback
from dtbench_core.errors import SimulationError
from dtbench_core.layout import rng
from dtbench_core.runtime import entered
from dtbench_core.simulate.group import (
    Arrival,
    Signature,
    SimulatedWork,
    combine,
    describe,
    mismatch,
    name_deeds,
    name_ranks,
    raised,
)

Tensors = list[torch.Tensor]


class AtCollective(BaseException):
    """Takes a rank out of its function until the others have come. No `except Exception` may stop it."""


class RankRun:
    """One rank's way through a function. `over` once it has returned or raised."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.over = False
        self.result: Any = None
        self.error: Exception | None = None
        self.arrival: Arrival | None = None  # where it stands
        # Of the collectives done: what their tensors hold after it, in the order of the call.
        self.answers: list[tuple[Signature, Tensors]] = []
        self._next = 0

    def attempt(self, fn: Callable[[], Any]) -> None:
        """Runs `fn` until it is over or at a collective that is not answered yet."""
        self._next, self.arrival = 0, None
        try:
            self.result = fn()
            self.over = True
        except AtCollective:
            pass
        except Exception as error:
            self.error, self.over = error, True

    def arrive(self, arrival: Arrival) -> dist.Work:
        """Answers a collective that is done, else stops here."""
        if self._next == len(self.answers):
            self.arrival = arrival._replace(call=_copied(arrival.call))
            raise AtCollective
        signature, after = self.answers[self._next]
        self._next += 1
        if signature != arrival.signature:
            raise SimulationError(
                f"rank {self.rank} called {describe(arrival.signature)} where it had called {describe(signature)} "
                "when it ran before: the function must do the same each time, without side effects"
            )
        for tensor, value in zip(_tensors(arrival.call), after, strict=True):
            # Against what is there now: memory to be written to holds anything, by chance what was there
            # the time before. What was only read is as it was.
            if not torch.equal(tensor, value):
                tensor.copy_(value)
        return SimulatedWork(arrival.results)


def _copied(call: Any) -> Any:
    """A copy of what a rank brought: the maths writes to it, and the rank must find its own unchanged."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, call)


def _tensors(call: Any) -> Tensors:
    return [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]


def meet(runs: dict[int, RankRun]) -> bool:
    """Does every collective that all ranks of its group have come to; whether there was one."""
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, run in runs.items():
        if run.arrival is not None:
            groups.setdefault((run.arrival.ranks, run.arrival.group_name), []).append(rank)
    met = False
    for (ranks, _), here in groups.items():
        missing = [rank for rank in ranks if rank not in runs]
        if missing:
            arrival = runs[here[0]].arrival
            assert arrival is not None
            raise SimulationError(
                f"{describe(arrival.signature)} of {name_ranks(ranks)} needs {name_ranks(missing)} too, but only "
                f"{name_ranks(list(runs))} take part: simulate all ranks of the group"
            )
        if len(here) == len(ranks):
            _do([runs[rank] for rank in ranks])
            met = True
    return met


def _do(runs: Sequence[RankRun]) -> None:
    """One collective, of these ranks in the order of the group."""
    arrivals = [run.arrival for run in runs if run.arrival is not None]
    first = arrivals[0]
    for arrival in arrivals:
        if arrival.signature != first.signature:
            raise SimulationError(mismatch(arrival, [runs[0].rank], first.signature))
    combine(first, [a.call for a in arrivals])
    for run, arrival in zip(runs, arrivals, strict=True):
        run.answers.append((arrival.signature, _tensors(arrival.call)))


def verdict(runs: dict[int, RankRun]) -> None:
    """Raises for ranks that raised, or that wait for a collective which will never be."""
    failed = {r: run.error for r, run in runs.items() if run.error is not None}
    waiting = {r: run.arrival for r, run in runs.items() if not run.over and run.arrival is not None}
    if not failed and not waiting:
        return
    first = next(iter(failed.values()), None)
    if first is not None and len(failed) == len(runs):
        first.add_note(f"on simulated {name_ranks(list(failed))}")
        raise first
    deeds = dict.fromkeys(runs, "returned")
    for rank, error in failed.items():
        deeds[rank] = raised(error)
    for rank, arrival in waiting.items():
        deeds[rank] = f"waited in {describe(arrival.signature)} of {name_ranks(arrival.ranks)}"
    hangs = any(runs[r].over for arrival in waiting.values() for r in arrival.ranks)
    raise SimulationError(
        f"{'hang' if hangs else 'diverged'}: {', '.join(name_deeds(deeds))}; every rank must go the same way"
    ) from first


class Inputs:
    """Puts tensors back as they were, should a run that has to start again have written to them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._kept:
                self._kept[id(tensor)] = (tensor, tensor.detach().clone())

    def put_back(self) -> None:
        for tensor, kept in self._kept.values():
            if not torch.equal(tensor, kept):
                tensor.detach().copy_(kept)


@contextmanager
def counted_once(run: RankRun, count: bool) -> Iterator[None]:
    """What the core remembers of an attempt: nothing, unless it got to the end of the run.

    count: of all ranks' runs, the one whose collectives and replicated ops are counted and whose warnings
    are shown.
    """
    counters, in_step, fallbacks = comm.counters.get(), rng.in_step.get(), fallback.seen.get()
    sent, show, warned = comm.CommCount(), warnings.showwarning, []
    warnings.showwarning = lambda *args, **kwargs: warned.append((args, kwargs))
    mine, ran = weakref.WeakSet(in_step), fallback.FallbackLog(warned=set(fallbacks.warned))
    try:
        with entered(
            (comm.counters, [sent] if count and counters else []), (rng.in_step, mine), (fallback.seen, ran)
        ):
            yield
    finally:
        warnings.showwarning = show
    if run.over:
        in_step.update(mine)
    if run.over and count:
        fallbacks.counts.update(ran.counts)
        fallbacks.warned.update(ran.warned)
        for counter in counters:
            counter.calls.update(sent.calls)
            counter.bytes.update(sent.bytes)
        for args, kwargs in warned:
            show(*args, **kwargs)
