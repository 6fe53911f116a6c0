"""The verdict: what the comparison comes to, in words and shape, with its thresholds and the way to each case."""

from __future__ import annotations

from dataclasses import dataclass

from dtbench.show.report.changes import GRAVE, OUTCOMES, WORDS, Changes
from dtbench.show.report.sources import Sources
from dtbench.show.report.tables import factor

MOST_LINKS = 12


@dataclass(frozen=True)
class Tally:
    """So many cases of one verdict. anchor: of the first of them in the table."""

    shape: str
    word: str
    count: int
    meaning: str
    anchor: str


@dataclass(frozen=True)
class Link:
    shape: str
    words: str
    anchor: str


@dataclass(frozen=True)
class Verdict:
    """outcome: one of OUTCOMES or "none"; sentence: what was found. links: to the gravest; more: how many others."""

    outcome: str
    shape: str
    headline: str
    sentence: str
    tallies: tuple[Tally, ...] = ()
    thresholds: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    more: int = 0
    notes: tuple[str, ...] = ()


def anchor_of(index: int) -> str:
    """Of the row of the table of changes."""
    return f"case-{index}"


def verdict(changes: Changes | None, sources: Sources) -> Verdict:
    if changes is None:
        return Verdict("none", "–", "Measured, not compared", _uncompared(sources))
    tallies, links, grave = [], [], 0
    for word, (shape, meaning) in WORDS.items():
        indices = [i for i, c in enumerate(changes.changes) if c.verdict == word]
        if indices:
            tallies.append(Tally(shape, word, len(indices), meaning, anchor_of(indices[0])))
        if word in GRAVE:
            grave += len(indices)
            links += [Link(shape, _words(changes, i), anchor_of(i)) for i in indices]
    shape, headline = OUTCOMES[changes.outcome]
    return Verdict(
        changes.outcome,
        shape,
        headline,
        _sentence(changes),
        tuple(tallies),
        changes.thresholds,
        tuple(links[:MOST_LINKS]),
        max(grave - MOST_LINKS, 0),
        changes.notes,
    )


def _words(changes: Changes, index: int) -> str:
    change = changes.changes[index]
    ratio = f", {factor(change.ratio)}" if change.ratio is not None else ""
    return f"{change.verdict}: {change.suite} {change.words}, {change.impl}{ratio}"


def _sentence(changes: Changes) -> str:
    total = len(changes.changes)
    counted = [f"{changes.count(word)} {word}" for word in WORDS if changes.count(word)]
    cases = "1 case was" if total == 1 else f"{total} cases were"
    return f"{cases} compared: {', '.join(counted)}." if total else "There was nothing to compare."


def _uncompared(sources: Sources) -> str:
    count = sum(len(run.results) for run in sources.runs)
    measured = f"{count} results were measured. " if count else ""
    return (
        f"{measured}There is nothing to compare them with, so no case is called slower or faster: "
        "give the run of an earlier state with --base, or the result of dtbench gate."
    )
