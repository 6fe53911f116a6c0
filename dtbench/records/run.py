"""The run file: JSON Lines, one durable line per finished case.

The first line is the header (`kind` run), then come results, `resume` lines where a run went on,
and an `end` line. A line is written, flushed and fsynced before `RunWriter.append` returns, so
what a killed run leaves is readable: at worst its last line is cut, and the reader drops that one.

Files from elsewhere are not trusted: `dtbench.records.read` checks every field for type and range.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from dtbench.records.atomic import refuse_taken
from dtbench.records.read import BadFieldError, decode, into, read_lines, shown
from dtbench.records.result import result_in, result_of
from dtbench.suite import SCHEMA, STATUSES, Header, Result, ResultKey, Run
from dtbench.suite.errors import OutputError, UnreadableRunError, UsageError

# A line holds every rank's samples: 1024 ranks x 1000 samples x 22 characters are 22 MiB. Beyond
# these limits a file is not a run, and reading it would only fill the memory.
MAX_LINE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20  # of lines that are written at once
MAX_FILE_BYTES = 2 * 2**30
# What clocks drift by, and are corrected by, is less; a host that slept is told by it, too.
CLOCK_MOVED_S = 10.0
_WHAT = "a dtbench run (JSON Lines)"
# A run that was killed: its ranks write their last line before they end.
_LET_OTHERS_END_S = 6.0
_CUT = ""  # in place of the kind of a last line without its end


# --------------------------------------------------------------------------------- writing


class RunWriter:
    """Appends results to a run file; one writer per file, any thread.

    A write that fails (no space, quota) is undone back to the last whole line before `OutputError`
    is raised, so the file stays readable and can be resumed once there is space. Where the file itself is gone, all
    that was written to it is saved beside it first.
    """

    _if_it_fails = "what was measured before is kept, go on with --resume"

    def __init__(self, path: Path, fd: int, end_of_last_line: int, results: Iterable[Result] = ()) -> None:
        self.path = path
        self._place = path.absolute()  # what is measured may change the current folder
        self._fd: int | None = fd
        self._length = end_of_last_line
        self._results = {result.key: result for result in results}
        self._lock = threading.RLock()
        _opened.add(self)
        self._clock_ahead_s = time.time() - time.monotonic()

    @classmethod
    def create(
        cls, path: str | Path, header: Mapping[str, object] | Header, *, resumable: bool = True
    ) -> RunWriter:
        """A new file that holds `header`. resumable: whether what is missing after a failure can be added.

        Raises:
            OutputError: the file is there already, or cannot be made.
        """
        path = Path(path)
        given = msgspec.to_builtins(header) if isinstance(header, Header) else header
        line = {"kind": "run", **_strict(given), "schema": SCHEMA}
        try:
            into(line, Header)
        except BadFieldError as error:
            raise ValueError(f"the header of a run is malformed: {error}") from error
        data = _encode(line)
        fd = _named_once_written(path, data)
        if fd is not None:
            writer = cls(path, fd, len(data))
        else:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            except OSError as error:
                refuse_taken(path)
                raise OutputError(f"cannot make {path}: {_reason(error)}; give another -o") from error
            writer = cls(path, fd, 0)
        writer._if_it_fails = "nothing was written: make space, or give another -o"
        try:
            _lock(fd, path)
            if not writer._length:
                writer._write(data)
            _sync_folder(path)
            if resumable:
                writer._if_it_fails = cls._if_it_fails
        except BaseException:
            writer.close()
            path.unlink(missing_ok=True)
            raise
        return writer

    @classmethod
    def resume(cls, of: Run | str | Path, record: Mapping[str, object] | None = None) -> RunWriter:
        """Goes on with an existing file: drops a last line cut short, appends a `resume` line.

        of: what was read of the file just now, or its path. record: what to note in the `resume` line; None appends
            none (a further launch of one run).

        Raises:
            UnreadableRunError: the file is not a run that can be read.
            OutputError: it cannot be written, or another dtbench is writing to it.
        """
        run = of if isinstance(of, Run) else read_run(of)
        path = run.path
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise OutputError(f"cannot append to {path}: {_reason(error)}; give another -o") from error
        writer = cls(path, fd, 0, run.results)
        try:
            _lock(fd, path, _LET_OTHERS_END_S)
            writer._drop_cut_line()
            if record is not None:
                writer._write(_encode({"kind": "resume", "resumed": _now(), **_strict(record)}))
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def results(self) -> Mapping[ResultKey, Result]:
        """What the file holds, whatever its status: `--resume` repeats none."""
        with self._lock:
            return dict(self._results)

    def append(self, result: Result) -> Result:
        """Writes one line and waits until it is on the disk.

        Returns the result as recorded: one that the file cannot hold (a time that is not finite,
        a line beyond the limit) is recorded as failed, with that reason.

        Raises:
            OutputError: the line cannot be written; the file ends with the line before it.
            UsageError: a param that is not a scalar, so the case has no name in the file.
        """
        result, data = _recorded(result)
        with self._lock:
            self._write(data)
            self._results[result.key] = result
        return result

    def append_all(self, results: Iterable[Result]) -> None:
        """As `append` of each, but what is written is on the disk at the end alone: for what can be made again.

        Raises:
            OutputError, UsageError: as `append`; some of the lines may be written.
        """
        with self._lock:
            block = bytearray()
            for each in results:
                result, data = _recorded(each)
                block += data
                self._results[result.key] = result
                if len(block) > _BLOCK_BYTES:
                    self._write(block, sync=False)
                    block = bytearray()
            self._write(block)

    @property
    def clock_moved_s(self) -> float:
        """How far the clock of the stamps was set ahead since the file was opened; 0 below `CLOCK_MOVED_S`. No time
        is measured by it."""
        moved = time.time() - time.monotonic() - self._clock_ahead_s
        return moved if abs(moved) > CLOCK_MOVED_S else 0.0

    def end(self) -> None:
        """Marks the run as complete."""
        with self._lock:
            found = Counter(result.status for result in self._results.values())
            counts = {status: found[status] for status in STATUSES}
            line = {"kind": "end", "finished": _now(), "failed": counts["failed"], "counts": counts}
            self._write(
                _encode(line | ({"clock_moved_s": round(moved)} if (moved := self.clock_moved_s) else {}))
            )

    def close(self) -> None:
        """Closes the file; without `end` before it the run counts as incomplete."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: bytes | bytearray, *, sync: bool = True) -> None:
        with self._lock:
            fd = self._fd
            if fd is None:
                raise ValueError(f"the run file {self.path} is closed")
            if self._is_gone(fd):
                raise self._saved_beside(fd, bytes(data))
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if sync:
                    _sync(fd)
            except BaseException as error:  # Ctrl-C between two partial writes counts too
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, self._length)
                if isinstance(error, OSError):
                    raise OutputError(
                        f"cannot write to {self.path}: {_reason(error)}; {self._if_it_fails}"
                    ) from error
                raise
            self._length += len(data)

    def _is_gone(self, fd: int) -> bool:
        """Whether the path leads to this file no more: somebody removed or replaced it."""
        try:
            return not os.path.samestat(self._place.stat(), os.fstat(fd))
        except FileNotFoundError:
            return True
        except OSError:  # not known: a folder that may not be searched any more
            return False

    def _saved_beside(self, fd: int, line: bytes) -> OutputError:
        """Writes the file that is gone and `line` under another name; the error that says so."""
        gone = f"{self.path} was removed or replaced while it was written"
        at = self._place
        names = (at.with_name(f"{at.stem}-saved-{n}{at.suffix}") for n in range(1, 1000))
        try:
            other = next(name for name in names if not os.path.lexists(name))
            with other.open("xb") as file:
                file.write(os.pread(fd, self._length, 0) + line)
                file.flush()
                _sync(file.fileno())
        except (OSError, StopIteration) as error:
            return OutputError(f"{gone}, and what was measured cannot be saved beside it: {error}")
        return OutputError(
            f"{gone}: what was measured until then is in {other}; go on with --resume -o {other}"
        )

    def _drop_cut_line(self) -> None:
        assert self._fd is not None
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        tail = data[whole:]
        if tail and _parse_tail(tail) is not None:  # only its newline is missing
            os.write(self._fd, b"\n")
            whole = len(data) + 1
        else:
            os.ftruncate(self._fd, whole)
        self._length = whole


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _lock(fd: int, path: Path, patience_s: float = 0.0) -> None:
    """Two writers would interleave their lines. A file system without locks goes without.

    patience_s: how long to wait for another writer.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            raise OutputError(
                f"another dtbench is writing to {path}: wait for it or give another -o"
            ) from error
        except OSError:
            pass
        return


def _close_in_child() -> None:
    """A process that a case forks off shares the lock, and would hold it when this one has died."""
    for writer in list(_opened):
        if writer._fd is not None:
            os.close(writer._fd)
            writer._fd = None


_opened: weakref.WeakSet[RunWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def _named_once_written(path: Path, first: bytes) -> int | None:
    """A new file that is never there without its first line, whenever we are killed; None where the file system or the
    kernel lacks the means (Linux's O_TMPFILE), or something stands there."""
    with contextlib.suppress(OSError, AttributeError):
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o644)
        try:
            if os.write(fd, first) == len(first):
                _sync(fd)
                # A `src_dir_fd`, which the path makes no use of, has Python call linkat; its link follows no symlink.
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe or a file system that cannot
            raise


