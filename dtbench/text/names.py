"""Names of machines and systems as people spell them: `8xH100`, `h100-8x` and `8xH100-AWS-p5` begin alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_COUNT = re.compile(r"\d+x")


def name_words(name: str) -> frozenset[str]:
    """The words of a name in small letters, in any order: `8xH100` and `h100-8x` have the same.

    Of several counts of GPUs the first is kept: `2xh100-8x` are two GPUs of a node of eight.
    """
    words = re.split(r"[-_ ]+|(?<=\dx)(?=[a-z])", name.lower())
    count = next(filter(_COUNT.fullmatch, words), None)
    return frozenset(word for word in words if word == count or not _COUNT.fullmatch(word))


def nearest(name: str, names: Iterable[str]) -> str:
    """The known names that are most like an unknown one, as a list in words."""
    by_spelling = {" ".join(sorted(name_words(known))): known for known in names}
    spelling = " ".join(sorted(name_words(name)))
    return ", ".join(by_spelling[near] for near in difflib.get_close_matches(spelling, by_spelling, 3, 0.0))
