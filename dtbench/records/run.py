"""Reads and writes run files, which are JSON Lines.

The first line is the header (`kind` run). A line per result follows, written as soon as the result is available. A
`resume` line marks where a run was continued, and an `end` line completes the run. The file of a killed run is valid:
at worst, its last line is incomplete and is dropped.

Files are not trusted. Type and range of every field are checked, and results are checked for consistency.
"""

import contextlib
import fcntl
import gc
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.records.atomic import check_output_path
from dtbench.records.read import BadFieldError, abbreviate, convert, decode, field_fault, read_lines
from dtbench.records.result import SCHEMA, STATUSES, Header, Result, ResultKey, Run
from dtbench.records.timing import SHARES, Timing, timing_quantiles

# A line contains the samples of all ranks: 1024 ranks x 1000 samples x 22 characters are 22 MiB. Files beyond these
# limits are refused before they fill the memory.
MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 2 * 2**30
_EXPECTED = "a dtbench run (JSON Lines)"
# The ranks of a killed run may still be writing their last line when the run is resumed.
_RESUME_PATIENCE_S = 6.0
_INCOMPLETE = ""  # replaces the kind of an incomplete last line

_USUAL_RANKS = frozenset(map(str, range(4096)))
_MAX_RANK_DIGITS = 18
# Tolerances for figures that other programs wrote with fewer digits.
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE_S = 1e-6, 1e-15
_decoder = msgspec.json.Decoder(Result)


class RunWriter:
    """Appends results to a run file. A file has one writer, which any thread may use.

    A write that fails (no space, quota, Ctrl-C) is undone, so that the file ends with a complete line.
    """

    def __init__(self, path: Path, fd: int, length: int, results: Iterable[Result] = ()) -> None:
        self.path = path
        self._fd: int | None = fd
        self._length = length  # bytes up to the end of the last complete line
        self._results = {result.key: result for result in results}
        self._writing = threading.RLock()

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, object] | Header) -> Self:
        """Creates a file that contains `header`.

        Raises:
            OutputError: the file exists, or cannot be created.
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
    def resume(cls, run_or_path: Run | str | Path, record: Mapping[str, object] | None = None) -> Self:
        """Continues an existing file: drops an incomplete last line and appends a `resume` line.

        Args:
            run_or_path: the file's contents, if they have just been read, or its path.
            record: further fields of the `resume` line; None writes no `resume` line,
                for a further launch of the same run.

        Raises:
            UnreadableRunError: the file is not a readable run.
            OutputError: the file cannot be written, or another dtbench is writing to it.
        """
        run = run_or_path if isinstance(run_or_path, Run) else read_run(run_or_path)
        try:
            fd = os.open(run.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise OutputError(f"cannot append to {run.path}: {_reason(error)}; give another -o") from error
        writer = cls(run.path, fd, 0, run.results)
        try:
            _lock(fd, run.path, _RESUME_PATIENCE_S)
            writer._drop_incomplete_line()
            if record is not None:
                writer._write(_encode({"kind": "resume", "resumed": _now(), **_strict(record)}))
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def results(self) -> Mapping[ResultKey, Result]:
        """The results in the file, of any status; `--resume` does not measure them again."""
        with self._writing:
            return dict(self._results)

    def append(self, result: Result) -> Result:
        """Writes the result as one line and returns it as recorded.

        A result that cannot be represented (a time that is not finite, a line that is too long) is recorded as failed.

        Raises:
            OutputError: the line cannot be written; the file is unchanged.
            UsageError: a param is not a scalar, so that the file cannot identify the case.
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
            self._write(
                _encode(
                    {
                        "kind": "end",
                        "finished": _now(),
                        "failed": statuses["failed"],
                        "counts": {status: statuses[status] for status in STATUSES},
                    }
                )
            )

    def close(self) -> None:
        """Closes the file. Without a preceding `end`, the run is incomplete."""
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
                unwritten = memoryview(line)
                while unwritten:
                    unwritten = unwritten[os.write(self._fd, unwritten) :]
            except BaseException as error:  # including Ctrl-C between two partial writes
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._length)
                if isinstance(error, OSError):
                    raise OutputError(
                        f"cannot write to {self.path}: {_reason(error)}; make space, or give another -o"
                    ) from error
                raise
            self._length += len(line)

    def _drop_incomplete_line(self) -> None:
        assert self._fd is not None
        data = self.path.read_bytes()
        self._length = data.rfind(b"\n") + 1
        # Only the newline of the last line is missing.
        if self._length < len(data) and not _is_incomplete(data[self._length :]):
            self._length = len(data)
            self._write(b"\n")
        os.ftruncate(self._fd, self._length)


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _lock(fd: int, path: Path, patience_s: float = 0.0) -> None:
    """Locks the file, since two writers would interleave their lines. Does nothing on file systems without locks.

    Args:
        patience_s: seconds to wait for another writer.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
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
    plain = msgspec.to_builtins(line, enc_hook=float)  # msgspec does not accept numpy's numbers
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _strict(value: Any) -> Any:
    """Converts a value to one that JSON can represent: NaN and infinity become null, lone surrogates are escaped."""
    if isinstance(value, Mapping):
        return {_text(str(key)): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(text: str) -> str:
    """Escapes bytes that are not UTF-8, which names of files and arguments may contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _recorded(result: Result) -> tuple[Result, bytes]:
    """Returns the result and its line. If the line could not be read back, returns a failed result with the reason."""
    result = msgspec.structs.replace(result, reason=_text(result.reason))
    try:
        return result, _encode_checked(result)
    except (TypeError, ValueError, OverflowError) as error:
        failed = Result(
            result.suite,
            result.name,
            result.impl,
            result.params,
            status="failed",
            reason=_text(f"the result cannot be recorded: {error}"),
            rank=result.rank,
            launch=result.launch,
        )
    try:
        return failed, _encode_checked(failed)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"the case {result.suite}/{result.name} [{result.impl}] cannot be identified in a run file: {error}; "
            "expected names and, as params, strings, bools and finite numbers"
        ) from error


