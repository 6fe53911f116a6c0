"""What rank 0 shows while a run goes on: a bar on a terminal, and the results as they come.

Collectives stand in a table in the form of nccl-tests (src/common.cu, its README): size in bytes; count, the elements
that a rank gives to or gets from the call, whichever are fewer; type by NCCL's name; algbw and busbw in 10^9 bytes per
second; how many values are wrong. Any other result is a line.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from dtbench.suite import STATUSES, Result
from dtbench.text.units import (
    format_bandwidth,
    format_seconds,
    format_size,
    format_spread,
    plural,
    significant,
)

# How often a log without a terminal is told how far the run is.
TELL_EVERY_S = 60.0
# How long a command may be at work before it says so.
SILENT_S = 1.0
# torch's dtype -> NCCL's name (nccl-tests src/common.cu, test_typenames), bytes per element.
_TYPES = {
    "float32": ("float", 4),
    "float64": ("double", 8),
    "float16": ("half", 2),
    "bfloat16": ("bfloat16", 2),
}
# Collectives of which a rank holds a share on one side: their count is that share's.
_SHARED = {"all_gather", "reduce_scatter", "all_to_all", "scatter"}
_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("time", "(us)", 10),
    ("spread", "", 7),
    ("algbw", "(GB/s)", 9),
    ("busbw", "(GB/s)", 9),
    ("#wrong", "", 7),
)


class Progress:
    """Where rank 0 reports to: a line per result on stdout, for logs and pipes, and now and then how far it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = self._done = 0
        self._began_s = self._told_s = clock()
        self._lines = ResultLines()

    def begin(self, headline: str, total: int) -> None:
        """So many results are to come."""
        self._total = total
        self._began_s = self._told_s = self._clock()
        say(headline)

    def more(self, count: int) -> None:
        """So many more are to come than `begin` said."""
        self._total += count
        say(f"{plural(count, 'more result')} to measure, where the sweep was too coarse")

    def result(self, result: Result, change: str = "") -> None:
        """change: against an earlier run, in words."""
        for line in self._lines.of(result, change):
            say(line)
        self._done += 1
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S and self._done < self._total:
            self._told_s = now_s
            left_s = (now_s - self._began_s) / self._done * (self._total - self._done)
            say(f"result {self._done} of {self._total}, {about(left_s)} left")

    def close(self) -> None:
        """Leaves the terminal in order; may be called twice, and from another thread."""


class ProgressBar(Progress):
    """A bar with the time left on stderr below the lines of the results."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        ]
        super().__init__()
        # Drawn when a result comes and not between: nothing may beat while times are taken.
        self._bar = RichProgress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = TaskID(0)

    def begin(self, headline: str, total: int) -> None:
        self._total = total
        self._print(headline)
        self._bar.start()
        self._task = self._bar.add_task("", total=total)
        self._bar.refresh()

    def more(self, count: int) -> None:
        self._total += count
        self._bar.update(self._task, total=self._total, refresh=True)

    def result(self, result: Result, change: str = "") -> None:
        if result.time_s is not None or result.status in ("failed", "wrong"):  # a verdict on an op is no news
            for line in self._lines.of(result, change):
                self._print(line)
        words = f"{result.suite} {result.name} {result.impl}"
        self._bar.update(self._task, advance=1, description=words, refresh=True)

    def close(self) -> None:
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class ProgressLine(Progress):
    """One line that is written over and over, which a terminal and a notebook show alike."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self._shown = shown
        self._length = 0

    def result(self, result: Result, change: str = "") -> None:
        self.show(line_of(result, change))

    def show(self, text: str) -> None:
        """In place of the text before."""
        if not self._shown:
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stdout.write(f"\r{text:{self._length}}")
        sys.stdout.flush()
        self._length = len(text)

    def close(self) -> None:
        if self._length:
            sys.stdout.write("\n")
            self._length = 0


def about(seconds: float) -> str:
    """`about 4 min`, `about 40 s`."""
    return f"about {f'{seconds / 60:.0f} min' if seconds > 90 else f'{seconds:.0f} s'}"


