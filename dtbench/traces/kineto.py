"""Reads traces of torch.profiler as a stream: Chrome's Trace Event Format as Kineto writes it, plain or gzip.

Traces may be of any size, cut off and unsorted, and may contain single events that are not valid JSON. Only a few MB of
text are in memory at a time.

The text is split between two events. Only parsing shows where an event ends, so a split is tried and accepted if the
text before it is a valid JSON array.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from dtbench.errors import UnreadableRunError, plain

PIECE = 4 * 2**20  # bytes read at a time
# Limits in bytes of JSON, since a gzip file of 1 MB can hold 1 GB of zeros.
MAX_EVENT_BYTES, MAX_TRACE_BYTES = 64 * 2**20, 8 * 2**30
_MAX_HEADER = 16 * 2**20
_SPLIT_WINDOW = 2**16  # bytes at the end of the text in which a split is tried first
_BEGINS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[')
_FIRST_KEY = re.compile(rb'\s*\{\s*("\w{1,40}")')
_SEPARATOR = re.compile(rb"\}\s*,\s*(?=\{)")
_AFTER_LIST = re.compile(rb'\s*(?:\Z|[\]}]|,\s*")')
_NAN_OR_INF = re.compile(rb":\s*-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)  # some versions write them
# Beyond this, a float does not resolve 1/500 us, so times are read as decimals.
_COARSE_US = 2.0**44


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that are read, under the names that torch writes.

    The names come from torch's ParamCommsUtils and Kineto's output_json.cpp.
    """

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
    """An event of a trace.

    Attributes:
        ph: its phase; "X" has a start and a duration.
        name: its name.
        cat: its category.
        pid, tid: its process and thread, or its device and stream.
        ts, dur: start and duration, microseconds.
        args: its arguments, not decoded yet.
    """

    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: float | int | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")


_floats = msgspec.json.Decoder(list[Event])
_decimals = msgspec.json.Decoder(list[Event], float_hook=Decimal)  # for fields of type Any, such as `ts`
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_args = msgspec.json.Decoder(Args)
# Errors from decoding invalid JSON.
_JSON_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)


def args_of(event: Event) -> Args:
    """Decodes the arguments of an event; empty if they are damaged."""
    try:
        return _args.decode(event.args) if event.args else Args()
    except _JSON_ERRORS:
        return Args()


