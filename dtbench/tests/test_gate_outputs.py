"""Files that a gate writes, with names and reasons of any characters, and its history."""

import html
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dtbench.errors import UnreadableRunError
from dtbench.gate import history, outputs
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.schedule import effect_and_times
from dtbench.gate.verdict import compared_case
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import Gate, encode_gate, read_history
from dtbench.records.read import convert, decode
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_arm import concluded

PAIRS = [(1e-5, 1.1e-5), (1e-5, 1.2e-5), (1e-5, 1.15e-5)]
HOSTILE = "a|b`c<script>alert(1)</script>&\"'%0A::error::\r\n\x1b[31m\x00\x07\ud800\u202e]]>*_[x](y)"


def compared(
    verdict: Verdict, name: str = "s", reason: str = "", pairs: Sequence[tuple[float, float]] = PAIRS
) -> ComparedCase:
    benchmark = Benchmark((name, name, "core", ()), f"{name} [core]", "simulated", "min")
    return compared_case(benchmark, verdict, reason, "confirmed", effect_and_times(pairs))


def report(items: Sequence[ComparedCase], *reasons: str) -> Gate:
    return concluded(items, *reasons, notes=[HOSTILE])


def test_junit_has_the_verdict_of_each_benchmark() -> None:
    suite = ET.fromstring(outputs.junit(report([compared(v, v) for v in Verdict], "the control moved")))[0]
    assert {case.get("classname"): [child.tag for child in case] for case in suite} == {
        Verdict.SAME: ["system-out"],
        Verdict.FASTER: ["system-out"],
        Verdict.SLOWER: ["failure"],
        Verdict.INCONCLUSIVE: ["skipped"],
        **{v: ["error"] for v in (Verdict.MISSING, Verdict.FAILED, Verdict.NEW, "gate")},
    }
    for (outcome,) in suite:
        assert outcome.text and outcome.get("message") in (
            [None] if outcome.tag == "system-out" else [outcome.text]
        )
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["8", "1", "4", "1"]


def test_names_of_any_characters_stay_text_in_each_output() -> None:
    hostile = report([compared(Verdict.SLOWER, HOSTILE, HOSTILE), compared(Verdict.SAME, HOSTILE)], HOSTILE)
    case = ET.fromstring(outputs.junit(hostile).encode())[0][0]
    for shown in (case.get("classname"), case.get("name"), case[0].get("message"), case[0].text):
        assert shown and "<script>alert(1)</script>" in shown and r"\x1b[31m\x00\x07\ud800" in shown
    assert all(line.replace("\n", "", 1).isprintable() for line in outputs.lines(hostile))
    text = outputs.markdown(hostile)
    assert {*re.findall(r"<(\w+)", text)} == {"details", "summary"}
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {7}
    assert "`" not in text and "](" not in text


@pytest.mark.parametrize("mark", "\\`*_[]|~<&")
def test_markdown_shows_names_literally(mark: str) -> None:
    text = outputs.markdown(concluded([compared(Verdict.SLOWER, f"a{mark}b")]))
    assert f"a{mark}b" not in text and html.unescape(text).count(f"a{mark}b") == 1


def test_outputs_of_thousands_of_benchmarks_are_shortened() -> None:
    slower, same = ([compared(v, f"s{i}") for i in range(5000)] for v in (Verdict.SLOWER, Verdict.SAME))
    text, lines = outputs.markdown(report(slower)), outputs.lines(report(same))
    assert len(text) < 2**20 and "and 4800 more" in text
    assert len(lines) < 10 and any("5000 more" in line for line in lines)


def _read_seconds(text: str) -> tuple[float, float]:
    """Returns the least and the largest time that a table shows so, seconds."""
    number, unit = text.split()
    scale, error = (
        {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit],
        0.5 * 0.1 ** len(number.partition(".")[2]),
    )
    return (float(number) - error) * scale, (float(number) + error) * scale


def _assert_agrees(base: str, head: str, change: str) -> None:
    (base_low_s, base_high_s), (head_low_s, head_high_s) = _read_seconds(base), _read_seconds(head)
    ratio = 1 + float(change.rstrip("%")) / 100
    error = 0.0005 + 1e-9
    assert head_low_s / base_high_s - error <= ratio <= head_high_s / base_low_s + error, (base, head, change)


