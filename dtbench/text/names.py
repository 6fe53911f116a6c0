"""Spelling-tolerant names of machines and systems: `8xH100` and `h100-8x` both match `8xH100-AWS-p5`."""

import difflib
import re
from collections.abc import Iterable

_COUNT = re.compile(r"\d+x")


def name_words(name: str) -> frozenset[str]:
    """Returns the words of a name in lower case, without their order: `8xH100` and `h100-8x` have the same words.

    If a name has several GPU counts, the first is kept: `2xh100-8x` means two GPUs of a node with eight.
    """
    words = re.split(r"[-_ ]+|(?<=\dx)(?=[a-z])", name.lower())
    count = next(filter(_COUNT.fullmatch, words), None)
    return frozenset(word for word in words if word == count or not _COUNT.fullmatch(word))


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the three names with the most similar spelling, separated by commas."""
    by_spelling = {" ".join(sorted(name_words(candidate))): candidate for candidate in names}
    spelling = " ".join(sorted(name_words(name)))
    return ", ".join(by_spelling[near] for near in difflib.get_close_matches(spelling, by_spelling, 3, 0.0))
