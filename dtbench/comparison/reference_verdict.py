"""Whether a run's bandwidths at large sizes are those of public systems of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from dtbench.suite.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_REGRESSION
from dtbench.suite.grouping import group_by
from dtbench.text.units import format_size

# On one host, sources of one GPU differ by 12 % at most from 64 MiB on (all_to_all of 8 A100 there), at 1 MiB by 70 %;
# on two hosts, whose networks differ, by a factor of 4 (A100) and 2 (H100): results/reference/README.md. A run is low
# below this share of the slowest source; where that is below it of the fastest, what lies between is not judged.
LOW = 0.85
JUDGED_FROM = 64 * 2**20

Verdict = Literal["low", "cannot tell", "as public measurements", "above public measurements"]
WORST_FIRST: tuple[Verdict, ...] = get_args(Verdict)
EXIT_CODES = dict(zip(WORST_FIRST, (EXIT_REGRESSION, EXIT_INCONCLUSIVE, EXIT_OK, EXIT_OK), strict=True))
_COUNTS = ("no source", "one source", "two sources", "three sources", "four sources")


class ReferenceRow(Struct, frozen=True):
    """One collective at one size: the run's bus bandwidth and the reference's, bytes per second, and their ratio.

    varies: whether systems of this kind may differ, by their network or PCIe, so that one of them says little.
    """

    system: str
    mesh_dim: str
    collective: str
    dtype: str
    size_bytes: int
    run_Bps: float  # noqa: N815 - bytes per second
    reference_Bps: float  # noqa: N815
    ratio: float
    varies: bool = False


class ReferenceVerdict(Struct, frozen=True, kw_only=True):
    """Collectives of one mesh dim that fared alike. ratios: least and most of the run's bandwidth over the median of
    the sources, at `sizes`. beside: the GPU and the scale, or the system that was named."""

    verdict: Verdict
    mesh_dim: str
    collectives: tuple[str, ...]
    ratios: tuple[float, float]
    beside: str
    sizes: str
    sources: int

    def __str__(self) -> str:
        least, most = (f"{ratio:.2f}" for ratio in self.ratios)
        ratios = least if least == most else f"{least} to {most}"
        sources = f"{self.sources} sources" if self.sources >= len(_COUNTS) else _COUNTS[self.sources]
        unsure = ": their network or PCIe may be another" if self.sources == 1 else ", which disagree"
        why = unsure if self.verdict == "cannot tell" else ""
        what = f"{', '.join(self.collectives)} of dim {self.mesh_dim}"
        return f"{self.verdict}: {ratios} of {self.beside} at {self.sizes}, {sources}{why} ({what})"


def verdicts_of(rows: Sequence[ReferenceRow], beside: str, one_is_enough: bool) -> Iterator[ReferenceVerdict]:
    """Per collective what its rows of one mesh dim, from `JUDGED_FROM` on, say; those that fared alike together.

    one_is_enough: whether a single source is believed where systems of its kind vary.
    """
    judged = [
        _judged(of, beside, one_is_enough) for of in group_by(rows, lambda row: row.collective).values()
    ]
    judged.sort(key=lambda verdict: WORST_FIRST.index(verdict.verdict))
    alike = group_by(judged, lambda v: (v.verdict, v.sizes, v.sources, v.verdict == "low" and v.collectives))
    for several in alike.values():
        ends = [ratio for verdict in several for ratio in verdict.ratios]
        names = tuple(name for verdict in several for name in verdict.collectives)
        yield replace(several[0], collectives=names, ratios=(min(ends), max(ends)))


def _judged(rows: Sequence[ReferenceRow], beside: str, one_is_enough: bool) -> ReferenceVerdict:
    at: dict[int, Verdict] = {}
    ratios: dict[int, float] = {}
    for size, of_size in sorted(group_by(rows, lambda row: row.size_bytes).items()):
        # Of several element types the fastest: some take longer to add.
        ours = max(row.run_Bps for row in of_size)
        sources = {row.system: row.reference_Bps for row in of_size}
        slowest, fastest = min(sources.values()), max(sources.values())
        ratios[size] = ours / median(sources.values())
        if ours < LOW * slowest:
            enough = one_is_enough or len(sources) > 1 or not of_size[0].varies
            at[size] = "low" if enough else "cannot tell"
        elif ours < LOW * fastest and slowest < LOW * fastest:
            at[size] = "cannot tell"
        else:
            at[size] = "above public measurements" if ours * LOW > fastest else "as public measurements"
    verdict = min(at.values(), key=WORST_FIRST.index)
    judged = [size for size in at if at[size] == verdict or verdict not in ("low", "cannot tell")]
    named = [
        format_size(round(size / 2**20) * 2**20) for size in judged
    ]  # nccl-tests cuts 64 MiB to whole ranks
    sizes = ", ".join(named)
    if len(judged) > 1 and judged == [size for size in at if judged[0] <= size <= judged[-1]]:
        sizes = f"{named[0]} and above" if judged[-1] == max(at) else f"{named[0]} to {named[-1]}"
    return ReferenceVerdict(
        verdict=verdict,
        mesh_dim=rows[0].mesh_dim,
        collectives=(rows[0].collective,),
        ratios=(min(ratios[size] for size in judged), max(ratios[size] for size in judged)),
        beside=beside,
        sizes=sizes,
        sources=len({row.system for row in rows if row.size_bytes in judged}),
    )
