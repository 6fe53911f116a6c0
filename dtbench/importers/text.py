"""Removes from a log what container runtimes, terminals and NCCL added to the benchmark's output."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from dtbench.records.read import BadFieldError, decode


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Compiles an expression whose `\\d` matches ASCII digits only, unlike int() and float()."""
    return re.compile(text, re.ASCII | flags)


# Lines of a table have some 200 characters. Longer lines are cut, since they would be slow to search.
MAX_LINE = 8192
_ESCAPES = pattern(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
# A message of NCCL, anywhere in a line: "host:pid:tid [device] NCCL INFO ...".
_NCCL = pattern(r":\d+:\d+ \[\d+\] (?:\d+\.\d+ \S+ )?NCCL [A-Z]+")
_VALUE = pattern(r"N/A|[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[+-]?nan|[+-]?inf", re.IGNORECASE)
# A number directly followed by text. Text that begins with a digit cannot be separated from the number.
_LEADING_VALUE = pattern(r"(N/A|[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?)(?=[A-Za-z\[(<_])")
# The line format of CRI runtimes (containerd, CRI-O): time, stream, F (full line) or P (partial line), text.
_CRI = pattern(r"\d{4}-\d\d-\d\dT\S+ (?:stdout|stderr) ([FP])(?::\S*)?(?: (.*))?")
_HEAD_LINES = 20  # lines that decide about the format; the first may be a message of the client


def strip_container_log(text: str) -> str:
    """Extracts the program's output from a container runtime's log (Docker's json-file, or CRI)."""
    lines = text.split("\n")
    is_plain = all(_container_text(line) == f"{line}\n" for line in lines[:_HEAD_LINES])
    return text if is_plain else "".join(map(_container_text, lines))


def _container_text(line: str) -> str:
    """Extracts the text from one line of a container's log; returns other lines unchanged."""
    if match := _CRI.fullmatch(line.rstrip("\r")):
        return (match[2] or "") + "\n" * (match[1] == "F")
    try:
        text = decode(line.encode("utf-8", "replace")).get("log") if line.startswith("{") else None
    except BadFieldError:
        text = None
    return text if isinstance(text, str) else f"{line}\n"


def clean_lines(text: str) -> Iterator[str]:
    """Yields the lines without terminal escapes and without the text that a carriage return overwrote."""
    for line in text.split("\n"):
        line = line[:MAX_LINE].rstrip("\r ")
        if "\x1b" in line:
            line = _ESCAPES.sub("", line)
        if "\r" in line:
            line = line.rsplit("\r", 1)[1]
        yield line.replace("\t", " ").replace("\x00", "")


def scan(text: str, kinds: Mapping[str, re.Pattern[str]]) -> Iterator[tuple[int, str, re.Match[str]]]:
    """Yields the number (from 1), the kind and the match of each line that matches one of the patterns.

    Args:
        kinds: kind -> pattern. The first that matches a line determines its kind.
    """
    for number, line in enumerate(clean_lines(text), 1):
        for kind, expression in kinds.items():
            if match := expression.search(line):
                yield number, kind, match
                break


def strip_nccl_message(line: str) -> str:
    """Removes a message of NCCL that was printed into the line, and all text behind it.

    The message begins with the host's name, directly behind the preceding value. The value is kept if the name
    begins with a letter.
    """
    match = _NCCL.search(line)
    if match is None:
        return line
    prefix, space, word = line[: match.start()].rpartition(" ")
    value = _LEADING_VALUE.match(word)
    return prefix + space + (value[1] if value else "")


@lru_cache(2**14)
def leading_value(word: str) -> tuple[str, bool]:
    """Returns the number or "N/A" that begins a word (else ""), and whether it is the entire word."""
    if _VALUE.fullmatch(word):
        return word, True
    value = _LEADING_VALUE.match(word)
    return (value[1], False) if value else ("", False)
