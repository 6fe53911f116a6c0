"""Logs with made-up times in the layouts of other benchmarks, for tests only: nothing here was measured."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.importers import checks
from dtbench.importers.import_logs import parse
from dtbench.importers.model import Log
from dtbench_core.cost.ring import busbw_factor

PROGRAMS = {"all_to_all": "alltoall"}
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
REDUCES = ("all_reduce", "reduce_scatter", "reduce", "sendrecv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SIZES = tuple(1024 * 4**k for k in range(9))  # 1 KiB to 64 MiB

NCCL = "node-7:4242:4343 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo RING proto LL\n"
UNRELATED = "[1622510346.876958] [g0185:144167:0] ucp_context.c:1437 UCX  WARN  version is incompatible\n"


def time_us(size: int, in_place: bool = False) -> float:
    """20 us and 100 GB/s, in place 3 % less."""
    return (20.0 + size / 100e3) * (0.97 if in_place else 1.0)


def digits(value: float, width: int) -> str:
    """Formats a number in `width` columns, shortened as by nccl-tests."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


@dataclass(frozen=True)
class LogLayout:
    """The format of a printed table. era: modern (2.13 on) or error (2.0 to 2.12).

    tag: what a launcher puts before each line. cut: what is printed between the three parts of a row.
    """

    era: str = "modern"
    tag: str = ""
    cut: Callable[[int], str] = lambda _: ""
    head: bool = True  # the program's name and the list of ranks
    foot: bool = True
    checked: bool = True


def table(
    collective: str = "all_reduce",
    ranks: int = 8,
    sizes: Sequence[int] = SIZES,
    *,
    redop: str | None = None,
    hosts: int = 1,
    layout: LogLayout = LogLayout(),
    time: Callable[[int, bool], float] = time_us,
    wrong: Callable[[int, bool], str] = lambda _size, _in_place: "0",
) -> str:
    """A log of one table."""
    head = [
        "# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807",
        f"# Collective test starting: {PROGRAMS.get(collective, collective)}_perf",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 128 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1",
        "#",
        "# Using devices",
        *(
            f"#  Rank {r:2} Group  0 Pid {9000 + r} on node-{7 + r * hosts // ranks} device {r:2} [1b:00] NVIDIA H100"
            for r in range(ranks)
        ),
    ]
    op, factor = redop or ("sum" if collective in REDUCES else "none"), busbw_factor(collective, ranks)

    def row(size: int) -> str:
        start = f"{size:12}  {size // 4 // (ranks if collective in PARTS else 1):12}     float"
        if layout.era == "modern":
            start += f"  {op:>6}  {0 if collective in ROOTED else -1:6}"
        else:  # up to 2.12 a column is there where the collective needs it, and empty for alltoall
            start += f"  {op:>6}" if collective in REDUCES else ""
            start += f"  {0:6}" if collective in ROOTED else ""
            start += " " * 8 if collective == "all_to_all" else ""
        parts = [start]
        for in_place in (False, True):
            us = time(size, in_place)
            algbw, check = size / us / 1e3, wrong(size, in_place) if layout.checked else "N/A"
            parts.append(f"  {digits(us, 7)}  {digits(algbw, 6)}  {digits(algbw * factor, 6)}  {check:>6}")
        return "".join(part + layout.cut(i) for i, part in enumerate(parts)) + "\n"

    rows = "".join(map(row, sizes)).splitlines()
    checks = [wrong(size, in_place) for size in sizes for in_place in (False, True)]
    bad = sum(text != "0" for text in checks) if layout.era == "modern" else 0
    foot = [
        f"# Out of bounds values : {bad} {'FAILED' if bad else 'OK'}",
        "# Avg bus bandwidth    : 1.0 ",
        "#",
    ]
    lines = [*head * layout.head, "#", *_titles(collective, layout.era), *rows, *foot * layout.foot]
    return "".join(f"{layout.tag}{line}\n" for line in lines)


def _titles(collective: str, era: str) -> list[str]:
    first = "#       size         count      type"
    if era == "modern":
        first, check = f"{first}   redop    root", "#wrong"
    else:
        first += "   redop" if collective in (*REDUCES, "all_to_all") else ""
        first, check = first + ("    root" if collective in ROOTED else ""), "error"
    group, unit = f"     time   algbw   busbw  {check}", "     (us)  (GB/s)  (GB/s)        "
    return [
        "#                 out-of-place            in-place",
        first + 2 * group,
        "#        (B)    (elements)" + " " * 20 + 2 * unit,
    ]


