"""What rank 0 shows while a run goes on: a bar on a terminal, a line per result otherwise."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from dtbench.model import STATUSES, Result
from dtbench.text.units import format_bandwidth, format_seconds, format_size, format_spread

# How often a log without a terminal is told how far the run is.
TELL_EVERY_S = 60.0


class Progress:
    """Where rank 0 reports to: a line per result on stdout, for logs and pipes, and now and then how far it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = self._done = 0
        self._began_s = self._told_s = clock()

    def begin(self, headline: str, total: int) -> None:
        """So many results are to come."""
        self._total = total
        self._began_s = self._told_s = self._clock()
        say(headline)

    def more(self, count: int) -> None:
        """So many more are to come than `begin` said."""
        self._total += count
        say(f"{count} more results to measure, where the sweep was too coarse")

    def result(self, result: Result) -> None:
        say(line_of(result))
        self._done += 1
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S and self._done < self._total:
            self._told_s = now_s
            left_s = (now_s - self._began_s) / self._done * (self._total - self._done)
            say(f"result {self._done} of {self._total}, {about(left_s)} left")

    def close(self) -> None:
        """Leaves the terminal in order; may be called twice, and from another thread."""


class Bar(Progress):
    """A bar with the time left on stderr; only what went wrong gets a line."""

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

    def result(self, result: Result) -> None:
        if result.status in ("failed", "wrong"):
            self._print(line_of(result))
        words = f"{result.suite} {result.name} {result.impl}"
        self._bar.update(self._task, advance=1, description=words, refresh=True)

    def close(self) -> None:
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class Line(Progress):
    """One line that is written over and over, which a terminal and a notebook show alike."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self._shown = shown
        self._length = 0

    def result(self, result: Result) -> None:
        self.show(line_of(result))

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
    return Bar() if sys.stderr.isatty() and sys.stdout.isatty() else Progress()


def say(text: str) -> None:
    """A line on stdout. A reader that has gone away (`| head`) does not end the run."""
    with suppress(OSError, ValueError):
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201


def line_of(result: Result) -> str:
    """`collectives all_reduce mesh_dim=tp size=64 KiB | c10d  312 µs  0.21 GB/s`."""
    params = " ".join(
        f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in result.params.items()
    )
    words = [f"{result.suite} {result.name} {params}".rstrip(), "|", result.impl]
    if result.status == "ok" and result.time_s is not None:
        words.append(format_seconds(result.estimate_s))
        words.append(format_spread(result.spread))
        bandwidth = result.busbw_Bps if result.busbw_Bps is not None else result.algbw_Bps
        if bandwidth is not None:
            words.append(format_bandwidth(bandwidth))
    else:
        where = "" if result.rank is None else f" on rank {result.rank}"
        words.append(f"{result.status}{where}")
    if result.reason:
        words.append(f"({result.reason})")
    return "  ".join(words).replace("  |  ", " | ")


def summary_of(results: Iterable[Result]) -> str:
    """`118 ok, 1 failed`: how many results have which status."""
    counts = Counter(result.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "no results"
