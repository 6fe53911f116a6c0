"""What is wrong in a log never becomes a time: it is refused or flagged, with the reason and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtbench.importers import checks, convert
from dtbench.importers.import_logs import report
from dtbench.importers.model import printed
from dtbench.importers.registry import EXPECTED, parse
from dtbench.suite import Result
from dtbench.suite.errors import DtbenchError, UnreadableRunError, UsageError
from dtbench.tests.made_up_logs import (
    DEEPSPEED,
    DEEPSPEED_ROW,
    ML_ENGINEERING,
    OSU,
    SIZES,
    Layout,
    document,
    json_text,
    read,
    table,
    time_us,
)


def faults(text: str) -> dict[int, list[str]]:
    """Line -> what is wrong with its figures."""
    found: dict[int, list[str]] = {}
    for each in read(text).tables:
        for row in each.rows:
            reasons = [figure.fault for figure in row.figures if figure.fault]
            if reasons:
                found[row.line] = reasons
    return found


def run_of(*texts: str) -> list[Result]:
    return convert.to_run([read(text, f"{i}.log") for i, text in enumerate(texts)], [])[1]


def line_of(text: str, size: int) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if re.match(rf" +{size} ", line))


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1),
        ("sendrecv", 3, 1),
    ],
)
def test_factors(collective: str, ranks: int, factor: float) -> None:
    assert checks.busbw_factor(collective, ranks) == factor


@pytest.mark.parametrize(
    ("text", "value", "half"),
    [
        ("12.30", 12.3, 0.005),
        ("123", 123, 0.5),
        ("1.04858e+06", 1048580, 5),
        ("0e+00", 0, 0.5),
        ("-1", -1, 0.5),
    ],
)
def test_a_printed_number_is_an_interval(text: str, value: float, half: float) -> None:
    number = printed(text)
    assert number is not None and (number.value, number.half) == (value, pytest.approx(half))


@pytest.mark.parametrize(
    "text", ["", "N/A", "nan", "inf", "1_000", "0x10", "1.2.3", "1e999", "١٢", "1,5", "+"]
)
def test_what_is_no_number(text: str) -> None:
    assert printed(text) is None


TAMPERED: dict[str, tuple[Callable[[str], str], str]] = {
    "time": (lambda row: row.replace("61.94", "60.94"), "the row says"),
    "size": (lambda row: row.replace("4194304 ", "4194305 "), "the row says 4194305"),
    "count": (lambda row: row.replace("1048576 ", "1048577 "), "1048577 elements of float32"),
    "type": (lambda row: row.replace(" float ", "double "), "elements of float64"),
    "algbw": (lambda row: re.sub(r"67\.\d+", "76.54", row, count=1), "the row says 76.5"),
    "busbw": (lambda row: re.sub(r"118\.\d+", "119.5", row, count=1), "is not 1.75 x its algbw"),
    "a word for a number": (lambda row: re.sub(r"67\.\d+", "oops", row, count=1), ""),
    "an added value": (lambda row: row + "  5", "1 value(s) more than the header has columns"),
    "a negative time": (lambda row: row.replace("61.94", "-61.94"), "no number for time"),
    "nan": (lambda row: re.sub(r"67\.\d+", "nan", row, count=1), "no number for algbw nan"),
    "inf": (lambda row: re.sub(r"118\.\d+", "inf", row, count=1), "no number for busbw inf"),
    "wrong": (lambda row: re.sub(r" 0$", " 7", row), "the data were wrong: wrong elements: 7"),
    "wrong in the millions": (lambda row: re.sub(r" 0$", " 1.04858e+06", row), "wrong elements: 1.04858e+06"),
    "wrong is nan": (lambda row: re.sub(r" 0$", " nan", row), "its check of the data says nan"),
    "wrong is negative": (lambda row: re.sub(r" 0$", " -3", row), "wrong elements: -3"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_row_that_was_altered_loses_its_numbers_and_no_other_does(what: str) -> None:
    text = table()
    change, says = TAMPERED[what]
    line = line_of(text, 4194304)
    row = text.splitlines()[line - 1]
    assert change(row) != row
    text = text.replace(row, change(row))
    if says:
        found = faults(text)
        assert list(found) == [line] and any(says in reason for reason in found[line])
    else:  # it is not even whole: left out, and said so
        log = read(text)
        assert len(log.tables[0].rows) == len(SIZES) - 1
        assert log.problems[0].line == line and "incomplete" in log.problems[0].text
    good = {r.size_bytes: r for r in run_of(text) if r.status == "ok" and not r.params["in_place"]}
    for size, result in good.items():
        if size not in (4194304, 4194305):
            assert result.time_s is not None and result.time_s.median == pytest.approx(
                time_us(size or 0) * 1e-6, rel=6e-3
            )
    bad = [r for r in run_of(text) if r.status in ("failed", "wrong")]
    assert all(r.time_s is None and r.samples_s == () and r.busbw_Bps is None for r in bad)
    assert all(f"line {line}" in r.reason for r in bad)
    assert bool(bad) == bool(says)


def test_each_figure_of_each_row_whose_first_digit_is_altered_is_refused() -> None:
    text = table(redop="sum", ranks=8)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        words = list(re.finditer(r"(?<= )\d[\d.]*(?= |$)", line)) if re.match(" +1", line[:12]) else []
        for word in words:
            digit = str(int(word[0][0]) % 9 + 1)
            altered = line[: word.start()] + digit + line[word.start() + 1 :]
            found = faults("\n".join([*lines[:number], altered, *lines[number + 1 :]]))
            assert list(found) == [number + 1], altered


@pytest.mark.parametrize(
    ("row", "says"),
    [
        # Both bandwidths are coarse, and each alone allows the time; that they are of one does not.
        ("512  128  float  sum  -1  34.94  0.01  0.03  0  35.20  0.01  0.03  0", ""),
        ("512  128  float  sum  -1  37.94  0.01  0.03  0  35.20  0.01  0.03  0", "0.02362 GB/s of busbw"),
        ("512  128  float  sum  8  34.94  0.01  0.03  0  35.20  0.01  0.03  0", "its root is rank 8 of 8"),
        ("512  128  float  sum  -2  34.94  0.01  0.03  0  35.20  0.01  0.03  0", "its root is rank -2 of 8"),
    ],
)
def test_figures_that_only_together_cannot_be(row: str, says: str) -> None:
    text = table(sizes=SIZES[:2])
    first = text.splitlines()[line_of(text, 1024) - 1]
    found = list(faults(text.replace(first, f"  {row}\n{first}")).values())
    assert bool(found) == bool(says) and all(says in reason for reasons in found for reason in reasons)


def test_the_printed_average_is_compared() -> None:
    text = table()
    assert not read(text).problems
    row = text.splitlines()[line_of(text, 4194304) - 1]
    found = read(text.replace(row + "\n", "")).problems
    assert len(found) == 1 and "rows are missing or were altered" in found[0].text
    assert "Avg bus" in text.splitlines()[found[0].line]  # one line was taken out above it
    assert "were left out of the log" in read(text.replace(row, "...")).problems[0].text


def test_a_log_without_an_end_says_so_and_keeps_its_rows() -> None:
    log = read(table(layout=Layout(foot=False)))
    assert "no end" in log.problems[0].text and len(log.tables[0].rows) == len(SIZES)


@pytest.mark.parametrize("ranks", [1])
def test_tables_of_one_rank_are_refused(ranks: int) -> None:
    text = table("reduce", ranks)
    assert "one rank: nothing is sent" in read(text).tables[0].refusal
    with pytest.raises(UsageError, match=r"nothing can be imported.*one rank"):
        run_of(text)
    # Beside a good table they are recorded as skipped, without times.
    results = run_of(text + table("all_reduce", 2))
    skipped = [r for r in results if r.params["ranks"] == 1]
    assert skipped and all(r.status == "skipped" and r.time_s is None for r in skipped)
    assert any(r.status == "ok" and r.params["ranks"] == 2 for r in results)


def test_processes_that_did_not_find_each_other_are_refused() -> None:
    """nccl-tests built without MPI: each process prints a table of its own, all of them at once."""
    one, two = (table("all_reduce", 2).replace("Pid 9000", f"Pid {pid}").splitlines() for pid in (1, 2))
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    tables = read(mixed).tables
    assert tables and all("without MPI" in each.refusal for each in tables if each.rows)
    with pytest.raises(UsageError, match="without MPI"):
        run_of(mixed)


def test_a_killed_run_and_its_repetition_in_one_file_are_two_launches() -> None:
    cut = table(sizes=SIZES[:4], layout=Layout(foot=False)).replace("Pid 9000", "Pid 77")
    results = run_of(cut + "Killed\n" + table())
    assert {r.launch for r in results if r.size_bytes == SIZES[0]} == {0, 1}
    assert {r.launch for r in results if r.size_bytes == SIZES[-1]} == {0}


def test_a_footer_that_counts_errors_which_no_row_shows_spoils_them_all() -> None:
    text = table(layout=Layout(checked=False))
    assert not faults(text)
    text = text.replace("values : 0 OK", "values : 4 FAILED")
    assert all("no row says which" in reason for reasons in faults(text).values() for reason in reasons)
    with pytest.raises(UsageError, match="4 values out of bounds"):
        run_of(text)


@pytest.mark.parametrize(
    ("deviation", "bad"), [("2e-07", False), ("1e+00", True), ("nan", True), ("0e+00", False)]
)
def test_deviations_of_old_logs(deviation: str, bad: bool) -> None:
    text = table(layout=Layout("error"), wrong=lambda _size, _in_place: deviation)
    assert bool(faults(text)) == bad


def test_a_benchmark_that_failed_says_so() -> None:
    head = "\n".join(line for line in table().splitlines() if line.startswith("#") and "Rank" in line)
    failed = (
        head
        + "\nnode-7: Test CUDA failure common.cu:1304 'CUDA-capable device(s) is/are busy or unavailable'\n"
    )
    with pytest.raises(UsageError, match=r"the benchmark failed, line 9: Test CUDA failure common.cu:1304"):
        run_of(failed)
    log = read(table() + " .. node-7 pid 662195: Test failure common.cu:1189\n")
    assert log.failures and any("Test failure" in line for line in report(log))


def test_units_that_do_not_fit_are_refused_and_known_ones_are_read() -> None:
    text = table()
    assert "expected one unit of time" in read(text.replace("(us)", "(lightyears)")).tables[0].refusal
    mixed = text.replace("(us)", "(ms)", 1)
    assert "expected one unit of time" in read(mixed).tables[0].refusal
    # Milliseconds that are said to be microseconds break the first law in every row.
    in_ms = table(time=lambda size, in_place: time_us(size, in_place) / 1e3)
    assert len(faults(in_ms.replace("(us)", "(ms)"))) == len(SIZES)


def test_a_name_that_the_numbers_contradict_is_refused() -> None:
    text = table("broadcast").replace("broadcast_perf", "all_reduce_perf")
    refusal = read(text).tables[0].refusal
    assert "all_reduce among 8 ranks" in refusal and "would have 1.75" in refusal
    assert "hypercube" in read(table().replace("all_reduce_perf", "hypercube_perf")).tables[0].refusal
    assert "no program of nccl-tests" in read(table().replace("all_reduce_perf", "my_perf")).tables[0].refusal


def test_zero_bytes_are_no_figure() -> None:
    row = (
        "           0             0     float     sum      -1" + 2 * "    15.51    0.00    0.00      0" + "\n"
    )
    text = table()
    first = text.splitlines(keepends=True)[line_of(text, 1024) - 1]
    results = run_of(text.replace(first, row * 3 + first))
    empty = [r for r in results if r.size_bytes == 0]
    assert empty and all(r.status == "skipped" and r.time_s is None for r in empty)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "hello", "{", '{"a": 1}', "[1, 2]", "\x00" * 100, '{"kind":"run","schema":1}']
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UnreadableRunError) as refused:
        read(text)
    is_object = text.endswith("}")
    assert ("not a whole JSON file of nccl-tests" if is_object else EXPECTED) in str(refused.value)


def test_truncated_json_is_refused() -> None:
    text = json_text()
    for end in (10, 100, len(text) // 2, len(text) - 1):
        with pytest.raises(UnreadableRunError, match="not a whole JSON file of nccl-tests"):
            read(text[:end])


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 9, "version is 9, expected one of 1, 2, 3, 4"),
        (("version",), True, "version is True, expected one of 1, 2, 3, 4"),
        (("config",), None, "config is missing, expected an object"),
        (("results",), {}, "results is {}"),
        (("results", 0), 3, "results"),
        (("results", 0, "size"), -1, "size is -1"),
        (("results", 0, "size"), "big", "size is 'big'"),
        (("results", 0, "type"), 4, "type is 4, expected a string"),
        (("config", "devices", 0, "rank"), -1, "rank is -1"),
    ],
)
def test_json_with_other_fields_is_refused(path: tuple[str | int, ...], value: object, says: str) -> None:
    made = document()
    place = made
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(UnreadableRunError, match=re.escape(says)):
        read(json.dumps(made))


def test_json_rows_with_bad_numbers_lose_them() -> None:
    made = document()
    made["results"][0]["out_of_place"]["time"] = "nan"
    made["results"][1]["out_of_place"]["nwrong"] = 4.0
    made["results"][2]["out_of_place"]["bus_bw"] *= 1.01
    log = read(json.dumps(made))
    reasons = [row.figures[0].fault for row in log.tables[0].rows[:4]]
    assert reasons[3] == "" and "no number for time" in reasons[0] and "wrong elements: 4" in reasons[1]
    assert "is not 0.875 x its algbw" in reasons[2]


# ------------------------------------------------------------------------------------- anything at all

BASES = (
    table(hosts=2),
    table("all_gather", 12, tuple(s // 48 * 48 for s in SIZES), layout=Layout("old", tag="[1,0]<stdout>:")),
    json_text(version=3),
    DEEPSPEED.format(name="all_reduce") + DEEPSPEED_ROW,
    OSU.format(program="allgather", title="Allgather"),
    ML_ENGINEERING,
    '{"numCycle":0, "name":"AllReduce", "nodes":1, "ranks":8, "gpusPerRank":1, "size":1024, "type":"float", '
    '"redop":"sum", "inPlace":0, "time":10.0, "algBw":0.1024, "busBw":0.1792, "wrong":"0"}\n' * 2,
)
WORDS = (
    *("N/A", "nan", "-inf", "1e+99", "9" * 20, "9" * 40, "-1", "0", "...", "1.04858e+06", "1e-99", "٣"),
    *("\x1b[2J", "float", "#", "|", "\ud7ff", '"', "null", "{"),
    "Rank  0 Group  0 Pid 1 on x device  0 [00] y",
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A log with words replaced, taken out or put in, lines moved or doubled, and cut somewhere."""
    text = draw(st.sampled_from(BASES))
    for _ in range(draw(st.integers(0, 6))):
        words = list(re.finditer(r"\S+", text))
        if not words:
            break
        word = words[draw(st.integers(0, len(words) - 1))]
        new = draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=8), st.integers(-10, 2**70).map(str)))
        end = word.end() if draw(st.booleans()) else word.start()
        text = text[: word.start()] + new + text[end:]
    lines = text.split("\n")
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), lines[draw(st.integers(0, len(lines) - 1))])
    return "\n".join(lines)[: draw(st.integers(0, len(text) + 1)) if draw(st.booleans()) else None]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(damaged(), st.text(max_size=300)))
