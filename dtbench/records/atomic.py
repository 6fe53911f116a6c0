"""Writing a file whole or not at all, and never over somebody else's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dtbench.errors import OutputError, plain

# How much of an existing file is read to tell whose it is.
HEAD_BYTES = 4096


def check_output_path(
    path: Path, remedy: str = "", *, resumable: bool = False, other: str = "another -o"
) -> None:
    """Refuses, before anything is measured, a file or folder that could not be made.

    remedy: what one may do other than give `other`. resumable: a regular file there can be gone on with.

    Raises:
        OutputError: it exists, or the folder around it does not or may not be written.
    """
    if _is_taken(path, other):
        kind = "" if remedy or path.is_file() else f" ({_kind(path)})"
        if resumable and path.is_file():
            remedy = "--resume to go on with it"
        raise OutputError(f"{path} exists already{kind}: give {other}{remedy and f', or {remedy}'}")
    if not path.parent.is_dir():
        raise OutputError(f"cannot make {path}: there is no folder {path.parent}; make it or give {other}")
    try:  # permissions do not tell of file systems in which nobody makes files
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot make {path}: {path.parent} may not be written ({os.strerror(error.errno or 0).lower()}); "
            f"give {other}"
        ) from error


def _is_taken(path: Path, other: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # such as a name that is too long, or one with a null byte
        raise OutputError(
            f"cannot make {plain(str(path))}: {getattr(error, 'strerror', None) or error}; give {other}"
        ) from error
    return True


def _kind(path: Path) -> str:
    """What stands there instead of a file."""
    if path.is_dir():
        return "a folder"
    return "no regular file" if path.exists() else "a link to nothing"


def write_atomically(path: Path, text: str, is_ours: Callable[[str], bool], kind: str) -> None:
    """Writes `text` to a temporary neighbour and renames it to `path`.

    is_ours: says, from the first 4096 bytes of a file that already stands at `path`, whether it
        may be replaced. An empty file may.
    kind: what `path` is to hold, in words, for the message.

    Raises:
        OutputError: the place cannot be written, or holds a file of another kind.
    """
    target = Path(os.path.realpath(path))  # a link stays a link: what it points to is replaced
    try:
        _refuse_foreign(target, path, is_ours, kind)
        replace_file(target, text.encode(), durable=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; "
            "give -o a path in a folder that exists, may be written and has space"
        ) from error


def replace_file(target: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a neighbour and renames it: who reads `target` finds all of `data`, or what was there before.

    durable: it is on the disk when this returns.
    """
    partial = _neighbour(target)
    try:
        with partial.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Makes the folder with these files in it.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    partial = _neighbour(folder)
    try:
        partial.mkdir()
        for name, data in files.items():
            (partial / name).write_bytes(data)
        check_output_path(folder, "remove it")
        partial.replace(folder)
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}; "
            "give -o a place that has space and may be written"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _neighbour(target: Path) -> Path:
    return target.parent / f".{target.name}.{os.getpid()}.partial"  # a root has no name to replace


def _refuse_foreign(target: Path, path: Path, is_ours: Callable[[str], bool], kind: str) -> None:
    if not target.exists():
        return
    if not target.is_file():
        raise OutputError(f"cannot write {path}: it is not a regular file; give -o the path of a file")
    with target.open("rb") as file:
        head = file.read(HEAD_BYTES).decode("utf-8", "replace")
    if head and not is_ours(head):
        raise OutputError(
            f"{path} exists and is not a {kind}: it is left as it was; give -o another path, or remove it"
        )
