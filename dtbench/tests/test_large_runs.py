"""Work on large runs: what is not shown is not made, and what is not needed is not kept."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dtbench.cost.calibration import intervals
from dtbench.cost.calibration.times import QUANTILE, SizeTimes, points_of
from dtbench.reporting.html import figures, gather, page, write_report
from dtbench.reporting.html.parts import changes as changes_part
from dtbench.stats import resample
from dtbench.tests import made_up
from dtbench.text import columns
from dtbench.text.table import Table, compact
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
    reason_text = changes_part.reason_text
    with monkeypatch.context() as patch:
        patch.setattr(changes_part, "reason_text", lambda case: formatted.append(case) or reason_text(case))
        new, base = (_write(tmp_path / f"{name}{cases}.jsonl", cases, f) for name, f in (("a", 5), ("b", 1)))
        path = tmp_path / f"{cases}.html"
        write_report(gather([new], [base]), path)
    return len(formatted), path.read_text("utf-8")


def test_report_formats_only_rows_that_a_page_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_part, "MAX_ROWS", 20)
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
    case_and_impl = [columns.text("Case", list("abcde")), columns.text("Impl", ["core"] * 5)]
    assert [c.header for c in compact(Table("", case_and_impl)).columns] == ["Case"]
    # The rows that are left out may differ, so the column stays.
    cut = compact(Table("", case_and_impl, total=9))
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


def test_bootstrap_of_many_samples_does_not_draw_each() -> None:
    samples = np.arange(1.0, 20_001)
    tracemalloc.start()
    try:
        got = intervals._repetitions([_of_one_launch(samples)], 400, np.random.default_rng(0))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.shape == (400, 1)
    assert peak_bytes < 20 * samples.nbytes


# At 2 and 4 samples the quantile lies between two of them.
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 20, 101])
def test_bootstrap_is_distributed_as_quantiles_of_drawn_samples(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.lognormal(size=count)
    alike = [_of_one_launch(values), _of_one_launch(rng.permutation(values))]
    first, second = intervals._repetitions(alike, 20_000, rng).T
    drawn = np.quantile(resample(values, 20_000, rng), QUANTILE, axis=1)
    # Beyond what rounds differently.
    ordered = np.sort(values)
    limits = np.concatenate([ordered, *(ordered[:-1] + np.diff(ordered) * part for part in (0.2, 0.5, 0.8))])
    for pair in itertools.combinations([first, second, drawn], 2):
        shares = [[np.mean(quantiles <= limit * (1 + 1e-9)) for limit in limits] for quantiles in pair]
        assert np.abs(np.subtract(*shares)).max() < 0.02
    # Sizes are drawn independently of each other.
    assert count == 1 or abs(np.corrcoef(first, second)[0, 1]) < 0.05


def _of_one_launch(samples_us: np.ndarray) -> SizeTimes:
    return points_of({1024: {("r", 0): samples_us}})[0]
