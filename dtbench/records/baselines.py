"""Runs to compare with, which are kept under a name.

A baseline is a copy of a run file in `.dtbench/baselines` of the current folder; commit it to share it.

What a run says of them while it goes on is a hint, not a verdict: a launch differs from the next one by more than its
samples tell, so `dtbench compare` asks for five launches a side and `dtbench gate` makes them in turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.records.atomic import replace_file
from dtbench.stats import MIN_CHANGE_S
from dtbench.suite import CaseKey, Result, Run
from dtbench.suite.errors import OutputError, UsageError
from dtbench.suite.grouping import group_by

FOLDER = Path(".dtbench", "baselines")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Below it a difference between two launches is called no change, as `dtbench compare` calls the same.
LEAST_CHANGE = 0.05
_NAMED = 3


def named(name: str) -> Path:
    """Where the baseline of this name lies, or would.

    Raises:
        UsageError: a name that is no name for a file.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} names no baseline: expected letters, digits, '.', '_' and '-', such as main"
        )
    return FOLDER / f"{name}.jsonl"


def find(text: str | Path) -> Path:
    """A run file by its path, or the baseline of that name.

    Raises:
        UsageError: neither is there.
    """
    path = Path(text)
    if path.is_file():
        return path
    if _NAME.fullmatch(str(text)) and named(str(text)).is_file():
        return named(str(text))
    there = ", ".join(sorted(file.stem for file in FOLDER.glob("*.jsonl"))) or "none yet"
    raise UsageError(
        f"there is no baseline {str(text)!r} (there: {there}), and no such file; "
        "`dtbench run --save-baseline NAME` makes one"
    )


def save(run: Path, name: str) -> Path:
    """Keeps the run under the name, in place of what had it; where.

    Raises:
        OutputError: it cannot be written.
    """
    path = named(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, run.read_bytes())
    except OSError as error:
        raise OutputError(f"cannot keep the baseline {path}: {error.strerror or error}") from error
    return path


@dataclass(frozen=True)
class TimeChange:
    """ratio: of the new time to that before. words: `no change`, `slower by 12%`, `faster by 12%`."""

    ratio: float

    @property
    def words(self) -> str:
        share = abs(self.ratio - 1)
        size = f"{share:.0%}" if self.ratio < 2 else f"{self.ratio:.3g}x"
        return "no change" if self.ratio == 1 else f"{'slower' if self.ratio > 1 else 'faster'} by {size}"


class EarlierTimes:
    """The times before. source: the baseline, as it was asked for."""

    def __init__(self, run: Run, source: str) -> None:
        self.source = source
        self._results = group_by((r for r in run.results if _is_timed(r)), lambda r: r.case_key)

    def change(self, new: Sequence[Result]) -> TimeChange | None:
        """What became of a case, by its launches; None where there is nothing to compare with.

        No change where the difference lies within 5 %, within 0.2 us, or where the quartiles overlap.
        """
        new = [r for r in new if _is_timed(r)]
        old = self._results.get(new[0].case_key) if new else None
        if not old:
            return None
        (before_s, before_high_s), (time_s, high_s) = _band(old), _band(new)
        apart = time_s > before_high_s or high_s < before_s
        ratio = time_s / before_s
        if (
            not apart
            or abs(time_s - before_s) <= MIN_CHANGE_S
            or 1 / (1 + LEAST_CHANGE) <= ratio <= 1 + LEAST_CHANGE
        ):
            return TimeChange(1.0)
        return TimeChange(ratio)

    def summary(self, results: Iterable[Result]) -> str:
        """`against main: 50 without change, 3 slower (a by 30%), 1 faster`; nothing where no case is shared."""
        by_case: dict[CaseKey, list[Result]] = group_by(results, lambda r: r.case_key)
        changes = {key: change for key, of in by_case.items() if (change := self.change(of)) is not None}
        if not changes:
            return ""
        counts = Counter(change.words.split(" ")[0] for change in changes.values())
        parts = [f"{counts['no']} without change"]
        for word, largest in (("slower", True), ("faster", False)):
            if counts[word]:
                of = [(key, change) for key, change in changes.items() if change.words.startswith(word)]
                of.sort(key=lambda pair: pair[1].ratio, reverse=largest)
                named = ", ".join(f"{_name(key)} {change.words}" for key, change in of[:_NAMED])
                parts.append(f"{counts[word]} {word} ({named}{', ...' if len(of) > _NAMED else ''})")
        return f"against {self.source}: {', '.join(parts)}"


def _is_timed(result: Result) -> bool:
    return result.status == "ok" and bool(result.estimate_s)


def _band(results: Sequence[Result]) -> tuple[float, float]:
    """From the estimate to the upper quartile, medians over launches."""
    times = [(r.estimate_s or 0.0, r.time_s.p75 if r.time_s else 0.0) for r in results]
    low, high = (median(column) for column in zip(*times, strict=True))
    return low, max(low, high)


def _name(key: CaseKey) -> str:
    suite, name, impl, params = key
    shown = " ".join(f"{k}={v}" for k, v in params)
    return f"{suite} {name} {shown} {impl}".replace("  ", " ")
