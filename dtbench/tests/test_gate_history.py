"""The history of a gate: what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtbench.errors import UnreadableRunError
from dtbench.gate import history
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.verdict import compared_case
from dtbench.records.comparison import Verdict
from dtbench.records.gate import Gate
from dtbench.records.history import read_history
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_arm import concluded

MACHINE = {"cpu": "Some CPU @ 2 GHz", "cores": 2}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(history, "machine_kind", lambda: MACHINE)
    return history.history_file(tmp_path / "h")


def report(time_s: float | None, commit: str = "c" * 40, *reasons: str) -> Gate:
    benchmark = Benchmark(("s", "n", "core", ()), "s n [core]", "simulated", "min")
    return concluded(
        [compared_case(benchmark, Verdict.SAME, figures=(None, None, time_s))], *reasons, head=commit
    )


def test_lines_are_only_added_and_one_cut_short_is_left_out(path: Path) -> None:
    assert history.append(path, report(1e-5, "a"))
    first = path.read_bytes()
    assert history.append(path, report(2e-5, "b"))
    assert path.read_bytes().startswith(first)
    with path.open("a") as file:
        file.write('{"kind":"hist')
    lines = read_history(history.history_file(path.parent), MACHINE)
    assert [(line.revision, line.times_s) for line in lines] == [
        ("a", {"s n [core]": 1e-5}),
        ("b", {"s n [core]": 2e-5}),
    ]


def test_what_is_not_trusted_or_not_measured_is_not_kept(path: Path) -> None:
    assert not history.append(path, report(1e-5, "a", "the control moved"))
    assert not history.append(path, report(None))
    assert not path.exists()


def test_another_machine_is_no_baseline(path: Path) -> None:
    history.append(path, report(1e-5))
    with pytest.raises(UnreadableRunError, match="another machine are no baseline"):
        read_history(path, {**MACHINE, "cores": 4})
    assert history.file_of(path.parent, {**MACHINE, "cores": 4}) != path


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"kind":"history","schema":99}',
        '{"kind":"history","schema":1,"revision":"a","times_s":{"x":-1}}',
    ],
)
def test_a_damaged_line_is_named_before_anything_is_measured(path: Path, line: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(UnreadableRunError, match="line 1"):
        history.history_file(path.parent)


@pytest.mark.parametrize("revisions", [1, 3])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a run"])
def test_report_of_the_folder_is_a_page_of_its_histories(
    dtbench: Cli, path: Path, revisions: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision in "abc"[:revisions]:
        history.append(path, report(1e-5, revision * 40))
    monkeypatch.setattr(history, "machine_kind", lambda: {**MACHINE, "cpu": "Another CPU"})
    history.append(history.history_file(path.parent), report(2e-5, "d" * 40))
    folder = path.parent
    if beside:
        made_up.write(folder / "run.jsonl", made_up.run(list(made_up.dispatch())))
    code, out, _ = dtbench("report", str(folder), "-o", "page.html")
    assert (code, out) == (0, "the report is in page.html\n")
    page = Path("page.html").read_text()
    assert "Some CPU @ 2 GHz, 2" in page and "Another CPU, 2" in page
    assert "abc"[revisions - 1] * 40 in page and "d" * 40 in page
