"""The lines of results as they come: a table in the form of nccl-tests for collectives, else one line for each.

Of nccl-tests (src/common.cu, its README): size in bytes; count, the elements that a rank gives to or gets from the
call, whichever are fewer; type by NCCL's name; algbw and busbw in 10^9 bytes per second; how many values are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtbench.suite import Result
from dtbench.text.units import format_bandwidth, format_seconds, format_size, format_spread, significant

# torch's dtype -> NCCL's name (nccl-tests src/common.cu, test_typenames), bytes per element.
_TYPES = {
    "float32": ("float", 4),
    "float64": ("double", 8),
    "float16": ("half", 2),
    "bfloat16": ("bfloat16", 2),
}
# Collectives of which a rank holds a share on one side: their count is that share's.
_SHARED = {"all_gather", "reduce_scatter", "all_to_all", "scatter"}
_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("time", "(us)", 10),
    ("spread", "", 7),
    ("algbw", "(GB/s)", 9),
    ("busbw", "(GB/s)", 9),
    ("#wrong", "", 7),
)


class Lines:
    """Says of each result what is to be printed."""

    def __init__(self) -> None:
        self._block: tuple[object, ...] = ()

    def of(self, result: Result, change: str = "") -> Iterator[str]:
        """change: against an earlier run, in words."""
        cells = _row(result)
        if cells is None:
            self._block = ()
            yield line_of(result, change)
            return
        block = (result.name, *(v for k, v in result.params.items() if k not in ("size", "dtype")))
        if block != self._block:
            self._block = block
            yield from _head(result)
        row = "".join(f" {cell:>{width - 1}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))
        notes = "; ".join(note for note in (change, result.reason) if note)
        yield f"{row}  {notes}".rstrip()


def _row(result: Result) -> list[str] | None:
    """The cells of a collective that went well; None of anything else."""
    size, dtype, ranks = (result.params.get(name) for name in ("size", "dtype", "ranks"))
    known = result.suite == "collectives" and isinstance(size, int) and isinstance(ranks, int)
    if not known or dtype not in _TYPES or result.status != "ok" or result.estimate_s is None:
        return None
    name, itemsize = _TYPES[str(dtype)]
    count = int(size or 0) // itemsize // (int(ranks or 1) if result.name in _SHARED else 1)
    bandwidths = [_bandwidth(b) for b in (result.algbw_Bps, result.busbw_Bps)]
    time = significant(result.estimate_s * 1e6)
    return [str(size), str(count), name, time, format_spread(result.spread), *bandwidths, "0"]


def _bandwidth(rate: float | None) -> str:
    """In 10^9 bytes per second; of what is next to nothing as many decimals as the column has room for."""
    if rate is None:
        return "N/A"
    return significant(rate / 1e9, 3) if rate >= 1e6 else f"{rate / 1e9:.5f}"


def _head(result: Result) -> Iterator[str]:
    params = {k: v for k, v in result.params.items() if k not in ("size", "dtype", "mesh_dim", "ranks")}
    words = ", ".join(f"{k}={v}" for k, v in params.items())
    over = f"over {result.params.get('mesh_dim')}, {result.params.get('ranks')} ranks"
    yield f"# {result.suite} {result.name} {over}; {words}"
    for line in zip(*((name, unit) for name, unit, _ in _COLUMNS), strict=True):
        yield (
            "#" + "".join(f"{text:>{width}}" for text, (_, _, width) in zip(line, _COLUMNS, strict=True))[1:]
        )


def line_of(result: Result, change: str = "") -> str:
    """`dispatch add mesh=8 call=cached | core  3.56 µs  +10%  no change`."""
    params = " ".join(
        f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in result.params.items()
    )
    name = result.suite if result.name == result.suite else f"{result.suite} {result.name}"
    words = [f"{name} {params}".rstrip(), "|", result.impl]
    if result.status == "ok" and result.time_s is not None:
        words += [format_seconds(result.estimate_s), format_spread(result.spread)]
        bandwidth = result.busbw_Bps if result.busbw_Bps is not None else result.algbw_Bps
        if bandwidth is not None:
            words.append(format_bandwidth(bandwidth))
    else:
        where = "" if result.rank is None else f" on rank {result.rank}"
        words.append(f"{result.status}{where}")
    words += [change] if change else []
    if result.reason:
        words.append(f"({result.reason})")
    return "  ".join(words).replace("  |  ", " | ")