def make_progress() -> Progress:
    """A bar where somebody watches, lines otherwise."""
    return ProgressBar() if sys.stderr.isatty() and sys.stdout.isatty() else Progress()


def say(text: str) -> None:
    """A line on stdout. A reader that has gone away (`| head`) does not end the run."""
    with suppress(OSError, ValueError):
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201


@contextmanager
def said_if_slow(text: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Says what is being done, where it takes longer than a second. tell: in place of `say`."""
    timer = threading.Timer(SILENT_S, tell or say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def summary_of(results: Iterable[Result]) -> str:
    """`118 ok, 1 failed`: how many results have which status."""
    counts = Counter(result.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "no results"


# --------------------------------------------------------------------------------- results


class ResultLines:
    """Says of each result what is to be printed."""

    def __init__(self) -> None:
        self._block: tuple[object, ...] = ()

    def of(self, result: Result, change: str = "") -> Iterator[str]:
        """change: against an earlier run, in words."""
        cells = _row(result)
        if cells is None:
            self._block = ()
            yield line_of(result, change)
            return
        block = (result.name, *(v for k, v in result.params.items() if k not in ("size", "dtype")))
        if block != self._block:
            self._block = block
            yield from _head(result)
        row = "".join(f" {cell:>{width - 1}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))
        notes = "; ".join(note for note in (change, result.reason) if note)
        yield f"{row}  {notes}".rstrip()


def _row(result: Result) -> list[str] | None:
    """The cells of a collective that went well; None of anything else."""
    size, dtype, ranks = (result.params.get(name) for name in ("size", "dtype", "ranks"))
    is_collective = result.suite == "collectives" and isinstance(size, int) and isinstance(ranks, int)
    if not is_collective or dtype not in _TYPES or result.status != "ok" or result.estimate_s is None:
        return None
    name, itemsize = _TYPES[str(dtype)]
    count = int(size or 0) // itemsize // (int(ranks or 1) if result.name in _SHARED else 1)
    bandwidths = [_bandwidth(b) for b in (result.algbw_Bps, result.busbw_Bps)]
    time = significant(result.estimate_s * 1e6)
    return [str(size), str(count), name, time, format_spread(result.spread), *bandwidths, "0"]


def _bandwidth(rate: float | None) -> str:
    """In 10^9 bytes per second; of what is next to nothing as many decimals as the column has room for."""
    if rate is None:
        return "N/A"
    return significant(rate / 1e9, 3) if rate >= 1e6 else f"{rate / 1e9:.5f}"


def _head(result: Result) -> Iterator[str]:
    params = {k: v for k, v in result.params.items() if k not in ("size", "dtype", "mesh_dim", "ranks")}
    words = ", ".join(f"{k}={v}" for k, v in params.items())
    over = f"over {result.params.get('mesh_dim')}, {result.params.get('ranks')} ranks"
    yield f"# {result.suite} {result.name} {over}; {words}"
    for line in zip(*((name, unit) for name, unit, _ in _COLUMNS), strict=True):
        yield (
            "#" + "".join(f"{text:>{width}}" for text, (_, _, width) in zip(line, _COLUMNS, strict=True))[1:]
        )


def line_of(result: Result, change: str = "") -> str:
    """`dispatch add mesh=8 call=cached | core  3.56 µs  +10%  no change`."""
    params = " ".join(
        f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in result.params.items()
    )
    name = result.suite if result.name == result.suite else f"{result.suite} {result.name}"
    words = [f"{name} {params}".rstrip(), "|", result.impl]
    if result.status == "ok" and result.time_s is not None:
        words += [format_seconds(result.estimate_s), format_spread(result.spread)]
        bandwidth = result.busbw_Bps if result.busbw_Bps is not None else result.algbw_Bps
        if bandwidth is not None:
            words.append(format_bandwidth(bandwidth))
    else:
        where = "" if result.rank is None else f" on rank {result.rank}"
        words.append(f"{result.status}{where}")
    words += [change] if change else []
    if result.reason:
        words.append(f"({result.reason})")
    return "  ".join(words).replace("  |  ", " | ")