# Positions of further columns in a row of `table`: the number of columns before them.
PLACES = {"before redop": 3, "before the times": 5, "between the placements": 9, "behind": 13}


def widened(
    text: str,
    at: int,
    names: Sequence[str],
    values: Callable[[int], Sequence[str]] = lambda _: ("RING", "LL", "2"),
) -> str:
    """The log with further columns: their names in the header, if any, and per size their values in the rows."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        if "algbw" in words:
            words[at + 1 : at + 1] = names  # the sign # counts as a word
        elif words and words[0].isdigit():
            words[at:at] = values(int(words[0]))
        lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def rccl_csv(head: str, row: str, sizes: Sequence[int] = SIZES, ranks: int = 8) -> str:
    """The CSV that rccl-tests writes for all_reduce. row: what stands before and behind a result, around {}."""
    lines = [head]
    for size in sizes:
        for in_place in (False, True):
            us = time_us(size, in_place)
            algbw = size / us / 1e3
            busbw = algbw * busbw_factor("all_reduce", ranks)
            values = (size, '"float"', '"sum"', int(in_place), us, algbw, busbw, '"0"')
            lines.append(row.format(("," if ", " not in head else ", ").join(map(str, values))))
    return "\n".join(lines) + "\n"


def document(version: int = 1, **changes: Any) -> dict[str, Any]:
    """The JSON of nccl-tests -J of all_gather among 8 ranks; from version 2 on with single iterations."""
    results = []
    for size in SIZES:
        entry: dict[str, Any] = {"size": size, "count": size // 32, "type": "float", "redop": "none"}
        for in_place, key in ((False, "out_of_place"), (True, "in_place")):
            us = time_us(size, in_place)
            algbw = size / us / 1e3
            numbers = {"time": us, "alg_bw": algbw, "bus_bw": algbw * busbw_factor("all_gather", 8)}
            entry[key] = {name: round(value, 6) for name, value in numbers.items()} | {"nwrong": 0.0}
            if version > 1:
                times = [us * (1 + k / 10) for k in range(-1, 3)]
                entry[f"{key}_per_iter"] = {"skipped_iterations": 1, "times_us": times}
        results.append(entry | {"root": "    -1", "actual_iterations": 20, "experiment_name": ""})
    devices = [
        {"rank": r, "pid": 9000 + r, "hostname": f"node-{r // 4}", "device_info": "NVIDIA H100"}
        for r in range(8)
    ]
    return {
        "version": version,
        "start_time": "2026-01-01 12:00:00",
        "args": ["/home/somebody/build/all_gather_perf_mpi", "-b", "1K"],
        "env": ["AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "USER=somebody", "HOME=/home/somebody"],
        "nccl_version": 22606,
        "config": {"nthreads": 1, "ngpus": 1, "blocking_collectives": "false", "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "unchecked"},
        "errors": [""],
        **changes,
    }


def json_text(**changes: Any) -> str:
    """`document` as the tool writes it: in one line, slashes escaped."""
    return json.dumps(document(**changes), separators=(",", ":")).replace("/", "\\/")


def read(text: str, name: str = "some.log", **options: object) -> Log:
    log = parse(text.encode(), name)
    checks.check(log, **options)  # type: ignore[arg-type]
    return log


DEEPSPEED = """x3: ---- Performance of {name} on 8 devices ---------------------------------------------------------
x3: Size (Bytes)         Description               Duration             Throughput (Gbps)    BusBW (Gbps)
x3: ----------------------------------------------------------------------------------------------------
"""
# 1 MiB in 100 us are 83.886 Gbps; its all_reduce throughput counts them twice.
DEEPSPEED_ROW = (
    "x3: 1.0 MB               262144x4                  100.000 us           167.772              146.801\n"
)
OSU = """$ mpirun -np 4 ./osu_{program} -d cuda
# OSU MPI-CUDA {title} Latency Test v7.4
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                      10.00              9.00             11.00        1000
[a100-01:mpi_rank_0][dreg_register] [Performance Impact Warning]: Entries are being evicted
1048576               100.00             90.00            110.00         100
"""
ML_ENGINEERING = """The average bandwidth of all_reduce over 4 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   0.02GBps |   0.01GBps |
|    1MiB |  15.73GBps |  10.49GBps |
|    4GB |  15.73GBps |  10.49GBps |
"""