def test_nothing_breaks_it_and_what_passes_obeys_the_laws(text: str) -> None:
    try:
        log = parse(text.encode("utf-8", "surrogatepass"), "some_allreduce.log")
        checks.check(log)
        list(report(log))
        header, results = convert.to_run([log], [])
    except DtbenchError as error:
        assert str(error)
        return
    assert header.mesh.shape[-1] >= 2
    for result in results:
        if result.status != "ok":
            assert result.reason and result.time_s is None
            continue
        assert result.time_s is not None and result.size_bytes and result.algbw_Bps
        assert 0 < result.time_s.min <= result.time_s.max < 1e12
        assert result.algbw_Bps == pytest.approx(result.size_bytes / result.time_s.p25)
    # Rows as they were printed give the times they were made with: an altered one is never taken over.
    if text in BASES[:1]:
        for result in results:
            assert result.time_s is not None
            made = time_us(result.size_bytes or 0, bool(result.params["in_place"])) * 1e-6
            assert result.time_s.median == pytest.approx(made, rel=6e-3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_time_that_differs_from_the_bandwidth_beside_it_is_always_found(data: st.DataObject) -> None:
    text = table(sizes=SIZES[4:])
    line = line_of(text, data.draw(st.sampled_from(SIZES[4:])))
    row = text.splitlines()[line - 1]
    column = data.draw(st.sampled_from((5, 6, 7, 9, 10, 11)))  # time, algbw and busbw of both placements
    words = row.split()
    factor = data.draw(st.floats(0.001, 1000).filter(lambda x: abs(x - 1) > 0.03))
    words[column] = f"{float(words[column]) * factor:.2f}"
    assert list(faults(text.replace(row, "  ".join(words)))) == [line]


def test_long_lines_and_many_lines_take_no_long_time(tmp_path: Path) -> None:
    """Linear work: a line of a megabyte, and a log with tens of thousands of NCCL's."""
    text = "a " * 500_000 + "\n" + "1 " * 500_000 + "\n" + "(" * 500_000 + "\n" + table()
    assert read(text).rows == len(SIZES)
    info = "node-7:4242:4343 [0] NCCL INFO Channel 00 : 0[101c0] -> 8[101c0] [send] via NET/AWS Libfabric/1/GDRDMA\n"
    assert read(info * 30_000 + table()).rows == len(SIZES)
