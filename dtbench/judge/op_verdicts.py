"""Verdicts on ops: reads them from a run's results, sums them up, spells tables, finds what became worse.

A result of the coverage suite is one op (`name`) in one mode (`params["mode"]`) for one impl. Its counters
hold the number of cases per verdict, and how often an op ran by fallback. Pure: no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.files.read import BadFieldError, into, read_json
from dtbench.grouping import known_first
from dtbench.model import Result, Run

# Worst first. An op has the worst verdict of its cases; what each means stands in the suite.
VERDICTS = ("wrong", "hang", "died", "differs", "error", "no rule", "random differs", "refused", "pass")
NOTHING = "n/a"
FALLBACKS = "fallbacks"
SUITE = "coverage"
PROGRAMS = "compat"  # its names are programs, its modes are their topics
MODES = ("even", "uneven", "partial", "mesh2x2", "inplace", "out")
MAX_BASELINE_BYTES = 64 * 2**20


def has_verdicts(result: Result) -> bool:
    """Whether it is a verdict on an op or program, not a time."""
    return result.suite in (SUITE, PROGRAMS) and "mode" in result.params


def verdict_of(result: Result) -> str:
    """One of VERDICTS or NOTHING."""
    return next((v for v in VERDICTS if result.counters.get(v)), NOTHING)


def mode_of(result: Result) -> str:
    return str(result.params["mode"])


def modes_of(results: Sequence[Result]) -> list[str]:
    """The modes there are, in the order in which people read them."""
    return known_first({mode_of(r) for r in results}, MODES)


def summary_rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table with a row per mode and impl: ops and cases per verdict; verdicts that no op has are
    left out. Fully pass are ops of which every case does.
    """
    groups = [
        (mode, impl, own)
        for mode in modes_of(results)
        for impl in sorted({r.impl for r in results})
        if (own := [r for r in results if mode_of(r) == mode and r.impl == impl])
    ]
    there = set(map(verdict_of, results))
    shown = [v for v in VERDICTS if v in there]
    head = ["mode", "impl", "ops", "fully pass", *shown, NOTHING, "cases", "cases pass", "by fallback"]
    rows = []
    for mode, impl, own in groups:
        ops = Counter(map(verdict_of, own))
        cases = {v: sum(int(r.counters.get(v, 0)) for r in own) for v in VERDICTS}
        tested, total = len(own) - ops[NOTHING], sum(cases.values())
        fully = f"{100 * ops['pass'] / tested if tested else 0:.1f}%"
        share = f"{100 * cases['pass'] / total:.1f}%" if total else "-"
        fallen = str(sum(1 for r in own if r.counters.get(FALLBACKS))) if impl == "core" else "-"
        counts = [str(ops[v]) for v in (*shown, NOTHING)]
        rows.append([mode, impl, str(tested), fully, *counts, str(total), share, fallen])
    return head, rows


# ---- the committed table ----


def markdown(runs: Sequence[Run]) -> str:
    """The verdicts of the runs as a page: how they came about, sums, then one line per op."""
    results = merged(runs)
    if all(r.suite == PROGRAMS for r in results):
        return _page_of_programs(runs, results)
    impls = [i for i in ("core", "torch") if any(r.impl == i for r in results)]
    modes = modes_of(results)
    lines = ["# Ops of torch's database on distributed tensors", "", *_origin(runs), ""]
    head, rows = summary_rows(results)
    lines += _grid(head, rows)
    key = (
        f"Per op and mode: {' / '.join(impls)}, one word where they agree. `*`: the core ran (also) by "
        "replicating, for want of a rule. An empty cell: nothing to compare."
    )
    lines += ["", key, ""]
    cells = {(r.name, mode_of(r), r.impl): r for r in results}
    table = []
    for op in dict.fromkeys(r.name for r in results):
        row = [_cell([cells.get((op, mode, impl)) for impl in impls]) for mode in modes]
        if any(row):
            table.append([op, *row])
    return "\n".join([*lines, *_grid(["op", *modes], table), ""])


def _page_of_programs(runs: Sequence[Run], results: Sequence[Result]) -> str:
    """As `markdown`: a table per topic, with what an implementation says where it does not pass."""
    impls = [i for i in ("core", "torch") if any(r.impl == i for r in results)]
    title = ["# PyTorch's other machinery on distributed tensors", ""]
    key = (
        "Each program runs on four gloo ranks and is compared with itself on plain tensors, values and gradients. "
        "`refused`: the core's own error on every rank, or autograd's of a write that gradients could not follow. "
        "What plain tensors refuse must be refused with the same class of error to pass."
    )
    lines = [*title, *_origin(runs), "", key, "", *_grid(*summary_rows(results))]
    cells = {(r.name, r.impl): _words(r) for r in results}
    for topic in modes_of(results):
        names = dict.fromkeys(r.name for r in results if mode_of(r) == topic)
        rows = [[name, *(cells.get((name, impl), "") for impl in impls)] for name in names]
        lines += ["", f"## {topic}", "", *_grid(["program", *impls], rows)]
    return "\n".join([*lines, ""])


