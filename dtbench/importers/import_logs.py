"""Implements `dtbench import`: recognizes the formats of logs, reads their tables, writes a run and reports on it."""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UnreadableRunError, UsageError, plain
from dtbench.importers import checks, convert, json_logs, nccl_text, other_tools
from dtbench.importers.model import COLLECTIVES, Log, LogTable, Problem, strip_container_log
from dtbench.records.read import read_bytes
from dtbench.records.result import Result
from dtbench.records.run import RunWriter, without_collecting
from dtbench.stats.drops import drops_of
from dtbench.suite.mesh import Mesh

# The report lists at most this many problems of one log.
_MAX_PROBLEMS_SHOWN = 12
# With NCCL_DEBUG=INFO, a log of a thousand ranks has some 100 MB.
MAX_FILE_BYTES = 512 * 2**20

STDIN = Path("-")

# A predicate that recognizes the tool's output, and a function that adds its tables to a log.
_Reader = tuple[Callable[[str], bool], Callable[[str, Log], None]]
# A JSON file has this format alone; a text may contain the outputs of several tools.
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
    """Reads the tables of each file, unchecked.

    Raises:
        UnreadableRunError: a file cannot be read, or contains no supported output.
        UsageError: two files have the same contents, which would count as two launches.
    """
    logs: list[Log] = []
    for path in map(Path, paths):
        log = parse(_bytes_of(path), "standard input" if path == STDIN else path.name)
        if previous := next((previous for previous in logs if previous.sha256 == log.sha256), None):
            raise UsageError(f"{path} and {previous.name} are the same log: give it once")
        logs.append(log)
    return logs


def _bytes_of(path: Path) -> bytes:
    if path != STDIN:
        return read_bytes(path, EXPECTED, MAX_FILE_BYTES)
    data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableRunError(f"standard input exceeds {MAX_FILE_BYTES >> 20} MiB: expected {EXPECTED}")
    return data


def parse(data: bytes, name: str) -> Log:
    """Reads the tables from the contents of a file.

    Raises:
        UnreadableRunError: they contain no supported output.
    """
    text = strip_container_log(data.decode("utf-8-sig", "replace"))
    log = Log(name, hashlib.sha256(data).hexdigest())
    tools = [tool for tool, (applies, _) in READERS.items() if applies(text)]
    tools = [JSON] if JSON in tools else tools
    if not tools:
        raise UnreadableRunError(f"{name} contains no table of a supported benchmark: expected {EXPECTED}")
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
    """Converts logs to a run file. Returns the exit code and the lines of the report.

    Args:
        mesh: the mesh whose dims the logs measured; see `convert.to_run`.
        dim: the mesh dim of all logs.
        collective: the collective of logs that do not name theirs.
        ranks: the number of ranks of logs that do not state theirs.

    Raises:
        UnreadableRunError: a file contains no supported output.
        UsageError: no table can be used, or the logs come from different machines.
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
    """Yields the lines of the report on one log: its tables, then its problems with their line numbers."""
    yield plain(
        f"{log.name}: {log.format}, {log.rows} rows"
        + (f", {log.refused} of them refused" if log.refused else "")
    )
    for table in log.tables:
        yield plain(f"  {_table(table)}")
    problems = [*log.failures, *log.problems]
    problems += dict.fromkeys(
        Problem(row.line, measurement.fault)
        for table in log.tables
        if not table.refusal
        for row, measurement in table.measurements
        if measurement.fault
    )
    for problem in problems[:_MAX_PROBLEMS_SHOWN]:
        yield plain(f"  ! {problem}")
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        yield f"  ! and {len(problems) - _MAX_PROBLEMS_SHOWN} more"


def _table(table: LogTable) -> str:
    name = table.collective or "a table"
    if table.refusal:
        return f"{name} at line {table.line}, {len(table.rows)} rows NOT USED: {table.refusal}"
    hosts = {device.host for device in table.devices if device.host}
    on_hosts = f" on {len(hosts)} host(s)" if hosts and (len(table.devices) == table.ranks) else ""
    sizes = [row.size_bytes for row in table.rows if row.size_bytes]
    size_range = f", {min(sizes)} to {max(sizes)} bytes" if sizes else ""
    return (
        f"{name} among {table.ranks} ranks{on_hosts} ({table.ranks_from}): {len(table.rows)} rows{size_range}"
    )


def _total(results: Sequence[Result], output: Path) -> str:
    counts = Counter(result.status for result in results)
    usable = sum(result.suite == convert.SUITE and result.status == "ok" for result in results)
    refused = ", ".join(f"{counts[status]} {status}" for status in ("wrong", "failed") if counts[status])
    return plain(
        f"wrote {counts['ok']} results to {output}, {usable} of which `dtbench calibrate` can use"
        + (f"; {refused}" if refused else "")
    )
