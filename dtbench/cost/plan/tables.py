"""Tables of measured steps and of measured all-reduces, in CSV, as they come out of scripts and spreadsheets.

Titles are known by their words, whatever their case, order and punctuation; a unit stands in brackets or at the end.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from msgspec import structs

from dtbench.cost.plan.job import PLAIN, RECOMPUTE, Job, Layout
from dtbench.cost.plan.machines import Machine
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.models import MAX_VALUE, Model
from dtbench.cost.plan.search import RESERVED_BYTES
from dtbench.model.errors import UnreadableRunError, UsageError
from dtbench.model.grouping import group_by
from dtbench.records.read import read_bytes

MAX_FILE_BYTES = 2**24
_WHAT = "a table of measured steps in CSV"
# Column -> other words for it; as `_title` leaves them.
_COLUMNS = {
    "gpus": ("gpu", "ngpus", "world", "ranks"),
    "global batch": ("gbs", "batch"),
    "micro batch": ("microbatch", "mbs"),
    "hidden": ("hidden dim", "hidden dimension"),
    "attention heads": ("heads",),
    "layers": ("nlayers",),
    "sequence length": ("sequence", "seq length", "seq len", "seqlen", "seq"),
    "tensor parallel": ("tp",),
    "data parallel": ("dp",),
    "pipeline parallel": ("pp",),
    "iteration time": ("step time", "time", "measured time", "measured"),
    "vocabulary": ("vocab",),
    "interleaved chunks": ("chunks",),
    "recomputation": (),
    "sequence parallel": (),
    "flash attention": (),
    "sharded optimizer": (),
}
_NAMES = {other: name for name, others in _COLUMNS.items() for other in (name, *others)}
_NEEDED = [name for name in tuple(_COLUMNS)[:11] if name != "data parallel"]  # which follows from the others
# Of a table of all-reduces; "size" alone is idle.
_SIZES = ("", "bytes", "message")
# Words that say nothing of which column it is; "# GPUs" is "gpus" as "number of GPUs" is.
_IDLE = {"number", "num", "of", "the", "size", "degree", "model", "in", "per", "rank"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_BYTES = {"": 1, "b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20}
_FLAGS = {
    "sequence parallel": "sequence_parallel",
    "flash attention": "flash",
    "sharded optimizer": "sharded_optimizer",
}
_SAID = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
# GPT-2's 50,257 tokens, padded as Megatron-LM pads them for 8 tensor-parallel ranks: a multiple of 128 x 8.
GPT_VOCAB = 51200


@dataclass(frozen=True)
class Measured:
    """A row of a table."""

    job: Job
    layout: Layout
    time_s: float


@dataclass(frozen=True)
class Table:
    """lines: number in the file and cells of each row. at, units: column -> its place, and its unit in lower case."""

    path: Path
    lines: Sequence[tuple[int, Sequence[str]]]
    at: Mapping[str, int]
    units: Mapping[str, str]

    @property
    def is_all_reduce(self) -> bool:
        return "bytes" in self.at

    def text(self, cells: Sequence[str], column: str) -> str:
        at = self.at.get(column, len(cells))
        return cells[at] if at < len(cells) else ""

    def number(self, line: int, cells: Sequence[str], column: str, whole: bool = True) -> float:
        """A whole number from 1 to 2^40, or any above 0.

        Raises:
            UsageError: anything else.
        """
        text = self.text(cells, column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_VALUE or (whole and value != int(value)):
            wanted = "a whole number from 1 to 2^40" if whole else "a number above 0"
            raise self.wrong(line, f"{column} is {ascii(text)[:40]}, expected {wanted}")
        return value

    def seconds(self, line: int, cells: Sequence[str], column: str) -> float:
        unit = self.units[column]
        if unit not in _SECONDS:
            raise UsageError(
                f"{self.path}: the unit of {column} is {ascii(unit)[:20] if unit else 'not said'}, expected one of "
                f"{', '.join(_SECONDS)}, as in {column} (ms)"
            )
        found = self.number(line, cells, column, whole=False) * _SECONDS[unit]
        if found < 1e-9:
            raise self.wrong(line, f"{column} is {found:.2g} s, expected a nanosecond or more")
        return found

    def wrong(self, line: int, what: str) -> UsageError:
        return UsageError(f"{self.path}: line {line}: {what}")


def read_table(path: Path) -> Table:
    """A table with at least one row, of steps or of all-reduces.

    Raises:
        UnreadableRunError: a file that cannot be read, or is no table.
        UsageError: a table without the columns.
    """
    try:
        text = read_bytes(path, _WHAT, MAX_FILE_BYTES).decode("utf-8-sig")
        delimiter = _delimiter(text)
        reader = csv.reader(io.StringIO(text, newline=None), strict=True, delimiter=delimiter)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_WHAT}: {str(error)[:120]}") from error
    while lines and sum(map(bool, lines[0][1])) < 2:  # words above the titles
        lines.pop(0)
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if len(lines) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_WHAT}")
    if delimiter == ";":  # as spreadsheets write it where the comma is in the numbers
        lines[1:] = [(n, [re.sub(r"^(\d+),(\d+)$", r"\1.\2", c) for c in cells]) for n, cells in lines[1:]]
    at, units = _columns(lines[0][1])
    missing = next((name for name in _NEEDED if name not in at), None)
    if missing is not None and "bytes" not in at:
        raise UsageError(
            f"{path} has no column {missing!r}: expected {', '.join(_NEEDED)}; or size and time of all-reduces"
        )
    return Table(path, lines[1:], at, units)


def _delimiter(text: str) -> str:
    titles = max(text.split("\n")[:8], key=lambda line: max(map(line.count, ",;\t")))
    return max(",;\t", key=titles.count)


def _columns(titles: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Places and units of the columns that are known; of equal ones the first (nccl-tests: out of place)."""
    at: dict[str, int] = {}
    units: dict[str, str] = {}
    read = [_title(title) for title in titles]
    names = [name for name, _ in read]
    sizes = next((i for i, title in enumerate(titles) if title and names[i] in _SIZES), -1)
    is_all_reduce = sizes >= 0 and "time" in names and "layers" not in names
    for place, (name, unit) in enumerate(read):
        column = ("bytes" if place == sizes else name) if is_all_reduce else _NAMES.get(name, "")
        if column and column not in at:
            at[column], units[column] = place, unit
    return at, units


