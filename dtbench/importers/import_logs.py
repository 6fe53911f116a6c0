"""`dtbench import`: finds out what logs are, reads them, says what was found in them, and writes a run."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UnreadableRunError, UsageError, plain
from dtbench.importers import checks, convert, json_logs, nccl_text, other_tools
from dtbench.importers.model import COLLECTIVES, Log, LogTable, Problem
from dtbench.importers.text import without_container
from dtbench.records.read import read_bytes
from dtbench.records.result import Result
from dtbench.records.run import RunWriter, without_collecting
from dtbench.stats.drops import drops_of
from dtbench.suite.mesh import Mesh

# How many problems of one log are spelled out.
_SHOWN = 12
# Logs with NCCL_DEBUG=INFO of a thousand ranks have some 100 MB.
MAX_FILE_BYTES = 512 * 2**20

STDIN = Path("-")

# Whether a text may be of the tool, and what adds its tables to a log.
_Reader = tuple[Callable[[str], bool], Callable[[str, Log], None]]
# JSON is tried first and alone; of the texts a log may hold several.
JSON = "nccl-tests JSON"
READERS: dict[str, _Reader] = {
    JSON: (json_logs.applies, json_logs.read),
    "nccl-tests text": (nccl_text.applies, nccl_text.read),
    "rccl-tests CSV": (other_tools.is_rccl_csv, other_tools.read_rccl_csv),
    "DeepSpeed": (other_tools.is_deepspeed, other_tools.read_deepspeed),
    "OSU": (other_tools.is_osu, other_tools.read_osu),
    "ml-engineering": (other_tools.is_ml_engineering, other_tools.read_ml_engineering),
}
EXPECTED = "the output of nccl-tests (text, JSON), rccl-tests (text, CSV), DeepSpeed, OSU or ml-engineering"


def read_logs(paths: Sequence[str | Path]) -> list[Log]:
    """Each file's tables, as they stand there.

    Raises:
        UnreadableRunError: a file that cannot be read or holds no such output.
        UsageError: one file twice: its figures would count as two launches.
    """
    logs: list[Log] = []
    for path in map(Path, paths):
        log = parse(_bytes_of(path), "standard input" if path == STDIN else path.name)
        for other in logs:
            if other.sha256 == log.sha256:
                raise UsageError(f"{path} and {other.name} are the same log: give it once")
        logs.append(log)
    return logs


def _bytes_of(path: Path) -> bytes:
    if path != STDIN:
        return read_bytes(path, EXPECTED, MAX_FILE_BYTES)
    data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableRunError(f"standard input holds over {MAX_FILE_BYTES >> 20} MiB: expected {EXPECTED}")
    return data


def parse(data: bytes, name: str) -> Log:
    """The log that the bytes of a file are.

    Raises:
        UnreadableRunError: no output of a tool that is known.
    """
    text = without_container(data.decode("utf-8-sig", "replace"))
    log = Log(name, hashlib.sha256(data).hexdigest())
    tools = [tool for tool, (applies, _) in READERS.items() if applies(text)]
    tools = [JSON] if JSON in tools else tools
    if not tools:
        raise UnreadableRunError(f"{name} holds no table of a benchmark that is known: expected {EXPECTED}")
    for tool in tools:
        READERS[tool][1](text, log)
    log.format = " and ".join(tools)
    return log


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
        for result in results:
            writer.append(result)
        writer.end()
    lines = [
        *(line for log in logs for line in report(log)),
        *(f"! {drop}" for drop in drops_of(results)),
        _total(results, output),
    ]
    return EXIT_CASE_FAILED if any(log.refused or log.failures for log in logs) else EXIT_OK, lines


def report(log: Log) -> Iterator[str]:
    """What was read of a log, and each doubt about it with its line."""
    yield plain(
        f"{log.name}: {log.format}, {log.rows} rows"
        + (f", {log.refused} of them refused" if log.refused else "")
    )
    for table in log.tables:
        yield plain(f"  {_table(table)}")
    problems = [*log.failures, *log.problems]
    usable = [table for table in log.tables if not table.refusal]
    faults = (Problem(row.line, f.fault) for table in usable for row, f in table.figures if f.fault)
    problems += dict.fromkeys(faults)
    for problem in problems[:_SHOWN]:
        yield plain(f"  ! {problem}")
    if len(problems) > _SHOWN:
        yield f"  ! and {len(problems) - _SHOWN} more"


def _table(table: LogTable) -> str:
    name = table.collective or "a table"
    if table.refusal:
        return f"{name} at line {table.line}, {len(table.rows)} rows NOT USED: {table.refusal}"
    hosts = {device.host for device in table.devices if device.host}
    complete = len(table.devices) == table.ranks
    where = f" on {len(hosts)} host(s)" if hosts and complete else ""
    sizes = [row.size_bytes for row in table.rows if row.size_bytes]
    span = f", {min(sizes)} to {max(sizes)} bytes" if sizes else ""
    return f"{name} among {table.ranks} ranks{where} ({table.ranks_from}): {len(table.rows)} rows{span}"


def _total(results: Sequence[Result], output: Path) -> str:
    counts = Counter(result.status for result in results)
    usable = sum(r.suite == convert.SUITE and r.status == "ok" for r in results)
    bad = ", ".join(f"{counts[s]} {s}" for s in ("wrong", "failed") if counts[s])
    return plain(
        f"{counts['ok']} figures are in {output}, {usable} of them for dtbench calibrate"
        + (f"; {bad}" if bad else "")
    )
