"""The run file: JSON Lines, one durable line per finished case.

The first line is the header (`kind` run), then come results, `resume` lines where a run went on,
and an `end` line. A line is written, flushed and fsynced before `RunWriter.append` returns, so
what a killed run leaves is readable: at worst its last line is cut, and the reader drops that one.

Files from elsewhere are not trusted: every field that dtbench uses is checked for type and range.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.model import SCHEMA, STATUSES, Param, Result, ResultKey, Run, Timing

# A line holds every rank's samples: 1024 ranks x 1000 samples x 22 characters are 22 MiB. Beyond
# these limits a file is not a run, and reading it would only fill the memory.
MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 2 * 2**30
# JSON's integers have no limit; 64-bit readers (pandas, jq) and `float` do.
_MAX_INT = 2**63 - 1
_T = TypeVar("_T")
_ORDERED = ("min", "p25", "median", "p75", "p95", "max")


class _BadField(Exception):  # noqa: N818 - becomes an UnreadableRunError once the line is known
    """A field of the wrong type or out of range; the message names it."""


# --------------------------------------------------------------------------------- writing


class RunWriter:
    """Appends results to a run file; one writer per file, any thread.

    A write that fails (no space, quota) is undone back to the last whole line before `OutputError`
    is raised, so the file stays readable and can be resumed once there is space.
    """

    def __init__(self, path: Path, fd: int, end_of_last_line: int, results: tuple[Result, ...]) -> None:
        self.path = path
        self._fd: int | None = fd
        self._length = end_of_last_line
        self._status = {r.key: r.status for r in results}
        self._lock = threading.RLock()

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, Any]) -> RunWriter:
        """A new file that holds `header`.

        Raises:
            OutputError: the file is there already, or cannot be made.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise OutputError(_why_not_created(path, error)) from error
        writer = cls(path, fd, 0, ())
        try:
            _lock(fd, path)
            line = {"kind": "run", **_strict(header), "schema": SCHEMA}
            _check_header(line)
            writer._write(line)
            _sync_folder(path)
        except BaseException as error:
            writer.close()
            path.unlink(missing_ok=True)
            if isinstance(error, _BadField):
                raise ValueError(f"the header of a run is malformed: {error}") from error
            raise
        return writer

    @classmethod
    def resume(cls, path: str | Path, record: Mapping[str, Any] | None = None) -> RunWriter:
        """Goes on with an existing file: drops a last line cut short, appends a `resume` line.

        record: what to note in the `resume` line; None appends none (a further launch of one run).

        Raises:
            UnreadableRunError: the file is not a run that can be read.
            OutputError: it cannot be written, or another dtbench is writing to it.
        """
        path = Path(path)
        run = read_run(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise OutputError(f"cannot append to {path}: {_reason(error)}; give another -o") from error
        writer = cls(path, fd, 0, run.results)
        try:
            _lock(fd, path)
            writer._drop_cut_line()
            if record is not None:
                writer._write({"kind": "resume", "resumed": _now(), **_strict(record)})
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def done(self) -> frozenset[ResultKey]:
        """The results that the file holds, whatever their status: `--resume` repeats none."""
        with self._lock:
            return frozenset(self._status)

    def append(self, result: Result) -> Result:
        """Writes one line and waits until it is on the disk.

        Returns the result as recorded: one that the file cannot hold (a time that is not finite,
        a line beyond the limit) is recorded as failed, with that reason.

        Raises:
            OutputError: the line cannot be written; the file ends with the line before it.
            UsageError: a param that is not a scalar, so the case has no name in the file.
        """
        result = _representable(result)
        with self._lock:
            self._write(result.to_json())
            self._status[result.key] = result.status
        return result

    def end(self) -> None:
        """Marks the run as complete."""
        with self._lock:
            counts = {s: sum(status == s for status in self._status.values()) for s in STATUSES}
            self._write({"kind": "end", "finished": _now(), "failed": counts["failed"], "counts": counts})

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

    def _write(self, line: Mapping[str, Any]) -> None:
        data = _encode(line)
        with self._lock:
            fd = self._fd
            if fd is None:
                raise ValueError(f"the run file {self.path} is closed")
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                _sync(fd)
            except BaseException as error:  # Ctrl-C between two partial writes counts too
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, self._length)
                if isinstance(error, OSError):
                    raise OutputError(
                        f"cannot write to {self.path}: {_reason(error)}; "
                        f"what was measured before is kept, go on with --resume"
                    ) from error
                raise
            self._length += len(data)

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


