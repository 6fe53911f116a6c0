"""Titles of tables of measured steps, in the words of those who publish them: Megatron-LM and Megatron-Bridge,
nanotron, torchtitan, llm-foundry, MLPerf.

Case, order and punctuation do not matter; a unit stands in brackets or at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources

_WORDS = json.loads(resources.files("dtbench.cost.plan").joinpath("columns.json").read_bytes())
# Column -> other words for it, without spaces and without the words of `_IDLE`.
COLUMNS: dict[str, list[str]] = _WORDS["columns"]
# What says nothing that the others do not: read, and said to be unused.
UNUSED: dict[str, list[str]] = _WORDS["unused"]
# Columns of which one at least must say a time, the most precise first.
TIMES = ("iteration time", "tokens/s", "sequences/s", "tokens/s/gpu", "tflop/s/gpu", "mfu")
_NAMES = {
    other.replace(" ", ""): name
    for name, others in {**COLUMNS, **UNUSED}.items()
    for other in (name.replace("/", ""), *others)
}
# Words that say nothing of which column it is; "# GPUs" is "gpus" as "number of GPUs" is.
_IDLE = {"number", "num", "of", "the", "size", "degree", "model", "in", "per", "rank", "count"}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
BYTES = {"": 1, "b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_UNITS = {*SECONDS, *BYTES, "%", "pct", "percent", "t", "tokens", "billion", "b"} - {""}
# Of a table of all-reduces; "size" alone is idle.
_SIZES = ("", "bytes", "message")
_OF_COLLECTIVES = {"iteration time": "time", "collective": "collective", "op": "collective", "gpus": "gpus"}
_OF_COLLECTIVES |= {"system": "system", "precision": "precision"}
# llm-foundry: `Throughput (T/s/GPU)`.
_THROUGHPUTS = {
    "t/s/gpu": "tokens/s/gpu",
    "tokens/s/gpu": "tokens/s/gpu",
    "tok/s/gpu": "tokens/s/gpu",
    "t/s": "tokens/s",
    "tokens/s": "tokens/s",
    "tok/s": "tokens/s",
    "s/s": "sequences/s",
    "samples/s": "sequences/s",
}


def find_columns(
    titles: Sequence[str], row: Sequence[str]
) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Places and units of the columns that are known, and the titles that are not, or say a column twice; of
    collectives the first counts (nccl-tests: out of place).

    row: the first below the titles, which tells a GPU's name from a number of GPUs.
    """
    at: dict[str, int] = {}
    units: dict[str, str] = {}
    unknown: list[str] = []
    read = [_title(title) for title in titles]
    sizes = next((i for i, title in enumerate(titles) if title and read[i][0] in _SIZES), -1)
    names = {name for name, _ in read}
    is_all_reduce = (
        sizes >= 0 and "iteration time" in names and "layers" not in names and "model" not in names
    )
    for place, (name, unit) in enumerate(read):
        if is_all_reduce:
            column = {sizes: "bytes"}.get(place, _OF_COLLECTIVES.get(name, ""))
        elif name in COLUMNS or name in UNUSED:
            column = name
        else:
            column = ""
            if titles[place].strip():
                unknown.append(titles[place].strip())
        if column == "gpus" and place < len(row) and not re.match(r"[\d.]+$", row[place]):
            column = "system"
        if column and column not in at:
            at[column], units[column] = place, unit
        elif column and not is_all_reduce:
            unknown.append(f"{titles[place].strip()} (a second {column})")
    return at, units, unknown


def _title(title: str) -> tuple[str, str]:
    """`Iteration time (ms)`, `iteration_time_ms` -> (iteration time, ms); `# layers` -> (layers, "")."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", title).lower().replace("parallelism", "parallel")
    bracket = re.search(r"[(\[](.*?)[)\]]", text)
    words = re.sub(r"[(\[].*?[)\]]|[^\w%]|_", " ", text).split()
    unit = re.sub(r"\s", "", bracket[1]) if bracket else ""
    if words == ["throughput"] and unit in _THROUGHPUTS:
        return _THROUGHPUTS[unit], ""
    if words == ["model"] or words == ["model", "name"]:
        return "model", ""
    left = [word for word in words if word not in _IDLE]
    name = _NAMES.get("".join(left), "")
    if not name and not unit and len(left) > 1 and left[-1] in _UNITS:
        unit = left.pop()
        name = _NAMES.get("".join(left), "")
    if name == "global batch" and unit in ("t", "tokens"):
        name = "global batch in tokens"
    return name or "".join(left), unit
