"""What rank 0 shows while a run goes on: a line for each result as it comes, and now and then the time left."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dtbench.records.result import STATUSES, Result
from dtbench.text.units import format_bandwidth, format_seconds, format_size, format_spread, plural

# How often it is said how far the run is.
TELL_EVERY_S = 60.0
# How long a command may be at work before it says so.
SILENT_S = 1.0


_STANDINGS = (STATUSES[0], "with caveat", *STATUSES[1:])


class Progress:
    """Where rank 0 reports to: a line per result on stdout, and now and then how far the run is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = 0
        self._estimates_s: list[float] = []
        self._end_s: float | None = None
        self._began_s = self._told_s = clock()

    def begin(self, headline: str, estimates_s: Sequence[float], end_s: float | None = None) -> None:
        """Results are to come that take about so many seconds each; or as many as there is time for until `end_s`."""
        self._estimates_s, self._end_s = list(estimates_s), end_s
        self._began_s = self._told_s = self._clock()
        print_status(headline)

    def more(self, estimates_s: Sequence[float]) -> None:
        """So many more are to come than `begin` said."""
        self._estimates_s += estimates_s
        print_status(
            f"{plural(len(estimates_s), 'more result')} to measure, between sizes where interpolation is off"
        )

    def result(self, result: Result) -> None:
        print_status(format_result(result))
        self._done += 1
        now_s, total = self._clock(), len(self._estimates_s)
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        if self._end_s is not None:
            print_status(
                f"{plural(self._done, 'result')}, {format_about(max(self._end_s - now_s, 0.0))} left"
            )
        elif self._done < total:
            pace = (now_s - self._began_s) / sum(self._estimates_s[: self._done])
            left_s = pace * sum(self._estimates_s[self._done :])
            print_status(f"result {self._done} of {total}, {format_about(left_s)} left")


class ProgressLine:
    """One line that is written over and over, which a terminal and a notebook show alike; elsewhere a line per text."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._overwrites = sys.stdout.isatty() or "ipykernel" in sys.modules
        self._length = 0

    def show(self, text: str) -> None:
        """In place of the text before."""
        if self._shown and self._overwrites:
            text = text[: shutil.get_terminal_size().columns - 1]
            sys.stdout.write(f"\r{text:{self._length}}")
            sys.stdout.flush()
            self._length = len(text)
        elif self._shown:
            print_status(text)

    def close(self) -> None:
        if self._length:
            sys.stdout.write("\n")
            self._length = 0


def format_about(seconds: float) -> str:
    """`about 4 min`, `about 40 s`."""
    return f"about {f'{seconds / 60:.0f} min' if seconds > 90 else f'{seconds:.0f} s'}"


def print_status(text: str) -> None:
    """A line on stdout. A reader that has gone away (`| head`) does not end the run."""
    with suppress(OSError, ValueError):
        encoding = sys.stdout.encoding or "utf-8"
        # In one piece with its newline: threads and ranks write to the same pipe.
        print(f"{text}\n".encode(encoding, "replace").decode(encoding), end="", flush=True)  # noqa: T201


@contextmanager
def print_status_if_slow(text: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Says what is being done, where it takes longer than a second. tell: in place of `say`."""
    timer = threading.Timer(SILENT_S, tell or print_status, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_status_counts(results: Iterable[Result]) -> str:
    """`118 ok, 1 failed`: how many results have which status."""
    counts = Counter(status_with_caveat(result) for result in results)
    return ", ".join(f"{counts[word]} {word}" for word in _STANDINGS if counts[word]) or "no results"


def status_with_caveat(result: Result) -> str:
    """Its status; "with caveat" of a time with a reason to doubt it, such as samples that scatter."""
    return _STANDINGS[1] if result.status == "ok" and result.reason else result.status


def params_of(result: Result) -> str:
    """`mesh_dim=tp size=1 KiB`."""
    params = result.params.items()
    return " ".join(f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in params)


def format_result(result: Result) -> str:
    """`dispatch add mesh=8 call=cached | core  3.56 µs  +10%`."""
    name = result.suite if result.name == result.suite else f"{result.suite} {result.name}"
    words = [f"{name} {params_of(result)}".rstrip(), "|", result.impl]
    if result.status == "ok" and result.time_s is not None:
        words += [format_seconds(result.estimate_s), format_spread(result.spread)]
        bandwidth = result.busbw_Bps if result.busbw_Bps is not None else result.algbw_Bps
        if bandwidth is not None:
            words.append(format_bandwidth(bandwidth))
    else:
        where = "" if result.rank is None else f" on rank {result.rank}"
        words.append(f"{result.status}{where}")
    if result.reason:
        words.append(f"({result.reason})")
    return "  ".join(words).replace("  |  ", " | ")
