"""A page that lists the reports of a folder, the newest first."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dtbench.records.atomic import HEAD_BYTES, write_atomically
from dtbench.records.read import opened
from dtbench.reporting.html.page import is_report, render_template
from dtbench.suite.errors import UnreadableRunError

GENERATOR = "dtbench report --index"
MAX_REPORTS = 2000


@dataclass(frozen=True)
class Entry:
    """A report, as it describes itself."""

    href: str
    title: str
    verdict: str
    started: str
    file: str


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
    return sorted(sorted(found, key=lambda e: e.file), key=lambda e: e.started, reverse=True)


def _entry(page: Path, path: Path) -> Entry | None:
    try:
        with opened(page, "a report") as file:
            head = file.read(HEAD_BYTES).decode("utf-8", "replace")
    except UnreadableRunError:
        return None
    if not is_report(head):
        return None
    return Entry(
        quote(os.path.relpath(page, path.parent)),
        _between("<title>", " – dtbench</title>", head) or page.name,
        _between('<meta name="dtbench-verdict" content="', '">', head),
        _between('<meta name="dtbench-started" content="', '">', head),
        page.name,
    )


def _between(before: str, after: str, head: str) -> str:
    """What the template of a page, which escapes every value, has between the two."""
    return html.unescape(head.partition(before)[2].partition(after)[0])


def _is_index(head: str) -> bool:
    return f'<meta name="generator" content="{html.escape(GENERATOR)}">' in head
