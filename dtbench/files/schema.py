"""The lines of a run file: strict JSON, and a check of every field's type and range.

A run file may come from anywhere, and what reads it computes with its figures, so nothing passes
that the writer could not have written. Messages name the field and show its value escaped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dtbench.model import STATUSES, Param, Result, Timing

_T = TypeVar("_T")
# JSON's integers have no limit; 64-bit readers (pandas, jq) and `float` do.
_MAX_INT = 2**63 - 1
# Params that a suite got later, and what its results meant before: old files have the keys of new ones.
_LATER_PARAMS: Mapping[str, Mapping[str, Param]] = {
    "redistribute": {"groups": "together", "mode": "isolated"}
}
_ORDERED = ("min", "p25", "median", "p75", "p95", "max")


class BadFieldError(ValueError):
    """A line that is no strict JSON, or a field of the wrong type or range; the message names it."""


def loads(data: bytes) -> dict[str, Any]:
    """One line as strict JSON: an object, no key twice, no NaN, no number beyond 64 bits.

    Raises:
        BadFieldError: anything else.
    """
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
        raise BadFieldError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except UnicodeError as error:
        raise BadFieldError(f"not UTF-8 ({error})") from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error
    if not isinstance(value, dict):
        raise BadFieldError(f"{shown(value)}, expected a JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise BadFieldError(f"the key {shown(twice)} appears twice in one object")
    return made


def _no_constant(name: str) -> None:
    raise BadFieldError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadFieldError(f"the number {text[:40]} is out of range")
    return value


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _MAX_INT:
        raise BadFieldError(f"the integer {text[:40]} is out of range, expected at most 64 bits")
    return int(text)


# ---------------------------------------------------------------------------- checking fields


def check_header(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The header with every field of the schema: missing ones are empty, present ones checked.

    Raises:
        BadFieldError: no run_id, or a field of the wrong type.
    """
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
    for key in ("host", "boot_id", "device", "pci_bus_id", "interface"):
        _optional(_str)(f"{name}.{key}", value.get(key))
    _optional(_list_of(_count(0)))(f"{name}.numa_nodes", value.get("numa_nodes"))
    _optional(_count(0))(f"{name}.device_numa_node", value.get("device_numa_node"))
    nvlink = _optional(_dict_of(_any))(f"{name}.nvlink", value.get("nvlink"))
    if nvlink is not None:
        _dict_of(_count(1))(f"{name}.nvlink.neighbours", nvlink.get("neighbours"))
        _count(0)(f"{name}.nvlink.switch_links", nvlink.get("switch_links"))
    return value


def _mesh(name: str, value: Any) -> Any:
    _dict_of(_any)(name, value)
    names = _list_of(_str)(f"{name}.dim_names", value.get("dim_names"))
    shape = _list_of(_count(1))(f"{name}.shape", value.get("shape"))
    if len(names) != len(shape):
        raise BadFieldError(f"{name} has {len(names)} dim_names for {len(shape)} dims")
    return value


def result_of(line: Mapping[str, Any]) -> Result:
    """The result that a line holds; unknown fields are ignored.

    Raises:
        BadFieldError: a field that is missing, of the wrong type or out of range.
    """
    status = line.get("status")
    if status not in STATUSES:
        raise BadFieldError(f"status is {shown(status)}, expected one of {', '.join(STATUSES)}")
    get = line.get
    times = _list_of(_amount)
    suite = _name("suite", get("suite"))
    params = _dict_of(_scalar)("params", get("params", {}))
    later = _LATER_PARAMS.get(suite, {})
    # Only `dispatch` timed the host in files that do not say the clock.
    clock = get("clock", "host" if suite == "dispatch" else "device")
    if clock not in ("host", "device"):
        raise BadFieldError(f"clock is {shown(clock)}, expected host or device")
    result = Result(
        suite=suite,
        name=_name("name", get("name")),
        impl=_name("impl", get("impl")),
        params=params | {name: value for name, value in later.items() if name not in params},
        status=status,
        reason=_str("reason", get("reason", "")),
        rank=_optional(_count(0))("rank", get("rank")),
        size_bytes=_optional(_count(0))("size_bytes", get("size_bytes")),
        time_s=_optional(_timing)("time_s", get("time_s")),
        samples_s=tuple(times("samples_s", get("samples_s", []))),
        rank_samples_s=_by_rank("rank_samples_s", get("rank_samples_s", {})),
        rank_arrivals_s=_by_rank("rank_arrivals_s", get("rank_arrivals_s", {})),
        algbw_Bps=_optional(_amount)("algbw_Bps", get("algbw_Bps")),
        busbw_Bps=_optional(_amount)("busbw_Bps", get("busbw_Bps")),
        counters=_dict_of(_number)("counters", get("counters", {})),
        launch=_count(0)("launch", get("launch", 0)),
        clock=clock,
    )
    if "clock" in line or result.time_s is None or not result.estimate_s:
        return result
    # Files that do not say the clock have the bandwidths of the median.
    faster = result.time_s.median / result.estimate_s
    return dataclasses.replace(
        result,
        algbw_Bps=result.algbw_Bps and result.algbw_Bps * faster,
        busbw_Bps=result.busbw_Bps and result.busbw_Bps * faster,
    )


