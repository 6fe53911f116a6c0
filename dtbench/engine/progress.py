"""The lines that rank 0 prints during a run: one for each result, and at times the remaining time."""

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dtbench.records.result import STATUSES, Result
from dtbench.text.units import format_bandwidth, format_seconds, format_size, format_spread, plural

# How often the progress of the run is printed.
PROGRESS_INTERVAL_S = 60.0
# After this many seconds, a command prints what it is waiting for.
SILENT_S = 1.0


_STATUSES = (STATUSES[0], "with caveat", *STATUSES[1:])


class Progress:
    """Prints a line per result to stdout, and at times the progress of the run."""

    def __init__(
        self,
        headline: str,
        estimates_s: Sequence[float],
        end_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prints the headline.

        Args:
            estimates_s: estimated seconds of each result to come.
            end_s: end of the time budget, if there is one.
        """
        self._clock = clock
        self._done = 0
        self._estimates_s, self._end_s = list(estimates_s), end_s
        self._began_s = self._printed_s = clock()
        print_status(headline)

    def more(self, estimates_s: Sequence[float]) -> None:
        """Adds results to those that are expected."""
        self._estimates_s += estimates_s
        print_status(
            f"{plural(len(estimates_s), 'more result')} to measure, between sizes where interpolation is off"
        )

    def result(self, result: Result) -> None:
        print_status(format_result(result))
        self._done += 1
        now_s, total = self._clock(), len(self._estimates_s)
        if now_s - self._printed_s < PROGRESS_INTERVAL_S:
            return
        self._printed_s = now_s
        if self._end_s is not None:
            print_status(
                f"{plural(self._done, 'result')}, {format_about(max(self._end_s - now_s, 0.0))} left"
            )
        elif self._done < total:
            pace = (now_s - self._began_s) / sum(self._estimates_s[: self._done])
            print_status(
                f"result {self._done} of {total}, {format_about(pace * sum(self._estimates_s[self._done :]))} left"
            )


class ProgressLine:
    """A line that each text overwrites, in a terminal or notebook; elsewhere a line per text."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._overwrites = sys.stdout.isatty() or "ipykernel" in sys.modules
        self._length = 0

    def show(self, text: str) -> None:
        """Replaces the previous text."""
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
    """Formats a rough duration: `about 4 min`, `about 40 s`."""
    return f"about {f'{seconds / 60:.0f} min' if seconds > 90 else f'{seconds:.0f} s'}"


def print_status(text: str) -> None:
    """Prints a line to stdout. A closed pipe (`| head`) does not end the run."""
    with suppress(OSError, ValueError):
        encoding = sys.stdout.encoding or "utf-8"
        # The newline in the same write, since threads and ranks share the pipe.
        print(f"{text}\n".encode(encoding, "replace").decode(encoding), end="", flush=True)  # noqa: T201


@contextmanager
def print_status_if_slow(text: str, show: Callable[[str], None] | None = None) -> Iterator[None]:
    """Prints `text` if the block takes longer than a second.

    Args:
        show: called with the text; by default `print_status`.
    """
    timer = threading.Timer(SILENT_S, show or print_status, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_status_counts(results: Iterable[Result]) -> str:
    """Formats the number of results by status: `118 ok, 1 failed`."""
    counts = Counter(status_with_caveat(result) for result in results)
    return ", ".join(f"{counts[word]} {word}" for word in _STATUSES if counts[word]) or "no results"


def status_with_caveat(result: Result) -> str:
    """Returns the status of a result, or "with caveat" if it is ok with a reason, such as scattered samples."""
    return _STATUSES[1] if result.status == "ok" and result.reason else result.status


def params_of(result: Result) -> str:
    """Formats the params: `mesh_dim=tp size=1 KiB`."""
    return " ".join(
        f"{name}={format_size(value) if name == 'size' and isinstance(value, int) else value}"
        for name, value in result.params.items()
    )


def format_result(result: Result) -> str:
    """Formats a result: `dispatch add mesh=8 call=cached | core  3.56 µs  +10%`."""
    name = result.suite if result.name == result.suite else f"{result.suite} {result.name}"
    words = [f"{name} {params_of(result)}".rstrip(), "|", result.impl]
    if result.status == "ok" and result.time_s is not None:
        words += [format_seconds(result.estimate_s), format_spread(result.spread)]
        bandwidth = result.busbw_Bps if result.busbw_Bps is not None else result.algbw_Bps
        if bandwidth is not None:
            words.append(format_bandwidth(bandwidth))
    else:
        words.append(result.status + ("" if result.rank is None else f" on rank {result.rank}"))
    if result.reason:
        words.append(f"({result.reason})")
    return "  ".join(words).replace("  |  ", " | ")
