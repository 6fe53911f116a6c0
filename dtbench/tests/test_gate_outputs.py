"""What a gate writes, with names and reasons of any characters."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser

import msgspec
import pytest

from dtbench.gate import outputs, verdict
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.schedule import effect_and_times
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import Gate, encode_gate
from dtbench.records.read import convert, decode
from dtbench.tests.made_up_arm import concluded

HOSTILE = "a|b`c<script>alert(1)</script>&\"'%0A::error::\r\n\x1b[31m\x00\x07\ud800\u202e]]>*_[x](y)"


def benchmark(name: str) -> Benchmark:
    return Benchmark((name, name, "core", ()), f"{name} [core]", "simulated", "min")


def judged(of: Verdict, name: str = "s", reason: str = "") -> ComparedCase:
    effect, base_s, head_s = effect_and_times([(1e-5, 1.1e-5), (1e-5, 1.2e-5), (1e-5, 1.15e-5)])
    return verdict.compared_case(benchmark(name), of, reason, "confirmed", (effect, base_s, head_s))


def report(items: Sequence[ComparedCase], *reasons: str) -> Gate:
    return concluded(items, *reasons, notes=[HOSTILE])


ALL = tuple(Verdict)


def test_junit_says_of_each_benchmark_what_became_of_it() -> None:
    text = outputs.junit(report([judged(v, v) for v in ALL], "the control moved"))
    suite = ET.fromstring(text)[0]
    kinds = {case.get("classname"): [child.tag for child in case] for case in suite}
    assert kinds == {
        Verdict.SAME: ["system-out"],
        Verdict.FASTER: ["system-out"],
        Verdict.SLOWER: ["failure"],
        Verdict.INCONCLUSIVE: ["skipped"],
        Verdict.MISSING: ["error"],
        Verdict.FAILED: ["error"],
        Verdict.NEW: ["error"],
        "gate": ["error"],
    }
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "8", "failures": "1", "errors": "4", "skipped": "1"}


def test_names_of_any_characters_stay_text_in_each_output() -> None:
    hostile = report([judged(Verdict.SLOWER, HOSTILE, HOSTILE), judged(Verdict.SAME, HOSTILE)], HOSTILE)
    name = ET.fromstring(outputs.junit(hostile))[0][0].get("name") or ""
    assert "<script>alert(1)</script>" in name and "\\x1b" in name and "\\x00" in name
    lines = outputs.lines(hostile)
    assert all(c.isprintable() or c == "\n" for line in lines for c in line)
    assert all(line.count("\n") <= 1 for line in lines)
    text = outputs.markdown(hostile)
    tags = Tags()
    tags.feed(text)
    assert tags.seen == {"details", "summary"}
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {7}
    assert "`" not in text and "](" not in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def test_thousands_are_cut_short() -> None:
    many = report([judged(Verdict.SLOWER, f"s{i}") for i in range(5000)])
    assert len(outputs.markdown(many)) < 2**20
    assert "and 4800 more" in outputs.markdown(many)
    passed = outputs.lines(report([judged(Verdict.SAME, f"s{i}") for i in range(5000)]))
    assert len(passed) < 10 and any("5000 more" in line for line in passed)


def _read_seconds(text: str) -> tuple[float, float]:
    """The time that a table shows, and half of its last digit."""
    number, unit = text.split()
    scale = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    return float(number) * scale, 0.5 * 10.0 ** -len(number.partition(".")[2]) * scale


def _assert_agrees(base: str, head: str, change: str) -> None:
    (base_s, base_error_s), (head_s, head_error_s) = _read_seconds(base), _read_seconds(head)
    low = (head_s - head_error_s) / (base_s + base_error_s) - 1
    high = (head_s + head_error_s) / (base_s - base_error_s) - 1
    shown = float(change.rstrip("%")) / 100
    assert low - 0.0005 - 1e-9 <= shown <= high + 0.0005 + 1e-9, (base, head, change)


@pytest.mark.parametrize("seed", range(40))
def test_times_and_change_beside_each_other_agree_to_the_printed_digits(seed: int) -> None:
    """Pairs that drift and scatter, whose median ratio is not the ratio of their medians."""
    drawn = random.Random(seed)
    base_s = 10 ** drawn.uniform(-7, 0)
    pairs = [
        (base_s * drift, base_s * drift * drawn.lognormvariate(0.05, 0.3))
        for drift in (drawn.lognormvariate(0, 0.5) for _ in range(drawn.randint(1, 22)))
    ]
    of = drawn.choice([Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.FASTER])
    whole = report([verdict.compared_case(benchmark("s"), of, "", "confirmed", effect_and_times(pairs))])
    line = next(line for line in outputs.lines(whole) if " -> " in line)
    base, head = line.partition(" pairs; ")[2].split(" -> ")
    _assert_agrees(base, head, re.findall(r"[-+][\d.]+%", line)[0])
    cells = next(row for row in outputs.markdown(whole).splitlines() if row.startswith(f"| {of}"))
    base, head, change = (cell.strip() for cell in cells.split("|")[3:6])
    _assert_agrees(base, head, change.partition(" (")[0])
    fields = json.loads(encode_gate(whole))["benchmarks"][0]
    assert fields["head_s"] / fields["base_s"] == pytest.approx(fields["effect"]["ratio"])
    (point,) = outputs.gate_points(whole)
    assert point.time_s == fields["head_s"]
    if point.low_s is not None and point.high_s is not None:
        assert point.low_s <= point.time_s <= point.high_s


def test_json_is_strict_and_whole() -> None:
    effect = effect_and_times([(1.0, 2.0)])[0]
    one = verdict.compared_case(benchmark("s"), Verdict.INCONCLUSIVE, "", "", (effect, 1.0, 2.0))
    whole = report([one, judged(Verdict.SAME, HOSTILE)])
    fields = json.loads(encode_gate(whole))
    assert fields["benchmarks"][0]["effect"]["high"] is None
    assert fields["benchmarks"][0]["effect"]["ratio"] == pytest.approx(2.0)
    assert fields["benchmarks"][1]["name"] == HOSTILE
    assert fields["counts"]["same"] == 1 and fields["benchmarks"][0]["verdict"] == "inconclusive"
    printable = report([one, judged(Verdict.SAME)])
    assert convert(
        decode(encode_gate(msgspec.structs.replace(printable, notes=())).encode()), Gate
    ).benchmarks == (printable.benchmarks)


def test_points_are_heads_times_where_both_arms_were_timed() -> None:
    points = outputs.gate_points(
        report([judged(Verdict.SAME), verdict.compared_case(benchmark("x"), Verdict.MISSING)])
    )
    head_s = pytest.approx(1e-5 * (judged(Verdict.SAME).ratio or 0))
    assert [(p.key[0], p.verdict, p.time_s) for p in points] == [("s", "same", head_s)]
    assert (points[0].low_s, points[0].high_s) == (None, None)  # three pairs bound nothing
