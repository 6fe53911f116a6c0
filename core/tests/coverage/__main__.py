"""Is every op of torch's database right on distributed tensors? `python -m core.tests.coverage --help`."""

import argparse
import gc
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from core.tests.coverage.judge import LIBRARIES, VERDICTS, OpOutcome, judge_op
from core.tests.coverage.samples import MODES, PLACES, RANKS, SAMPLES, database, has_mode
from dtbench_core.simulate import ThreadWorld

# The slowest op takes some seconds on a core of its own, and many times as long beside more urgent work.
OP_TIMEOUT_S = 600.0

Outcomes = Mapping[tuple[str, str, str], OpOutcome]  # by library, op and mode
OpJob = tuple[str, str, list[str]]  # a library, an op and its modes


def judge_all(
    jobs: Sequence[OpJob], workers: int, timeout_s: float = OP_TIMEOUT_S
) -> Iterator[tuple[tuple[str, str, str], OpOutcome]]:
    """Yields outcomes as they finish. Each op runs in a forked process.

    A mode in which the process dies, or does not answer in time, is an "error"; a new process runs the remaining modes.
    """
    context, waiting = multiprocessing.get_context("fork"), list(jobs[::-1])
    running: dict[Connection, tuple[OpJob, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            connection, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(theirs, waiting[-1]), daemon=True)
            process.start()
            theirs.close()
            running[connection] = waiting.pop(), process, time.monotonic() + timeout_s
        answered = wait(list(running), timeout=0.2)
        for connection, (job, process, deadline) in list(running.items()):
            if connection not in answered and time.monotonic() < deadline:
                continue
            impl, op, (mode, *later) = job
            ended = True
            try:
                outcome = OpOutcome.of("error", f"no answer within {timeout_s:.0f} s")
                if connection in answered:
                    outcome, ended = connection.recv(), not later
            except EOFError:
                process.join()
                outcome = OpOutcome.of("error", f"the process ended with code {process.exitcode}")
            running[connection] = (impl, op, later), process, time.monotonic() + timeout_s
            if ended:
                process.kill()
                process.join()
                del running[connection]
                waiting += [(impl, op, later)] if later else []
            yield (impl, op, mode), outcome


def _serve(connection: Connection, job: OpJob) -> None:
    warnings.simplefilter("ignore")  # thousands of calls would repeat the libraries' own
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    # torch's own formats a stack trace for each kind of GPU that is not there, a quarter of the time of all.
    torch.manual_seed = torch.default_generator.manual_seed
    impl, op, modes = job
    with ThreadWorld(RANKS) as world:
        for mode in modes:
            connection.send(judge_op(world, impl, op, mode))


def table_of(outcomes: Outcomes) -> dict[str, Any]:
    """Returns the core's verdicts in the form of the committed table: op -> mode -> verdict."""
    verdicts: dict[str, dict[str, str]] = {}
    for (impl, op, mode), outcome in sorted(outcomes.items(), key=lambda item: MODES.index(item[0][2])):
        if impl == "core":
            verdicts.setdefault(op, {})[mode] = outcome.verdict
    return {"torch": torch.__version__, "verdicts": dict(sorted(verdicts.items()))}


def text_of(table: Mapping[str, Any]) -> str:
    """Returns JSON with one line per op, so that diffs are easy to read."""
    ops = ",\n".join(f"  {json.dumps(op)}: {json.dumps(modes)}" for op, modes in table["verdicts"].items())
    return f'{{"torch": {json.dumps(table["torch"])}, "verdicts": {{\n{ops}\n}}}}\n'


def became_worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns one line per op and mode that became worse.

    An op that passed must pass. Any other op must not become wrong, hang, or be missing.
    """
    if was["torch"] != now["torch"]:
        sys.exit(
            f"the table is of torch {was['torch']}, this run of {now['torch']}: write a new table with -o"
        )
    return [
        f"{op} ({mode}): was {before}, is {after}"
        for op, modes in was["verdicts"].items()
        for mode, before in modes.items()
        for after in [now["verdicts"].get(op, {}).get(mode, "not measured")]
        if after != before and (before == "pass" or after in ("wrong", "hang", "not measured"))
    ]


def sums(outcomes: Outcomes) -> list[list[str]]:
    """Returns one row per mode and library: number of ops per verdict, ops that used a fallback, cases."""
    words = [*VERDICTS, "n/a"]
    rows = [["mode", "library", *words, "by fallback", "cases"]]
    for mode, impl in itertools.product(MODES, LIBRARIES):
        own = [outcome for key, outcome in outcomes.items() if key[::2] == (impl, mode)]
        ops = Counter(outcome.verdict for outcome in own)
        fallen = str(sum(bool(outcome.fallbacks) for outcome in own)) if impl == "core" else "-"
        cases = str(sum(outcome.cases.total() for outcome in own))
        rows += [[mode, impl, *(str(ops[word]) for word in words), fallen, cases]] * bool(own)
    return rows


def page_of(outcomes: Outcomes) -> str:
    """Returns a page with the sums and the ops whose verdicts differ between the core and torch, grouped by modes."""
    differing: dict[str, list[str]] = {}
    for op in sorted({op for _, op, _ in outcomes}):
        by_pair: dict[str, list[str]] = {}
        for mode in MODES:
            pair = [outcomes[i, op, mode].verdict if (i, op, mode) in outcomes else "" for i in LIBRARIES]
            if pair[0] != pair[1]:
                by_pair.setdefault(" / ".join(pair), []).append(mode)
        if by_pair:
            where = "; ".join(f"{pair}: {', '.join(modes)}" for pair, modes in by_pair.items())
            differing.setdefault(where, []).append(op.replace("_", "\\_"))
    rows = [[", ".join(ops), where] for where, ops in sorted(differing.items(), key=lambda one: -len(one[1]))]
    rows = [["ops", "core / torch"], ["---"] * 2, *rows]
    own, *others = sums(outcomes)
    tables = [
        "\n".join(f"| {' | '.join(row)} |" for row in part)
        for part in ([own, ["---"] * len(own), *others], rows)
    ]
    command = "`python -m core.tests.coverage --impl core,torch -o results/coverage.md`"
    return f"""# Ops of torch's database on distributed tensors

torch {torch.__version__}, {SAMPLES} samples of each op, {PLACES} placements of each, four simulated ranks: {command}.

{tables[0]}

Ops whose verdicts differ:

{tables[1]}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.tests.coverage", description=__doc__)
    parser.add_argument("--impl", default="core", help="comma list of core, torch [core]")
    parser.add_argument("--ops", default="", help="regular expression that an op's name holds [all]")
    parser.add_argument("--base", type=Path, help="table that no op may fall behind: exit code 1 and names")
    parser.add_argument("-o", dest="output", type=Path, help="table.json, for --base; or page.md")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    jobs: list[OpJob] = [
        (impl, op, [mode for mode in MODES if has_mode(op, mode)])
        for impl in options.impl.split(",")
        for op in database()
        if re.search(options.ops, op)
    ]
    with ThreadWorld(RANKS) as world:
        judge_op(world, "core", "add", "even")  # loads what all ops need
    gc.disable()  # in the workers forked from here, each of which ends after an op
    outcomes: dict[tuple[str, str, str], OpOutcome] = {}
    for (impl, op, mode), outcome in judge_all(jobs, len(os.sched_getaffinity(0))):
        outcomes[impl, op, mode] = outcome
        if outcome.verdict not in ("pass", "n/a"):
            _say(f"{impl} {op} ({mode}): {outcome.verdict}: {outcome.reasons[outcome.verdict]}")
    for row in sums(outcomes):
        _say("  ".join(f"{cell:>10}" for cell in row))
    table = table_of(outcomes)
    if options.output:
        options.output.write_text(page_of(outcomes) if options.output.suffix == ".md" else text_of(table))
    worse = became_worse(json.loads(options.base.read_text()), table) if options.base else []
    for line in worse:
        _say(f"worse: {line}")
    return int(bool(worse))


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    sys.exit(main())
