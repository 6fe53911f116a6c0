"""The strict reader: what is no JSON object or has a field of another type is refused in one line that names it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from dtbench.errors import UnreadableRunError
from dtbench.fields import Amount, Count, Name, Whole
from dtbench.records.read import BadFieldError, convert, decode, read_json


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": "\xff"}', "not JSON"),
        (rb'{"a": "\ud800"}', "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b"[]", r"\[\], expected a JSON object"),
    ],
)
def test_what_is_no_strict_json_says_why(data: bytes, says: str) -> None:
    with pytest.raises(BadFieldError, match=says) as caught:
        decode(data)
    assert str(caught.value).isprintable()


class Inner(msgspec.Struct, frozen=True):
    size: Whole
    low: Amount = 0.0


@dataclass(frozen=True)
class Outer:
    name: Name
    kind: Literal["a", "b"] = "a"
    pair: tuple[Amount, Amount] = (0.0, 0.0)
    inner: Inner | None = None
    rows: tuple[Inner, ...] = ()
    by_name: dict[str, dict[str, Inner]] | None = None
    by_rank: dict[Name, Count] | None = None


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"name": ""}, "name", "expected str of length >= 1"),
        ({"name": None}, "name", "expected str, got null"),
        ({"kind": "\x1b[2J"}, "kind", r"invalid enum value '\\x1b\[2J'"),
        ({"pair": [1, -1]}, r"pair\[1\]", "expected float >= 0.0"),
        ({"inner": {}}, "inner", "object missing required field size"),
        ({"rows": [{"size": 1}, {"size": True}]}, r"rows\[1\]\.size", "expected int, got bool"),
        (
            {"by_name": {"x": {}, "y": {"z": {"size": 0}}}},
            r"by_name\[\.\.\.\]\[\.\.\.\]\.size",
            "expected int >= 1",
        ),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(BadFieldError, match=f"^{field}: {says}"):
        convert({"name": "n"} | changes, Outer)
    with pytest.raises(BadFieldError, match=rf"^results\[3\]\.{field}: {says}"):
        convert({"name": "n"} | changes, Outer, "results[3]")


def test_a_bad_key_names_its_mapping() -> None:
    with pytest.raises(BadFieldError, match="by_rank"):
        convert({"name": "n", "by_rank": {"": 1}}, Outer)


def test_fields_of_a_later_version_are_left_out_and_missing_ones_have_their_values() -> None:
    assert convert({"name": "n", "rows": [{"size": 2, "new": 1}], "later": {}}, Outer) == Outer(
        "n", rows=(Inner(2),)
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        (b"", "is not a table: not JSON"),
        (b"[]", "is not a table: .*expected a JSON object"),
        (b'{"a": "' + b"x" * 100 + b'"}', "more than 99 bytes"),
    ],
)
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableRunError, match=says):
        read_json(path, "a table", 99)
    with pytest.raises(UnreadableRunError, match="not a regular file"):
        read_json(tmp_path, "a table", 99)
