"""Which reader a file needs, by what is in it."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dtbench.importers import deepspeed, json_logs, ml_engineering, nccl_text, osu
from dtbench.importers.model import Log
from dtbench.records.read import read_bytes
from dtbench.suite.errors import UnreadableRunError, UsageError

# Logs with NCCL_DEBUG=INFO of a thousand ranks have some 100 MB.
MAX_FILE_BYTES = 512 * 2**20

STDIN = Path("-")

# Whether a text may be of the tool, and what adds its tables to a log.
_Reader = tuple[Callable[[str], bool], Callable[[str, Log], None]]
# JSON is tried first and alone; of the texts a log may hold several.
JSON: dict[str, _Reader] = {
    "rccl-tests JSON": (json_logs.is_rccl, json_logs.read_rccl),
    "nccl-tests JSON": (json_logs.is_nccl, json_logs.read_nccl),
}
TEXTS: dict[str, _Reader] = {
    "nccl-tests text": (nccl_text.applies, nccl_text.read),
    "DeepSpeed": (deepspeed.applies, deepspeed.read),
    "OSU": (osu.applies, osu.read),
    "ml-engineering": (ml_engineering.applies, ml_engineering.read),
}
EXPECTED = "the output of nccl-tests or rccl-tests (text or JSON), DeepSpeed, OSU or ml-engineering"


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
    """Of the file, or of standard input; unpacked where gzip has packed it."""
    name = "standard input" if path == STDIN else str(path)
    data = (
        sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        if path == STDIN
        else read_bytes(path, EXPECTED, MAX_FILE_BYTES)
    )
    if data.startswith(b"\x1f\x8b"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UnreadableRunError(f"{name} is damaged: {error}; expected a whole gzip file") from error
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableRunError(f"{name} holds over {MAX_FILE_BYTES >> 20} MiB: expected {EXPECTED}")
    return data


def parse(data: bytes, name: str) -> Log:
    """The log that the bytes of a file are.

    Raises:
        UnreadableRunError: no output of a tool that is known.
    """
    text = data.decode("utf-8-sig", "replace")
    log = Log(name, hashlib.sha256(data).hexdigest())
    found = [(title, read) for title, (applies, read) in JSON.items() if applies(text)][:1]
    found = found or [(title, read) for title, (applies, read) in TEXTS.items() if applies(text)]
    for _, read in found:
        read(text, log)
    if not found:
        raise UnreadableRunError(f"{name} holds no table of a benchmark that is known: expected {EXPECTED}")
    log.format = " and ".join(title for title, _ in found)
    return log