def _why_not_created(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError):
        if path.is_dir():
            return f"{path} is a folder: give the path of a file to -o"
        return f"{path} exists already: give another -o, or --resume to go on with it"
    if isinstance(error, FileNotFoundError):
        return f"the folder of {path} does not exist: make it (mkdir -p {path.parent}) or give another -o"
    return f"cannot make {path}: {_reason(error)}; give another -o"


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _lock(fd: int, path: Path) -> None:
    """Two writers would interleave their lines. A file system without locks goes without."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(f"another dtbench is writing to {path}: wait for it or give another -o") from error
    except OSError:
        pass


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


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


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


def _representable(result: Result) -> Result:
    """`result` if what it says can be read back, else a failed one with the reason."""
    for name, value in result.params.items():
        if not isinstance(name, str) or not _is_scalar(value):
            raise UsageError(
                f"the case {result.suite}/{result.name} has the param {name}={value!r}: expected a string, "
                f"a bool or a finite number, so that the case can be found again in the file"
            )
    reason = _text(result.reason)
    if reason != result.reason:
        result = dataclasses.replace(result, reason=reason)
    try:
        line = _encode(result.to_json())
        if len(line) > MAX_LINE_BYTES:
            raise _BadField(f"the line has {len(line)} bytes, the limit is {MAX_LINE_BYTES}")
        _result_of(_loads(line))
    except (_BadField, TypeError, ValueError) as error:
        return Result(
            result.suite,
            result.name,
            result.impl,
            result.params,
            "failed",
            reason=f"the result cannot be recorded: {error}",
            rank=result.rank,
            launch=result.launch,
        )
    return result


# --------------------------------------------------------------------------------- reading


def read_run(path: str | Path) -> Run:
    """The run in a file: its header and results, in the file's order.

    A last line cut short is dropped and leaves the run incomplete. Unknown kinds of lines and
    unknown fields are ignored. A result that appears twice counts as its last line says.

    Raises:
        UnreadableRunError: not a file, not a run, of a newer schema, or damaged (with the line).
    """
    path = Path(path)
    header: Mapping[str, Any] | None = None
    results: dict[ResultKey, Result] = {}
    complete = False
    for number, data in _lines(path):
        cut = not data.endswith(b"\n")
        if header is None:
            header = _first_line(path, data)
            continue
        if not data.strip():
            continue
        try:
            line = _parse_tail(data) if cut else _loads(data)
            if line is None:
                complete = False
                break
            match line.get("kind"):
                case "result":
                    result = _result_of(line)
                    results[result.key] = result
                case "end":
                    complete = True
                case "resume":
                    complete = False
                case "run":
                    raise _BadField("a second header: two runs were joined in one file, split them")
                case str():
                    pass
                case other:
                    raise _BadField(f"kind is {_shown(other)}, expected a string")
        except (_BadField, ValueError) as error:
            raise UnreadableRunError(f"{path}: line {number} is damaged: {error}") from error
    if header is None:
        raise UnreadableRunError(f"{path} is empty: expected a dtbench run (JSON Lines)")
    return Run(path, header, tuple(results.values()), complete)


def read_header(path: str | Path) -> Mapping[str, Any]:
    """The first line of a run file, checked; fields that are missing have empty values.

    Raises:
        UnreadableRunError: as `read_run`, for the first line.
    """
    path = Path(path)
    for _, data in _lines(path):
        return _first_line(path, data)
    raise UnreadableRunError(f"{path} is empty: expected a dtbench run (JSON Lines)")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        if path.is_dir():
            raise UnreadableRunError(f"{path} is a folder: expected the file of a dtbench run (.jsonl)")
        if path.exists() and not path.is_file():  # a pipe would be waited on for ever
            raise UnreadableRunError(f"{path} is not a regular file: expected the file of a dtbench run")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise UnreadableRunError(f"{path} has {size} bytes: a run has at most {MAX_FILE_BYTES}")
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    raise UnreadableRunError(
                        f"{path}: line {number} is longer than {MAX_LINE_BYTES} bytes: not a dtbench run"
                    )
                yield number, data
    except FileNotFoundError as error:
        raise UnreadableRunError(f"there is no file {path}: expected a dtbench run (JSON Lines)") from error
    except OSError as error:
        raise UnreadableRunError(f"cannot read {path}: {_reason(error)}") from error
    except ValueError as error:  # a null byte in the name
        raise UnreadableRunError(f"{str(path)!r} is not the path of a file: {error}") from error


def _first_line(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        line = _loads(data)
    except (_BadField, ValueError) as error:
        raise UnreadableRunError(
            f"{path} is not a dtbench run: its first line is not a JSON object ({error})"
        ) from error
    if line.get("kind") != "run":
        raise UnreadableRunError(
            f'{path} is not a dtbench run: its first line has kind {_shown(line.get("kind"))}, expected "run"'
        )
    schema = line.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by a newer dtbench (schema {schema}, this one reads up to {SCHEMA}): "
            f"upgrade dtbench to read it"
        )
    try:
        return _check_header(line)
    except _BadField as error:
        raise UnreadableRunError(f"{path}: line 1 is damaged: {error}") from error


def _parse_tail(data: bytes) -> dict[str, Any] | None:
    """A last line without its newline: whole if it is an object all the same, else None."""
    try:
        return _loads(data)
    except (_BadField, ValueError):
        return None


def _loads(data: bytes) -> dict[str, Any]:
    """One line as strict JSON: an object, no key twice, no NaN, no number beyond 64 bits."""
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
        if "\\u" in text:  # the escape of half a surrogate pair is JSON, but no text one can print
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise _BadField(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except UnicodeError as error:
        raise _BadField(f"not UTF-8 ({error})") from error
    except RecursionError as error:
        raise _BadField("nested too deeply") from error
    if not isinstance(value, dict):
        raise _BadField(f"{_shown(value)}, expected a JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _BadField(f"the key {_shown(twice)} appears twice in one object")
    return made


def _no_constant(name: str) -> None:
    raise _BadField(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadField(f"the number {text[:40]} is out of range")
    return value


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _MAX_INT:
        raise _BadField(f"the integer {text[:40]} is out of range, expected at most 64 bits")
    return int(text)


# ---------------------------------------------------------------------------- checking fields


def _check_header(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The header with every field of the schema: missing ones are empty, present ones checked."""
    checks: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
        "started": ("", _str),
        "argv": ([], _list_of(_str)),
        "versions": ({}, _dict_of(_optional(_str))),
        "git": ({}, _dict_of(_any)),
        "machine": ({}, _machine),
        "ranks": ([], _list_of(_rank)),
        "mesh": ({"dim_names": [], "shape": []}, _mesh),
        "env": ({}, _dict_of(_str)),
        "plan": ({}, _dict_of(_any)),
        "suites": ([], _list_of(_str)),
        "launches": (1, _count(1)),
    }
    header = dict(line)
    header["schema"] = _count(1)("schema", line.get("schema"))
    header["run_id"] = _name("run_id", line.get("run_id"))
    for name, (empty, check) in checks.items():
        header[name] = check(name, line.get(name, empty))
    header["machine"] = {"cpu": {}, "gpus": [], **header["machine"]}
    return header


