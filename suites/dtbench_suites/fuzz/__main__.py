"""`python -m dtbench_suites.fuzz`: searches for programs that the core gets wrong, and prints each minimised."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import click

from dtbench.records.verdicts import NOTHING, OpVerdict
from dtbench_suites.coverage.pool import Worker
from dtbench_suites.coverage.verdicts import Caps, Job
from dtbench_suites.fuzz.generate import Program, program
from dtbench_suites.fuzz.judge import EAGER
from dtbench_suites.fuzz.minimise import Judge, kind_of, minimise

# A program of some statements takes milliseconds, compiled on four ranks seconds; more on a busy machine.
_TIMEOUT_S = 120.0
# Of what is left to search, a find may cost at most so much to be minimised.
_MINIMISE_S = 120.0
FINE = ("pass", "refused", NOTHING)


class Workers:
    """A process for each kind of program; one that has died is started again."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._live: list[Worker] = []
        self._by_mode: dict[str, Worker] = {}

    def judge(self, one: Program) -> tuple[str, str]:
        return self.judge_text(one.text())

    def judge_text(self, text: str) -> tuple[str, str]:
        """(verdict, reason)"""
        mode = self._backend if "@compiled" in text else EAGER
        worker = self._by_mode.get(mode)
        if worker is None or not worker.alive:
            worker = self._by_mode[mode] = Worker(self._live, "dtbench_suites.fuzz.judge")
        found: OpVerdict = worker.judge(Job(text, mode, "core", Caps()), _TIMEOUT_S)
        return found.verdict, found.reason

    def close(self) -> None:
        for worker in tuple(self._live):
            worker.end()


@click.command(
    help="Executes random programs on distributed and on plain tensors; FILES: texts of programs instead."
)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--seed", default="0", show_default=True, help="Of the first program; the same seed, the same programs."
)
@click.option("--minutes", default=5.0, show_default=True, help="How long to search.")
@click.option(
    "--compile", "compiling", default=0.2, show_default=True, help="Share of programs with a compiled part."
)
@click.option("--ascending", is_flag=True, help="Only meshes whose ranks ascend.")
@click.option("--backend", default="aot_eager", show_default=True, help="Of torch.compile.")
def main(
    files: tuple[Path, ...], seed: str, minutes: float, compiling: float, ascending: bool, backend: str
) -> None:
    with closing(Workers(backend)) as ranks:
        if files:
            found = [(file.name, *ranks.judge_text(file.read_text())) for file in files]
            for name, verdict, reason in found:
                click.echo(f"{name}: {verdict} {reason}".rstrip())
            sys.exit(any(verdict not in FINE for _, verdict, _ in found))
        sys.exit(search(ranks.judge, seed, minutes * 60, compiling, ascending) > 0)


def search(judge: Judge, seed: str, limit_s: float, compiling: float, ascending: bool) -> int:
    """How many finds of different kinds there are; each is printed, minimised."""
    end = time.monotonic() + limit_s
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    for number in itertools.count():
        if time.monotonic() > end:
            break
        one = program(f"{seed}/{number}", compiling, ascending)
        verdict, reason = judge(one)
        counts[verdict] += 1
        kind = kind_of(verdict, reason)
        if verdict in FINE or (verdict != "wrong" and kind in seen):
            continue
        seen.add(kind)
        until = time.monotonic() + _MINIMISE_S
        small = minimise(one, kind, judge, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        known = f"{kind} {statements(small)}"
        if known not in seen:
            seen.add(known)
            verdict, reason = judge(small)
            click.echo(f"# program {seed}/{number}, {verdict}: {reason}\n{small.text()}")
    click.echo(f"{counts.total()} programs: {', '.join(f'{n} {v}' for v, n in counts.most_common())}")
    return sum(n for verdict, n in counts.items() if verdict not in FINE)


def statements(one: Program) -> str:
    """Its statements without names and numbers: what finds of one cause mostly share."""
    return "; ".join("".join(c for c in line if not c.isdigit()) for line in one.lines)


if __name__ == "__main__":
    main()
