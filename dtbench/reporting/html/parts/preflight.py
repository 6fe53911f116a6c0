"""Links, mesh dims and work of ranks beside their peers, and what is slow."""

from __future__ import annotations

from statistics import median

from dtbench.records.preflight import Finding, Preflight
from dtbench.reporting.html.axes import seconds_tick, value_axis
from dtbench.reporting.html.figures import DotRow, Figure, HeatMap, Style, dots, maps
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.text import table as t
from dtbench.text.units import format_bandwidth, format_seconds, format_size, plural

STYLES = {"rank": Style("s0", "o", None, words="time of equal work")}
# Beyond, the cells of a map are too small to be told apart.
MAX_RANKS = 64


def fill(section: ReportSection, of: Material) -> None:
    for number, one in enumerate(of.sources.preflights):
        ranks = f"{len(one.hosts)} ranks on {plural(len(set(one.hosts)), 'host')}"
        slow = "; ".join(map(_words, one.findings))
        section.lead = section.lead or (
            f"{ranks}: {slow or f'nothing is below {one.named:.0%} of its peers'}. Where all are equal, at most "
            f"{one.level:.1%} of preflights name anything."
        )
        named = [f.what for f in one.findings]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        section.outcome = section.outcome or (f"slow: {named[0]}{more}" if named else f"{ranks} are healthy")
        section.cuts += [f"{note[:1].upper()}{note[1:]}." for note in one.notes]
        section.add(_links(section, one, number), _work(one, number), _findings(one), _dims(one), _rates(one))


def _words(one: Finding) -> str:
    return f"{one.what}: {one.how} ({one.kind})"


def _links(section: ReportSection, one: Preflight, number: int) -> Figure | None:
    count = len(one.hosts)
    if count > MAX_RANKS:
        section.cuts.append(f"A map of {count} x {count} links is not drawn; the table has them all.")
        return None
    panels = []
    for kind in dict.fromkeys(link.kind for link in one.links):
        rates = {frozenset(link.ranks): link.rate for link in one.links if link.kind == kind}
        cells = [[(f"{a}–{b}", rates.get(frozenset((a, b)))) for b in range(count)] for a in range(count)]
        slowest = min(rates, key=lambda pair: rates[pair])
        ranks = "–".join(map(str, sorted(slowest)))
        desc = f"{len(rates)} pairs; the slowest is {ranks} with {format_bandwidth(rates[slowest])}"
        panels.append(HeatMap(f"Links {kind}", cells, format_bandwidth, desc))
    return maps(
        f"preflight{number}",
        panels,
        ("rank", "rank"),
        "Bandwidth of each pair, both ways at once, each way; the deeper the faster. Empty: not measured.",
    )


def _work(one: Preflight, number: int) -> Figure | None:
    if len(one.hosts) > MAX_RANKS:
        return None
    panels = {
        kind: [
            DotRow(f"rank {rank} ({one.hosts[rank]})", {"rank": s}, format_seconds(s))
            for rank, s in enumerate(by_rank)
        ]
        for kind, by_rank in one.work_s.items()
    }
    return dots(
        f"work{number}",
        panels,
        STYLES,
        "The same work on every rank, at once where each has a CPU of its own; the shorter the faster.",
        lambda values: value_axis(values, seconds_tick, log=False),
        each_axis=True,
    )


def _findings(one: Preflight) -> t.Table:
    return t.Table(
        "What is slow, measured again beside its peers",
        [
            t.text("What", [f.what for f in one.findings]),
            t.text("In", [f.kind for f in one.findings]),
            t.percents("Of peers’ speed", [f.share for f in one.findings]),
            t.percents("Packets sent again", [f.lost for f in one.findings]),
            t.TableColumn("By chance, at most", [f"{f.p:.1g}" for f in one.findings], True),
        ],
    )


def _dims(one: Preflight) -> t.Table:
    rows = [(dim, at) for dim in one.dims for at in range(len(dim.groups))]
    return t.Table(
        "All_reduce of each mesh dim, all groups at once",
        [
            t.text("Dim", [dim.dim for dim, _ in rows]),
            t.text("Ranks", [", ".join(map(str, dim.groups[at])) for dim, at in rows]),
            t.sizes("Size", [format_size(dim.size_bytes) for dim, _ in rows]),
            *t.times(
                [
                    ("Time", [dim.times_s[at] for dim, at in rows]),
                    ("Median of the groups", [median(dim.times_s) for dim, _ in rows]),
                    ("First group alone", [dim.alone_s if at == 0 else None for dim, at in rows]),
                ]
            ),
        ],
        folded=True,
    )


def _rates(one: Preflight) -> t.Table:
    return t.Table(
        "All pairs",
        [
            t.text("Ranks", ["–".join(map(str, link.ranks)) for link in one.links]),
            t.text("Hosts", [" – ".join(one.hosts[rank] for rank in link.ranks) for link in one.links]),
            t.text("Kind", [link.kind for link in one.links]),
            *t.bandwidths([("Each way", [link.rate for link in one.links])]),
            t.percents("Packets sent again", [link.lost for link in one.links], 2),
        ],
        folded=True,
        most=2000,
    )


PREFLIGHT = Part("preflight", "Slow links, hosts and ranks", fill)
