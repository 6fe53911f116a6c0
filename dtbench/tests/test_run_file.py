"""The run file: what is written can be read, a cut file too, and a foreign one gives one clear line."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.fields import MAX_NUMBER, Amount, Count, Name, Whole
from dtbench.records import run as run_file
from dtbench.records.read import BadFieldError, convert, decode, read_json
from dtbench.records.result import STATUSES, Header, Result
from dtbench.records.run import RunWriter, read_run
from dtbench.records.timing import Timing
from dtbench.stats import summarize

HEADER: dict[str, Any] = {
    "kind": "run",
    "schema": 1,
    "run_id": "r1",
    "started": "2026-01-01T00:00:00+00:00",
    "argv": ["dtbench", "run"],
    "versions": {"torch": "2.13.0", "nccl": None},
    "git": {"commit": None, "dirty": None},
    "machine": {"cpu": {"model": "x"}, "gpus": []},
    "ranks": [{"rank": 0, "host": "h", "local_rank": 0, "device": "cpu", "pid": 1}],
    "mesh": {"dim_names": ["dp", "tp"], "shape": [2, 2]},
    "env": {"OMP_NUM_THREADS": "1"},
    "plan": {"quick": True},
    "suites": ["dispatch"],
    "launches": 1,
}


def good(name: str = "add", launch: int = 0, **params: Any) -> Result:
    times = (1e-6, 2e-6, 4e-6)
    return Result(
        "dispatch",
        name,
        "core",
        params,
        "ok",
        size_bytes=64,
        time_s=summarize(times),
        samples_s=times,
        rank_samples_s={"0": times, "11": times},
        rank_arrivals_s={"0": (0.0, 0.0, 0.0), "11": times},
        algbw_Bps=64 / 1.5e-6,
        counters={"collectives": 3},
        launch=launch,
    )


def line_of(**changes: Any) -> str:
    """A result line with some fields changed; a change to `...` leaves the field out."""
    return json.dumps({k: v for k, v in (msgspec.to_builtins(good()) | changes).items() if v is not ...})


def written(path: Path, *lines: str, header: dict[str, Any] | None = None) -> Path:
    path.write_text("".join(f"{line}\n" for line in (json.dumps(header or HEADER), *lines)))
    return path


# ------------------------------------------------------------------------------- round trip

amounts = st.floats(0, 1e12)
scalars = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def results(draw: st.DrawFn) -> Result:
    samples = draw(st.lists(amounts, min_size=1, max_size=8))
    clock = draw(st.sampled_from(["host", "device"]))
    size, timing = draw(st.none() | st.integers(0, 2**50)), draw(st.none() | st.just(summarize(samples)))
    seconds = timing and (timing.min if clock == "host" else timing.p25)
    algbw = size / seconds if size is not None and seconds else draw(st.none() | amounts)
    if algbw is not None and algbw > MAX_NUMBER:  # so much in hardly any time
        algbw = None
    return Result(
        draw(words),
        draw(words),
        draw(words),
        draw(st.dictionaries(words, scalars, max_size=4)),
        draw(st.sampled_from(STATUSES)),
        reason=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        rank=draw(st.none() | st.integers(0, 10**6)),
        size_bytes=size,
        time_s=timing,
        samples_s=tuple(samples),
        rank_samples_s={str(k): tuple(samples) for k in draw(st.sets(st.integers(0, 99), max_size=3))},
        rank_arrivals_s={str(k): tuple(samples) for k in draw(st.sets(st.integers(0, 99), max_size=3))},
        algbw_Bps=algbw,
        busbw_Bps=None if algbw is None else draw(st.none() | st.just(algbw * 0.75)),
        counters=draw(st.dictionaries(words, st.integers(-(2**60), 2**60), max_size=3)),
        launch=draw(st.integers(0, 99)),
        clock=clock,  # type: ignore[arg-type]
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(results(), max_size=5, unique_by=lambda r: r.key))
def test_run_file_round_trips_any_result(tmp_path: Path, made: list[Result]) -> None:
    path = tmp_path / "x.jsonl"
    path.unlink(missing_ok=True)
    with RunWriter.create(path, HEADER) as writer:
        assert [writer.append(r) for r in made] == made
        assert writer.results == {r.key: r for r in made}
        writer.end()
    run = read_run(path)
    assert run.header == convert(HEADER, Header) and list(run.results) == made and run.complete
    for line in path.read_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_file_cut_anywhere_can_be_read_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    three = [good(size=2**k) for k in range(3)]
    with RunWriter.create(path, HEADER) as writer:
        for r in three:
            writer.append(r)
        writer.end()
    whole = path.read_bytes()
    first = whole.index(b"\n")
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")][1:-1]  # of the results' lines
    cut = tmp_path / "cut.jsonl"
    # Within a line the place makes no difference: some of them, and all places around its ends.
    near_ends = {end + offset for end in (0, first, *ends, len(whole)) for offset in range(-3, 4)}
    for length in sorted(near_ends & {*range(len(whole))} | {*range(0, len(whole), 23)}):
        cut.write_bytes(whole[:length])
        if length < first:
            with pytest.raises(UnreadableRunError):
                read_run(cut)
            continue
        run = read_run(cut)
        # A line that lacks nothing but its newline is whole.
        expected = sum(end <= length for end in ends)
        assert (list(run.results), run.complete) == (three[:expected], length == len(whole) - 1), length
        with RunWriter.resume(cut, {"argv": ["again"]}) as writer:
            assert writer.results.keys() == {r.key for r in three[:expected]}
            for r in three[expected:]:
                writer.append(r)
            assert not read_run(cut).complete
            writer.end()
        resumed = read_run(cut)
        assert (list(resumed.results), resumed.complete) == (three, True)
        assert [json.loads(s)["kind"] for s in cut.read_text().splitlines()].count("resume") == 1


# ------------------------------------------------------------------------- what JSON cannot hold


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_result_that_cannot_be_read_back_is_recorded_as_failed(tmp_path: Path, value: float) -> None:
    path = tmp_path / "x.jsonl"
    bad = Result("s", "n", "core", {"size": 1}, "ok", algbw_Bps=value, launch=2)
    with RunWriter.create(path, HEADER) as writer:
        recorded = writer.append(bad)
    assert (recorded.status, recorded.key) == ("failed", bad.key)
    assert recorded.reason.startswith("the result cannot be recorded: ")
    assert read_run(path).results == (recorded,)
    assert not re.search(b"NaN|Infinity", path.read_bytes())


@pytest.mark.parametrize("value", [(2, 2), None, math.nan, [1], 2**70, b"x", "\ud800"])
def test_a_param_that_is_no_scalar_is_refused(tmp_path: Path, value: Any) -> None:
    with RunWriter.create(tmp_path / "x.jsonl", HEADER) as writer:
        with pytest.raises(UsageError, match=r"the case dispatch/add \[core\] cannot be identified"):
            writer.append(good(shape=value))
        with pytest.raises(UsageError, match="name: expected str of length >= 1"):
            writer.append(good(name=""))
        writer.append(good())
    assert len(read_run(tmp_path / "x.jsonl").results) == 1


def test_undecodable_text_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    name = b"caf\xe9.py".decode("utf-8", "surrogateescape")  # as Python hands over a Latin-1 argument
    with RunWriter.create(path, HEADER | {"argv": [name], "options": {"x": math.inf}}) as writer:
        writer.append(Result("s", "n", "core", {}, "failed", reason=name))
    run = read_run(path)
    escaped = "caf\\udce9.py"
    assert (run.header.argv, run.header.options) == ((escaped,), {"x": None})
    assert run.results[0].reason == escaped


# ------------------------------------------------------------------------------ where to write


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with RunWriter.create(path, HEADER) as writer:
        with pytest.raises(OutputError, match="another dtbench"):
            RunWriter.resume(path, {})
        writer.append(good())
    RunWriter.resume(path, {}).close()
    assert len(read_run(path).results) == 1


def test_an_interrupt_inside_a_line_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    with RunWriter.create(path, HEADER) as writer:
        real = run_file.os.write

        def half(fd: int, data: memoryview) -> int:
            real(fd, data[: len(data) // 2])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(run_file.os, "write", half)
            with pytest.raises(KeyboardInterrupt):
                writer.append(good())
        writer.end()
    run = read_run(path)
    assert run.complete and run.results == ()


# ---------------------------------------------------------------------------- foreign files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello\n", "first line is not a header: not JSON"),
        (b"[1, 2]\n", "expected a JSON object"),
        (b"{}\n", 'kind missing, expected "run"'),
        (b'{"kind":"topology"}\n', "is a topology, expected a dtbench run"),
        (b'{"kind":"run","schema":2,"run_id":"x"}\n', "newer dtbench .schema 2.*upgrade"),
        (b'{"kind":"run","schema":true,"run_id":"x"}\n', "schema: expected int, got bool"),
        (b'{"kind":"run","schema":1}\n', "line 1 is damaged: Object missing required field run_id"),
    ],
)
def test_read_run_refuses_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UnreadableRunError, match=message) as caught:
        read_run(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


TIMING = {"min": 1.0, "p25": 1.0, "median": 1.0, "p75": 1.0, "p95": 1.0, "max": 1.0, "mean": 1.0, "n": 1}
BAD_FIELDS: dict[str, list[Any]] = {
    "suite": ["", ...],
    "impl": [None],
    "params": [[], {"a": [1]}, {"a": None}],
    "status": ["fine", [], ...],
    "rank": [-1, 1.5, True],
    "size_bytes": ["64", -1],
    "time_s": [
        3,
        {},
        TIMING | {"n": 0},
        TIMING | {"min": -1.0},
        TIMING | {"min": 2.0},
        TIMING | {"mean": 2.0},
        TIMING | {"max": "1"},
        TIMING | {"n": 2},
        TIMING | {"p75": 2.0, "p95": 2.0, "max": 2.0},
    ],
    "samples_s": [[1, -1], {"0": 1}, [None], [1e-6, 2e-6, 5e-6], [1e-6, 3e-6, 4e-6], [1e-6, 2e-6]],
    "rank_samples_s": [{"a": [1]}, {"0": 1}],
    "rank_arrivals_s": [{"-1": [1]}, {"0": [-1]}],
    "algbw_Bps": [64.0, -1],
    "busbw_Bps": [1e9, "fast"],
    "counters": [{"a": "1"}, {"a": True}],
    "launch": [-1],
}
BAD_HEADERS: dict[str, list[Any]] = {
    "argv": ["dtbench run", [1]],
    "versions": [{"torch": 2}, []],
    "git": [None],
    "machine": [{"gpus": {}}, {"cpu": "fast"}],
    "ranks": [[{}], [{"rank": -1}], [{"rank": 0, "host": 3}]],
    "mesh": [{"dim_names": ["dp"], "shape": [2, 2]}, {"dim_names": ["dp"], "shape": [0]}, {}],
    "env": [{"A": 1}],
    "launches": [0],
}


@pytest.mark.parametrize(
    ("field", "number", "line"),
    [
        *((field, 3, {field: value}) for field, values in BAD_FIELDS.items() for value in values),
        *((field, 1, {field: value}) for field, values in BAD_HEADERS.items() for value in values),
    ],
)
def test_a_bad_field_is_named_with_its_line(
    tmp_path: Path, field: str, number: int, line: dict[str, Any]
) -> None:
    header, lines = (HEADER | line, [line_of()]) if number == 1 else (HEADER, [line_of(), line_of(**line)])
    path = written(tmp_path / "x", *lines, line_of(name="later"), header=header)
    with pytest.raises(UnreadableRunError, match=rf"line {number} is damaged: .*{field}"):
        read_run(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("3", "expected a JSON object"),
        ("{}", "kind is missing"),
        ('{"kind":["result"]}', "expected a string"),
        (json.dumps(HEADER), "two runs were joined"),
    ],
)
def test_a_damaged_line_before_the_end(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "x", line, '{"kind":"end"}')
    with pytest.raises(UnreadableRunError, match=f"line 2 is damaged: .*{message}"):
        read_run(path)


def test_read_run_ignores_fields_of_later_versions(tmp_path: Path) -> None:
    later = line_of(colour="red", time_s=TIMING | {"p99": 1.0}, samples_s=[1.0], algbw_Bps=64.0)
    (result,) = read_run(written(tmp_path / "x", '{"kind":"weather","rain":true}', later, "")).results
    assert result.time_s == Timing(1, 1, 1, 1, 1, 1, 1, 1)


def test_read_run_limits_line_and_file_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x", line_of())
    monkeypatch.setattr(run_file, "MAX_LINE_BYTES", 100)
    with pytest.raises(UnreadableRunError, match="line 1 is longer than 100 bytes"):
        read_run(path)
    monkeypatch.setattr(run_file, "MAX_FILE_BYTES", 200)
    with pytest.raises(UnreadableRunError, match="more than 200 bytes"):
        read_run(path)


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
def test_decode_refuses_invalid_json_with_a_reason(data: bytes, says: str) -> None:
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
