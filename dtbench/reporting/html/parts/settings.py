"""Settings out of measurements: the size of a bucket, and the variables that win a sweep per size of a collective."""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.cost.settings.buckets import INDUCTOR, MIB, Choice, choose, sweeps_of
from dtbench.cost.settings.nccl import ranges_of, times_of, winners_of
from dtbench.reporting.html import tables as t
from dtbench.reporting.html.section import Material, Part, Section
from dtbench.suite.errors import UsageError
from dtbench.text.units import format_size, plural

DEFAULT = "NCCL's default"


def fill(section: Section, of: Material) -> None:
    buckets, winners = _buckets(section, of), _winners(section, of)
    section.add(buckets, winners)
    section.lead = "What to set, where launches show that it is better."


def _buckets(section: Section, of: Material) -> t.Table | None:
    """What `dtbench settings` says of buckets."""
    try:
        choices = [choose(sweep) for sweep in sweeps_of(of.sources.runs)]
    except UsageError:  # no sweep over sizes
        return None
    for c in [c for c in choices if not c.edge]:
        words = f"bucket_cap_mb for {c.group[2]} over {c.group[0]}={c.group[1]}"
        section.headlines.append((format_size(c.bucket), words))
    return t.Table(
        "The smallest bucket within 5% of the best rate, as DDP's and inductor's bucket_cap_mb",
        [
            t.Column("Mesh dim", [c.group[0] for c in choices]),
            t.Column("Ranks", [str(c.group[1]) for c in choices], True),
            t.Column("Dtype", [c.group[2] for c in choices]),
            t.Column("Tensor", [format_size(c.group[3]) for c in choices], True),
            t.Column("Launches", [str(c.launches) for c in choices], True),
            t.Column("bucket_cap_mb", _mib([None if c.edge else c.bucket for c in choices]), True, "MiB"),
            t.Column("90% interval, low", _mib([c.low for c in choices]), True, "MiB"),
            t.Column("90% interval, high", _mib([c.high for c in choices]), True, "MiB"),
            t.percents("Slower than the best by", [c.loss for c in choices]),
        ],
        folded=not of.sources.sweep
        and (bool(of.crowded) or all(c.edge for c in choices)),  # no setting is among them
        note=f"The interval is over launches; one launch has none. {_edges(choices)}{INDUCTOR}",
    )


def _edges(choices: Sequence[Choice]) -> str:
    """Why some have no recommendation."""
    edges = dict.fromkeys(c.edge for c in choices if c.edge)
    return f"The edge of a sweep is no recommendation: {'; '.join(edges)}. " if edges else ""


def _mib(sizes: Sequence[int | None]) -> list[str]:
    return [t.MISSING if size is None else f"{size / MIB:g}" for size in sizes]


def _winners(section: Section, of: Material) -> t.Table | None:
    """What `dtbench settings` says of variables."""
    if not of.sources.sweep:
        return None
    try:
        ranges = ranges_of(winners_of(times_of((None, run) for run in of.sources.sweep)))
    except UsageError as error:
        section.missing = f"dtbench settings --sweep; {error}"
        return None
    won = [one for one in ranges if one.arm]
    sizes = sum(len(one.winners) for one in won)
    section.outcome = f"variables win at {plural(sizes, 'size')}" if won else "no variables win"
    effects = [[w.effect for w in one.winners if w.effect] for one in ranges]
    return t.Table(
        "The fastest variables per collective and range of sizes",
        [
            t.text("Collective", [dict(one.case)["collective"] for one in ranges]),
            t.Column("Ranks", [str(dict(one.case).get("ranks", t.MISSING)) for one in ranges], True),
            t.sizes("From", [format_size(one.winners[0].size) for one in ranges]),
            t.sizes("To", [format_size(one.winners[-1].size) for one in ranges]),
            t.text("Set", [" ".join("=".join(pair) for pair in one.arm) or DEFAULT for one in ranges]),
            t.ratios("Time / default, best", [min((e.ratio for e in es), default=None) for es in effects]),
            t.ratios("worst", [max((e.ratio for e in es), default=None) for es in effects]),
            t.ratios("95% bound, worst", [max((e.high for e in es), default=None) for es in effects]),
            t.counts("Pairs of launches", [min((e.pairs for e in es), default=None) for es in effects]),
        ],
        note="Variables are named only where the gate's paired test shows that every size of the range is faster with "
        "them; dtbench settings -o writes these ranges as the file of NCCL's tuner plugin. The other sections are "
        "of the launches as they come.",
    )


SETTINGS = Part("settings", "Settings", fill, of_links=True)
