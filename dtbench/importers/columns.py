"""Values of rows and the columns they are of: by the header's names, and where it lacks some by the bandwidths.

nccl-tests and rccl-tests print more columns with each version: statistics of the iterations, the time by events, the
algorithm, protocol and channels. What is not known here is kept aside.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.importers.model import DTYPES, Log, LogFigure, LogRow, LogTable, amount, collective_of, printed
from dtbench.importers.text import value_of

REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
# A placement's columns, which every version prints together.
TIMED = {"time": 1e-6, "algbw": 1e9, "busbw": 1e9}
CHECKS = ("#wrong", "wrong", "error")
_OF_ROW = ("size", "count", "type", "redop", "root", "inplace")
_READ = (*_OF_ROW, "collective", "ranks", "gpus", "gpusperrank", *TIMED, *CHECKS)
_SAID_ELSEWHERE = ("numcycle", "nodes", "rankspernode")
# Bandwidths printed so finely tell a time from another number; the 0.00 of a small size does not.
_FINE = 0.01

Names = tuple[str, ...]
Words = Sequence[str]
Row = tuple[int, Words]  # with its line


def groups_of(names: Names) -> list[range]:
    """The places of each placement's columns: a placement ends where a name comes again. None where one
    lacks its time or a bandwidth."""
    starts = [0]
    for place, name in enumerate(names):
        if name and name in names[starts[-1] : place]:
            starts.append(place)
    groups = map(range, starts, [*starts[1:], len(names)])
    timed = [group for group in groups if {names[i] for i in group} >= TIMED.keys()]
    return timed if all(names.count(name) == len(timed) for name in TIMED) else []


def values_of(names: Names, words: Words) -> dict[str, str]:
    """A row's values by name; of a name that comes again, the first."""
    return dict(reversed([*zip(names, words, strict=False)]))


def add_rows(log: Log, table: LogTable, names: Names, rows: Sequence[Row], optional: int = 0) -> Names:
    """Adds a table's rows and returns the names of their columns. optional: how many of the last a row may lack."""
    if len({len(words) for _, words in rows}) == 1:
        names = _with_unnamed(names, [words for _, words in rows])
    for line, words in rows:
        of = values_of(names, words)
        odd = [k for k in ("count", "root") if of.get(k) and not is_whole(of[k])]
        odd += ["inplace"] if of.get("inplace", "0") not in ("0", "1") else []
        fault = f"its {odd[0]} is {of[odd[0]][:20]!r}" if odd else ""
        if extra := [word for word in words[len(names) :] if value_of(word)[0]]:
            fault = f"it has {len(extra)} value(s) more than the header has columns"
        if len(words) < len(names) and len(words) != len(names) - optional:
            log.say(
                line,
                f"it has {len(words)} of the {len(names)} values that its header names: left out",
                leaves_out=True,
            )
        elif not is_whole(of["size"]) or of["size"][0] == "-":
            log.say(line, f"{fault or 'its size is ' + repr(of['size'][:20])}: left out", leaves_out=True)
        else:
            table.rows.append(_row(line, names, words, fault))
            for place, (name, word) in enumerate(zip(names, words, strict=False), 1):
                if name not in (*_READ, *_SAID_ELSEWHERE):
                    table.aside.setdefault(name[:20] or f"column {place}", {})[word[:20]] = None
    if table.aside:
        columns = (f"{name} ({', '.join([*held][:4])})" for name, held in table.aside.items())
        log.say(table.line, f"columns kept aside: {', '.join(columns)}")
    return names


def is_whole(word: str) -> bool:
    return word.removeprefix("-").isdecimal() and len(word) <= 20


def _row(line: int, names: Names, words: Words, fault: str = "") -> LogRow:
    of = values_of(names, words)
    count, root = (int(of[name]) if is_whole(of.get(name, "")) else None for name in ("count", "root"))
    dtype = DTYPES.get(of["type"], (of["type"][:20], 0))[0]
    row = LogRow(line, int(of["size"]), count, dtype, of.get("redop", "")[:20], root, [])
    for index, group in enumerate(groups_of(names)):
        values = {names[i]: words[i] for i in group if i < len(words)}
        in_place = index == 1 or of.get("inplace") == "1"
        row.figures.append(LogFigure(in_place, None, fault=fault) if fault else figure_of(values, in_place))
    return row


def figure_of(values: dict[str, str], in_place: bool) -> LogFigure:
    """values: us, GB/s and wrong elements, as printed, by the names of `TIMED` and `CHECKS`."""
    time, algbw, busbw = (amount(values.get(name, ""), unit) for name, unit in TIMED.items())
    figure = LogFigure(in_place, time, algbw, busbw)
    if time is None or algbw is None or busbw is None:
        bad = [f"{k} {v[:20]}" for k, v in values.items() if k in TIMED and amount(v) is None]
        figure.fail(f"it has no number for {', '.join(bad) or 'time, algbw or busbw'}")
    text = next((values[name] for name in CHECKS if name in values), "N/A")
    wrong = printed(text)
    if wrong is not None:
        figure.wrong = wrong.value
    elif text.upper() != "N/A":
        figure.fail(f"its check of the data says {text[:20]}", wrong_data=True)
    return figure


def _with_unnamed(names: Names, rows: Sequence[Words]) -> Names:
    """The names, with "" for the values that all rows have beyond them, if these fit in one place and no other."""
    extra = len(rows[0]) - len(names)
    timed = ([i for i in group if names[i] in (*TIMED, *CHECKS)] for group in groups_of(names))
    together = {i for places in timed for i in range(places[0] + 1, places[-1] + 1)}
    together |= {i for i, name in enumerate(names) if name == "root"}
    held: dict[tuple[int, ...], Names] = {}
    for place in range(len(names) + 1 if 0 < extra <= 16 else 0):
        trial = names[:place] + ("",) * extra + names[place:]
        fits = [_fits(trial, words) for words in rows] if place not in together else []
        if fits.count(True) > 4 * fits.count(False):  # single rows that were altered do not decide
            held.setdefault(tuple(i for i, name in enumerate(trial) if name in _READ), trial)
    return held.popitem()[1] if len(held) == 1 else names


def _fits(names: Names, words: Words) -> bool | None:
    """Whether a row may have these columns: size / time = algbw. None where it is printed too coarsely to tell."""
    of = values_of(names, words)
    if not (
        all(is_whole(of[name]) for name in ("size", "count", "root") if of.get(name))
        and of["type"] in DTYPES
        and of.get("redop", "") in ("", *REDOPS)
        and of.get("inplace", "0") in ("0", "1")
        and collective_of(of.get("collective", "reduce")) is not None
    ):
        return False
    fine = True
    for figure in _row(0, names, words).figures:
        time, algbw, size = figure.time, figure.algbw, int(of["size"])
        if figure.fault or (figure.wrong or 0) >= 1 or time is None or time.low <= 0 or algbw is None:
            return False
        if not (size / time.high <= algbw.high * (1 + 1e-6) and size / time.low >= algbw.low * (1 - 1e-6)):
            return False
        fine = fine and algbw.coarseness < _FINE
    return fine or None