def _words(result: Result) -> str:
    """The verdict, and the first 160 characters of why."""
    verdict = verdict_of(result)
    why = result.reason if len(result.reason) <= 160 else f"{result.reason[:157]}..."
    short = re.sub(r"[|\[\]*_`]", r"\\\g<0>", why).replace("<", "&lt;")  # no markup of a page's
    return f"{verdict}: {short}" if why and verdict != "pass" else verdict


def _origin(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        header = run.header
        plan = header.plan
        words = [
            f"--impl {','.join(map(str, plan.get('impls') or []))}",
            *["--quick"] * bool(plan.get("quick")),
        ]
        words += [f"--{name} {value}" for name, value in (plan.get("options") or {}).items()]
        suite = next((r.suite for r in run.results), SUITE)
        commit = str(header.git.commit or "unknown")[:12]
        lines.append(
            f"Made {header.started[:10]} with torch {header.versions.get('torch')} at commit {commit}: "
            f"`dtbench run {suite} {' '.join(words)}`"
        )
    return lines


def _cell(results: Sequence[Result | None]) -> str:
    words = []
    for result in results:
        verdict = NOTHING if result is None else verdict_of(result)
        fell = result is not None and result.impl == "core" and bool(result.counters.get(FALLBACKS))
        words.append(("" if verdict == NOTHING else verdict) + ("*" if fell else ""))
    if not any(words):
        return ""
    same = len({word.rstrip("*") for word in words}) == 1
    return words[0] if same else " / ".join(word or "-" for word in words)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


# ---- the baseline ----


@dataclass(frozen=True)
class Baseline:
    """The core's verdicts that were committed: op -> mode -> verdict, and what they were made with."""

    torch: str
    options: Mapping[str, str]
    verdicts: Mapping[str, Mapping[str, str]]
    schema: Literal[1] = 1


def baseline_of(run: Run) -> Baseline:
    """What a run says of the core."""
    verdicts: dict[str, dict[str, str]] = {}
    for result in merged([run]):
        if result.impl == "core":
            verdicts.setdefault(result.name, {})[mode_of(result)] = verdict_of(result)
    return Baseline(str(run.header.versions.get("torch")), _caps(run), verdicts)


def _caps(run: Run) -> dict[str, str]:
    plan = run.header.plan
    options = {"quick": plan.get("quick", False), **(plan.get("options") or {})}
    return {name: str(options[name]) for name in ("quick", "samples", "places") if name in options}


def write_baseline(baseline: Baseline, path: Path) -> None:
    """As JSON with a line per op, which makes changes easy to read."""
    head = json.dumps({"schema": baseline.schema, "torch": baseline.torch, "options": dict(baseline.options)})
    ops = [f"  {json.dumps(op)}: {json.dumps(dict(modes))}" for op, modes in baseline.verdicts.items()]
    path.write_text(head[:-1] + ', "verdicts": {\n' + ",\n".join(ops) + "\n}}\n")


def read_baseline(path: Path) -> Baseline:
    """What `write_baseline` wrote.

    Raises:
        UnreadableRunError: it is something else.
    """
    read = read_json(path, "what `coverage -o` writes", MAX_BASELINE_BYTES)
    try:
        return into(read, Baseline)
    except BadFieldError as error:
        raise UnreadableRunError(
            f"{path} is no table of verdicts: {error}; expected what `coverage -o` writes"
        ) from error


def became_worse(was: Baseline, now: Baseline) -> tuple[list[str], int]:
    """(what to repair, a line per op and mode; how many became better).

    An op that passed must pass; one that did not must not have become wrong, nor a hang. An op that is
    not in `now` counts as worse: it was not measured.

    Raises:
        UsageError: the two cannot be compared.
    """
    if (was.torch, dict(was.options)) != (now.torch, dict(now.options)):
        raise UsageError(
            f"the baseline was made with torch {was.torch} and {dict(was.options)}, the run with torch {now.torch} "
            f"and {dict(now.options)}: measure with the baseline's, or save a new one"
        )
    worse, better = [], 0
    for op, modes in was.verdicts.items():
        for mode, before in modes.items():
            after = now.verdicts.get(op, {}).get(mode, "not measured")
            if after == before:
                continue
            if before == "pass" or after in ("wrong", "hang", "died", "differs", "not measured"):
                worse.append(f"{op} ({mode}): was {before}, is {after}")
            elif after == "pass":
                better += 1
    return worse, better


# ---- results ----


def merged(runs: Sequence[Run]) -> list[Result]:
    """The verdicts of several runs, the last of each op, mode and impl.

    Raises:
        UsageError: there are none.
    """
    last = {(r.name, mode_of(r), r.impl): r for run in runs for r in run.results if has_verdicts(r)}
    if not last:
        raise UsageError("no verdicts in these runs: make some with `dtbench run coverage`")
    return sorted(last.values(), key=lambda r: r.name)