def _title(title: str) -> tuple[str, str]:
    """`Iteration time (ms)`, `iteration_time_ms` -> (iteration time, ms); `# layers` -> (layers, "")."""
    text = title.lower().replace("parallelism", "parallel")
    bracket = re.search(r"[(\[](.*?)[)\]]", text)
    words = re.sub(r"[(\[].*?[)\]]|[^\w/]|_", " ", text).split()
    unit = bracket[1].strip() if bracket else ""
    if not unit and len(words) > 1 and words[-1] in {**_SECONDS, **_BYTES}:
        unit = words.pop()
    return " ".join(word for word in words if word not in _IDLE), unit


# ------------------------------------------------------------------------------------------- steps


def measured_steps(table: Table, machine: Machine) -> list[Measured]:
    """Rows as jobs and layouts. Where the table does not say what is computed again: nothing if every layout of a
    model on as many GPUs fits into memory so, else everything, as one script trained them all.

    Raises:
        UsageError: a value that cannot be; the line is named.
    """
    if table.is_all_reduce:
        raise UsageError(f"{table.path} is a table of all-reduces, expected one of measured steps")
    read = [_measured(table, line, cells) for line, cells in table.lines]
    if "recomputation" in table.at:
        return read
    limit = machine.memory_GiB * 2**30 - RESERVED_BYTES
    for group in group_by(
        enumerate(read), lambda found: (found[1].job.model.name, found[1].job.gpus)
    ).values():
        if any(memory_of(one.job, one.layout).total > limit for _, one in group):
            for at, one in group:
                read[at] = replace(one, layout=replace(one.layout, recompute="full"))
    return read


