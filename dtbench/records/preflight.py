"""What `dtbench preflight --json` writes: what was measured, and what was named."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.suite.fields import Amount, Count, Whole


class Link(Struct, frozen=True, kw_only=True):
    """A pair of ranks. rate: bytes per second each way, both ways at once. lost: of the TCP segments meanwhile."""

    kind: str
    ranks: tuple[Count, Count]
    rate: Amount
    lost: Amount = 0.0


class DimTimes(Struct, frozen=True, kw_only=True):
    """The all_reduce of a mesh dim, per group with all at work; alone_s: of the first group, the others idle."""

    dim: str
    groups: tuple[tuple[Count, ...], ...]
    size_bytes: Whole
    times_s: tuple[Amount, ...]
    alone_s: Amount

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.groups):
            raise ValueError(
                f"times_s has {len(self.times_s)} times for {len(self.groups)} groups, expected one each"
            )


class Finding(Struct, frozen=True, kw_only=True):
    """share: of its peers' speed. p: by chance alone, at most. lost: of its packets, where that is why it is named."""

    what: str
    kind: str
    ranks: tuple[Count, ...]
    share: Amount
    p: Amount
    lost: Amount = 0.0

    @property
    def how(self) -> str:
        """`79% of its peers`."""
        if self.lost:
            return f"{self.lost:.1%} of its packets sent again, at {self.share:.0%} of its peers' speed"
        return f"{self.share:.0%} of its peers"


class Preflight(Struct, frozen=True, kw_only=True):
    """hosts: by rank. work_s: kind -> seconds by rank of equal pieces of work. level: chance of naming anything where
    all are equal; found from a share of `named` on."""

    kind: Literal["preflight"] = "preflight"
    schema: Literal[1] = 1
    time: str
    seconds: Amount
    device: str
    hosts: tuple[str, ...]
    mesh: tuple[tuple[str, Whole], ...]
    links: tuple[Link, ...]
    dims: tuple[DimTimes, ...]
    work_s: dict[str, tuple[Amount, ...]]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    named: Amount
    level: Amount

    def __post_init__(self) -> None:
        for times in self.work_s.values():
            if len(times) > len(self.hosts):
                raise ValueError(
                    f"work_s has {len(times)} times of {len(self.hosts)} ranks, expected one each"
                )
