"""What rank 0 shows while a run goes on: a bar on a terminal, a line per result otherwise."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from dtbench.engine.live import Lines, line_of
from dtbench.suite import STATUSES, Result
from dtbench.text.units import plural

# How often a log without a terminal is told how far the run is.
TELL_EVERY_S = 60.0
# How long a command may be at work before it says so.
SILENT_S = 1.0


class Progress:
    """Where rank 0 reports to: a line per result on stdout, for logs and pipes, and now and then how far it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = self._done = 0
        self._began_s = self._told_s = clock()
        self._lines = Lines()

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


class Bar(Progress):
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


class Line(Progress):
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
    return Bar() if sys.stderr.isatty() and sys.stdout.isatty() else Progress()


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
