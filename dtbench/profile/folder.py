"""The folder that a profile is written into: whole, or not at all."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtbench.bench.progress import say
from dtbench.errors import OutputError
from dtbench.files.atomic import refuse_taken


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Makes the folder with these texts in it; a name that ends in .gz is compressed.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        for name, text in files.items():
            data = text.encode("utf-8", "replace")
            if name.endswith(".gz"):
                data = gzip.compress(data, compresslevel=6, mtime=0)
            (partial / name).write_bytes(data)
        refuse_taken(folder, "remove it")
        partial.replace(folder)
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}; give -o a place that has space and may be written"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_and_tell(folder: Path, lines: Sequence[str], files: Mapping[str, str]) -> None:
    """Prints the lines and writes the folder."""
    for line in lines:
        say(line)
    write_folder(folder, files)
    say(f"{folder}: {', '.join(files)}; open the trace at https://ui.perfetto.dev or chrome://tracing")


def as_json(value: Any) -> str:
    """Strict JSON, without spaces: traces are large."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
