"""Time and bandwidth of the collectives of torch.distributed, per mesh dim.

    group of 4 ranks        send         receive      S (size_bytes)
    all_reduce              S            S            the buffer
    all_gather              S/4          S            the gathered buffer
    reduce_scatter          S            S/4          the buffer to be reduced
    all_to_all              S            S            the buffer, S/4 of it for each rank
    broadcast               S (rank 0)   S            the buffer
    scatter                 S (rank 0)   S/4          the buffer on rank 0
    all_to_all_v            S (mean)     S (mean)     as all_to_all, with unequal parts

S is defined as in nccl-tests. Each mesh dim is measured **alone** (one group communicates, the others wait) and
**together** (all groups of the dim communicate at once and share the links, as in training). The group of all ranks
("dp+tp") is measured, too.

`all_to_all_v` sends what expert parallelism sends: rows of tokens, in numbers that the param `routing` names (see
`dtbench_suites.routing`). All routings of a size send the same number of bytes in total. Its bus bandwidth counts the
bytes whose source and destination differ, per rank on average; for `uniform` that is the factor of all_to_all. The
counter `max_over_mean_received` is the number of rows that the fullest rank receives, over the mean. These cases are
measured together and isolated, at few sizes. Calibration does not use them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from dtbench.engine.refine import is_calibrated_with, sizes_between
from dtbench.records.result import integer_param
from dtbench.suite import ROUTING, Case, Param, Refinement, RunOptions, Workload, World, suite
from dtbench_core.cost.ring import busbw_factor
from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single
from dtbench_suites import SUITES
from dtbench_suites.data import (
    calibrated_dims,
    mesh_of_dim,
    mismatch,
    moved_values,
    sum_of_values,
    summed_values,
    torch_dtype,
)
from dtbench_suites.routing import OPTION, RoutedSweepPoint, routed_sweep

# Calls between two clock readings in the mode back_to_back: 10, or fewer if they move so many bytes that overlap
# between calls no longer matters. nccl-tests launches 20 calls of any size (`-n`, src/common.cu).
BACK_TO_BACK_CALLS, BACK_TO_BACK_BYTES = 10, 16 * 2**20
# A regime is a pair (groups, mode). Groups: "alone" measures the links; "together" has the load of training. Mode:
# "isolated" has a barrier before every call; "back_to_back" calls follow each other without one, as in training.
REGIMES = tuple(itertools.product(("alone", "together"), ("isolated", "back_to_back")))


@dataclass(frozen=True)
class Buffers:
    """Makes the inputs, outputs and expected results of a collective on one rank.

    Attributes:
        rank: the rank within the group.
        n: the number of ranks of the group.
        count: the number of elements in S.
    """

    group: dist.ProcessGroup
    rank: int
    n: int
    count: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, count: int) -> torch.Tensor:  # (count,)
        return torch.empty(count, dtype=self.dtype, device=self.device)

    def moved(
        self, rank: int, parts: int = 1
    ) -> torch.Tensor:  # (count / parts,): the data that `rank` sends
        return moved_values(rank, self.count // parts, self.dtype, self.device)

    def summed(self) -> torch.Tensor:  # (count,): this rank's addend
        return summed_values(self.rank, self.n, self.count, self.dtype, self.device)

    def sum(self) -> torch.Tensor:  # (count,)
        return sum_of_values(self.n, self.count, self.dtype, self.device)

    def own_shard(self, full: torch.Tensor) -> torch.Tensor:  # (count,) -> (count / n,)
        return full.chunk(self.n)[self.rank]

    def concatenate(
        self, part: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:  # part(rank) of all ranks -> (count,)
        return torch.cat([part(rank) for rank in range(self.n)])


@dataclass(frozen=True)
class TimedCollective:
    """A collective with its buffers.

    Attributes:
        reset: restores the input and overwrites `result` with wrong values.
        expected: returns the correct `result`.
    """

    run: Callable[[], object]
    reset: Callable[[], object]
    result: torch.Tensor
    expected: Callable[[], torch.Tensor]

    def check(self) -> str | None:
        """Runs the collective once on fresh data. All ranks of the group must call it together."""
        self.reset()
        self.run()
        return mismatch(self.result, self.expected())


def all_reduce(b: Buffers) -> TimedCollective:
    data = b.summed()
    return TimedCollective(
        partial(dist.all_reduce, data, group=b.group), lambda: data.copy_(b.summed()), data, b.sum
    )


def all_gather(b: Buffers) -> TimedCollective:
    full, part = b.empty(b.count), b.moved(b.rank, parts=b.n)
    return TimedCollective(
        partial(all_gather_single, full, part, group=b.group),
        full.zero_,
        full,
        lambda: b.concatenate(lambda r: b.moved(r, parts=b.n)),
    )


def reduce_scatter(b: Buffers) -> TimedCollective:
    part, full = b.empty(b.count // b.n), b.summed()
    return TimedCollective(
        partial(reduce_scatter_single, part, full, group=b.group),
        part.zero_,
        part,
        lambda: b.own_shard(b.sum()),
    )


def all_to_all(b: Buffers) -> TimedCollective:
    received, sent = b.empty(b.count), b.moved(b.rank)
    return TimedCollective(
        partial(dist.all_to_all_single, received, sent, group=b.group),
        received.zero_,
        received,
        lambda: b.concatenate(lambda r: b.own_shard(b.moved(r))),
    )


def broadcast(b: Buffers) -> TimedCollective:
    data = b.moved(b.rank)
    return TimedCollective(
        partial(dist.broadcast, data, group=b.group, group_src=0),
        lambda: data.copy_(b.moved(b.rank)),
        data,
        partial(b.moved, 0),
    )


def scatter(b: Buffers) -> TimedCollective:
    part = b.empty(b.count // b.n)
    parts = list(b.moved(0).chunk(b.n)) if b.rank == 0 else None
    return TimedCollective(
        partial(dist.scatter, part, parts, group=b.group, group_src=0),
        part.zero_,
        part,
        lambda: b.own_shard(b.moved(0)),
    )


_TIMED = (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter)
COLLECTIVES = {function.__name__: function for function in _TIMED}
WHOLE_BUFFER = ("all_reduce", "broadcast")  # their S need not be a multiple of the number of ranks


def build(
    collective: str, mesh_dim: str, groups: str, dtype: torch.dtype, size_bytes: int, world: World
) -> Workload:
    group = mesh_of_dim(world, mesh_dim).get_group()
    if groups == "alone" and 0 not in dist.get_process_group_ranks(group):
        return Workload(run=lambda: None, participates=False)
    call = COLLECTIVES[collective](
        Buffers(group, group.rank(), group.size(), size_bytes // dtype.itemsize, dtype, world.device)
    )
    return Workload(run=call.run, check=call.check)


def trimmed(collective: str, size_bytes: int, n: int, itemsize: int) -> int:
    """Rounds S down to an equal number of elements per rank, at least one. Returns bytes."""
    step = itemsize if collective in WHOLE_BUFFER else itemsize * n
    return max(size_bytes // step, 1) * step


def calls_per_sample_of(mode: str, size_bytes: int) -> int:
    """Returns the number of calls per sample."""
    if mode == "isolated":
        return 1
    return min(max(BACK_TO_BACK_BYTES // size_bytes, 2), BACK_TO_BACK_CALLS)


def accompanying_sizes(options: RunOptions, groups: str, mode: str) -> tuple[int, ...]:
    """Returns the sizes (bytes) of a regime that calibration does not fit.

    Calibration fits the sweep of the regime (together, isolated). For (alone, isolated) the largest size is enough: it
    saturates the links, so it shows how much bandwidth the groups share.
    """
    if options.refine and not options.sizes_chosen and (groups, mode) == ("alone", "isolated"):
        return options.sizes_bytes[-1:]
    return options.few_sizes_bytes


def sweep_cases(
    options: RunOptions,
    dims: Iterable[tuple[str, int]],
    names: Iterable[str],
    sizes_of: Callable[[RunOptions, str, str], Iterable[int]],
    case_of: Callable[..., Case],
) -> Iterator[Case]:
    """Yields the cases of all names on the given mesh dims, in all regimes.

    Args:
        sizes_of: (options, groups, mode) -> requested sizes in bytes.
    """
    for (mesh_dim, n), dtype, name in itertools.product(dims, options.dtypes, names):
        cases = [
            case_of(name, mesh_dim, n, groups, mode, dtype, size)
            for groups, mode in REGIMES
            if groups != "alone" or n < options.world_size  # a group of all ranks is both alone and together
            for size in sizes_of(options, groups, mode)
        ]
        # Sizes too small to divide among the ranks are rounded to the same size: keep one case of it.
        yield from {tuple(case.params.items()): case for case in cases}.values()


def refinement_of(case_of: Callable[..., Case]) -> Refinement:
    """Returns a Refinement that adds sizes between those of a sweep. `case_of` builds the cases and rounds sizes."""
    return Refinement(sizes_between, lambda _options, name, params: case_of(name, **params))


def sizes_of(options: RunOptions, groups: str, mode: str) -> Sequence[int]:
    if options.refine and (groups, mode) != ("together", "isolated"):
        return accompanying_sizes(options, groups, mode)
    return options.sizes_bytes if mode == "isolated" else options.coarse_sizes_bytes


def case_of(
    collective: str, mesh_dim: str, ranks: int, groups: str, mode: str, dtype: str, size: int
) -> Case:
    """Returns the case of a collective. `size`: requested bytes, rounded by `trimmed`."""
    size = trimmed(collective, size, ranks, torch_dtype(dtype).itemsize)
    return Case(
        name=collective,
        params=params_of(mesh_dim, ranks, groups, mode, dtype, size),
        build={"c10d": partial(build, collective, mesh_dim, groups, torch_dtype(dtype), size)},
        size_bytes=size,
        bandwidth=ranks > 1,  # one rank sends nothing, so only the overhead of the call is timed
        busbw_factor=busbw_factor(collective, ranks) if ranks > 1 else None,
        calls_per_sample=calls_per_sample_of(mode, size),
    )


def params_of(mesh_dim: str, n: int, groups: str, mode: str, dtype: str, size: int) -> dict[str, Param]:
    """Returns the params of a case of this suite or of the redistribute suite."""
    return {"mesh_dim": mesh_dim, "ranks": n, "groups": groups, "mode": mode, "dtype": dtype, "size": size}


def build_routed(point: RoutedSweepPoint, dtype: torch.dtype, world: World) -> Workload:
    group, counts, width = world.mesh.get_group(str(point.params["mesh_dim"])), point.counts, point.width
    rank, splits = group.rank(), (point.received(group.rank()), counts[group.rank()])

    def sent_by(source: int) -> torch.Tensor:  # (rows, width)
        return moved_values(source, sum(counts[source]) * width, dtype, world.device).view(-1, width)

    def received_from(source: int) -> torch.Tensor:  # (rows, width)
        return sent_by(source).split(counts[source])[rank]  # type: ignore[no-any-return]

    sent, received = sent_by(rank), torch.empty(sum(splits[0]), width, dtype=dtype, device=world.device)
    call = TimedCollective(
        partial(dist.all_to_all_single, received, sent, *splits, group=group),
        received.zero_,
        received,
        lambda: torch.cat([received_from(source) for source in range(len(counts))]),
    )
    return Workload(call.run, check=call.check, counters=lambda: point.skew)


@suite(
    "collectives",
    world="ranks",
    help=SUITES["collectives"],
    options=OPTION,
    impl_s=(0.155, 0.095),
    refinement=refinement_of(case_of),
    budget_priority=lambda case: None if ROUTING in case.params else is_calibrated_with(case),
)
def collectives(options: RunOptions) -> Iterator[Case]:
    yield from sweep_cases(
        options, calibrated_dims(options) or options.mesh[-1:], COLLECTIVES, sizes_of, case_of
    )
    for point in routed_sweep(options, {"groups": "together", "mode": "isolated"}):
        yield Case(
            name="all_to_all_v",
            params=point.params,
            build={"c10d": partial(build_routed, point, torch_dtype(str(point.params["dtype"])))},
            size_bytes=integer_param(point.params, "size"),
            busbw_factor=point.moved_share or None,
        )
