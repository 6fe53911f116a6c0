"""Which results of runs are shown, and in which order: `show --filter`, `--sort`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from dtbench.engine.options import label_of, matcher
from dtbench.suite import Result, Run
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by

# Of a case: the time of one of its impls, as named first, else the core's.
_FIGURES: Mapping[str, Callable[[Result], float | None]] = {
    "time": lambda result: result.estimate_s,
    "spread": lambda result: result.spread,
    "algbw": lambda result: result.algbw_Bps,
    "busbw": lambda result: result.busbw_Bps,
}
_RATIO = "core/torch"


def choose(runs: Sequence[Run], text: str, sort: str) -> list[Run]:
    """The runs with those results alone whose case `text` matches (`dtbench.engine.options.matcher`), sorted.

    sort: time, spread, algbw, busbw, core/torch or the name of a param, smallest first; with a - before it the largest
    first. Cases without the figure come last; the impls of a case stay together.

    Raises:
        UsageError: nothing matches, or no case has what to sort by.
    """
    if text:
        matches = matcher(text)
        runs = [_of(run, [r for r in run.results if matches(_label(r))]) for run in runs]
        if not any(run.results for run in runs):
            raise UsageError(f"--filter {text!r} matches no result; `dtbench show` without it lists them")
    return [_of(run, _sorted(run.results, sort)) for run in runs] if sort else list(runs)


def _of(run: Run, results: Sequence[Result]) -> Run:
    return replace(run, results=tuple(results))


def _label(result: Result) -> str:
    return label_of(result.suite, result)


def _sorted(results: Sequence[Result], sort: str) -> list[Result]:
    name, sign = sort.removeprefix("-"), -1 if sort.startswith("-") else 1
    cases = group_by(results, lambda r: (r.suite, r.name, tuple(sorted(r.params.items()))))
    keys = {case: _key(name, of, sign) for case, of in cases.items()}
    if all(key[0] for key in keys.values()):
        params = ", ".join(dict.fromkeys(param for r in results for param in r.params))
        raise UsageError(
            f"--sort {sort}: no case has it; expected {', '.join((*_FIGURES, _RATIO))} or a param: {params}"
        )
    return [result for case in sorted(cases, key=lambda case: keys[case]) for result in cases[case]]


def _key(name: str, of: Sequence[Result], sign: int) -> tuple[bool, float, str]:
    """(whether it is missing, the number, the text)."""
    value: object
    if name == _RATIO:
        core, torch = (_figure([r for r in of if r.impl == impl], "time") for impl in ("core", "torch"))
        value = core / torch if core and torch else None
    elif name in _FIGURES:
        value = _figure([r for r in of if r.impl == "core"] or of, name)
    else:
        value = of[0].params.get(name)
    if isinstance(value, str):
        return False, 0.0, value
    number = math.nan if value is None else float(value)
    return math.isnan(number), 0.0 if math.isnan(number) else sign * number, ""


def _figure(of: Sequence[Result], name: str) -> float | None:
    """Over launches."""
    there = [value for r in of if r.status == "ok" and (value := _FIGURES[name](r)) is not None]
    return median(there) if there else None