def _encode_checked(result: Result) -> bytes:
    line = _encode(result)
    if len(line) > MAX_LINE_BYTES:
        raise BadFieldError(f"the line has {len(line)} bytes, the limit is {MAX_LINE_BYTES}")
    read = _decode_result(line)
    if read is None or read.key != result.key:
        raise BadFieldError("its name and params would change when read back")
    return line


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Disables the garbage collector within the block: while samples are taken, or while large files are read.

    While a file is read, the collector would repeatedly scan new objects that contain no cycles.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collecting()
def read_run(path: str | Path, *, with_samples: bool = True) -> Run:
    """Reads a run: its header and its results, in the file's order.

    An incomplete last line is dropped and leaves the run incomplete. Unknown kinds of lines and unknown fields are
    ignored. The last line of a result replaces earlier ones.

    Args:
        with_samples: False checks the samples but drops them, which saves most of the memory.

    Raises:
        UnreadableRunError: the path is not a file, or the file is not a run, is of a newer schema, or is damaged.
    """
    path = Path(path)
    lines = read_lines(path, _EXPECTED, MAX_FILE_BYTES, MAX_LINE_BYTES)
    header = _read_first_line(path, lines)
    results: dict[ResultKey, Result] = {}
    complete = False
    for number, data in lines:
        if not data.strip():
            continue
        try:
            line = _decode_line(data)
        except ValueError as error:
            raise UnreadableRunError(f"{path}: line {number} is damaged: {error}") from error
        if isinstance(line, Result):
            results[line.key] = line if with_samples else line.without_samples()
        elif line in ("end", "resume", _INCOMPLETE):
            complete = line == "end"
    return Run(path, header, tuple(results.values()), complete)


def read_header(path: str | Path) -> Header:
    """Reads only the header of a run file.

    Raises:
        UnreadableRunError: the path is not a file, or the file is not a run or is of a newer schema.
    """
    return _read_first_line(Path(path), read_lines(Path(path), _EXPECTED, MAX_FILE_BYTES, MAX_LINE_BYTES))


