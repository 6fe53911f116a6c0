"""What a preflight found: as JSON, and in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

from msgspec import Struct

from dtbench.preflight.examine import DimTimes, SlowFinding
from dtbench.suite.errors import plain
from dtbench.text.terminal import new_console, print_columns, print_line
from dtbench.text.units import bandwidth_unit, format_seconds, format_size, plural


class LinkRate(Struct, frozen=True, kw_only=True):
    """A pair of ranks. rate: bytes per second each way, both ways at once."""

    kind: str
    ranks: tuple[int, int]
    rate: float


class Preflight(Struct, frozen=True, kw_only=True):
    """hosts: by rank. work_s: kind -> seconds by rank of equal pieces of work. level: chance of naming anything where
    all are equal; found from a share of `named` on."""

    kind: Literal["preflight"] = "preflight"
    schema: Literal[1] = 1
    time: str
    seconds: float
    device: str
    hosts: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    links: tuple[LinkRate, ...]
    dims: tuple[DimTimes, ...]
    work_s: dict[str, tuple[float, ...]]
    findings: tuple[SlowFinding, ...]
    notes: tuple[str, ...]
    named: float
    level: float


def print_all(file: Preflight) -> None:
    """Speeds of peers, then the verdict in one line."""
    console = new_console()
    rows = list(_rows(file))
    print_columns(
        console,
        [("what", [row[0] for row in rows])],
        [(title, [row[at] for row in rows]) for at, title in enumerate(("slowest", "median", "fastest"), 1)],
        [("of", [row[4] for row in rows])],
    )
    for note in file.notes:
        print_line(console, f"note: {note}")
    print_line(console, sentence(file))


def _rows(file: Preflight) -> Iterator[list[str]]:
    """What; of it the slowest, the median and the fastest; of how many."""
    for kind in dict.fromkeys(link.kind for link in file.links):
        rates = [link.rate for link in file.links if link.kind == kind]
        unit = bandwidth_unit(rates)
        cells = [f"{unit.format(rate)} {unit.name}" for rate in reversed(_worst_first(rates))]
        yield [f"links {kind}, each way", *cells, plural(len(rates), "pair")]
    for dim in file.dims:
        title = f"all_reduce of {format_size(dim.size_bytes)} over {dim.dim}={len(dim.groups[0])}"
        yield [title, *map(format_seconds, _worst_first(dim.times_s)), plural(len(dim.groups), "group")]
    for kind, by_rank in file.work_s.items():
        yield [kind, *map(format_seconds, _worst_first(by_rank)), plural(len(by_rank), "rank")]


def _worst_first(values: Sequence[float]) -> list[float]:
    return [max(values), median(values), min(values)]


def sentence(file: Preflight) -> str:
    """The verdict in one line."""
    about = f"{len(file.hosts)} ranks on {plural(len(set(file.hosts)), 'host')}, {file.seconds:.0f} s"
    if not file.findings:
        return f"preflight: healthy ({about}): nothing below {file.named:.0%} of its peers"
    return f"preflight: slow ({about}): {'; '.join(plain(one.words()) for one in file.findings)}"
