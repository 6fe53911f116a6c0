"""Large run files: the fast way of reading a line is the thorough one, and tables are cut with a word about it."""

from __future__ import annotations

import gc
import json
from functools import cache
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtbench.comparison.runs import MAX_LAUNCHES, compare
from dtbench.cost.calibration.times import quartiles
from dtbench.records.layout import from_last_arrival_s, from_last_arrivals_s
from dtbench.records.read import decode
from dtbench.records.result import result_in, result_of
from dtbench.records.run import read_run
from dtbench.reporting.html.sources import gather
from dtbench.reporting.tables import print_runs
from dtbench.suite import Run
from dtbench.suite.errors import UnreadableRunError
from dtbench.tests import large_run, made_up
from dtbench.tests.made_up import Cli
from dtbench.text.terminal import MAX_ROWS


@cache
def lines() -> list[bytes]:
    results = [*islice(large_run.lines(2000), 0, None, 97), *(msgspec.to_builtins(r) for r in made_up.NOT_OK)]
    return [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in results]


def test_a_line_as_it_is_written_takes_the_fast_way_and_says_the_same() -> None:
    for line in lines():
        assert result_in(line) == result_of(decode(line)) is not None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"launch":0', b'"launch":9223372036854775808', "the integer 9223372036854775808 is out of range"),
        (b'"launch":0', b'"launch":-1', "launch is -1, expected an integer of at least 0"),
        (b'"clock":"device"', b'"clock":"sundial"', "clock is 'sundial', expected one of host, device"),
        (b'"counters":{}', b'"counters":{"n":-9223372036854775808}', "the integer -9223372036854775808"),
        (b'"0":[', b'"one":[', "rank_samples_s has the key 'one', expected a rank"),
        (b'"n":3', b'"n":4', "time_s.n is 4, but there are 3 samples_s"),
        (b'"reason":""', b'"reason":"\\ud800"', "not UTF-8"),
        (b'"kind":"result"', b'"kind":3', "kind is 3, expected a string"),
    ],
)
def test_a_line_that_is_not_sound_says_why(tmp_path: Path, old: bytes, new: bytes, says: str) -> None:
    line = lines()[0]
    assert old in line
    head = json.dumps(made_up.header()).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(head + line + line.replace(old, new, 1))
    with pytest.raises(UnreadableRunError, match=f"line 3 is damaged: {says}"):
        read_run(tmp_path / "a.jsonl")


def test_tables_are_cut_and_say_so(dtbench: Cli, tmp_path: Path) -> None:
    one = next(made_up.dispatch())
    results = [msgspec.structs.replace(one, name=f"op{n}") for n in range(MAX_ROWS + 7)]
    head = json.dumps(made_up.header())
    (tmp_path / "a.jsonl").write_text(
        "\n".join([head, *(json.dumps(msgspec.to_builtins(r)) for r in results)]) + "\n"
    )
    for words, what in (
        ("show a.jsonl", "... and 7 more cases;"),
        ("compare a.jsonl a.jsonl", "... and 7 more cases"),
    ):
        _, out, _ = dtbench(*words.split())
        assert what in out and f"op{MAX_ROWS - 1}" in out and f"op{MAX_ROWS}" not in out


def test_without_samples_only_the_samples_are_missing(tmp_path: Path) -> None:
    large_run.write(1500, tmp_path / "a.jsonl")
    whole = read_run(tmp_path / "a.jsonl").results
    assert read_run(tmp_path / "a.jsonl", with_samples=False).results == tuple(
        r.without_samples() for r in whole
    )
    assert any(r.rank_samples_s for r in whole)


def test_more_launches_than_can_be_paired_are_compared_in_part(tmp_path: Path) -> None:
    one = next(made_up.dispatch())
    run = made_up.run([msgspec.structs.replace(one, launch=n) for n in range(MAX_LAUNCHES + 1)])
    comparison = compare([run], [run])
    assert comparison.rows[0].verdict == "same" and comparison.rows[0].head_launches == MAX_LAUNCHES + 1
    assert any("more launches" in note for note in comparison.notes)


def test_many_results_at_once_have_the_arrivals_that_each_has() -> None:
    groups = [[0, 1], [2, 3]]
    results = [
        *islice(made_up.collectives(samples=3), 5),
        *made_up.NOT_OK,
        *islice(made_up.collectives(samples=4), 5),
    ]
    together = from_last_arrivals_s(results, groups)
    assert [tuple(map(float, times)) for times in together] == [
        from_last_arrival_s(r, groups) for r in results
    ]


def test_a_run_of_many_suites_names_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    one = next(made_up.dispatch())
    print_runs([made_up.run([msgspec.structs.replace(one, suite=f"s{n}") for n in range(103)])])
    out = capsys.readouterr().out
    assert "... and 3 more suites" in out and "s99:" in out and "s100:" not in out


def test_quartiles_at_once_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.exponential(1.0, n) for n in (1, 3, 4, 7, 3, 600, 4)]
    assert quartiles(samples) == [float(np.quantile(of, 0.25)) for of in samples]


def test_what_a_command_read_is_not_searched_for_garbage(
    dtbench: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(made_up.header()) + "\n")
    searched = []

    def spy(*_: object, **__: object) -> None:
        searched.append(gc.isenabled())

    monkeypatch.setattr("dtbench.reporting.tables.print_runs", spy)
    assert dtbench("show", "a.jsonl")[0] == 0
    assert searched == [False] and gc.isenabled()


def test_in_a_folder_samples_are_held_of_the_last_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        large_run.write(200, tmp_path / f"{n}.jsonl")
    whole = []

    def reading(path: Path, *, with_samples: bool = True) -> Run:
        whole.extend([path.name] * with_samples)
        return read_run(path, with_samples=with_samples)

    monkeypatch.setattr("dtbench.reporting.html.sources.read_run", reading)
    found = gather([tmp_path])
    assert whole == ["2.jsonl"] and len(found.histories[0].points) == 3
    assert found.runs == (read_run(tmp_path / "2.jsonl"),)
