"""`python -m dtbench_suites.coverage`: judges ops in this process and prints what came out, for developers.

A crash in native code ends it; `dtbench run coverage` judges in processes of their own.
"""

from __future__ import annotations

import argparse
import re
import time
import traceback

from dtbench_core.simulate import ThreadWorld
from dtbench_suites.coverage.judge import count_fallbacks, judge_op, quiet
from dtbench_suites.coverage.samples import op_names
from dtbench_suites.coverage.verdicts import MODES, NOTHING, RANKS, VERDICTS, Caps, summarize


def main() -> None:
    """Parses the command line and judges."""
    parser = argparse.ArgumentParser(prog="python -m dtbench_suites.coverage", description=main.__doc__)
    parser.add_argument("--mode", default="even", help=f"comma list of {', '.join(MODES)}, or all")
    parser.add_argument("--ops", default="", help="regular expression that the op's name holds")
    parser.add_argument("--impl", default="core", help="comma list of core, torch")
    parser.add_argument("--samples", type=int, default=Caps.samples)
    parser.add_argument("--places", type=int, default=Caps.places, help="placements per sample")
    parser.add_argument("-v", action="store_true", help="the traceback of the first case that does not pass")
    parser.add_argument("-a", action="store_true", help="every case that does not pass")
    given = parser.parse_args()
    modes = MODES if given.mode == "all" else given.mode.split(",")
    names = [name for name in op_names() if re.search(given.ops, name)]
    quiet()
    with ThreadWorld(RANKS) as world:
        for mode in modes:
            for impl in given.impl.split(","):
                _judge(world, names, mode, impl, given)


def _judge(world: ThreadWorld, names: list[str], mode: str, impl: str, given: argparse.Namespace) -> None:
    totals = dict.fromkeys((*VERDICTS, NOTHING), 0)
    started = time.perf_counter()
    for name in names:
        before = count_fallbacks()
        cases = list(judge_op(world, name, mode, impl, Caps(given.samples, given.places)))
        verdict = summarize(name, mode, impl, cases, count_fallbacks() - before)
        totals[verdict.verdict] += 1
        how = f"  [{verdict.fallbacks} fallbacks]" if verdict.fallbacks else ""
        counts = ", ".join(f"{count} {kind}" for kind, count in verdict.counts.items())
        print(f"{mode:8} {impl:5} {name:45} {verdict.verdict:14} {counts}{how}", flush=True)  # noqa: T201
        if verdict.reason:
            print(f"    {verdict.reason}", flush=True)  # noqa: T201
        failed = [case for case in cases if case.verdict != "pass"]
        for case in failed if given.a else ():
            print(f"        {case.verdict}: {case.describe()[:400]}")  # noqa: T201
        first = next((case for case in failed if case.error is not None), None)
        if given.v and first is not None and first.error is not None:
            traceback.print_exception(first.error)
    tested = sum(totals.values()) - totals[NOTHING]
    summary = ", ".join(f"{count} {kind}" for kind, count in totals.items() if count)
    percent = 100 * totals["pass"] / tested if tested else 0.0
    took = time.perf_counter() - started
    print(f"{mode} {impl}: {tested} ops tested, {percent:.1f}% fully pass ({summary}), {took:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
