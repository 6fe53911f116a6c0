"""Time and bandwidth of torch.distributed's collectives, per dim of the device mesh.

    group of 4 ranks        send         receive      S (size_bytes)
    all_reduce              S            S            the buffer
    all_gather              S/4          S            the gathered buffer
    reduce_scatter          S            S/4          the buffer to be reduced
    all_to_all              S            S            the buffer, S/4 of it for each rank
    broadcast               S (rank 0)   S            the buffer
    scatter                 S (rank 0)   S/4          the buffer on rank 0

S is counted as nccl-tests counts it. Each dim is measured **alone** (one group works, the others
wait) and **together** (all its groups at once, as in training, where they share the links); all dims as one
group ("dp+tp") are measured, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from dtbench.engine.refine import is_calibrated_with, sizes_between
from dtbench.suite import Case, Param, Refinement, RunOptions, Workload, World, suite
from dtbench_core.cost.ring import busbw_factor
from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single
from dtbench_suites import SUITES
from dtbench_suites.data import (
    mesh_of_dim,
    mismatch,
    moved_values,
    priced_dims,
    sum_of_values,
    summed_values,
    torch_dtype,
)

# Calls between two clock readings when back to back: 10, fewer once they move so many bytes that what
# the calls overlap no longer matters. nccl-tests launches 20 of any size (`-n`, src/common.cu).
BACK_TO_BACK_CALLS, BACK_TO_BACK_BYTES = 10, 16 * 2**20
# Which groups of a mesh dim work, and how: alone shows the links, together the load of training, in
# which calls also follow each other without a barrier.
REGIMES = tuple(itertools.product(("alone", "together"), ("isolated", "back_to_back")))


@dataclass(frozen=True)
class Buffers:
    """What a collective needs to know on one rank of a group of `n`. count: elements in S."""

    group: dist.ProcessGroup
    rank: int  # in the group
    n: int
    count: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, count: int) -> torch.Tensor:  # (count,)
        return torch.empty(count, dtype=self.dtype, device=self.device)

    def moved(self, rank: int, parts: int = 1) -> torch.Tensor:  # (count / parts,) what `rank` sends
        return moved_values(rank, self.count // parts, self.dtype, self.device)

    def summed(self) -> torch.Tensor:  # (count,) what this rank adds
        return summed_values(self.rank, self.n, self.count, self.dtype, self.device)

    def sum(self) -> torch.Tensor:  # (count,)
        return sum_of_values(self.n, self.count, self.dtype, self.device)

    def mine(self, full: torch.Tensor) -> torch.Tensor:  # (count,) -> (count / n,)
        return full.chunk(self.n)[self.rank]

    def from_all(self, part: Callable[[int], torch.Tensor]) -> torch.Tensor:  # (count,) a part of each rank
        return torch.cat([part(rank) for rank in range(self.n)])


@dataclass(frozen=True)
class TimedCollective:
    """One collective with its buffers. reset: makes `result` wrong and the input right again."""

    run: Callable[[], object]
    reset: Callable[[], object]
    result: torch.Tensor
    expected: Callable[[], torch.Tensor]

    def check(self) -> str | None:
        """Calls once on fresh data; all ranks of the group together."""
        self.reset()
        self.run()
        return mismatch(self.result, self.expected())


def all_reduce(b: Buffers) -> TimedCollective:
    data = b.summed()
    run = partial(dist.all_reduce, data, group=b.group)
    return TimedCollective(run, lambda: data.copy_(b.summed()), data, b.sum)


def all_gather(b: Buffers) -> TimedCollective:
    full, part = b.empty(b.count), b.moved(b.rank, parts=b.n)
    run = partial(all_gather_single, full, part, group=b.group)
    return TimedCollective(run, full.zero_, full, lambda: b.from_all(lambda r: b.moved(r, parts=b.n)))


def reduce_scatter(b: Buffers) -> TimedCollective:
    part, full = b.empty(b.count // b.n), b.summed()
    run = partial(reduce_scatter_single, part, full, group=b.group)
    return TimedCollective(run, part.zero_, part, lambda: b.mine(b.sum()))


def all_to_all(b: Buffers) -> TimedCollective:
    received, sent = b.empty(b.count), b.moved(b.rank)
    run = partial(dist.all_to_all_single, received, sent, group=b.group)
    return TimedCollective(run, received.zero_, received, lambda: b.from_all(lambda r: b.mine(b.moved(r))))


def broadcast(b: Buffers) -> TimedCollective:
    data = b.moved(b.rank)
    run = partial(dist.broadcast, data, group=b.group, group_src=0)
    return TimedCollective(run, lambda: data.copy_(b.moved(b.rank)), data, partial(b.moved, 0))


def scatter(b: Buffers) -> TimedCollective:
    part = b.empty(b.count // b.n)
    parts = list(b.moved(0).chunk(b.n)) if b.rank == 0 else None
    run = partial(dist.scatter, part, parts, group=b.group, group_src=0)
    return TimedCollective(run, part.zero_, part, lambda: b.mine(b.moved(0)))


_TIMED = (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter)
COLLECTIVES = {function.__name__: function for function in _TIMED}
WHOLE_BUFFER = ("all_reduce", "broadcast")  # their S need not divide by the number of ranks


def build(
    collective: str, mesh_dim: str, groups: str, dtype: torch.dtype, size_bytes: int, world: World
) -> Workload:
    group = mesh_of_dim(world, mesh_dim).get_group()
    if groups == "alone" and 0 not in dist.get_process_group_ranks(group):
        return Workload(run=lambda: None, participates=False)
    buffers = Buffers(group, group.rank(), group.size(), size_bytes // dtype.itemsize, dtype, world.device)
    call = COLLECTIVES[collective](buffers)
    return Workload(run=call.run, check=call.check)


def trimmed(collective: str, size_bytes: int, n: int, itemsize: int) -> int:
    """S in bytes: whole elements, the same number for each rank, at least one."""
    step = itemsize if collective in WHOLE_BUFFER else itemsize * n
    return max(size_bytes // step, 1) * step


def calls_of(mode: str, size_bytes: int) -> int:
    """Calls per sample."""
    if mode == "isolated":
        return 1
    return min(max(BACK_TO_BACK_BYTES // size_bytes, 2), BACK_TO_BACK_CALLS)


def accompanying_sizes(options: RunOptions, groups: str, mode: str) -> tuple[int, ...]:
    """Bytes of the regimes beside the sweep that calibration fits, of all groups together and isolated. One
    group alone tells by the largest size, which fills the links, how much the groups share."""
    if options.refine and not options.sizes_chosen and (groups, mode) == ("alone", "isolated"):
        return options.sizes_bytes[-1:]
    return options.few_sizes_bytes


def swept(
    options: RunOptions,
    dims: Iterable[tuple[str, int]],
    names: Iterable[str],
    sizes_of: Callable[[RunOptions, str, str], Iterable[int]],
    case_of: Callable[..., Case],
) -> Iterator[Case]:
    """The cases of all names on these mesh dims, in all regimes; sizes_of: of a regime, bytes asked for."""
    for (mesh_dim, n), dtype, name in itertools.product(dims, options.dtypes, names):
        whole = n == options.world_size  # alone and together at once
        cases = [
            case_of(name, mesh_dim, n, groups, mode, dtype, size)
            for groups, mode in REGIMES
            if not (whole and groups == "alone")
            for size in sizes_of(options, groups, mode)
        ]
        # Sizes below what the ranks can share are the same one.
        yield from {tuple(case.params.items()): case for case in cases}.values()


def refinement_of(case_of: Callable[..., Case]) -> Refinement:
    """Sizes between those of a sweep, which `case_of` trims as it does theirs."""
    return Refinement(sizes_between, lambda _plan, name, params: case_of(name, **params))


def sizes_of(options: RunOptions, groups: str, mode: str) -> Sequence[int]:
    if options.refine and (groups, mode) != ("together", "isolated"):
        return accompanying_sizes(options, groups, mode)
    return options.sizes_bytes if mode == "isolated" else options.coarse_sizes_bytes


def case_of(
    collective: str, mesh_dim: str, ranks: int, groups: str, mode: str, dtype: str, size: int
) -> Case:
    """size: bytes asked for."""
    size = trimmed(collective, size, ranks, torch_dtype(dtype).itemsize)
    return Case(
        name=collective,
        params=params_of(mesh_dim, ranks, groups, mode, dtype, size),
        build={"c10d": partial(build, collective, mesh_dim, groups, torch_dtype(dtype), size)},
        size_bytes=size,
        bandwidth=ranks > 1,  # one rank sends nothing: its time is that of a launch
        busbw_factor=busbw_factor(collective, ranks) if ranks > 1 else None,
        calls_per_sample=calls_of(mode, size),
    )


def params_of(mesh_dim: str, n: int, groups: str, mode: str, dtype: str, size: int) -> dict[str, Param]:
    """What tells the cases of a collective, or of a change of placement, apart."""
    return {"mesh_dim": mesh_dim, "ranks": n, "groups": groups, "mode": mode, "dtype": dtype, "size": size}


@suite(
    "collectives",
    world="ranks",
    help=SUITES["collectives"],
    impl_s=(0.155, 0.095),
    refinement=refinement_of(case_of),
    budget_priority=is_calibrated_with,
)
def collectives(options: RunOptions) -> Iterator[Case]:
    yield from swept(options, priced_dims(options) or options.mesh[-1:], COLLECTIVES, sizes_of, case_of)
