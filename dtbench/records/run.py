"""The run file: JSON Lines, one for each result, written as soon as it is there.

The first line is the header (`kind` run), then come results, `resume` lines where a run went on, and an `end` line.
What a killed run leaves can be read: at worst its last line is cut, and that one is dropped.

Files from elsewhere are not trusted: `dtbench.records.read` checks every field for type and range.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.records.atomic import check_output_path
from dtbench.records.read import BadFieldError, abbreviate, convert, decode, read_lines
from dtbench.records.result import SCHEMA, STATUSES, Header, Result, ResultKey, Run
from dtbench.records.result_checks import result_in

# A line holds every rank's samples: 1024 ranks x 1000 samples x 22 characters are 22 MiB. Beyond
# these limits a file is not a run, and reading it would only fill the memory.
MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 2 * 2**30
_WHAT = "a dtbench run (JSON Lines)"
# A run that was killed: its ranks write their last line before they end.
_LET_OTHERS_END_S = 6.0
_CUT = ""  # in place of the kind of a last line without its end


class RunWriter:
    """Appends results to a run file; one writer per file, any thread.

    A write that fails (no space, quota, Ctrl-C) is undone back to the last whole line.
    """

    def __init__(self, path: Path, fd: int, length: int, results: Iterable[Result] = ()) -> None:
        self.path = path
        self._fd: int | None = fd
        self._length = length  # up to the end of the last whole line
        self._results = {result.key: result for result in results}
        self._writing = threading.RLock()

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, object] | Header) -> RunWriter:
        """A new file that holds `header`.

        Raises:
            OutputError: the file is there already, or cannot be made.
        """
        path = Path(path)
        fields = msgspec.to_builtins(header) if isinstance(header, Header) else header
        line = {"kind": "run", **_strict(fields), "schema": SCHEMA}
        try:
            convert(line, Header)
        except BadFieldError as error:
            raise ValueError(f"the header of a run is malformed: {error}") from error
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            check_output_path(path)
            raise OutputError(f"cannot make {path}: {_reason(error)}; give another -o") from error
        writer = cls(path, fd, 0)
        try:
            _lock(fd, path)
            writer._write(_encode(line))
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
        try:
            fd = os.open(run.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise OutputError(f"cannot append to {run.path}: {_reason(error)}; give another -o") from error
        writer = cls(run.path, fd, 0, run.results)
        try:
            _lock(fd, run.path, _LET_OTHERS_END_S)
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
        with self._writing:
            return dict(self._results)

    def append(self, result: Result) -> Result:
        """Writes one line.

        Returns the result as recorded: one that the file cannot hold (a time that is not finite,
        a line beyond the limit) is recorded as failed, with that reason.

        Raises:
            OutputError: the line cannot be written; the file ends with the line before it.
            UsageError: a param that is not a scalar, so the case has no name in the file.
        """
        result, line = _recorded(result)
        with self._writing:
            self._write(line)
            self._results[result.key] = result
        return result

    def end(self) -> None:
        """Marks the run as complete."""
        with self._writing:
            statuses = Counter(result.status for result in self._results.values())
            counts = {status: statuses[status] for status in STATUSES}
            self._write(
                _encode({"kind": "end", "finished": _now(), "failed": counts["failed"], "counts": counts})
            )

    def close(self) -> None:
        """Closes the file; without `end` before it the run counts as incomplete."""
        with self._writing:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        with self._writing:
            if self._fd is None:
                raise ValueError(f"the run file {self.path} is closed")
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except BaseException as error:  # Ctrl-C between two partial writes counts too
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._length)
                if isinstance(error, OSError):
                    raise OutputError(
                        f"cannot write to {self.path}: {_reason(error)}; make space, or give another -o"
                    ) from error
                raise
            self._length += len(line)

    def _drop_cut_line(self) -> None:
        assert self._fd is not None
        data = self.path.read_bytes()
        self._length = data.rfind(b"\n") + 1
        if self._length < len(data) and not _is_cut(data[self._length :]):  # only its newline is missing
            self._length = len(data)
            self._write(b"\n")
        os.ftruncate(self._fd, self._length)


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _encode(line: Mapping[str, object] | Result) -> bytes:
    plain = msgspec.to_builtins(line, enc_hook=float)  # numpy's numbers are no floats to msgspec
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


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
    """`result` and its line if it can be read back, else a failed one of the same case with the reason."""
    result = msgspec.structs.replace(result, reason=_text(result.reason))
    try:
        return result, _line_of(result)
    except (TypeError, ValueError, OverflowError) as error:
        reason = _text(f"the result cannot be recorded: {error}")
    failed = Result(
        result.suite,
        result.name,
        result.impl,
        result.params,
        status="failed",
        reason=reason,
        rank=result.rank,
        launch=result.launch,
    )
    try:
        return failed, _line_of(failed)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"the case {result.suite}/{result.name} [{result.impl}] cannot be named in a run file: {error}; "
            "expected names and, as params, strings, bools and finite numbers"
        ) from error


def _line_of(result: Result) -> bytes:
    line = _encode(result)
    if len(line) > MAX_LINE_BYTES:
        raise BadFieldError(f"the line has {len(line)} bytes, the limit is {MAX_LINE_BYTES}")
    read = result_in(line)
    if read is None or read.key != result.key:
        raise BadFieldError("its name and params would not be read back as they are")
    return line


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
        BadFieldError: it is damaged.
    """
    if not data.endswith(b"\n") and _is_cut(data):
        return _CUT
    if (result := result_in(data)) is not None:
        return result
    match decode(data).get("kind"):
        case "run":
            raise BadFieldError("a second header: two runs were joined in one file, split them")
        case str(kind):
            return kind
        case other:
            raise BadFieldError(f"kind is {abbreviate(other)}, expected a string")


def _first_line(path: Path, data: bytes) -> Header:
    no_run = f"{path} is not a dtbench run: its first line"
    try:
        line = decode(data)
    except ValueError as error:
        raise UnreadableRunError(f"{no_run} is no header: {error}") from error
    if line.get("kind") != "run":
        raise UnreadableRunError(f'{no_run} has kind {abbreviate(line.get("kind"))}, expected "run"')
    schema = line.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by a newer dtbench (schema {schema}, this one reads up to {SCHEMA}): "
            f"upgrade dtbench to read it"
        )
    try:
        return convert(line, Header)
    except BadFieldError as error:
        raise UnreadableRunError(f"{path}: line 1 is damaged: {error}") from error


def _is_cut(tail: bytes) -> bool:
    """Whether a last line without its newline lacks more than that."""
    try:
        decode(tail)
    except ValueError:
        return True
    return False
