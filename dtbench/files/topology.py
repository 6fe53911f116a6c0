"""The topology file that `calibrate` writes: JSON, validated when read.

Schema 2. Schema 1 had no tables of times and no transitions, so it cannot price what schema 2 is asked
for: such a file is refused, and the run file it came from calibrated again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtbench.errors import UnreadableRunError
from dtbench.files.atomic import write_atomically

SCHEMA = 2
# The largest mesh has few dims and each some hundred points; beyond this it is another file.
MAX_BYTES = 64 * 2**20

Check = Callable[[str, Any], None]


class _BadField(Exception):  # noqa: N818 - becomes an UnreadableRunError that names the file
    """A field of the wrong type or out of range."""


def write_topology(topology: Mapping[str, Any], path: str | Path) -> None:
    """Writes the file whole or not at all.

    Raises:
        OutputError: the place cannot be written, or holds a file that is no topology.
    """
    text = json.dumps(topology, indent=1, allow_nan=False, ensure_ascii=True) + "\n"
    write_atomically(Path(path), text, _looks_like_one, "topology of dtbench")


def read_topology(path: str | Path) -> dict[str, Any]:
    """The topology in a file.

    Raises:
        UnreadableRunError: not a topology, of a newer schema, or damaged; the message names the field.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UnreadableRunError(
                f"{path} is not a regular file: expected a topology of `dtbench calibrate`"
            )
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableRunError(f"{path} has more than {MAX_BYTES} bytes: it is no topology")
        topology = json.loads(path.read_text("utf-8"), parse_constant=_no_constant)
        json.dumps(topology, ensure_ascii=False).encode("utf-8")  # half a surrogate pair cannot be shown
    except OSError as error:
        raise UnreadableRunError(
            f"cannot read {path}: {error.strerror or error}; expected a topology of `dtbench calibrate`"
        ) from error
    except (ValueError, RecursionError, _BadField) as error:
        raise UnreadableRunError(
            f"{path} is not a topology of `dtbench calibrate`: not JSON ({str(error)[:120]})"
        ) from error
    _check_kind(path, topology)
    try:
        _topology("", topology)
    except _BadField as error:
        raise UnreadableRunError(
            f"{path} is damaged: {error}; make it again with `dtbench calibrate`"
        ) from error
    made: dict[str, Any] = topology
    _check_names(path, made)
    return made


def _looks_like_one(head: str) -> bool:
    return head.lstrip().startswith("{") and '"kind": "topology"' in head.replace('":"', '": "')


def _check_kind(path: Path, topology: Any) -> None:
    kind = topology.get("kind") if isinstance(topology, dict) else None
    if kind != "topology":
        raise UnreadableRunError(
            f"{path} is not a topology: kind is {ascii(kind)[:60]}, "
            'expected "topology"; make one with `dtbench calibrate`'
        )
    schema = topology.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise UnreadableRunError(
            f"{path} is damaged: schema is {ascii(schema)[:60]}, expected {SCHEMA}; "
            "make it again with `dtbench calibrate`"
        )
    if schema > SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by a newer dtbench (schema {schema}, this one reads {SCHEMA}): "
            "upgrade dtbench to read it"
        )
    if schema < SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by an older dtbench (schema {schema}, this one reads {SCHEMA}): "
            "calibrate again from the run file, `dtbench calibrate RUN.jsonl -o TOPOLOGY.json`"
        )


def _check_names(path: Path, topology: Mapping[str, Any]) -> None:
    names = [dim["name"] for dim in topology["dims"]]
    if len(set(names)) < len(names):
        raise UnreadableRunError(
            f"{path} is damaged: dims has {ascii(names)[:60]}, expected each name once; "
            "make it again with `dtbench calibrate`"
        )


def _no_constant(name: str) -> None:
    raise _BadField(f"{name} is not a number that JSON knows")


# ------------------------------------------------------------------------------ what fields must be


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _BadField(f"{name} is {ascii(value)[:60]}, expected a string")


def _number(least: float, *, above: bool = False) -> Check:
    def check(name: str, value: Any) -> None:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not fine or not math.isfinite(value) or value < least or (above and value == least):
            bound = f"{'above' if above else 'at least'} {least:g}"
            raise _BadField(f"{name} is {ascii(value)[:60]}, expected a number {bound}")

    return check