def _timing(name: str, value: Any) -> Timing:
    _dict_of(_any)(name, value)
    figures = {k: _amount(f"{name}.{k}", value.get(k)) for k in (*_ORDERED, "mean")}
    ordered = [figures[k] for k in _ORDERED]
    if ordered != sorted(ordered):
        raise BadFieldError(f"{name} is not in order: expected {' <= '.join(_ORDERED)}")
    # The mean of equal numbers may round to just beside them.
    if not figures["min"] * (1 - 1e-9) <= figures["mean"] <= figures["max"] * (1 + 1e-9):
        raise BadFieldError(f"{name}.mean is {figures['mean']!r}, expected it between min and max")
    return Timing(**figures, n=_count(1)(f"{name}.n", value.get("n")))


def _by_rank(name: str, value: Any) -> dict[str, tuple[float, ...]]:
    times = _dict_of(_list_of(_amount))(name, value)
    for text in times:
        if not (text.isascii() and text.isdigit()):
            raise BadFieldError(f"{name} has the key {shown(text)}, expected a rank")
    return {rank: tuple(own) for rank, own in times.items()}


def _any(name: str, value: Any) -> Any:
    return value


def _str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadFieldError(f"{name} is {shown(value)}, expected a string")
    return value


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadFieldError(f"{name} is {shown(value)}, expected a name")
    return value


def _is_scalar(value: Any) -> bool:
    """Whether a param may have this value: a string, a bool, a finite number of at most 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= _MAX_INT)


def _scalar(name: str, value: Any) -> Param:
    if not _is_scalar(value):
        raise BadFieldError(f"{name} is {shown(value)}, expected a string, a number or a bool")
    scalar: Param = value
    return scalar


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadFieldError(f"{name} is {shown(value)}, expected a finite number")
    return value


def _amount(name: str, value: Any) -> float:
    amount = float(_number(name, value))
    if amount < 0:
        raise BadFieldError(f"{name} is {amount!r}, expected at least 0")
    return amount


def _count(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadFieldError(f"{name} is {shown(value)}, expected an integer of at least {least}")
        return value

    return check


def _optional(check: Callable[[str, Any], _T]) -> Callable[[str, Any], _T | None]:
    return lambda name, value: None if value is None else check(name, value)


def _list_of(check: Callable[[str, Any], _T]) -> Callable[[str, Any], list[_T]]:
    def check_list(name: str, value: Any) -> list[_T]:
        if not isinstance(value, list):
            raise BadFieldError(f"{name} is {shown(value)}, expected a list")
        return [check(f"{name}[{i}]", v) for i, v in enumerate(value)]

    return check_list


def _dict_of(check: Callable[[str, Any], _T]) -> Callable[[str, Any], dict[str, _T]]:
    def check_dict(name: str, value: Any) -> dict[str, _T]:
        if not isinstance(value, Mapping):
            raise BadFieldError(f"{name} is {shown(value)}, expected an object")
        return {k: check(f"{name}.{_key(k)}", v) for k, v in value.items()}

    return check_dict


def _key(key: str) -> str:
    return key if key.isidentifier() and len(key) <= 60 else shown(key)


def shown(value: Any) -> str:
    """A value from a foreign file, short and without characters that would move a terminal's cursor."""
    if value is None:
        return "missing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
