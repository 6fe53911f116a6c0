"""Writes files atomically, without replacing files that dtbench did not write."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dtbench.errors import OutputError, plain

# Number of bytes that are read of an existing file to decide whether dtbench wrote it.
HEAD_BYTES = 4096


def check_output_path(
    path: Path, other_remedy: str = "", *, resumable: bool = False, path_option: str = "another -o"
) -> None:
    """Checks, before anything is measured, that a file or folder can be created at `path`.

    Args:
        other_remedy: what the user can do besides giving another path, for the message.
        resumable: whether `--resume` could continue an existing regular file; the message then suggests it.
        path_option: the option that names another path, for the message.

    Raises:
        OutputError: the path exists, or its parent folder does not exist or is not writable.
    """
    if _exists(path, path_option):
        kind = "" if other_remedy or path.is_file() else f" ({_kind(path)})"
        if resumable and path.is_file():
            other_remedy = "--resume to continue it"
        raise OutputError(
            f"{path} exists already{kind}: give {path_option}{other_remedy and f', or {other_remedy}'}"
        )
    if not path.parent.is_dir():
        raise OutputError(
            f"cannot make {path}: there is no folder {path.parent}; make it or give {path_option}"
        )
    try:  # a file system may forbid new files whatever the permissions say
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot make {path}: {path.parent} may not be written ({os.strerror(error.errno or 0).lower()}); "
            f"give {path_option}"
        ) from error


def _exists(path: Path, path_option: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # e.g. a name that is too long or contains a null byte
        raise OutputError(
            f"cannot make {plain(str(path))}: {getattr(error, 'strerror', None) or error}; give {path_option}"
        ) from error
    return True


def _kind(path: Path) -> str:
    """Describes an existing path that is not a regular file."""
    if path.is_dir():
        return "a folder"
    return "no regular file" if path.exists() else "a link to nothing"


def write_atomically(path: Path, text: str, is_ours: Callable[[str], bool], kind: str) -> None:
    """Writes `text` to a temporary file in the same folder and renames that to `path`.

    Args:
        is_ours: whether an existing file may be replaced, given its first 4096 bytes. Empty files always may.
        kind: description of the new file's contents, for the message.

    Raises:
        OutputError: the path cannot be written, or is a file of another kind.
    """
    target = Path(os.path.realpath(path))  # keeps a link and replaces its target
    try:
        if target.is_file():
            with target.open("rb") as file:
                head = file.read(HEAD_BYTES).decode("utf-8", "replace")
            if head and not is_ours(head):
                raise OutputError(
                    f"{path} exists and is not a {kind}: not overwritten; give -o another path, or remove it"
                )
        elif target.exists():
            raise OutputError(f"cannot write {path}: it is not a regular file; give -o the path of a file")
        replace_file(target, text.encode(), durable=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; "
            "give -o a path in a folder that exists, may be written and has space"
        ) from error


def replace_file(target: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a temporary file and renames it, so readers of `target` see either the old or the complete new data.

    Args:
        durable: whether to wait until the data are on the disk.
    """
    partial = _temporary_path(target)
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
    """Creates the folder with these files in it.

    Args:
        files: path in the folder -> contents.

    Raises:
        OutputError: it cannot be written, or has been created by another program meanwhile.
    """
    partial = _temporary_path(folder)
    try:
        partial.mkdir()
        for path, data in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            (partial / path).write_bytes(data)
        check_output_path(folder, "remove it")
        partial.replace(folder)
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}; "
            "give -o a place that has space and may be written"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _temporary_path(target: Path) -> Path:
    return target.parent / f".{target.name}.{os.getpid()}.partial"  # also works for a root, which has no name
