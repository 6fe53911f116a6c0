"""Lines of a log without what launchers, terminals and other processes put into them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from dtbench.records.read import BadFieldError, decode


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """A compiled expression whose digits are ASCII's: int() and float() would take other scripts' too."""
    return re.compile(text, re.ASCII | flags)


# A line of a table has some 200 characters; what is longer is another thing, and slow to search.
MAX_LINE = 8192
_ESCAPES = pattern(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
# What NCCL logs, wherever in a line it begins: "host:pid:tid [device] NCCL INFO ...".
_NCCL = pattern(r":\d+:\d+ \[\d+\] (?:\d+\.\d+ \S+ )?NCCL [A-Z]+")
_VALUE = pattern(r"N/A|[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[+-]?nan|[+-]?inf", re.IGNORECASE)
# A number with text glued to it; where that text begins with a digit, nothing tells them apart.
_LEADING_VALUE = pattern(r"(N/A|[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?)(?=[A-Za-z\[(<_])")
# A line as CRI runtimes (containerd, CRI-O) log it: time, stream, F for a full line or P for a part of one, the text.
_CRI = pattern(r"\d{4}-\d\d-\d\dT\S+ (?:stdout|stderr) ([FP])(?::\S*)?(?: (.*))?")
_HEAD_LINES = 20  # of a container's log: the first may be a message of the client that printed it


def without_container(text: str) -> str:
    """What a program printed, out of the log that a container's runtime keeps: Docker's json-file, or CRI."""
    lines = text.split("\n")
    is_plain = all(_printed(line) == f"{line}\n" for line in lines[:_HEAD_LINES])
    return text if is_plain else "".join(map(_printed, lines))


def _printed(line: str) -> str:
    """The text in a line of a container's log; other lines as they are."""
    if match := _CRI.fullmatch(line.rstrip("\r")):
        return (match[2] or "") + "\n" * (match[1] == "F")
    try:
        text = decode(line.encode("utf-8", "replace")).get("log") if line.startswith("{") else None
    except BadFieldError:
        text = None
    return text if isinstance(text, str) else f"{line}\n"


def lines_of(text: str) -> Iterator[str]:
    """The lines without terminal escapes; of a line that was overwritten (\\r), what remained visible."""
    for line in text.split("\n"):
        line = line[:MAX_LINE].rstrip("\r ")
        if "\x1b" in line:
            line = _ESCAPES.sub("", line)
        if "\r" in line:
            line = line.rsplit("\r", 1)[1]
        yield line.replace("\t", " ").replace("\x00", "")


def scan(text: str, kinds: Mapping[str, re.Pattern[str]]) -> Iterator[tuple[int, str, re.Match[str]]]:
    """Of each line its number, from 1, the first kind whose pattern is found in it, and what was found."""
    for number, line in enumerate(lines_of(text), 1):
        for kind, wanted in kinds.items():
            if match := wanted.search(line):
                yield number, kind, match
                break


def without_nccl(line: str) -> str:
    """What stands before a message of NCCL that was printed into the line.

    The name of its host touches the value before it: a name that begins with a letter is told from a number.
    """
    match = _NCCL.search(line)
    if match is None:
        return line
    before, space, word = line[: match.start()].rpartition(" ")
    value = _LEADING_VALUE.match(word)
    return before + space + (value[1] if value else "")


@lru_cache(2**14)
def value_of(word: str) -> tuple[str, bool]:
    """The number or N/A that a word is or begins with, and whether it is the whole word; "" for none."""
    if _VALUE.fullmatch(word):
        return word, True
    value = _LEADING_VALUE.match(word)
    return (value[1], False) if value else ("", False)
