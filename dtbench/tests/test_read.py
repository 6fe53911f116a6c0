"""The strict reader: msgspec's speed with what the standard library finds, and messages that name the field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtbench.records.read import BadFieldError, decode, into, read_json
from dtbench.suite.errors import UnreadableRunError
from dtbench.suite.fields import Amount, Count, Name, Rank, Whole

keys = st.sampled_from(["a", "b", "a:b", ":", "µ", "", '"'])
texts = st.sampled_from(["", ":", "a:b:c", "µ", "\n", '\\"', "x" * 9])
numbers = st.sampled_from(["0", "-1", "1.5", "1e-6", str(2**63 - 1), str(2**63), "1" * 30, "1e999", "NaN"])


def spelled(text: str, escaped: bool) -> str:
    return json.dumps(text, ensure_ascii=escaped)


@st.composite
def values(draw: st.DrawFn, depth: int = 3) -> str:
    """The text of a value, in which a key may stand twice and a number may be none that is read."""
    kind = draw(
        st.sampled_from(["text", "number", "word", "list", "object"] if depth else ["text", "number"])
    )
    if kind == "text":
        return spelled(draw(texts), draw(st.booleans()))
    if kind == "number":
        return draw(numbers)
    if kind == "word":
        return draw(st.sampled_from(["null", "true", "false"]))
    items = draw(st.lists(values(depth=depth - 1), max_size=3))
    if kind == "list":
        return f"[{','.join(items)}]"
    return "{" + ",".join(f"{spelled(draw(keys), draw(st.booleans()))}: {item}" for item in items) + "}"


def by_the_library(text: str) -> Any:
    """The object in a text, by the standard library alone; ValueError for what is not strict JSON."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def small(digits: str) -> int:
        if abs(int(digits)) > 2**63 - 1:
            raise ValueError("too large")
        return int(digits)

    def finite(digits: str) -> float:
        if float(digits) in (float("inf"), float("-inf")):
            raise ValueError("too large")
        return float(digits)

    def constant(name: str) -> None:
        raise ValueError(name)

    return json.loads(
        text, object_pairs_hook=unique, parse_int=small, parse_float=finite, parse_constant=constant
    )


@given(st.lists(st.tuples(keys, values()), max_size=4))
@example([("a", "1"), ("a", "1")])
@example([("a", '":"'), ("a", "1")])
@example([("a", r'"\u003a"'), ("b", '{"c": 1, "c": 2}')])  # an escaped colon beside a lost key
def test_an_object_is_what_the_standard_library_reads_or_is_refused(pairs: list[tuple[str, str]]) -> None:
    text = "{" + ", ".join(f"{spelled(key, False)}: {value}" for key, value in pairs) + "}"
    try:
        expected = by_the_library(text)
    except ValueError:
        with pytest.raises(BadFieldError):
            decode(text.encode())
    else:
        found = decode(text.encode())
        assert found == expected
        assert json.dumps(found) == json.dumps(expected)  # 1 is no 1.0 and no true


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' appears twice in one object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1e999}', "the number 1e999 is out of range"),
        (b'{"a": 9223372036854775808}', "the integer 9223372036854775808 is out of range"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (rb'{"a": "\ud800"}', "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b"[]", r"\[\], expected a JSON object"),
    ],
)
def test_what_is_no_strict_json_says_why(data: bytes, says: str) -> None:
    with pytest.raises(BadFieldError, match=says):
        decode(data)


class Inner(msgspec.Struct, frozen=True):
    size: Whole
    low: Amount = 0.0


@dataclass(frozen=True)
class Outer:
    name: Name
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    pair: tuple[Amount, Amount] = (0.0, 0.0)
    inner: Inner | None = None
    rows: tuple[Inner, ...] = ()
    by_name: dict[str, dict[str, Inner]] | None = None
    by_rank: dict[Rank, Count] | None = None
    few: Annotated[int, msgspec.Meta(le=9, description="a digit")] = 0
    value: str | int | float = ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "name is '', expected a name"),
        ({"name": None}, "name is missing, expected a name"),
        ({"kind": "c"}, "kind is 'c', expected one of a, b"),
        ({"kind": [1]}, r"kind is \[1\], expected one of a, b"),
        ({"flag": 1}, "flag is 1, expected true or false"),
        ({"pair": [1]}, r"pair is \[1\], expected a list of 2"),
        ({"pair": [1, -1]}, r"pair\[1\] is -1, expected a number of at least 0"),
        ({"inner": {}}, "inner.size is missing, expected an integer of at least 1"),
        ({"inner": 3}, "inner is 3, expected an object or null"),
        (
            {"rows": [{"size": 1}, {"size": True}]},
            r"rows\[1\].size is True, expected an integer of at least 1",
        ),
        ({"rows": {}}, r"rows is {}, expected a list"),
        ({"by_name": {"x": {}, "y": {"S(0)->R": {"size": 0}}}}, r"by_name.y.S\(0\)->R.size is 0"),
        ({"by_name": {"x": {"\x1b[2J": 3}}}, r"by_name.x.\\x1b\[2J is 3, expected an object"),
        ({"by_rank": {"0": 1, "one": 1}}, "by_rank has the key 'one', expected a rank"),
        ({"by_rank": {"0": -1}}, "by_rank.0 is -1, expected an integer of at least 0"),
        ({"few": 10}, "few is 10, expected a digit"),
        ({"value": None}, "value is missing, expected a string or an integer or a number"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_was_expected(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadFieldError, match=f"^{says}"):
        into({"name": "n"} | changes, Outer)
    with pytest.raises(BadFieldError, match=rf"^results\[3\]\.{says}"):
        into({"name": "n"} | changes, Outer, "results[3]")


def test_fields_of_a_later_version_are_left_out_and_missing_ones_have_their_values() -> None:
    assert into({"name": "n", "rows": [{"size": 2, "new": 1}], "later": {}}, Outer) == Outer(
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
