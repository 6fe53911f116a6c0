"""A process that judges ops for a pool: a crash in native code, or a deadlock, costs one op's verdict.

Reads a JSON list per line from stdin: [op, mode, impl, samples, places]. Answers on stdout, per line a
JSON list: ["case", verdict, stage, reason, sample, placements] after each case, and ["done", fallbacks].
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from dtbench_core.simulate import ThreadWorld
from dtbench_suites.coverage.judge import count_fallbacks, judge_op, quiet
from dtbench_suites.coverage.samples import op_names
from dtbench_suites.coverage.verdicts import RANKS, Caps


def main() -> None:
    """Serves until stdin ends."""
    # What ops print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    quiet()
    op_names()  # the slow import, before the first op's time runs
    _answer(answers, ["ready"])
    with ThreadWorld(RANKS) as world:
        for line in sys.stdin:
            op, mode, impl, samples, places = json.loads(line)
            before = count_fallbacks()
            for case in judge_op(world, op, mode, impl, Caps(samples, places)):
                placed = [list(one) for one in case.places]
                _answer(answers, ["case", case.verdict, case.stage, case.reason, case.sample, placed])
            _answer(answers, ["done", count_fallbacks() - before])


def _answer(answers: TextIO, message: list[Any]) -> None:
    answers.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
