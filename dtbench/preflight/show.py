"""What a preflight found: lines for people, JSON, JUnit, a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from dtbench.preflight.rounds import BETWEEN
from dtbench.records.atomic import write_atomically
from dtbench.records.preflight import Finding, Preflight
from dtbench.suite.errors import UsageError, plain
from dtbench.text.junit import Outcome, Testcase, document
from dtbench.text.terminal import new_console, print_columns, print_json, print_line
from dtbench.text.units import bandwidth_unit, format_seconds, format_size, plural

ENDINGS = (".html", ".json", ".xml")


def check_outputs(paths: Sequence[Path]) -> None:
    """
    Raises:
        UsageError: an ending that says nothing.
    """
    for path in paths:
        if path.suffix not in ENDINGS:
            raise UsageError(
                f"-o {path}: expected a name that ends in {', '.join(ENDINGS)} (a page, JSON, JUnit)"
            )


def write_all(file: Preflight, paths: Sequence[Path], as_json: bool) -> None:
    """Prints the verdict and writes the files."""
    if as_json:
        print_json(msgspec.to_builtins(file))
    else:
        print_all(file)
    for path in paths:
        if path.suffix == ".html":
            from dtbench.reporting.html import Sources, write_report

            write_report(Sources(preflights=(file,)), path)
        else:
            text = junit(file) if path.suffix == ".xml" else msgspec.json.encode(file).decode() + "\n"
            write_atomically(path, text, lambda _: False, "preflight")


def print_all(file: Preflight) -> None:
    """Speeds of peers, then the verdict in one line."""
    console = new_console()
    rows = list(_rows(file))
    print_columns(
        console,
        [("what", [row[0] for row in rows])],
        [(title, [row[at] for row in rows]) for at, title in enumerate(("slowest", "median", "fastest"), 1)],
        [("of", [row[4] for row in rows])],
    )
    for note in file.notes:
        print_line(console, f"note: {note}")
    print_line(console, sentence(file))


def _rows(file: Preflight) -> Iterator[list[str]]:
    """What; of it the slowest, the median and the fastest; of how many."""
    for kind in dict.fromkeys(link.kind for link in file.links):
        rates = [link.rate for link in file.links if link.kind == kind]
        unit = bandwidth_unit(rates)
        cells = [f"{unit.format(rate)} {unit.name}" for rate in reversed(_worst_first(rates))]
        yield [f"links {kind}, each way", *cells, plural(len(rates), "pair")]
    if lost := [link.lost for link in file.links if link.kind == BETWEEN]:
        shares = [f"{share:.2%}" for share in _worst_first(lost)]
        yield ["TCP segments sent again", *shares, plural(len(lost), "pair")]
    for dim in file.dims:
        of = f"{plural(len(dim.groups), 'group')} at once; one alone {format_seconds(dim.alone_s)}"
        title = f"all_reduce of {format_size(dim.size_bytes)} over {dim.dim}={len(dim.groups[0])}"
        yield [title, *map(format_seconds, _worst_first(dim.times_s)), of]
    for kind, by_rank in file.work_s.items():
        yield [kind, *map(format_seconds, _worst_first(by_rank)), plural(len(by_rank), "rank")]


def _worst_first(values: Sequence[float]) -> list[float]:
    """Of times and losses."""
    return [max(values), median(values), min(values)]


def sentence(file: Preflight) -> str:
    """The verdict in one line."""
    about = f"{len(file.hosts)} ranks on {plural(len(set(file.hosts)), 'host')}, {file.seconds:.0f} s"
    if not file.findings:
        return f"preflight: healthy ({about}): nothing below {file.named:.0%} of its peers"
    return f"preflight: slow ({about}): {'; '.join(map(words, file.findings))}"


def words(one: Finding) -> str:
    """`host node-3: 79% of its peers (links between hosts)`."""
    kind = one.kind if one.kind.startswith(("all_reduce", "matrix", "memory")) else f"links {one.kind}"
    return f"{plain(one.what)}: {one.how} ({kind})"


def junit(file: Preflight) -> str:
    """A testcase per kind of link, mesh dim and work; one that has findings fails."""
    kinds = [
        *dict.fromkeys(link.kind for link in file.links),
        *(f"all_reduce over {dim.dim}" for dim in file.dims),
    ]
    kinds += [*file.work_s, *(one.kind for one in file.findings)]
    cases = []
    for kind in dict.fromkeys(kinds):
        slow = [words(one) for one in file.findings if one.kind == kind]
        outcome: Outcome = "failure" if slow else "passed"
        cases.append(Testcase("preflight", kind, outcome, "; ".join(slow), "\n".join(slow)))
    return document("dtbench preflight", cases, file.seconds)
