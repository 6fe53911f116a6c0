"""Work on large runs: what is not shown is not made, and what is not needed is not kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dtbench.cost.calibration import intervals
from dtbench.cost.calibration.times import QUANTILE
from dtbench.reporting.html import figures, gather, page, write_report
from dtbench.reporting.html.parts import changes as changes_part
from dtbench.stats import drawn_again
from dtbench.tests import made_up
from dtbench.text import table as t
from dtbench.text.terminal import print_json


def _write(path: Path, cases: int, factor: float = 1.0) -> Path:
    results = [
        made_up.result("mine", f"op{i}", "core", {"i": i}, [factor * 1e-4, factor * 1.1e-4])
        for i in range(cases)
    ]
    return made_up.write(path, made_up.run(results, run_id=path.stem))


def _formatted_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: int) -> tuple[int, str]:
    """How many rows of changes are put into words for a page of so many cases, and the page."""
    formatted = []
    why = changes_part.why
    with monkeypatch.context() as patch:
        patch.setattr(changes_part, "why", lambda case: formatted.append(case) or why(case))
        new, base = (_write(tmp_path / f"{name}{cases}.jsonl", cases, f) for name, f in (("a", 5), ("b", 1)))
        path = tmp_path / f"{cases}.html"
        write_report(gather([new], [base]), path)
    return len(formatted), path.read_text("utf-8")


def test_report_formats_only_rows_that_a_page_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t, "MAX_ROWS", 20)
    assert _formatted_rows(monkeypatch, tmp_path, 15)[0] == 15
    rows, page = _formatted_rows(monkeypatch, tmp_path, 50)
    assert rows == 20
    assert '<span class="count">50 rows</span>' in page


def test_page_that_does_not_fit_is_written_again_with_the_same_drawings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = [], figures.draw
    monkeypatch.setattr(
        figures, "draw", lambda *args, **words: drawn.append(words["prefix"]) or draw(*args, **words)
    )
    monkeypatch.setattr(page, "BUDGET_BYTES", 100_000)
    sources = gather([_write(tmp_path / "new.jsonl", 400)], [_write(tmp_path / "base.jsonl", 400, 0.1)])
    assert "below" in page.render(sources)  # what was left out, and why
    panels = [prefix for prefix in drawn if "L" not in prefix]
    assert panels
    assert len(panels) == len(set(panels))


def test_table_counts_rows_that_its_columns_do_not_hold() -> None:
    columns = [t.text("Case", list("abcde")), t.text("Impl", ["core"] * 5)]
    assert [c.header for c in t.compact(t.Table("", columns)).columns] == ["Case"]
    # Of the rows that are not there nothing can be said: the column stays.
    cut = t.compact(t.Table("", columns, total=9))
    assert ([c.header for c in cut.columns], cut.total_rows) == (["Case", "Impl"], 9)


def test_base_of_a_report_is_read_without_samples(tmp_path: Path) -> None:
    new, base = (_write(tmp_path / f"{name}.jsonl", 3) for name in ("new", "base"))
    sources = gather([new], [base])
    assert all(result.samples_s for run in sources.runs for result in run.results)
    assert not any(result.samples_s for run in sources.baseline for result in run.results)


@pytest.mark.parametrize("text", ["µ", 'quoted " \\ \x1b', "\udcff"], ids=["latin", "escaped", "surrogate"])
def test_printed_json_is_indented_as_by_the_standard_library(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"a": [1, 2.5e-7, True, None], "b": {}, "c": [], text: text, "d": [{"e": [[]]}]}
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    print_json(value)
    assert out.getvalue() == json.dumps(value, indent=2) + "\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json([float("nan")])


def test_bootstrap_takes_quantiles_of_many_sizes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, quantile = [], np.quantile
    monkeypatch.setattr(intervals.np, "quantile", lambda *a, **k: calls.append(1) or quantile(*a, **k))
    values = [np.arange(1.0, 6.0) + place for place in range(256)]
    points = [SimpleNamespace(launches={0: of}) for of in values]
    got = intervals._repetitions(points, 10, np.random.default_rng(0))
    assert len(calls) <= len(points) / 32
    rng = np.random.default_rng(0)
    expected = [quantile(drawn_again(of, 10, rng), QUANTILE, axis=1) for of in values]
    assert (got == np.stack(expected, axis=1)).all()
