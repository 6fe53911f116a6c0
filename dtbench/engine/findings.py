"""What a run found, in a line per suite, and what to type next.

A figure that the run itself gives reasons to doubt is said with them: ranks that share cores, samples that scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

from dtbench.records.layout import crowded
from dtbench.stats import drifts_of, has_drifted
from dtbench.suite import Result, Run
from dtbench.suite.grouping import group_by
from dtbench.text.units import (
    format_change,
    format_seconds,
    format_size,
    format_spread,
    plural,
    significant,
)

# Half of the cases scattering by more than this: the machine was busy with something else.
SCATTERED = 0.5

_Case = Mapping[str, Sequence[Result]]  # impl -> its launches


def findings(run: Run) -> list[str]:
    """The lines, suite by suite; those that are doubtful stand below the others, with what makes them so."""
    sure: list[str] = []
    doubted: defaultdict[str, list[str]] = defaultdict(list)
    for suite, results in group_by(run.results, lambda r: r.suite).items():
        timed = [r for r in results if r.status == "ok" and r.estimate_s]
        if timed:
            doubts = _doubts(run, timed)
            (doubted[doubts] if doubts else sure).append(f"{suite}: {_finding(_cases(timed))}")
    for doubts, lines in doubted.items():
        sure += [f"with doubts, as {doubts}:", *(f"  {line}" for line in lines)]
    return [*sure, *_drifts(run)]


def _drifts(run: Run) -> list[str]:
    """Where plain torch and all beside it took longer, or less, in the later launches than in the earlier."""
    half, moves = max((r.launch for r in run.results), default=0) / 2, []
    timed = (r for r in run.results if r.status == "ok" and r.estimate_s)
    for (suite, _, impl, _), launches in group_by(timed, lambda r: r.case_key).items():
        parts = group_by(launches, lambda r: r.launch > half)
        if len(parts) == 2:
            early, late = (median(r.estimate_s or 0.0 for r in parts[is_late]) for is_late in (False, True))
            moves.append((suite, impl, late / early))
    return [
        f"the machine drifted: plain torch and all else of {suite} became {format_change(factor)} in the later launches"
        for suite, factor in drifts_of(moves).items()
        if has_drifted(factor)
    ]


def next_commands(run: Run) -> list[str]:
    """What a reader may want to type, as lines."""
    path = run.path
    bad = any(r.status in ("failed", "wrong") for r in run.results)
    commands = [f"dtbench show {path}" + ("  # with the reasons of what is not ok" if bad else "")]
    if any(r.params.get("groups") == "together" for r in run.ok("collectives")):
        commands.append(f"dtbench calibrate {path} -o {path.with_suffix('.topology.json')}")
    if run.ok("bucketer"):
        commands.append(f"dtbench calibrate {path}")
    commands.append(f"dtbench report {path} -o {path.with_suffix('.html')}")
    return [f"{'next:' if not number else '     '} {command}" for number, command in enumerate(commands)]


def _cases(results: Sequence[Result]) -> list[_Case]:
    cases = group_by(results, lambda r: (r.name, tuple(sorted(r.params.items()))))
    return [group_by(of, lambda r: r.impl) for of in cases.values()]


def _time_s(case: _Case, impl: str) -> float | None:
    """Over launches; None where the case lacks it."""
    return median(r.estimate_s or 0.0 for r in case[impl]) if impl in case else None


def _doubts(run: Run, timed: Sequence[Result]) -> str:
    doubts = []
    if any(r.rank_samples_s for r in timed) and (shared := crowded(run.header)):
        doubts.append(f"{shared}, so times of collectives are not those of the links")
    if median(r.spread or 0.0 for r in timed) > SCATTERED:
        doubts.append(f"samples scatter by over {SCATTERED:.0%} (see dtbench doctor)")
    return " and ".join(doubts)


def _finding(cases: Sequence[_Case]) -> str:
    """The core against torch where both are there, by cached calls where there are; else from the fastest case on."""
    cases = [c for c in cases if next(iter(c.values()))[0].params.get("call") == "cached"] or cases
    pairs = [(core, torch) for c in cases if (core := _time_s(c, "core")) and (torch := _time_s(c, "torch"))]
    if pairs:
        return f"the core is {_speed([torch / core for core, torch in pairs])}"
    times = [
        (time_s, of[0]) for case in cases for of in case.values() if (time_s := _time_s(case, of[0].impl))
    ]
    (low_s, fastest), (high_s, slowest) = min(times, key=_first), max(times, key=_first)
    if len(times) == 1:
        return f"{_words(fastest)} {format_seconds(low_s)} {format_spread(fastest.spread)}"
    return (
        f"{plural(len(times), 'result')}, fastest {_words(fastest)} at {format_seconds(low_s)}, "
        f"slowest {_words(slowest)} at {format_seconds(high_s)}"
    )


def _first(pair: tuple[float, Result]) -> float:
    return pair[0]


def _words(result: Result) -> str:
    params = " ".join(
        f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in result.params.items()
    )
    return " ".join(filter(None, (result.name, params, result.impl)))


def _speed(ratios: Sequence[float]) -> str:
    """`1.96x faster than torch.distributed.tensor over 12 cases (0.9x to 5.3x)`."""
    mean = geometric_mean(ratios)
    factor = f"{significant(max(mean, 1 / mean), 3)}x {'faster' if mean >= 1 else 'slower'}"
    span = (
        f", from {significant(min(ratios), 2)}x to {significant(max(ratios), 2)}x" if len(ratios) > 1 else ""
    )
    return f"{factor} than torch.distributed.tensor over {plural(len(ratios), 'case')}{span}"