def _measured(table: Table, line: int, cells: Sequence[str]) -> Measured:
    def count(column: str, default: int | None = None) -> int:
        missing = default is not None and not table.text(cells, column)
        return default if missing and default is not None else int(table.number(line, cells, column))

    gpus, tp, pp = count("gpus"), count("tensor parallel"), count("pipeline parallel")
    dp = count("data parallel", None if "data parallel" in table.at else max(1, gpus // (tp * pp)))
    layout = Layout(tp, pp, dp, 1, count("micro batch"), count("interleaved chunks", 1))
    model = gpt(count("hidden"), count("layers"), count("attention heads"), count("vocabulary", GPT_VOCAB))
    batch = count("global batch")
    _check(table, line, gpus, batch, model, layout)
    given = table.text(cells, "recomputation").lower() or "none"
    recompute = next((one for one in RECOMPUTE if one == given), None)
    if recompute is None:
        raise table.wrong(
            line, f"recomputation is {ascii(given)[:40]}, expected one of {', '.join(RECOMPUTE)}"
        )
    said = {name: table.text(cells, title).lower() for title, name in _FLAGS.items() if title in table.at}
    if unknown := next((word for word in said.values() if word not in _SAID), None):
        raise table.wrong(line, f"got {ascii(unknown)[:40]}, expected yes or no")
    software = replace(PLAIN, **{name: _SAID[word] for name, word in said.items()})
    time_s = table.seconds(line, cells, "iteration time")
    job = Job(model, gpus, batch, count("sequence length"), software)
    return Measured(job, replace(layout, recompute=recompute), time_s)


def _check(table: Table, line: int, gpus: int, batch: int, model: Model, layout: Layout) -> None:
    """What no run can have been."""
    ranks = layout.tp * layout.dp * layout.pp
    stages = layout.pp * layout.chunks
    samples = layout.dp * layout.micro_batch
    wrong = {
        f"tensor x data x pipeline parallelism is {ranks}, expected the {gpus} GPUs": ranks != gpus,
        f"the global batch {batch} is no multiple of data parallelism x micro batch = {samples}": batch
        % samples,
        f"the hidden size {model.hidden} is no multiple of the attention heads {model.heads}": (
            model.hidden % model.heads
        ),
        f"tensor parallelism is {layout.tp}, expected at most the {model.heads} attention heads": (
            layout.tp > model.heads
        ),
        f"pipeline parallelism x chunks is {stages}, expected at most the {model.layers} layers": (
            stages > model.layers
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise table.wrong(line, what)


def gpt(hidden: int, layers: int, heads: int, vocab: int) -> Model:
    """A model of GPT's kind: an MLP of four times the width, embedding and head one matrix."""
    model = Model(
        "", hidden, layers, heads, heads, hidden // heads, 4 * hidden, vocab, gated=False, tied=True
    )
    return structs.replace(model, name=f"GPT {model.elements() / 1e9:.3g} B ({layers} x {hidden})")


# -------------------------------------------------------------------------------------- all-reduce


def all_reduces(table: Table) -> list[tuple[int, float]]:
    """(bytes, seconds), ascending; of a size that stands more than once the median.

    Raises:
        UsageError: a value that cannot be, or fewer than 3 sizes.
    """
    unit = table.units["bytes"]
    if unit not in _BYTES:
        raise UsageError(f"{table.path}: the unit of the sizes is {ascii(unit)[:20]}, expected B, KiB or MiB")
    times: defaultdict[int, list[float]] = defaultdict(list)
    for line, cells in table.lines:
        size = int(table.number(line, cells, "bytes")) * _BYTES[unit]
        times[size].append(table.seconds(line, cells, "time"))
    if len(times) < 3:
        raise UsageError(
            f"{table.path} has {len(times)} sizes, expected at least 3: most are predicted from the others"
        )
    return sorted((size, median(of)) for size, of in times.items())