def _decode_line(data: bytes) -> Result | str:
    """Returns the result in a line after the first, the kind of another line, or `_INCOMPLETE`.

    Raises:
        BadFieldError: the line is damaged.
    """
    if not data.endswith(b"\n") and _is_incomplete(data):
        return _INCOMPLETE
    if (result := _decode_result(data)) is not None:
        return result
    match decode(data).get("kind"):
        case "run":
            raise BadFieldError("a second header: two runs were joined in one file; split them")
        case str(kind):
            return kind
        case kind:
            raise BadFieldError(f"kind is {abbreviate(kind)}, expected a string")


def _read_first_line(path: Path, lines: Iterator[tuple[int, bytes]]) -> Header:
    _, data = next(lines, (0, b""))
    if not data:
        raise UnreadableRunError(f"{path} is empty: expected {_EXPECTED}")
    no_run = f"{path} is not a dtbench run: its first line"
    try:
        line = decode(data)
    except ValueError as error:
        raise UnreadableRunError(f"{no_run} is not a header: {error}") from error
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


def _is_incomplete(tail: bytes) -> bool:
    """Whether a last line lacks more than its newline."""
    try:
        decode(tail)
    except ValueError:
        return True
    return False


def _decode_result(data: bytes) -> Result | None:
    """Returns the result in a line of a run file; None if the line is of another kind. Ignores unknown fields.

    Raises:
        BadFieldError: the line is not a JSON object; a field is missing, has the wrong type or is out of range; or the
            figures contradict each other.
    """
    try:
        result = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if decode(data).get("kind") != "result" or not isinstance(error, msgspec.ValidationError):
            return None
        raise BadFieldError(field_fault(error)) from error
    _check_ranks("rank_samples_s", result.rank_samples_s)
    _check_ranks("rank_arrivals_s", result.rank_arrivals_s)
    if result.time_s is not None:
        _check_order(result.time_s)
        _check_samples(result.time_s, result.samples_s)
    _check_bandwidths(result)
    return result


def _check_ranks(name: str, by_rank: Mapping[str, object]) -> None:
    """Checks that the keys are ranks. A regular expression in the type would slow down all checks."""
    for rank in () if _USUAL_RANKS.issuperset(by_rank) else by_rank:
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= _MAX_RANK_DIGITS):
            raise BadFieldError(f"{name} has the key {abbreviate(rank)}, expected a rank")


def _check_order(timing: Timing) -> None:
    if not timing.min <= timing.p25 <= timing.median <= timing.p75 <= timing.p95 <= timing.max:
        raise BadFieldError(f"time_s is not in order: expected {' <= '.join(SHARES)}")
    # Rounding may put the mean of equal numbers just outside them.
    if not timing.min * (1 - 1e-9) <= timing.mean <= timing.max * (1 + 1e-9):
        raise BadFieldError(f"time_s.mean is {timing.mean!r}, expected it between min and max")


def _check_samples(timing: Timing, samples_s: Sequence[float]) -> None:
    """Checks the statistics against the samples, if the file contains them."""
    if not samples_s:
        return
    if len(samples_s) != timing.n:
        raise BadFieldError(f"time_s.n is {timing.n}, but there are {len(samples_s)} samples_s")
    got, expected = [getattr(timing, name) for name in SHARES], timing_quantiles(samples_s)
    for name, got_s, expected_s in zip(SHARES, got, expected, strict=True) if got != expected else ():
        _expect(f"time_s.{name}", got_s, expected_s, "by samples_s")
    _expect("time_s.mean", timing.mean, math.fsum(samples_s) / timing.n, "by samples_s")


def _check_bandwidths(result: Result) -> None:
    """Checks that algbw is size / time, and that busbw is at most 2 x algbw, the limit of a large all_reduce."""
    algbw, busbw = result.algbw_Bps, result.busbw_Bps
    if algbw is not None and result.size_bytes is not None and result.estimate_s:
        _expect("algbw_Bps", algbw, result.size_bytes / result.estimate_s, "by size_bytes and time_s")
    if busbw is not None and (algbw is None or busbw > 2 * algbw):
        raise BadFieldError(f"busbw_Bps is {busbw!r}, expected at most 2 x algbw_Bps, which is {algbw!r}")


def _expect(name: str, got: float, expected: float, source: str) -> None:
    if got != expected and not math.isclose(
        got, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE_S
    ):
        raise BadFieldError(f"{name} is {got!r}, expected {expected!r} {source}")