def _integer(least: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise _BadField(f"{name} is {ascii(value)[:60]}, expected an integer of at least {least}")

    return check


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _BadField(f"{name} is {ascii(value)[:60]}, expected true or false")


def _one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise _BadField(f"{name} is {ascii(value)[:60]}, expected one of {', '.join(allowed)}")

    return check


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _list(check: Check, length: int | None = None) -> Check:
    def check_list(name: str, value: Any) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            wanted = "a list" if length is None else f"a list of {length}"
            raise _BadField(f"{name} is {ascii(value)[:60]}, expected {wanted}")
        for index, item in enumerate(value):
            check(f"{name}[{index}]", item)

    return check_list


def _values(check: Check) -> Check:
    def check_values(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _BadField(f"{name} is {ascii(value)[:60]}, expected an object")
        for key, item in value.items():
            check(f"{name}.{ascii(key)[1:-1][:60]}", item)

    return check_values


def _object(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Fields that must be there and fields that may be; others are left alone."""

    def check_object(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _BadField(f"{name or 'the file'} is {ascii(value)[:60]}, expected an object")
        prefix = f"{name}." if name else ""
        for key, check in required.items():
            if key not in value:
                raise _BadField(f"{prefix}{key} is missing")
            check(prefix + key, value[key])
        for key, check in (optional or {}).items():
            if key in value:
                check(prefix + key, value[key])

    return check_object


_positive, _amount, _ratio = _number(0, above=True), _number(0), _number(1 - 1e-9)
_sizes = _list(_integer(1), 2)
_CONSTANTS: dict[str, Check] = {"bandwidth_GiBps": _positive, "latency_us_per_hop": _amount}

_interval = _list(_amount, 2)
_rows = _list(
    _object(
        {
            "size_bytes": _integer(1),
            "time_us": _positive,
            "low_us": _positive,
            "high_us": _positive,
            "measured_us": _positive,
        },
        {"launch_us": _list(_or_none(_positive))},
    )
)


def _table(name: str, value: Any) -> None:
    """Rows by size, times that do not fall, each within its interval: what pricing relies on."""
    _rows(name, value)
    if not value:
        raise _BadField(f"{name} is empty, expected a row for every size")
    for index, row in enumerate(value):
        before = value[index - 1] if index else {"size_bytes": 0, "time_us": 0}
        if row["size_bytes"] <= before["size_bytes"]:
            raise _BadField(f"{name}[{index}].size_bytes is not above that of the row before it")
        if row["time_us"] < before["time_us"]:
            raise _BadField(f"{name}[{index}].time_us is below that of the row before it")
        if not row["low_us"] <= row["time_us"] <= row["high_us"]:
            raise _BadField(f"{name}[{index}].time_us is not between low_us and high_us")


_curve_fields = _object(
    {
        "alpha_us": _or_none(_amount),
        "beta_GiBps": _or_none(_positive),
        "beta_is_lower_bound": _flag,
        "alpha_interval": _or_none(_interval),
        "beta_interval": _or_none(_list(_positive, 2)),
        "geometric_mean_ratio": _or_none(_ratio),
        "worst_ratio": _or_none(_ratio),
        "size_bytes": _sizes,
        "points": _integer(1),
        "launches": _integer(1),
        "table": _table,
    },
    {"dtype": _text, "end_GiBps": _or_none(_positive), "end_interval": _or_none(_list(_positive, 2))},
)


def _curve(name: str, value: Any) -> None:
    _curve_fields(name, value)
    if (value["alpha_us"] is None) != (value["beta_GiBps"] is None):
        raise _BadField(f"{name} has one of alpha_us and beta_GiBps, expected both or neither")


_layout = _object(
    {
        "kind": _or_none(_one_of("intra-host", "inter-host", "mixed")),
        "hosts_per_group": _or_none(_sizes),
        "ranks_per_host": _or_none(_sizes),
        "groups_per_host_pair": _or_none(_integer(0)),
    }
)
_residuals = _object(
    {
        "geometric_mean_ratio": _ratio,
        "worst_ratio": _ratio,
        "points": _list(
            _object(
                {
                    "collective": _text,
                    "size_bytes": _integer(1),
                    "measured_s": _positive,
                    "predicted_s": _positive,
                }
            )
        ),
    }
)
_dim = _object(
    {
        "name": _text,
        "ranks": _integer(2),
        "layout": _layout,
        "groups_sharing": _one_of("together", "alone"),
        **_CONSTANTS,
        "bandwidth_interval": _list(_positive, 2),
        "latency_interval": _interval,
        "builtin": _or_none(
            _object(
                _CONSTANTS,
                {
                    "layout": _one_of("intra-host", "inter-host"),
                    "predicted_over_measured": _positive,
                    "geometric_mean_ratio": _ratio,
                },
            )
        ),
        "fitted_on": _object(
            {
                "collectives": _list(_text),
                "size_bytes": _sizes,
                "points": _integer(1),
                "launches": _integer(1),
            },
            {"sample": _text, "estimator": _text},
        ),
        "residuals": _residuals,
        "collectives": _values(_curve),
        "transitions": _values(_values(_curve)),
        "contention": _values(_object({"together_over_alone": _positive, "size_bytes": _integer(1)})),
    },
    {
        "groups": _integer(1),
        "bandwidth_is_lower_bound": _flag,
        "intervals": _text,
        "warnings": _list(_text),
    },
)
_mesh = _object({"dim_names": _list(_text), "shape": _list(_integer(1))})
_topology = _object(
    {
        "kind": _text,
        "schema": _integer(1),
        "runs": _list(_object({"run_id": _text})),
        "device_type": _text,
        "backend": _text,
        "mesh": _mesh,
        "base_latency_us": _amount,
        "dims": _list(_dim),
    },
    {
        "created": _text,
        "interval_method": _text,
        "left_out": _list(_object({"name": _text, "ranks": _integer(1), "reason": _text})),
        "warnings": _list(_text),
    },
)
