"""Large run files: tables are cut with a word about it, and samples are held where they are needed alone."""

from __future__ import annotations

import gc
import json
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtbench.comparison.runs import MAX_LAUNCHES, compare
from dtbench.cost.calibration.times import quartiles
from dtbench.records.layout import from_last_arrival_s, from_last_arrivals_s
from dtbench.records.run import read_run
from dtbench.reporting.html.sources import gather
from dtbench.suite import Run
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.text.terminal import MAX_ROWS


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
    made_up.write(tmp_path / "a.jsonl", made_up.run(list(islice(made_up.collectives(samples=3), 40))))
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

    monkeypatch.setattr("dtbench.reporting.run_tables.print_runs", spy)
    assert dtbench("show", "a.jsonl")[0] == 0
    assert searched == [False] and gc.isenabled()


def test_in_a_folder_samples_are_held_of_the_last_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        run = made_up.run(list(islice(made_up.collectives(samples=3), 5)), run_id=str(n))
        made_up.write(tmp_path / f"{n}.jsonl", run)
    whole = []

    def reading(path: Path, *, with_samples: bool = True) -> Run:
        whole.extend([path.name] * with_samples)
        return read_run(path, with_samples=with_samples)

    monkeypatch.setattr("dtbench.reporting.html.sources.read_run", reading)
    found = gather([tmp_path])
    assert whole == ["2.jsonl"] and len(found.histories[0].points) == 3
    assert found.runs == (read_run(tmp_path / "2.jsonl"),)
