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
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dtbench.errors import UnreadableRunError, plain

PIECE = 4 * 2**20  # bytes read at a time
# One event of more is none; a whole trace of more is refused: a gzip of a MB can hold a GB of zeros.
MOST_EVENT, MOST_TRACE = 64 * 2**20, 8 * 2**30
_MOST_HEADER = 16 * 2**20
_WINDOW = 2**16  # of the text's end, where an event is expected to end
_BEGINS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[')
_FIRST_KEY = re.compile(rb'\s*\{\s*("\w{1,40}")')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_AFTER_LIST = re.compile(rb'\s*(?:\Z|[\]}]|,\s*")')
_NO_NUMBER = re.compile(rb":\s*-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)  # some versions write them
# From here on a float holds no 1/500 us: such times are read digit by digit.
_COARSE_US = 2.0**44


class Args(msgspec.Struct, gc=False):
    """Of an event's arguments those that are read; with spaces as torch writes them (ParamCommsUtils, Kineto's
    output_json.cpp)."""

    correlation: Any = None
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
    ts: Any = None
    dur: float | int | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")


_floats = msgspec.json.Decoder(list[Event])
_decimals = msgspec.json.Decoder(list[Event], float_hook=Decimal)  # of fields of any type, as `ts` is
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_args = msgspec.json.Decoder(Args)
_NO_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)


def args_of(event: Event) -> Args:
    """Its arguments; none where they are damaged."""
    try:
        return _args.decode(event.args) if event.args else Args()
    except _NO_JSON:
        return Args()


class Trace:
    """One file. After `events` are through: header (all but the events), cut_off (the file ends before its events do),
    damaged (events that could not be read), size (bytes of unpacked JSON)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.cut_off = False
        self.damaged = self.size = 0
        self._text = b""
        self._tail: bytes | None = None  # what follows the list of events
        self._between = _BETWEEN
        self._decoder: Any = _floats

    def events(self) -> Iterator[list[Event]]:
        """The events, some thousands at a time.

        Raises:
            UnreadableRunError: it is no trace, or cannot be read.
        """
        if self.path.exists() and not self.path.is_file():  # a pipe would be waited on for ever
            raise self._refused("not a regular file")
        with self._opened() as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            self._read_header(stream)
            enough = 0
            while self._tail is None:
                last = not self._read(stream)
                if last or len(self._text) >= enough:
                    if (events := self._take(last)) is not None:
                        yield events
                    elif len(self._text) > MOST_EVENT:
                        raise self._refused(f"an event has more than {MOST_EVENT >> 20} MiB")
                    enough = 2 * len(self._text) if events is None else 0
                    if last and (events is None or not self._text):
                        break
            self.cut_off |= self._tail is None
            while self._tail is not None and len(self._tail) < _MOST_HEADER and self._read(stream):
                self._tail, self._text = self._tail + self._text, b""
            self._keep_header(b"{" + (self._tail or b"}").lstrip().lstrip(b","))

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except (OSError, ValueError) as error:  # a null byte in its name
            raise self._refused(f"it cannot be read ({error})") from error

    def _refused(self, why: str) -> UnreadableRunError:
        return UnreadableRunError(
            f"{self.path} is no trace of torch.profiler: {why}, expected its JSON, plain or gzip"
        )

    def _read(self, stream: Any) -> bool:
        """Another piece of text; False at the end."""
        more = b""
        try:
            while len(more) < PIECE and (part := stream.read1(PIECE)):
                more += part
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.cut_off = True
        except OSError as error:
            raise self._refused(f"it cannot be read ({error.strerror})") from error
        self.size += len(more)
        if self.size > MOST_TRACE:
            raise self._refused(f"it holds more than {MOST_TRACE >> 30} GiB")
        self._text = self._text + more if self._text else more
        return bool(more)

    def _read_header(self, stream: Any) -> None:
        while self._read(stream) and len(self._text) < _MOST_HEADER:
            if begin := _BEGINS.search(self._text):
                head = self._text[: begin.end()] + b"]"
                self._keep_header(head + b"}" if head.lstrip().startswith(b"{") else b"{}")
                self._text = self._text[begin.end() :]
                return
        raise self._refused(
            "it ends before its events" if b'"schemaVersion"' in self._text[:4096] else "no events are in it"
        )

    def _keep_header(self, text: bytes) -> None:
        with suppress(*_NO_JSON):
            header = msgspec.json.decode(_NO_NUMBER.sub(b":null", text))
            self.header |= {key: value for key, value in header.items() if key != "traceEvents"}

    def _take(self, last: bool) -> list[Event] | None:
        """The events that the text holds whole, None where it holds none; what is left of it stays."""
        if self._between is _BETWEEN and (first := _FIRST_KEY.match(self._text)):
            # As all events of a trace begin, and hardly a thing in them: no text in JSON holds {"key" as it is.
            self._between = re.compile(rb"\}\s*,\s*(?=\{\s*" + first[1] + rb")")
        text = self._text.rstrip().removesuffix(b",") if last else self._text
        if last and (events := self._decoded(text)) is not None:
            self._text = b""
            return events
        for start in (max(len(text) - _WINDOW, 0), 0):
            cuts = [match.span() for match in _BETWEEN.finditer(text, start)]
            # Seldom is it not the last: twice as far back with each try.
            for back in (2**n for n in range(len(cuts).bit_length())):
                if (events := self._decoded(text[: cuts[-back][0] + 1])) is not None:
                    return self._cut(cuts[-back], events)
        own = [match.span() for match in self._between.finditer(text)]
        if own and (last or len(text) > 2 * PIECE):  # a bracket that is never closed
            return self._cut(own[-1], self._one_by_one(text[: own[-1][0] + 1]))
        try:
            _raw_events.decode(b"[" + text + b"]")
        except _NO_JSON as error:
            return self._ended(text, str(error))
        return None

    def _cut(self, at: tuple[int, int], events: list[Event]) -> list[Event]:
        if self._tail is not None:
            self._tail += self._text[at[0] + 1 :]
        self._text = self._text[at[1] :]
        return events

    def _decoded(self, text: bytes, repaired: bool = False) -> list[Event] | None:
        """Of a text that ends where an event does, also beyond the list; None where it ends within an event."""
        try:
            return self._whole(text)
        except msgspec.DecodeError as error:
            if "truncated" in str(error):
                return None
            if (events := self._ended(text, str(error))) is not None:
                return events
        except (UnicodeError, RecursionError):
            pass
        if repaired:
            return self._one_by_one(text)
        text = _NO_NUMBER.sub(b":null", text)
        return self._decoded(text.decode("utf-8", "replace").encode(), True)

    def _ended(self, text: bytes, error: str) -> list[Event] | None:
        """The events, where the list ends within the text; what comes after it is kept."""
        if trailing := re.search(r"trailing (characters|comma) .*byte (\d+)", error):
            end = text.rfind(b"]", 0, int(trailing[2]) - 2 * (trailing[1] == "characters"))
            if end >= 0 and _AFTER_LIST.match(text, end + 1):
                self._tail = text[end + 1 :]
                return self._whole(text[:end].rstrip().removesuffix(b","))
        return None

    def _whole(self, text: bytes) -> list[Event]:
        array = b"[" + text + b"]"
        try:
            events: list[Event] = self._decoder.decode(array)
        except msgspec.ValidationError:  # JSON, with a field of another type
            events = []
            for raw in _raw_events.decode(array):
                try:
                    events += self._decoder.decode(b"[" + bytes(raw) + b"]")
                except _NO_JSON:
                    self.damaged += 1
        if self._decoder is _floats and any(
            type(of.ts) is float and of.ts > _COARSE_US for of in events[:99]
        ):
            self._decoder = _decimals
            return self._whole(text)
        return events

    def _one_by_one(self, text: bytes) -> list[Event]:
        """Of a text that is no JSON as a whole the events that are; the others are counted."""
        events: list[Event] = []
        at = 0
        for brace in [*(match.start() for match in self._between.finditer(text)), len(text) - 1]:
            piece = text[at : brace + 1].lstrip(b", \t\r\n")
            at = brace + 1
            try:
                events += self._whole(piece)
            except _NO_JSON as error:
                one = self._ended(piece, str(error))
                self.damaged += one is None
                events += one or []
            if self._tail is not None:
                self._tail += text[at:]
                break
        return events


def printable(value: object) -> str:
    """A text of a trace, as a terminal may show it."""
    return plain(str(value))[:200]
