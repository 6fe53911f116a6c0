"""Routings of expert parallelism: the number of rows that each rank sends to each other rank.

    uniform           every rank sends equally many rows to every rank
    lognormal(SIGMA)  the ranks' shares of the rows are the quantiles of a log-normal distribution
    zipf(S)           rank i receives a share proportional to 1 / (i + 1)^S
    hot               rank 0 receives all rows: the largest possible skew
    FILE              recorded counts, scaled to the number of rows: a CSV file `source,destination,count` with header,
                      or a square matrix with a line per source

In a model's routing, all ranks send equally many rows, and the shares are the same for all of them. All routings are
deterministic and have exactly as many rows in total as the uniform one. Counts are rounded to whole rows: down, and
then up where most was cut off. They may be 0.
"""

import csv
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from dtbench.errors import UsageError, describe
from dtbench.suite import ROUTING, Param, RunOptions
from dtbench_suites.data import dims_with_several_ranks, torch_dtype

# Log-normal loads are those of https://github.com/deepseek-ai/DeepEP/issues/393. Zipf's law has the exponent 1. A quick
# run measures the first two.
ROUTINGS = ("uniform", "lognormal(1)", "zipf(1)", "hot")
# Elements of a row, i.e. of a token: hidden_size in the config.json of Qwen/Qwen3-30B-A3B.
HIDDEN = 2048
# In small buffers the rows are shorter, so that a uniform routing sends at least this many to each rank. With fewer,
# rounding to whole rows would change the shares.
FEWEST_ROWS = 16
OPTION = {
    "routing": "also measure this routing: a CSV file with the header source,destination,count, or a model such as "
    "zipf(1.5)"
}
HEADER = ["source", "destination", "count"]
# Weights of models are rounded to integers of this scale, so that all arithmetic is exact.
_SCALE = 2**40
_MODEL, _NUMBER = re.compile(r"(lognormal|zipf)\((\d{1,3}(?:\.\d{1,6})?)\)"), re.compile(r"\s*[0-9]{1,15}\s*")


class RoutedSweepPoint(NamedTuple):
    """A routing at a size on a mesh dim.

    Attributes:
        params: params of the case; `size` is the mean bytes that a rank sends, including those to itself.
        counts: rows by source and destination, (ranks, ranks).
        width: elements of a row.
    """

    params: Mapping[str, Param]
    counts: Sequence[list[int]]
    width: int

    def received(self, rank: int) -> list[int]:
        """Returns the rows that `rank` receives from each rank."""
        return [row[rank] for row in self.counts]

    @property
    def moved_share(self) -> float:
        """The share of the rows whose source and destination differ."""
        rows_to_itself, rows = (
            sum(row[rank] for rank, row in enumerate(self.counts)),
            sum(map(sum, self.counts)),
        )
        return (rows - rows_to_itself) / rows

    @property
    def skew(self) -> dict[str, float]:
        """The counter of the rows that the fullest rank receives, including its own, over the mean of all ranks."""
        received = [*map(sum, zip(*self.counts, strict=True))]
        return {"max_over_mean_received": max(received) * len(received) / sum(received)}


