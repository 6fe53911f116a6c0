"""What the program prints goes through here: text from files, suites and errors moves no cursor and sets no title."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# Controls of C0 (but for tab and newline) and C1, and those that reverse what stands after them (Unicode, UAX 9).
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
# What our own tables and bars say to a terminal: colours; the line anew, one up, the cursor hidden and shown.
_COLOURS = r"\x1b\[[0-9;]*m"
_OF_BARS = rf"{_COLOURS}|\r|\x1b\[[0-9]*[AK]|\x1b\[\?25[lh]"


class CleanStream(io.TextIOWrapper):
    """A text stream over another one's buffer, in which controls are written as `\\x1b`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer,
            # click writes past a stream of ASCII, which it takes for misconfigured.
            encoding="utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding,
            errors="backslashreplace",
            line_buffering=bool(stream.line_buffering),
            write_through=getattr(stream, "write_through", False),
        )
        self._over = stream  # which closes the buffer once nobody refers to it
        kept = _OF_BARS if stream.isatty() else _COLOURS if os.environ.get("FORCE_COLOR") else ""
        self._pattern = re.compile(f"({kept})|{_CONTROLS}" if kept else f"(?!)()|{_CONTROLS}")

    def write(self, text: str) -> int:
        """Cleaned; the number of characters of `text`, as ever."""
        super().write(self._pattern.sub(lambda found: found[1] or ascii(found[0])[1:-1], text))
        return len(text)


@contextlib.contextmanager
def clean_output() -> Iterator[None]:
    """Within the block standard output and error are clean."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    cleaned: dict[str, CleanStream] = {}
    for name, stream in before.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):  # one without bytes below stays
            stream.flush()
            cleaned[name] = CleanStream(stream)
            setattr(sys, name, cleaned[name])
    try:
        yield
    finally:
        for name, stream in cleaned.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            with contextlib.suppress(OSError, ValueError):
                stream.detach()
