"""What a run is compared with while it goes on: a baseline, or the last run of the same cases.

A hint, not a verdict: a launch differs from the next one by more than its samples tell, so `dtbench compare` asks for
five launches a side and `dtbench gate` makes them in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.records import baselines
from dtbench.records.run import read_run
from dtbench.stats import MIN_CHANGE_S
from dtbench.suite import CaseKey, Header, Result, Run
from dtbench.suite.grouping import group_by

# Below it a difference between two launches is called no change, as `dtbench compare` calls the same.
LEAST = 0.05
_NAMED = 3


@dataclass(frozen=True)
class Change:
    """ratio: of the new time to that before. words: `no change`, `slower by 12%`, `faster by 12%`."""

    ratio: float

    @property
    def words(self) -> str:
        share = abs(self.ratio - 1)
        size = f"{share:.0%}" if self.ratio < 2 else f"{self.ratio:.3g}x"
        return "no change" if self.ratio == 1 else f"{'slower' if self.ratio > 1 else 'faster'} by {size}"


class Before:
    """The times before. source: the run, and in words what it is."""

    def __init__(self, run: Run, source: str) -> None:
        self.path, self.source = run.path, source
        self._results = group_by((r for r in run.results if _is_timed(r)), lambda r: r.case_key)

    def change(self, new: Sequence[Result]) -> Change | None:
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
        if not apart or abs(time_s - before_s) <= MIN_CHANGE_S or 1 / (1 + LEAST) <= ratio <= 1 + LEAST:
            return Change(1.0)
        return Change(ratio)

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


def find_before(header: Header, output: Path, baseline: str | None) -> Before | None:
    """The baseline that was asked for, else the last run of such cases beside the output, if any.

    Raises:
        UsageError: there is no such baseline. UnreadableRunError: it is no run.
    """
    if baseline is not None:
        path = baselines.find(baseline)
        return Before(read_run(path, with_samples=False), baseline)
    run = baselines.last_like(header, output)
    return None if run is None else Before(run, f"{run.path}, the last run of such cases")


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
