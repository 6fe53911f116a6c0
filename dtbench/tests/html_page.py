"""Pages and their sections for tests: made in short, parsed for what they hold, drawings checked for their texts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure

from dtbench.records.result import Result, Run
from dtbench.reporting import html as reporting
from dtbench.reporting.html import Sources
from dtbench.reporting.html.parts import PARTS
from dtbench.reporting.html.section import Material, ReportSection
from dtbench.tests import made_up


def sources(runs: Sequence[Run], topology: Mapping[str, Any] | None = None, **more: Any) -> Sources:
    return Sources(runs=tuple(runs), topology=topology, **more)


def render(runs: Sequence[Run], topology: Mapping[str, Any] | None = None) -> str:
    return reporting.render(sources(runs, topology))


def section(part_id: str, results: Iterable[Result] = (), **more: Any) -> ReportSection:
    """Returns a part of the page of these results, without drawing it."""
    material = Material(sources([made_up.run(list(results))], **more))
    (shown,) = [
        section for part in PARTS if part.id == part_id and (section := part.section(material)) is not None
    ]
    return shown


def cells(shown: ReportSection, *start: str) -> list[str]:
    """The one row of the section's tables that begins with these cells."""
    (match,) = [row for table in shown.tables for *_, row in table.rows if tuple(row[: len(start)]) == start]
    return list(match)


# Text that would break out of its element, of a script, of a template, of a formula, or turn the reading direction.
HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}"
    "]]>--><!--$\\frac$\x00\x1b[2J\u202e</style>"
)


def hostile(value: object, kept: Collection[str]) -> Any:
    """The same structure with every string hostile, but for those under the keys `kept`, which choose a branch."""
    if isinstance(value, dict):
        return {k: v if k in kept else hostile(v, kept) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, kept) for v in value]
    return HOSTILE if isinstance(value, str) else value


def harmless(text: str) -> "Page":
    """The page, on which hostile text is text."""
    shown = Page(text)  # fails on an element that the text opened or closed
    # One script, without attributes; no image and no handler of events.
    assert [attrs for tag, attrs in shown.tags if tag in ("script", "img")] == [{}]
    assert not any(name.startswith("on") for _, attrs in shown.tags for name in attrs)
    assert sum(tag == "style" for tag, _ in shown.tags) == 1
    assert "{{ 7*7 }}" in shown.text and not {"\x00", "\x1b", "\u202e"} & set(text)
    assert len(shown.ids()) == len(set(shown.ids()))
    return shown


class Page(HTMLParser):
    """A parsed page: its tags, ids, table rows, and the text of each section."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.section_text: dict[str, str] = {}
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self._sections: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "section":
            self._sections.append(dict(attrs).get("id") or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._sections.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self._open or "script" in self._open:
            return
        self.text += data
        for section in self._sections:
            self.section_text[section] = self.section_text.get(section, "") + data
        if self._open[-1:] and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def ids(self) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get("id"))]

    def row(self, *start: str) -> list[str]:
        """The one table row that begins with these cells."""
        (match,) = [row for row in self.rows if tuple(row[: len(start)]) == start]
        return match


# Blank margin at each side of a text's box: it has room for accents and descenders.
SLACK_PX = 1.5


def overlapping_texts(canvas: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than the slack; a text that begins left of the drawing, with ""."""
    canvas.draw_without_rendering()
    boxes = []
    for axes in canvas.axes:
        texts = list(axes.texts)
        if axes.axison:
            texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        boxes += [
            (text.get_text(), text.get_window_extent().extents * 72 / canvas.dpi)
            for text in texts
            if text.get_visible() and text.get_text().strip()
        ]
    cut_off = [(words, "") for words, (left, *_) in boxes if left < -SLACK_PX]
    return cut_off + [
        (first, second)
        for (first, a), (second, b) in combinations(boxes, 2)
        if all(min(a[i + 2], b[i + 2]) - max(a[i], b[i]) > 2 * SLACK_PX for i in (0, 1))
    ]