def routed_sweep(options: RunOptions, params: Mapping[str, Param]) -> Iterator[RoutedSweepPoint]:
    """Yields the routings at few sizes, on each mesh dim of several ranks: models, and the argument of --routing.

    A size is rounded down to equally many whole rows per pair of ranks, at least one.

    Args:
        params: further params of the cases, which come after the mesh dim.

    Raises:
        UsageError: --routing names neither a model nor a valid file, or its ranks fit no mesh dim.
    """
    dims, chosen = dims_with_several_ranks(options), options.options.get(ROUTING, ROUTINGS[0])
    needed = 1 if _weights(chosen, 1) else 1 + max(map(max, read_counts(Path(chosen))))
    if dims and needed > max(ranks for _, ranks in dims):
        raise UsageError(
            f"--routing {chosen} has counts for {needed} ranks, the mesh has {', '.join(f'{d}={n}' for d, n in dims)}: "
            f"expected a mesh dim of at least {needed}, such as --mesh ep={needed}"
        )
    for (mesh_dim, n), dtype in itertools.product(dims, options.dtypes):
        itemsize = torch_dtype(dtype).itemsize
        texts = dict.fromkeys([*ROUTINGS[: 2 if options.quick else None], *([chosen] if needed <= n else [])])
        # Small sizes may have the same shape.
        shapes = dict.fromkeys(_shape_of(size // (n * itemsize)) for size in options.few_sizes_bytes)
        for (rows, width), text in itertools.product(shapes, texts):
            name, size = text if _weights(text, 1) else Path(text).name, n * rows * width * itemsize
            case_params = {
                "mesh_dim": mesh_dim,
                "ranks": n,
                **params,
                "dtype": dtype,
                "size": size,
                ROUTING: name,
            }
            yield RoutedSweepPoint(case_params, counts_of(text, n, rows), width)


def _shape_of(elements: int) -> tuple[int, int]:
    """Returns (rows, width) of what a rank sends to each rank by the uniform routing, at most `elements`."""
    width = min(max(elements // FEWEST_ROWS, 1), HIDDEN)
    return max(elements // width, 1), width


def counts_of(text: str, ranks: int, rows: int) -> Sequence[list[int]]:
    """Returns the rows by source and destination.

    Args:
        text: the name of a model, or the path of a file.
        rows: mean rows per pair of ranks.

    Raises:
        UsageError: see `read_counts`.
    """
    if weights := _weights(text, ranks):
        return [apportion(weights, rows * ranks)] * ranks
    recorded = read_counts(Path(text))
    flat = apportion(
        [recorded.get((source, destination), 0) for source in range(ranks) for destination in range(ranks)],
        rows * ranks**2,
    )
    return [flat[start : start + ranks] for start in range(0, ranks**2, ranks)]


def _weights(text: str, ranks: int) -> list[int]:
    """Returns the weight of each receiving rank in a model's routing; [] if no model has this name."""
    if text in ("uniform", "hot"):
        return [1] + [int(text == "uniform")] * (ranks - 1)
    if (model := _MODEL.fullmatch(text)) is None:
        return []
    # The log of the ranks' weights for a parameter of 1. The quantiles of a log-normal distribution are taken in the
    # middle of equal intervals.
    logs = (
        [-math.log(rank + 1) for rank in range(ranks)]
        if model[1] == "zipf"
        else [NormalDist().inv_cdf((rank + 0.5) / ranks) for rank in range(ranks)]
    )
    return [round(_SCALE * math.exp(float(model[2]) * (log - max(logs)))) for log in logs]


def apportion(weights: Sequence[int], total: int) -> list[int]:
    """Divides `total` in proportion to the weights, by the method of largest remainders. The sum is exact."""
    parts = [divmod(weight * total, sum(weights)) for weight in weights]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-parts[i][1], i))
    rounded_up = {*by_remainder[: total - sum(quotient for quotient, _ in parts)]}
    return [quotient + (i in rounded_up) for i, (quotient, _) in enumerate(parts)]


def read_counts(path: Path) -> dict[tuple[int, int], int]:
    """Reads recorded counts: (source, destination) -> count. A missing pair is 0.

    Raises:
        UsageError: the file cannot be read, a value is not a non-negative integer, a pair occurs twice, or all are 0.
    """
    try:
        lines = [line for line in csv.reader(path.read_text("utf-8").splitlines()) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"--routing {path}: {describe(error)}; expected a file of counts or one of uniform, lognormal(SIGMA), "
            "zipf(S), hot"
        ) from None
    if (
        lines and all(map(_NUMBER.fullmatch, lines[0])) and {*map(len, lines)} == {len(lines)}
    ):  # a square matrix
        lines = [
            HEADER,
            *([str(source), str(rank), c] for source, row in enumerate(lines) for rank, c in enumerate(row)),
        ]
    header, *rows = lines or [[]]
    bad = [row for row in rows if len(row) != len(HEADER) or not all(map(_NUMBER.fullmatch, row))]
    if bad or [cell.strip().lower() for cell in header] != HEADER:
        raise UsageError(
            f"--routing {path} has {','.join([*bad, header][0])[:60]!r}: expected the header {','.join(HEADER)}, and "
            "lines of three non-negative integers; or a square matrix of them"
        )
    counts = {(int(source), int(destination)): int(count) for source, destination, count in rows}
    if len(counts) < len(rows) or not any(counts.values()):
        raise UsageError(
            f"--routing {path} has {len(counts)} pairs in {len(rows)} lines and {sum(counts.values())} rows: expected "
            "each pair of source and destination once, and a count above 0"
        )
    return counts