def _machine(name: str, value: Any) -> Any:
    _dict_of(_any)(name, value)
    _dict_of(_any)(f"{name}.cpu", value.get("cpu", {}))
    _list_of(_dict_of(_any))(f"{name}.gpus", value.get("gpus", []))
    return value


def _rank(name: str, value: Any) -> Any:
    _dict_of(_any)(name, value)
    _count(0)(f"{name}.rank", value.get("rank"))
    _optional(_count(0))(f"{name}.local_rank", value.get("local_rank"))
    for key in ("host", "device"):
        _optional(_str)(f"{name}.{key}", value.get(key))
    return value


def _mesh(name: str, value: Any) -> Any:
    _dict_of(_any)(name, value)
    names = _list_of(_str)(f"{name}.dim_names", value.get("dim_names"))
    shape = _list_of(_count(1))(f"{name}.shape", value.get("shape"))
    if len(names) != len(shape):
        raise _BadField(f"{name} has {len(names)} dim_names for {len(shape)} dims")
    return value


def _result_of(line: Mapping[str, Any]) -> Result:
    status = line.get("status")
    if status not in STATUSES:
        raise _BadField(f"status is {_shown(status)}, expected one of {', '.join(STATUSES)}")
    get = line.get
    times = _list_of(_amount)
    return Result(
        suite=_name("suite", get("suite")),
        name=_name("name", get("name")),
        impl=_name("impl", get("impl")),
        params=_dict_of(_scalar)("params", get("params", {})),
        status=status,
        reason=_str("reason", get("reason", "")),
        rank=_optional(_count(0))("rank", get("rank")),
        size_bytes=_optional(_count(0))("size_bytes", get("size_bytes")),
        time_s=_optional(_timing)("time_s", get("time_s")),
        samples_s=tuple(times("samples_s", get("samples_s", []))),
        rank_samples_s={
            _rank_number(k): tuple(v)
            for k, v in _dict_of(times)("rank_samples_s", get("rank_samples_s", {})).items()
        },
        algbw_Bps=_optional(_amount)("algbw_Bps", get("algbw_Bps")),
        busbw_Bps=_optional(_amount)("busbw_Bps", get("busbw_Bps")),
        counters=_dict_of(_number)("counters", get("counters", {})),
        launch=_count(0)("launch", get("launch", 0)),
    )