@pytest.mark.parametrize("seed", range(40))
def test_times_and_change_beside_each_other_agree_to_the_printed_digits(seed: int) -> None:
    """Pairs that drift and scatter: their median ratio is not the ratio of their medians."""
    rng = random.Random(seed)
    base_s = 10 ** rng.uniform(-7, 0)
    drifts = [rng.lognormvariate(0, 0.5) for _ in range(rng.randint(1, 22))]
    pairs = [(base_s * drift, base_s * drift * rng.lognormvariate(0.05, 0.3)) for drift in drifts]
    verdict = rng.choice([Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.FASTER])
    gate = report([compared(verdict, pairs=pairs)])
    line = next(line for line in outputs.lines(gate) if " -> " in line)
    _assert_agrees(*line.partition(" pairs; ")[2].split(" -> "), re.findall(r"[-+][\d.]+%", line)[0])
    row = next(row for row in outputs.markdown(gate).splitlines() if row.startswith(f"| {verdict}"))
    base, head, change = (cell.strip() for cell in row.split("|")[3:6])
    _assert_agrees(base, head, change.partition(" (")[0])
    (case,), (point,) = gate.benchmarks, outputs.gate_points(gate)
    assert case.effect and case.head_s / case.base_s == pytest.approx(case.effect.ratio)
    assert point.time_s == case.head_s
    assert point.low_s is None or point.high_s is None or point.low_s <= point.time_s <= point.high_s


def test_json_is_strict_and_read_back() -> None:
    single = compared(Verdict.INCONCLUSIVE, pairs=[(1.0, 2.0)])
    first, second = json.loads(encode_gate(report([single, compared(Verdict.SAME, HOSTILE)])))["benchmarks"]
    assert (first["effect"]["high"], first["effect"]["ratio"]) == (None, pytest.approx(2.0))
    assert (first["verdict"], second["name"]) == ("inconclusive", HOSTILE)
    printable = msgspec.structs.replace(report([single, compared(Verdict.SAME)]), notes=())
    assert convert(decode(encode_gate(printable).encode()), Gate).benchmarks == printable.benchmarks


MACHINE = {"cpu": "Some CPU @ 2 GHz", "cores": 2}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(history, "machine_kind", lambda: MACHINE)
    return history.history_file(tmp_path / "h")


def gate_of(time_s: float | None, commit: str = "c" * 40, *reasons: str) -> Gate:
    benchmark = Benchmark(("s", "n", "core", ()), "s n [core]", "simulated", "min")
    return concluded(
        [compared_case(benchmark, Verdict.SAME, figures=(None, None, time_s))], *reasons, head=commit
    )


def test_lines_are_only_added_and_one_cut_short_is_left_out(path: Path) -> None:
    assert history.append(path, gate_of(1e-5, "a"))
    first = path.read_bytes()
    assert history.append(path, gate_of(2e-5, "b")) and path.read_bytes().startswith(first)
    with path.open("a") as file:
        file.write('{"kind":"hist')
    lines = read_history(history.history_file(path.parent), MACHINE)
    assert {line.revision: line.times_s["s n [core]"] for line in lines} == {"a": 1e-5, "b": 2e-5}


def test_untrusted_and_unmeasured_gates_are_not_appended(path: Path) -> None:
    assert not history.append(path, gate_of(1e-5, "a", "the control moved"))
    assert not history.append(path, gate_of(None)) and not path.exists()


def test_another_machine_is_no_baseline(path: Path) -> None:
    history.append(path, gate_of(1e-5))
    with pytest.raises(UnreadableRunError, match="different machines cannot be compared"):
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
        history.append(path, gate_of(1e-5, revision * 40))
    monkeypatch.setattr(history, "machine_kind", lambda: {**MACHINE, "cpu": "Another CPU"})
    history.append(history.history_file(path.parent), gate_of(2e-5, "d" * 40))
    if beside:
        made_up.write(path.with_name("run.jsonl"), made_up.run(list(made_up.dispatch())))
    assert dtbench("report", str(path.parent), "-o", "page.html")[:2] == (0, "the report is in page.html\n")
    page = Path("page.html").read_text()
    assert "Some CPU @ 2 GHz, 2" in page and "Another CPU, 2" in page
    assert "abc"[revisions - 1] * 40 in page and "d" * 40 in page