def _sync_folder(path: Path) -> None:
    """Makes the new name durable too (a file can be synced while its folder's entry is not)."""
    with contextlib.suppress(OSError):
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line(result: Result) -> dict[str, object]:
    times = None if result.time_s is None else msgspec.to_builtins(result.time_s)
    return {"kind": "result", **msgspec.structs.asdict(result), "time_s": times}


_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encode(line: Mapping[str, object]) -> bytes:
    return _encoder.encode(line).encode("ascii") + b"\n"


def _strict(value: Any) -> Any:
    """`value` as JSON can hold it: no NaN or infinity (null), no half of a surrogate pair."""
    if isinstance(value, Mapping):
        return {_text(str(k)): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(text: str) -> str:
    """Names of files and arguments may hold bytes that are no UTF-8; spell those out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _recorded(result: Result) -> tuple[Result, bytes]:
    """`result` and its line if what it says can be read back, else a failed one with the reason."""
    result = msgspec.structs.replace(result, reason=_text(result.reason))
    try:
        line = _encode(_line(result))
        if len(line) > MAX_LINE_BYTES:
            raise BadFieldError(f"the line has {len(line)} bytes, the limit is {MAX_LINE_BYTES}")
        if result_in(line) is None:
            result_of(decode(line))
    except (TypeError, ValueError) as error:
        reason = f"the result cannot be recorded: {_fault(result, error)}"
        failed = msgspec.structs.replace(_named(result), reason=_text(reason), rank=result.rank)
        return failed, _encode(_line(failed))
    return result, line


def _named(result: Result) -> Result:
    """A failed one of the same case, which without a name in the file could never be found again."""
    named = Result(result.suite, result.name, result.impl, result.params, "failed", launch=result.launch)
    try:
        result_of(decode(_encode(_line(named))))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the case {result.suite}/{result.name} [{result.impl}] cannot be named in a run file: "
            f"{_fault(named, error)}; expected names and, as params, strings, bools and finite numbers"
        ) from error
    return named


def _fault(result: Result, error: Exception) -> str:
    """What is wrong with a result that JSON cannot hold; the encoder itself does not name the field."""
    for name, value in _line(result).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"{name} holds {shown(value)}, which JSON cannot"
    return str(error)


# --------------------------------------------------------------------------------- reading


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """What is read of files holds no cycles; the collector would go over all of it again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collecting()
def read_run(path: str | Path, *, with_samples: bool = True) -> Run:
    """The run in a file: its header and results, in the file's order.

    with_samples: False leaves them out, checked all the same, for what needs only their statistics: they are
    most of what is held in memory.

    A last line cut short is dropped and leaves the run incomplete. Unknown kinds of lines and
    unknown fields are ignored. A result that appears twice counts as its last line says.

    Raises:
        UnreadableRunError: not a file, not a run, of a newer schema, or damaged (with the line).
    """
    path = Path(path)
    header: Header | None = None
    results: dict[ResultKey, Result] = {}
    complete = False
    for number, data in read_lines(path, _WHAT, MAX_FILE_BYTES, MAX_LINE_BYTES):
        if header is None:
            header = _first_line(path, data)
            continue
        if not data.strip():
            continue
        try:
            line = _line_in(data)
        except ValueError as error:
            raise UnreadableRunError(f"{path}: line {number} is damaged: {error}") from error
        if isinstance(line, Result):
            results[line.key] = line if with_samples else line.without_samples()
        elif line in ("end", "resume", _CUT):
            complete = line == "end"
    if header is None:
        raise UnreadableRunError(f"{path} is empty: expected {_WHAT}")
    return Run(path, header, tuple(results.values()), complete)


def read_header(path: str | Path) -> Header:
    """The header alone of a run file.

    Raises:
        UnreadableRunError: not a file, not a run, or of a newer schema.
    """
    path = Path(path)
    for _, data in read_lines(path, _WHAT, MAX_FILE_BYTES, MAX_LINE_BYTES):
        return _first_line(path, data)
    raise UnreadableRunError(f"{path} is empty: expected {_WHAT}")


def _line_in(data: bytes) -> Result | str:
    """The result in a line after the first, or the kind of the line, `_CUT` where it ends before its end.

    Raises:
        ValueError: it is damaged.
    """
    if (result := result_in(data)) is not None:
        return result
    line = decode(data) if data.endswith(b"\n") else _parse_tail(data)
    if line is None:
        return _CUT
    match line.get("kind"):
        case "result":
            return result_of(line)
        case "run":
            raise BadFieldError("a second header: two runs were joined in one file, split them")
        case str(kind):
            return kind
        case other:
            raise BadFieldError(f"kind is {shown(other)}, expected a string")


def _first_line(path: Path, data: bytes) -> Header:
    try:
        line = decode(data)
    except ValueError as error:
        raise UnreadableRunError(
            f"{path} is not a dtbench run: its first line is not a JSON object ({error})"
        ) from error
    if line.get("kind") != "run":
        raise UnreadableRunError(
            f'{path} is not a dtbench run: its first line has kind {shown(line.get("kind"))}, expected "run"'
        )
    schema = line.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by a newer dtbench (schema {schema}, this one reads up to {SCHEMA}): "
            f"upgrade dtbench to read it"
        )
    try:
        return into(line, Header)
    except BadFieldError as error:
        raise UnreadableRunError(f"{path}: line 1 is damaged: {error}") from error


def _parse_tail(data: bytes) -> dict[str, object] | None:
    """A last line without its newline: whole if it is an object all the same, else None."""
    try:
        return decode(data)
    except ValueError:
        return None
