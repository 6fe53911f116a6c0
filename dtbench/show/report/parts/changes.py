"""What changed: the verdict in words, case by case a table to sort and filter, and the ratios with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtbench.records import judged
from dtbench.records.judged import Judged
from dtbench.show.report import tables as t
from dtbench.show.report.axes import Axis, ratio_axis
from dtbench.show.report.changes import OUTCOMES, Changes, observations_of, why
from dtbench.show.report.figures import Figure, Row, Style, dots
from dtbench.show.report.section import Material, Part, Section

MOST_LINKS = 12
MOST_INTERVALS = 40
STYLES = {
    "slower": Style("s1", "^"),
    "faster": Style("s3", "v"),
    "inconclusive": Style("s2", "D", hollow=True),
    "same": Style("s0", "o"),
    "failed": Style("s4", "X"),
}


# ------------------------------------------------------------------------------------ verdict


@dataclass(frozen=True)
class Link:
    """The way to a case. count: how many there are of its verdict, whose meaning `meaning` says."""

    shape: str
    words: str
    anchor: str
    count: int = 1
    meaning: str = ""


@dataclass(frozen=True)
class Verdict:
    """outcome: one of OUTCOMES or "none"; sentence: what was found. tallies: a link per verdict, to its first case.
    links: to the gravest; more: how many others."""

    outcome: str
    shape: str
    headline: str
    sentence: str
    tallies: tuple[Link, ...] = ()
    thresholds: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    more: int = 0

    def reaching(self, sections: Sequence[Section]) -> Verdict:
        """Links to rows that were cut lead to the table."""
        there = {id_ for section in sections for table in section.tables for id_, _, _ in table.rows}

        def led(links: tuple[Link, ...]) -> tuple[Link, ...]:
            return tuple(one if one.anchor in there else replace(one, anchor="changes") for one in links)

        return replace(self, tallies=led(self.tallies), links=led(self.links))


def verdict(of: Material) -> Verdict:
    changes = of.changes
    if changes is None:
        if not of.sources.runs:
            said = "No cases of a run are part of this report, so none is called slower or faster."
            return Verdict("none", "–", "Nothing to compare", said)
        count = sum(len(run.results) for run in of.sources.runs)
        measured = f"{count} results were measured. " if count else ""
        sentence = (
            f"{measured}There is nothing to compare them with, so no case is called slower or faster: "
            "give the run of an earlier state with --base, or the result of dtbench gate."
        )
        return Verdict("none", "–", "Measured, not compared", sentence)
    places = {
        word: [i for i, c in enumerate(changes.changes) if c.verdict == word] for word in judged.Verdict
    }
    tallies = [
        Link(word.shape, word, _anchor(of_word[0]), len(of_word), word.meaning)
        for word, of_word in places.items()
        if of_word
    ]
    grave = [
        Link(word.shape, _words(changes.changes[i]), _anchor(i))
        for word in places
        if word.is_grave
        for i in places[word]
    ]
    total = len(changes.changes)
    counted = ", ".join(f"{tally.count} {tally.words}" for tally in tallies)
    sentence = f"{'1 case was' if total == 1 else f'{total} cases were'} compared: {counted}."
    return Verdict(
        changes.outcome,
        *OUTCOMES[changes.outcome],
        sentence if total else "There was nothing to compare.",
        tuple(tallies),
        (*changes.thresholds, *changes.notes),
        tuple(grave[:MOST_LINKS]),
        max(len(grave) - MOST_LINKS, 0),
    )


def _anchor(index: int) -> str:
    """Of the row of the table of changes."""
    return f"case-{index}"


def _words(change: Judged) -> str:
    ratio = f", {t.factor(change.ratio)}" if change.ratio is not None else ""
    return f"{change.verdict}: {change.suite} {change.words}, {change.impl}{ratio}"


# ------------------------------------------------------------------------------------ section


def fill(section: Section, of: Material) -> None:
    changes = of.changes
    if changes is None or not changes.changes:
        return
    section.lead = (
        "Ratio is the time now over the time before: above 1 is slower. A change counts where its interval and "
        "its size both say so; “over threshold” is the change over the least that counts for this case. "
        f"{changes.bounds}"
    )
    section.add(_intervals(section, changes), _table(changes.changes))


def _intervals(section: Section, changes: Changes) -> Figure | None:
    drawn = [c for c in changes.changes if c.ratio and c.matters]
    if len(drawn) > MOST_INTERVALS:
        section.cuts.append(
            f"The figure shows the {MOST_INTERVALS} gravest of {len(drawn)} cases; the table has more."
        )
    values = {name: {c.params.get(name) for c in drawn} for c in drawn for name in c.params}
    rows = []
    for c in drawn[:MOST_INTERVALS]:
        assert c.ratio is not None and c.matters is not None
        style = c.verdict if c.verdict in STYLES else "inconclusive"
        # Short enough for a figure: what tells the case from the others in it.
        told = [str(value) for name, value in c.params.items() if len(values[name]) > 1]
        rows.append(
            Row(
                " ".join([c.name, *told, f"({c.impl})"]),
                {style: c.ratio},
                f"{c.verdict.shape} {c.verdict} {t.factor(c.ratio)}",
                {style: (c.low, c.high)},
                (1 / (1 + c.matters), 1 + c.matters),
            )
        )

    def axis(ratios: Sequence[float]) -> Axis:
        return ratio_axis(ratios, 0.9, 1.1, lambda ratio: f"{ratio:g}×")

    slower = sum(c.verdict == "slower" for c in drawn)
    return dots(
        "forest",
        {"New over base": rows},
        STYLES,
        "New over base, the gravest first, on a logarithmic axis; the line at 1 is no change, the grey band is too "
        "small to count. What lies right of the band with its whole interval has become slower. An arrowhead at "
        "the end of an interval: no bound yet on that side.",
        axis,
        desc=lambda of: f"Ratios of {len(of)} cases with their intervals; {slower} are slower.",
        intervals=True,
    )


def _table(changes: Sequence[Judged]) -> t.Table:
    def bound(header: str, values: Sequence[float | None]) -> t.Column:
        cells = ["open" if v is None else t.factor(v) for v in values]
        known = [c.ratio is not None for c in changes]
        return t.Column(header, [x if k else t.MISSING for x, k in zip(cells, known, strict=True)], True)

    noise = [c.effect.sd if c.effect else None for c in changes]
    over = [t.MISSING if c.ratio is None or not c.matters else f"{c.severity:+.1f}" for c in changes]
    return t.Table(
        "Every case: before and now",
        [
            t.text("Verdict", [f"{c.verdict.shape} {c.verdict}" for c in changes]),
            t.text("Suite", [c.suite for c in changes]),
            t.text("Case", [c.words for c in changes]),
            t.text("Impl", [c.impl for c in changes]),
            *t.times([("base", [c.base_s for c in changes]), ("now", [c.head_s for c in changes])]),
            t.ratios("ratio", [c.ratio for c in changes]),
            bound("low", [c.low for c in changes]),
            bound("high", [c.high for c in changes]),
            t.percents("least that counts", [c.matters for c in changes]),
            t.Column("over threshold", over, True),
            *([t.percents("noise between pairs", noise)] if any(n is not None for n in noise) else []),
            t.text("Observations", [observations_of(c) for c in changes]),
            t.text("Estimator", [c.estimator for c in changes]),
            t.text("Why", [why(c) for c in changes]),
        ],
        note="Base and now: the median over launches of each launch’s estimate. “open”: so few observations "
        "bound it on no side.",
        ids=[_anchor(i) for i in range(len(changes))],
        tags=[c.verdict for c in changes],
        filter="changes",
    )


CHANGES = Part("changes", "Changes, case by case", fill, leads=True)