def _timing(name: str, value: Any) -> Timing:
    _dict_of(_any)(name, value)
    figures = {k: _amount(f"{name}.{k}", value.get(k)) for k in (*_ORDERED, "mean")}
    ordered = [figures[k] for k in _ORDERED]
    if ordered != sorted(ordered):
        raise _BadField(f"{name} is not in order: expected {' <= '.join(_ORDERED)}")
    # The mean of equal numbers may round to just beside them.
    if not figures["min"] * (1 - 1e-9) <= figures["mean"] <= figures["max"] * (1 + 1e-9):
        raise _BadField(f"{name}.mean is {figures['mean']!r}, expected it between min and max")
    return Timing(**figures, n=_count(1)(f"{name}.n", value.get("n")))


def _rank_number(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise _BadField(f"rank_samples_s has the key {_shown(text)}, expected a rank")
    return text


def _any(name: str, value: Any) -> Any:
    return value


def _str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _BadField(f"{name} is {_shown(value)}, expected a string")
    return value


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _BadField(f"{name} is {_shown(value)}, expected a name")
    return value


def _is_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= _MAX_INT)


def _scalar(name: str, value: Any) -> Param:
    if not _is_scalar(value):
        raise _BadField(f"{name} is {_shown(value)}, expected a string, a number or a bool")
    scalar: Param = value
    return scalar


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _BadField(f"{name} is {_shown(value)}, expected a finite number")
    return value


def _amount(name: str, value: Any) -> float:
    amount = float(_number(name, value))
    if amount < 0:
        raise _BadField(f"{name} is {amount!r}, expected at least 0")
    return amount


def _count(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _BadField(f"{name} is {_shown(value)}, expected an integer of at least {least}")
        return value

    return check


def _optional(check: Callable[[str, Any], _T]) -> Callable[[str, Any], _T | None]:
    return lambda name, value: None if value is None else check(name, value)


def _list_of(check: Callable[[str, Any], _T]) -> Callable[[str, Any], list[_T]]:
    def check_list(name: str, value: Any) -> list[_T]:
        if not isinstance(value, list):
            raise _BadField(f"{name} is {_shown(value)}, expected a list")
        return [check(f"{name}[{i}]", v) for i, v in enumerate(value)]

    return check_list


def _dict_of(check: Callable[[str, Any], _T]) -> Callable[[str, Any], dict[str, _T]]:
    def check_dict(name: str, value: Any) -> dict[str, _T]:
        if not isinstance(value, Mapping):
            raise _BadField(f"{name} is {_shown(value)}, expected an object")
        return {k: check(f"{name}.{k}", v) for k, v in value.items()}

    return check_dict


def _shown(value: Any) -> str:
    """A value from a foreign file, short and without characters that would move a terminal's cursor."""
    if value is None:
        return "missing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