class Trace:
    """A trace file.

    Attributes:
        path: the file.
        header: all keys but the events. It is complete once all `events` were read, like the attributes below.
        cut_off: whether the file ends within the list of events.
        damaged: number of events that are not valid JSON.
        size: bytes of JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.cut_off = False
        self.damaged = self.size = 0
        self._text = b""
        self._tail: bytes | None = None  # the text after the list of events
        self._separator = _SEPARATOR
        self._decoder: Any = _floats

    def events(self) -> Iterator[list[Event]]:
        """Yields the events, some thousands at a time.

        Raises:
            UnreadableRunError: the file is not a trace, or cannot be read.
        """
        if self.path.exists() and not self.path.is_file():  # reading a pipe could block forever
            raise self._refused("not a regular file")
        with self._opened() as file:
            stream = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
            self._read_header(stream)
            if "dtbench_export" in self.header:  # its events were not recorded
                raise self._refused("`dtbench export` wrote it for torch.compile")
            needed = 0  # bytes of text before the next attempt
            while self._tail is None:
                last = not self._read(stream)
                if last or len(self._text) >= needed:
                    if (events := self._take(last)) is not None:
                        yield events
                    elif len(self._text) > MAX_EVENT_BYTES:
                        raise self._refused(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
                    needed = 2 * len(self._text) if events is None else 0
                    if last and (events is None or not self._text):
                        break
            self.cut_off |= self._tail is None
            while self._tail is not None and len(self._tail) < _MAX_HEADER and self._read(stream):
                self._tail, self._text = self._tail + self._text, b""
            self._keep_header(b"{" + (self._tail or b"}").lstrip().lstrip(b","))

    def _opened(self) -> BufferedReader:
        try:
            return self.path.open("rb")
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise self._refused(f"it cannot be read ({error})") from error

    def _refused(self, why: str) -> UnreadableRunError:
        return UnreadableRunError(
            f"{self.path} is not a trace of torch.profiler: {why}; expected its JSON, plain or gzip, or "
            "logs of NCCL's inspector (JSON lines)"
        )

    def _read(self, stream: Any) -> bool:
        """Appends the next piece of text; returns False at the end of the file."""
        piece = b""
        try:
            while len(piece) < PIECE and (part := stream.read1(PIECE)):
                piece += part
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.cut_off = True
        except OSError as error:
            raise self._refused(f"it cannot be read ({error.strerror})") from error
        self.size += len(piece)
        if self.size > MAX_TRACE_BYTES:
            raise self._refused(f"it holds more than {MAX_TRACE_BYTES >> 30} GiB")
        self._text = self._text + piece if self._text else piece
        return bool(piece)

    def _read_header(self, stream: Any) -> None:
        while self._read(stream) and len(self._text) < _MAX_HEADER:
            if begin := _BEGINS.search(self._text):
                head = self._text[: begin.end()] + b"]"
                self._keep_header(head + b"}" if head.lstrip().startswith(b"{") else b"{}")
                self._text = self._text[begin.end() :]
                return
        raise self._refused(
            "it ends before its events" if b'"schemaVersion"' in self._text[:4096] else "no events are in it"
        )

    def _keep_header(self, text: bytes) -> None:
        with suppress(*_JSON_ERRORS):
            header = msgspec.json.decode(_NAN_OR_INF.sub(b":null", text))
            self.header |= {key: value for key, value in header.items() if key != "traceEvents"}

    def _take(self, last: bool) -> list[Event] | None:
        """Removes complete events from the text and returns them; None if it has no complete event.

        Args:
            last: whether the text reaches to the end of the file.
        """
        if self._separator is _SEPARATOR and (first := _FIRST_KEY.match(self._text)):
            # All events of a trace begin with the same key. JSON strings escape quotes, so they do not contain it.
            self._separator = re.compile(rb"\}\s*,\s*(?=\{\s*" + first[1] + rb")")
        text = self._text.rstrip().removesuffix(b",") if last else self._text
        if last and (events := self._try_decode(text)) is not None:
            self._text = b""
            return events
        for start in (max(len(text) - _SPLIT_WINDOW, 0), 0):
            cuts = [match.span() for match in _SEPARATOR.finditer(text, start)]
            # The last split nearly always works. Otherwise, each attempt goes twice as far back.
            for back in (2**n for n in range(len(cuts).bit_length())):
                if (events := self._try_decode(text[: cuts[-back][0] + 1])) is not None:
                    return self._cut(cuts[-back], events)
        starts = [match.span() for match in self._separator.finditer(text)]
        if starts and (last or len(text) > 2 * PIECE):  # an event with an unclosed bracket
            return self._cut(starts[-1], self._one_by_one(text[: starts[-1][0] + 1]))
        try:
            _raw_events.decode(b"[" + text + b"]")
        except _JSON_ERRORS as error:
            return self._ended(text, str(error))
        return None

    def _cut(self, separator: tuple[int, int], events: list[Event]) -> list[Event]:
        """Removes the text up to the separator and returns `events`, which were decoded from it."""
        if self._tail is not None:
            self._tail += self._text[separator[0] + 1 :]
        self._text = self._text[separator[1] :]
        return events

    def _try_decode(self, text: bytes, repaired: bool = False) -> list[Event] | None:
        """Decodes a text that ends with an event or after the list of events; None if it ends within an event."""
        try:
            return self._decode(text)
        except msgspec.DecodeError as error:
            if "truncated" in str(error):
                return None
            if (events := self._ended(text, str(error))) is not None:
                return events
        except (UnicodeError, RecursionError):
            pass
        if repaired:
            return self._one_by_one(text)
        return self._try_decode(_NAN_OR_INF.sub(b":null", text).decode("utf-8", "replace").encode(), True)

    def _ended(self, text: bytes, error: str) -> list[Event] | None:
        """Decodes a text in which the list of events ends, and keeps the tail; None if it does not end there.

        Args:
            error: the message of the failed attempt to decode the text, which contains the position.
        """
        if trailing := re.search(r"trailing (characters|comma) .*byte (\d+)", error):
            end = text.rfind(b"]", 0, int(trailing[2]) - 2 * (trailing[1] == "characters"))
            if end >= 0 and _AFTER_LIST.match(text, end + 1):
                self._tail = text[end + 1 :]
                return self._decode(text[:end].rstrip().removesuffix(b","))
        return None

    def _decode(self, text: bytes) -> list[Event]:
        """Decodes events that are separated by commas. Those with fields of a wrong type count as damaged."""
        array = b"[" + text + b"]"
        try:
            events: list[Event] = self._decoder.decode(array)
        except msgspec.ValidationError:
            events = []
            for raw in _raw_events.decode(array):
                try:
                    events += self._decoder.decode(b"[" + bytes(raw) + b"]")
                except _JSON_ERRORS:
                    self.damaged += 1
        if self._decoder is _floats and any(
            type(event.ts) is float and event.ts > _COARSE_US for event in events[:99]
        ):
            self._decoder = _decimals
            return self._decode(text)
        return events

    def _one_by_one(self, text: bytes) -> list[Event]:
        """Decodes the valid events of a text that is not valid JSON, and counts the others as damaged."""
        events: list[Event] = []
        start = 0
        for brace in [*(match.start() for match in self._separator.finditer(text)), len(text) - 1]:
            piece = text[start : brace + 1].lstrip(b", \t\r\n")
            start = brace + 1
            try:
                events += self._decode(piece)
            except _JSON_ERRORS as error:
                ended = self._ended(piece, str(error))
                self.damaged += ended is None
                events += ended or []
            if self._tail is not None:
                self._tail += text[start:]
                break
        return events


def printable(value: object) -> str:
    """Returns text from a trace, shortened and safe to print."""
    return plain(str(value))[:200]
