"""Reads traces of torch.profiler (Chrome's Trace Event Format as Kineto writes it) as a stream: plain or gzip, of any
size, cut off, unsorted, with an event here and there that is no JSON. Memory holds a few MB of text at a time.

A piece of text is cut where one event ends and the next begins. Where exactly cannot be told without parsing it, so a
cut is tried and is right if what lies before it is a whole JSON array.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dtbench.suite.errors import UnreadableRunError, plain

PIECE = 4 * 2**20  # bytes read at a time
# One event of more is none; a whole trace of more is refused: a gzip of a MB can hold a GB of zeros.
MOST_EVENT, MOST_TRACE = 64 * 2**20, 8 * 2**30
_CUTS_TRIED = 40  # of one piece: events may hold lists of objects of their own
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_ENDS = re.compile(rb"\}\s*\]")
_BEGINS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[')
_NO_NUMBER = re.compile(rb":\s*-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)  # some versions write them
_MOST_HEADER = 16 * 2**20


class Args(msgspec.Struct, gc=False):
    """Of an event's arguments those that are read; with spaces as torch writes them (ParamCommsUtils, Kineto's
    output_json.cpp)."""

    correlation: Any = None
    stream: Any = None
    external: Any = msgspec.field(name="External id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    elements_out: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group_size: Any = msgspec.field(name="Group size", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    description: Any = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    sequence: Any = msgspec.field(name="Seq", default=None)
    shapes: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)


class Event(msgspec.Struct, gc=False):
    """ts, dur: us."""

    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: Any = None
    tid: Any = None
    ts: float | int | str | None = None
    dur: float | int | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")


_events = msgspec.json.Decoder(list[Event])
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_event = msgspec.json.Decoder(Event)
_args = msgspec.json.Decoder(Args)


def args_of(event: Event) -> Args:
    """Its arguments; none where they are damaged."""
    try:
        return _args.decode(event.args) if event.args else Args()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Args()


class Trace:
    """One file. After `events` are through: header (all but the events), cut_off (the file ends before its end),
    damaged (events that could not be read), size (bytes of unpacked JSON)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.cut_off = False
        self.damaged = self.size = 0
        self._text = b""
        self._file: BinaryIO | None = None

    def events(self) -> Iterator[list[Event]]:
        """The events, some thousands at a time.

        Raises:
            UnreadableRunError: it is no trace, or cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                self._file = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
                self._read_header()
                while self._read():
                    yield from self._whole_events()
                yield from self._last_events()
        except OSError as error:
            raise UnreadableRunError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _read(self) -> bool:
        """Another piece of text; False at the end."""
        assert self._file is not None
        try:
            more = self._file.read(PIECE)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.cut_off, more = True, b""
        self.size += len(more)
        if self.size > MOST_TRACE:
            raise UnreadableRunError(
                f"{self.path} holds more than {MOST_TRACE >> 30} GiB, expected a trace of less"
            )
        self._text = self._text + more if self._text else more
        return bool(more)

    def _read_header(self) -> None:
        while self._read() and len(self._text) < _MOST_HEADER:
            if begin := _BEGINS.search(self._text):
                head = self._text[: begin.end()] + b"]"
                self._keep_header(head + b"}" if head.lstrip().startswith(b"{") else b"{}")
                self._text = self._text[begin.end() :]
                return
        why = (
            "it ends before its events" if b'"schemaVersion"' in self._text[:4096] else "no events are in it"
        )
        raise UnreadableRunError(
            f"{self.path} is no trace of torch.profiler: {why}, expected its JSON, plain or gzip"
        )

    def _keep_header(self, text: bytes) -> None:
        try:
            header = msgspec.json.decode(_NO_NUMBER.sub(b":null", text))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        self.header |= {key: value for key, value in header.items() if key != "traceEvents"}

    def _whole_events(self) -> Iterator[list[Event]]:
        """Those that the text holds whole; what is left of it stays."""
        window = max(len(self._text) - 2**16, 0)
        cuts = [match.span() for match in _BETWEEN.finditer(self._text, window)]
        cuts = cuts or [match.span() for match in _BETWEEN.finditer(self._text)]
        for brace, following in cuts[: -_CUTS_TRIED - 1 : -1]:
            if (events := self._decoded(self._text[: brace + 1])) is not None:
                self._text = self._text[following:]
                yield events
                return
        if cuts and (len(self._text) > 2 * PIECE or len(cuts) > 1):
            yield self._one_by_one(cuts[-1])
        elif len(self._text) > MOST_EVENT:
            raise UnreadableRunError(
                f"{self.path} has an event of more than {MOST_EVENT >> 20} MiB, expected a trace"
            )

    def _decoded(self, text: bytes) -> list[Event] | None:
        """Of a text of whole events; None where it is not."""
        array = b"[" + text + b"]"
        try:
            return _events.decode(array)
        except msgspec.ValidationError:  # JSON, with a field of another type
            events = []
            for raw in _raw_events.decode(array):
                try:
                    events.append(_event.decode(raw))
                except msgspec.MsgspecError:
                    self.damaged += 1
            return events
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None

    def _one_by_one(self, last_cut: tuple[int, int]) -> list[Event]:
        """Where a piece as a whole is no JSON: its events; damaged ones are counted. The end of the list may lie in it,
        before what the file has after its events."""
        text, self._text = self._text[: last_cut[0] + 1], self._text[last_cut[1] :]
        text = _NO_NUMBER.sub(b":null", text).decode("utf-8", "replace").encode()
        if (events := self._decoded(text)) is not None:
            return events
        pieces = _BETWEEN.split(text + b",{")[:-1] if not text.endswith(b"}") else _BETWEEN.split(text)
        events = []
        for number, piece in enumerate(pieces):
            one = self._decoded(piece if number == len(pieces) - 1 else piece + b"}")
            events += one or []
            if one is None:
                self.damaged += 1
                if end := _ENDS.search(piece + b"}"):  # the last event, and then something else
                    events += self._decoded(piece[: end.start() + 1]) or []
        return events

    def _last_events(self) -> Iterator[list[Event]]:
        """What the text holds at the end of the file, up to the end of the list; then the rest of the header."""
        ends = [match.span() for match in _ENDS.finditer(self._text)]
        for brace, after in [*ends[:_CUTS_TRIED], *ends[_CUTS_TRIED:][-_CUTS_TRIED:]]:
            if (events := self._decoded(self._text[: brace + 1])) is not None:
                self._keep_header(b"{" + self._text[after:].lstrip().lstrip(b","))
                yield events
                return
        if not self._text.strip().rstrip(b"]}").strip():  # no event, or none after the last piece
            return
        self.cut_off = True
        cuts = [match.span() for match in _BETWEEN.finditer(self._text)]
        whole = self._decoded(self._text) if self._text.rstrip().endswith(b"}") else None
        if whole is not None:
            yield whole
        elif cuts:
            yield self._one_by_one(cuts[-1])


def told(value: object) -> str:
    """A text of a trace, as a terminal may show it."""
    return plain(str(value))[:200]
