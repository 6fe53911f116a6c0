"""Which reader a file needs, by what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.files.read import read_bytes
from dtbench.importers import deepspeed, ml_engineering, nccl_json, nccl_text, osu, rccl_json
from dtbench.importers.model import Log

# Logs with NCCL_DEBUG=INFO of a thousand ranks have some 100 MB.
MAX_FILE_BYTES = 512 * 2**20

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
        log = parse(read_bytes(path, EXPECTED, MAX_FILE_BYTES), path.name)
        for other in logs:
            if other.sha256 == log.sha256:
                raise UsageError(f"{path} and {other.name} are the same log: give it once")
        logs.append(log)
    return logs


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
