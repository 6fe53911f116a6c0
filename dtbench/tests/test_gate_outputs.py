"""What a gate writes, with names and reasons of any characters."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from dtbench.gate import outputs, verdict
from dtbench.gate.benchmark import Benchmark, Listing, read_listing, write_listing
from dtbench.gate.schedule import effect_and_times
from dtbench.records.gate import Gate, text_of
from dtbench.records.judged import Counts, Judged, Verdict
from dtbench.records.read import decode, into
from dtbench.suite.errors import UnreadableRunError
from dtbench.tests.made_up_arm import concluded

HOSTILE = "a|b`c<script>alert(1)</script>&\"'%0A::error::\r\n\x1b[31m\x00\x07\ud800\u202e]]>*_[x](y)"


def benchmark(name: str) -> Benchmark:
    return Benchmark((name, name, "core", ()), f"{name} [core]", "simulated", "min")


def judged(of: Verdict, name: str = "s", reason: str = "") -> Judged:
    effect, base_s, head_s = effect_and_times([(1e-5, 1.1e-5), (1e-5, 1.2e-5), (1e-5, 1.15e-5)])
    return verdict.judged(benchmark(name), of, reason, "confirmed", effect, base_s, head_s)


def report(items: Sequence[Judged], *reasons: str) -> Gate:
    return concluded(items, *reasons, notes=[HOSTILE])


ALL = tuple(Verdict)


def test_junit_says_of_each_benchmark_what_became_of_it():
    text = outputs.junit(report([judged(v, v) for v in ALL], "the control moved"))
    suite = ET.fromstring(text)[0]
    kinds = {case.get("classname"): [child.tag for child in case] for case in suite}
    assert kinds == {
        Verdict.PASS: ["system-out"],
        Verdict.IMPROVED: ["system-out"],
        Verdict.REGRESSION: ["failure"],
        Verdict.INCONCLUSIVE: ["skipped"],
        Verdict.MISSING: ["error"],
        Verdict.FAILED: ["error"],
        Verdict.NEW: ["error"],
        "gate": ["error"],
    }
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "8", "failures": "1", "errors": "4", "skipped": "1"}


def test_junit_holds_any_name():
    suite = ET.fromstring(outputs.junit(report([judged(Verdict.REGRESSION, HOSTILE, HOSTILE)])))[0]
    name = suite[0].get("name") or ""
    assert "<script>alert(1)</script>" in name and "\\x1b" in name and "\\x00" in name


def test_a_terminal_gets_no_control_characters():
    lines = outputs.lines(report([judged(Verdict.FAILED, HOSTILE, HOSTILE)], HOSTILE))
    assert all(c.isprintable() or c == "\n" for line in lines for c in line)
    assert all(line.count("\n") <= 1 for line in lines)


def test_a_workflow_command_is_one_line_and_one_command():
    for line in outputs.annotations_of(report([judged(Verdict.REGRESSION, HOSTILE, HOSTILE)], HOSTILE)):
        assert "\n" not in line and "\r" not in line
        command, _, rest = line.partition(" ")
        assert command in ("::error", "::warning")
        title = rest.partition("::")[0]
        assert ":" not in title and "," not in title
        assert "%0A" not in line, "GitHub would unescape it"


def test_of_many_regressions_the_last_annotation_says_how_many():
    made = outputs.annotations_of(report([judged(Verdict.REGRESSION, f"s{i}") for i in range(30)]))
    assert len(made) == outputs.ANNOTATIONS
    assert "30 REGRESSION" in made[-1]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def test_a_job_summary_is_a_table_whatever_the_names():
    text = outputs.markdown(
        report([judged(Verdict.REGRESSION, HOSTILE, HOSTILE), judged(Verdict.PASS, HOSTILE)], HOSTILE)
    )
    tags = Tags()
    tags.feed(text)
    assert tags.seen == {"details", "summary"}
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}
    assert "`" not in text and "](" not in text


def test_thousands_are_cut_short():
    many = report([judged(Verdict.REGRESSION, f"s{i}") for i in range(5000)])
    assert len(outputs.markdown(many)) < 2**20
    assert "and 4800 more" in outputs.markdown(many)
    passed = outputs.lines(report([judged(Verdict.PASS, f"s{i}") for i in range(5000)]))
    assert len(passed) < 10 and any("5000 more" in line for line in passed)


def test_json_is_strict_and_whole():
    effect = effect_and_times([(1.0, 2.0)])[0]
    one = verdict.judged(benchmark("s"), Verdict.INCONCLUSIVE, "", "", effect, 1.0, 2.0)
    whole = report([one, judged(Verdict.PASS, HOSTILE)])
    made = json.loads(text_of(whole))
    assert made["benchmarks"][0]["effect"]["high"] is None
    assert made["benchmarks"][0]["effect"]["ratio"] == pytest.approx(2.0)
    assert made["benchmarks"][1]["name"] == HOSTILE
    assert made["counts"]["PASS"] == 1 and made["benchmarks"][0]["verdict"] == "INCONCLUSIVE"
    printable = report([one, judged(Verdict.PASS)])
    assert into(decode(text_of(msgspec.structs.replace(printable, notes=())).encode()), Gate).benchmarks == (
        printable.benchmarks
    )


def test_points_are_heads_times_where_both_arms_were_timed():
    made = outputs.points_of(report([judged(Verdict.PASS), verdict.judged(benchmark("x"), Verdict.MISSING)]))
    assert [(p.key[0], p.verdict, p.time_s) for p in made] == [("s", "PASS", pytest.approx(11.5e-6))]
    assert (made[0].low_s, made[0].high_s) == (None, None)  # three pairs bound nothing


def test_counters_are_told_in_words():
    counters = {"python_calls": Counts(41.0, 43.0), "collectives": Counts(1.0, 2.0)}
    counted = verdict.judged(benchmark("s"), Verdict.REGRESSION, counters=counters)
    assert outputs.words(counted) == "python_calls 41 -> 43, collectives 1 -> 2"


def test_a_benchmark_survives_the_listing(tmp_path: Path):
    made = Benchmark(("s", "n", "i", (("a", 1), ("b", "x"))), "s n", "ranks", "p25", 0.1, 1e-6)
    path = tmp_path / "listing.json"
    write_listing(path, Listing((made,), ("none",), "3.11", "2.13", {"": ("torch.fx",)}))
    assert read_listing(path).benchmarks == (made,)
    whole = json.loads(path.read_text())
    for name, value in (
        ("tolerance", -1),
        ("floor_s", None),
        ("world", "moon"),
        ("label", ""),
        ("key", ["s", "n", "i", [1]]),
    ):
        path.write_text(json.dumps(whole | {"benchmarks": [whole["benchmarks"][0] | {name: value}]}))
        with pytest.raises(UnreadableRunError, match=rf"no listing of an arm: .*benchmarks.*{name}"):
            read_listing(path)
    path.write_text(json.dumps(whole | {"loaded": {"": ["os.path"]}}))
    with pytest.raises(UnreadableRunError, match="loaded"):
        read_listing(path)


def test_benchmarks_that_the_budget_left_are_counted():
    reason = "the budget of 4 s holds no further launch; it was not measured"
    left = [judged(Verdict.INCONCLUSIVE, f"b{n}", reason) for n in range(5)]
    lines = outputs.lines(report([*left, judged(Verdict.INCONCLUSIVE, "b9", "neither slower nor same")]))
    named = [line for line in lines if line.startswith("INCONCLUSIVE")]
    assert len(named) == 2 and any("5 benchmarks" in line for line in named)
