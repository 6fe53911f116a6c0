"""A page that lists the reports of a folder, the newest first."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

from dtbench.errors import UnreadableRunError
from dtbench.files.atomic import HEAD_BYTES, write_atomically
from dtbench.show.report.page import is_report, render_template

GENERATOR = "dtbench report --index"
MAX_REPORTS = 2000
# A report names itself at its beginning; the style sheet follows.
_WORDS = ("dtbench-verdict", "dtbench-started")


@dataclass(frozen=True)
class Entry:
    """A report, as it describes itself."""

    href: str
    title: str
    verdict: str
    started: str
    file: str


class _Head(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag == "meta" and of.get("name") in _WORDS:
            self.found.setdefault(str(of["name"]), of.get("content") or "")
        self._in_title = tag == "title" and not self.title

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data


def write_index(folder: Path, path: Path) -> None:
    """Writes the page.

    Raises:
        UnreadableRunError: the folder is none, or holds no report.
        OutputError: the place cannot be written, or holds a file that is no index.
    """
    entries = entries_of(folder, path)
    if not entries:
        raise UnreadableRunError(f"{folder} holds no report: expected pages of `dtbench report`")
    shown = entries[:MAX_REPORTS]
    text = render_template(
        "index.html.j2",
        entries=shown,
        left=len(entries) - len(shown),
        folder=folder.name,
        generator=GENERATOR,
    )
    write_atomically(path, text, _is_index, "index of reports")


def entries_of(folder: Path, path: Path) -> list[Entry]:
    """The reports of a folder as seen from `path`, the newest first.

    Raises:
        UnreadableRunError: the folder is none.
    """
    try:
        pages = sorted(p for p in folder.iterdir() if p.suffix == ".html" and p.is_file())
    except OSError as error:
        raise UnreadableRunError(
            f"cannot read {folder}: {error.strerror or error}; expected a folder of reports"
        ) from error
    found = [entry for page in pages if (entry := _entry(page, path)) is not None]
    return _newest_first(found)


def _newest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(sorted(entries, key=lambda e: e.file), key=lambda e: e.started, reverse=True)


def _entry(page: Path, path: Path) -> Entry | None:
    try:
        with page.open("rb") as file:
            head = file.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    if not is_report(head):
        return None
    said = _Head(head.partition("<style>")[0])
    relative = os.path.relpath(page, path.parent)
    return Entry(
        quote(relative),
        said.title.removesuffix(" – dtbench") or page.name,
        said.found.get(_WORDS[0], ""),
        said.found.get(_WORDS[1], ""),
        page.name,
    )


def _is_index(head: str) -> bool:
    return f'<meta name="generator" content="{html.escape(GENERATOR)}">' in head
