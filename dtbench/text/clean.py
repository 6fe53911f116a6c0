"""Output streams without control characters: no text can move the cursor or set the title."""

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# Control characters of C0 (except tab and newline) and C1, line separators, and those that reverse the direction of the
# text after them (Unicode, UAX 9).
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
# Controls that dtbench itself writes. Tables use colours. Progress bars also restart, erase or leave the line and hide
# the cursor.
_COLOURS = r"\x1b\[[0-9;]*m"
_PROGRESS_BARS = rf"{_COLOURS}|\r|\x1b\[[0-9]*[AK]|\x1b\[\?25[lh]"


class CleanStream(io.TextIOWrapper):
    """A text stream on the buffer of another one that writes control characters as escapes, e.g. `\\x1b`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer,
            # click takes an ASCII stream for misconfigured and bypasses it.
            encoding="utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding,
            errors="backslashreplace",
            line_buffering=bool(stream.line_buffering),
            write_through=getattr(stream, "write_through", False),
        )
        self._stream = stream  # keeps the buffer open: the stream closes it when it is garbage-collected
        allowed = _PROGRESS_BARS if stream.isatty() else _COLOURS if os.environ.get("FORCE_COLOR") else ""
        self._pattern = re.compile(f"({allowed})|{_CONTROLS}" if allowed else f"(?!)()|{_CONTROLS}")

    def write(self, text: str) -> int:
        """Writes the text without control characters; returns the number of characters of `text`."""
        super().write(self._pattern.sub(lambda match: match[1] or ascii(match[0])[1:-1], text))
        return len(text)


@contextlib.contextmanager
def clean_output() -> Iterator[None]:
    """Replaces standard output and error by clean streams within the block."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    clean_streams: dict[str, CleanStream] = {}
    for name, stream in streams.items():
        # A stream without a byte buffer stays as it is.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
            clean_streams[name] = CleanStream(stream)
            setattr(sys, name, clean_streams[name])
    try:
        yield
    finally:
        for name, stream in clean_streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, streams[name])
            for finish in (stream.flush, stream.detach):
                with contextlib.suppress(OSError, ValueError):
                    finish()
