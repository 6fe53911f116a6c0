"""Which reader a file needs, by what is in it."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.files.read import read_bytes
from dtbench.importers import deepspeed, ml_engineering, nccl_json, nccl_text, osu, rccl_json
from dtbench.importers.model import Log

# Logs with NCCL_DEBUG=INFO of a thousand ranks have some 100 MB.
MAX_FILE_BYTES = 512 * 2**20

STDIN = Path("-")

# JSON is tried first and alone; of the texts a log may hold several.
JSON = {"rccl-tests JSON": rccl_json, "nccl-tests JSON": nccl_json}
TEXTS = {"nccl-tests text": nccl_text, "DeepSpeed": deepspeed, "OSU": osu, "ml-engineering": ml_engineering}
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
    found = [title for title, reader in JSON.items() if reader.applies(text)][:1]
    found = found or [title for title, reader in TEXTS.items() if reader.applies(text)]
    for title in found:
        (JSON | TEXTS)[title].read(text, log)
    if not found:
        raise UnreadableRunError(f"{name} holds no table of a benchmark that is known: expected {EXPECTED}")
    log.format = " and ".join(found)
    return log
