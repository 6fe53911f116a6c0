"""`dtbench import`: reads logs, says what was found in them, and writes a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dtbench.importers import checks, convert
from dtbench.importers.model import COLLECTIVES, Log, Problem, Table
from dtbench.importers.registry import read_logs
from dtbench.records.run import RunWriter, without_collecting
from dtbench.suite import Result
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError, plain
from dtbench.suite.mesh import Mesh

# How many problems of one log are spelled out.
_SHOWN = 12


@without_collecting()
def import_logs(
    paths: Sequence[Path],
    output: Path,
    argv: Sequence[str],
    *,
    mesh: Mesh | None = None,
    dim: str | None = None,
    collective: str | None = None,
    ranks: int | None = None,
) -> tuple[int, list[str]]:
    """Writes the run of the logs to `output`: the exit code, and what to tell the user.

    Raises:
        UnreadableRunError: a file that holds no output of a tool that is known.
        UsageError: nothing that can be used, or logs that do not go together.
        OutputError: the run cannot be written.
    """
    if collective is not None and collective not in COLLECTIVES:
        raise UsageError(f"--collective {collective}: expected one of {', '.join(COLLECTIVES)}")
    logs = read_logs(paths)
    for log in logs:
        checks.check(log, collective=collective, ranks=ranks)
    header, results = convert.to_run(logs, argv, mesh, dim)
    with RunWriter.create(output, header) as writer:
        try:
            for result in results:
                writer.append(result)
            writer.end()
        except BaseException:
            with contextlib.suppress(OSError):
                output.unlink()
            raise
    lines = [line for log in logs for line in report(log)] + [_total(results, output)]
    flagged = any(r.status in ("failed", "wrong") for r in results) or any(log.failures for log in logs)
    return EXIT_CASE_FAILED if flagged else EXIT_OK, lines


def report(log: Log) -> Iterator[str]:
    """What was read of a log, and each doubt about it with its line."""
    yield plain(f"{log.name}: {log.format}, {log.rows} rows")
    for table in log.tables:
        yield plain(f"  {_table(table)}")
    problems = [*log.failures, *log.problems]
    problems += [fault for table in log.tables if not table.refusal for fault in _faults(table)]
    for problem in problems[:_SHOWN]:
        yield plain(f"  ! {problem}")
    if len(problems) > _SHOWN:
        yield f"  ! and {len(problems) - _SHOWN} more"


def _table(table: Table) -> str:
    name = table.collective or "a table"
    if table.refusal:
        return f"{name} at line {table.line}, {len(table.rows)} rows NOT USED: {table.refusal}"
    hosts = {device.host for device in table.devices if device.host}
    complete = len(table.devices) == (table.ranks or 0) * table.groups
    where = f" on {len(hosts)} host(s)" if hosts and complete else ""
    sizes = [row.size_bytes for row in table.rows if row.size_bytes]
    span = f", {min(sizes)} to {max(sizes)} bytes" if sizes else ""
    return f"{name} among {table.ranks} ranks{where} ({table.ranks_from}): {len(table.rows)} rows{span}"


def _faults(table: Table) -> Iterable[Problem]:
    return dict.fromkeys(Problem(row.line, figure.fault) for row, figure in table.figures if figure.fault)


def _total(results: Sequence[Result], output: Path) -> str:
    counts = Counter(result.status for result in results)
    usable = sum(r.suite == convert.SUITE and r.status == "ok" for r in results)
    bad = ", ".join(f"{counts[s]} {s}" for s in ("wrong", "failed", "skipped") if counts[s])
    return plain(
        f"{counts['ok']} figures are in {output}, {usable} of them for dtbench calibrate"
        + (f"; {bad}" if bad else "")
    )
