"""Is every op of torch's database right on distributed tensors? `python -m core.tests.coverage --help`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from core.tests.coverage.judge import LIBRARIES, VERDICTS, OpOutcome
from core.tests.coverage.pool import OpJob, judge_all
from core.tests.coverage.samples import MODES, database, has_mode

# Of the samples, what may stay not judged, because the plain op or its gradient raises.
MOST_NOT_JUDGED = 0.005

Outcomes = Mapping[tuple[str, str, str], OpOutcome]  # by library, op and mode


def table_of(outcomes: Outcomes, samples: int, places: int) -> dict[str, Any]:
    """The core's verdicts as they are committed: op -> mode -> verdict."""
    table: dict[str, Any] = {
        "torch": torch.__version__,
        "options": {"samples": samples, "places": places},
        "samples": sum(outcome.samples for (impl, *_), outcome in outcomes.items() if impl == "core"),
        "not_judged": {},
        "verdicts": {},
    }
    for (impl, op, mode), outcome in sorted(
        outcomes.items(), key=lambda one: (one[0][1], MODES.index(one[0][2]))
    ):
        if impl == "core":
            table["verdicts"].setdefault(op, {})[mode] = outcome.verdict
            if outcome.not_judged:
                table["not_judged"].setdefault(op, {})[mode] = outcome.not_judged
    return table


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """As JSON with a line per op, which makes changes easy to read."""
    head = json.dumps({name: value for name, value in table.items() if name != "verdicts"})
    ops = ",\n".join(f"  {json.dumps(op)}: {json.dumps(modes)}" for op, modes in table["verdicts"].items())
    path.write_text(f'{head[:-1]}, "verdicts": {{\n{ops}\n}}}}\n')


def became_worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], int]:
    """(a line per op and mode that became worse; how many became better).

    An op that passed must pass; one that did not must not have become wrong, nor a hang, nor be left out.
    """
    if (was["torch"], was["options"]) != (now["torch"], now["options"]):
        made, run = (f"torch {one['torch']} and {one['options']}" for one in (was, now))
        sys.exit(
            f"the table was made with {made}, this run with {run}: measure as the table, or write a new one"
        )
    worse, better = [], 0
    for op, modes in was["verdicts"].items():
        for mode, before in modes.items():
            after = now["verdicts"].get(op, {}).get(mode, "not measured")
            better += after == "pass" != before
            if after != before and (before == "pass" or after in ("wrong", "hang", "not measured")):
                worse.append(f"{op} ({mode}): was {before}, is {after}")
    count = sum(sum(modes.values()) for modes in now["not_judged"].values())
    if count > MOST_NOT_JUDGED * now["samples"]:
        worse.append(
            f"{count} of {now['samples']} samples are not judged, at most {MOST_NOT_JUDGED:.1%} may be"
        )
    return worse, better


def sums(outcomes: Outcomes) -> list[list[str]]:
    """A row per mode and library: ops per verdict, ops that the core ran (also) on replicated inputs, cases."""
    words = [*VERDICTS, "n/a"]
    rows = [["mode", "library", *words, "by fallback", "cases", "samples not judged"]]
    for mode, impl in itertools.product(MODES, LIBRARIES):
        own = [outcome for key, outcome in outcomes.items() if key[::2] == (impl, mode)]
        ops = Counter(outcome.verdict for outcome in own)
        fallen = str(sum(bool(outcome.fallbacks) for outcome in own)) if impl == "core" else "-"
        cases = str(sum(outcome.cases.total() for outcome in own))
        judged = f"{sum(o.not_judged for o in own)} of {sum(o.samples for o in own)}"
        rows += [[mode, impl, *(str(ops[word]) for word in words), fallen, cases, judged]] * bool(own)
    return rows


def page_of(outcomes: Outcomes, samples: int, places: int) -> str:
    """Sums, and the ops whose verdicts on the core and on torch's DTensor differ, those of the same modes in a row."""
    differing: dict[str, list[str]] = {}
    for op in dict.fromkeys(op for _, op, _ in outcomes):
        by_pair: dict[str, list[str]] = {}
        for mode in MODES:
            ours, theirs = (
                outcomes[i, op, mode].verdict if (i, op, mode) in outcomes else "" for i in LIBRARIES
            )
            if ours != theirs:
                by_pair.setdefault(f"{ours} / {theirs}", []).append(mode)
        if by_pair:
            where = "; ".join(f"{pair}: {', '.join(modes)}" for pair, modes in by_pair.items())
            differing.setdefault(where, []).append(op.replace("_", "\\_"))
    rows = [[", ".join(ops), where] for where, ops in sorted(differing.items(), key=lambda one: -len(one[1]))]
    command = "`python -m core.tests.coverage --impl core,torch -o results/coverage.md`"
    return f"""# Ops of torch's database on distributed tensors

torch {torch.__version__}, {samples} samples of each op, {places} placements of each, four simulated ranks: {command}.

{_markdown(sums(outcomes))}

Ops whose verdicts differ:

{_markdown([["ops", "core / torch"], *rows])}
"""


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.tests.coverage", description=__doc__)
    parser.add_argument("--impl", default="core", help="comma list of core, torch [core]")
    parser.add_argument("--mode", default=",".join(MODES), help=f"comma list of {', '.join(MODES)} [all]")
    parser.add_argument("--ops", default="", help="regular expression that an op's name holds [all]")
    parser.add_argument("--samples", type=int, default=3, help="samples tried per op [3]")
    parser.add_argument("--places", type=int, default=4, help="placements tried per sample [4]")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes [all cores]"
    )
    parser.add_argument(
        "--base", type=Path, help="table that no op may fall behind: exit code 1 and their names"
    )
    parser.add_argument(
        "-o", dest="outputs", type=Path, nargs="+", default=(), help="table.json, for --base; page.md"
    )
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    jobs: list[OpJob] = [
        (impl, name, mode, options.samples, options.places)
        for impl in options.impl.split(",")
        for mode in options.mode.split(",")
        for name in database()
        if re.search(options.ops, name) and has_mode(name, mode)
    ]
    outcomes: dict[tuple[str, str, str], OpOutcome] = {}
    for (impl, op, mode, *_), outcome in judge_all(jobs, options.workers):
        outcomes[impl, op, mode] = outcome
        if outcome.verdict not in ("pass", "n/a"):
            _say(f"{impl} {op} ({mode}): {outcome.verdict}: {outcome.reasons[outcome.verdict]}")
    for row in sums(outcomes):
        _say("  ".join(f"{cell:>10}" for cell in row))
    table = table_of(outcomes, options.samples, options.places)
    for path in options.outputs:
        if path.suffix == ".md":
            path.write_text(page_of(outcomes, options.samples, options.places))
        else:
            write_table(table, path)
    if options.base is None:
        return 0
    worse, better = became_worse(json.loads(options.base.read_text()), table)
    for line in worse:
        _say(f"worse: {line}")
    _say(f"{len(worse)} worse than {options.base}, {better} better")
    return int(bool(worse))


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    sys.exit(main())
