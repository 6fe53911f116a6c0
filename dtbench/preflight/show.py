"""What a preflight found: lines for people, JSON, JUnit, a page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from dtbench.errors import UsageError, plain
from dtbench.files.atomic import write_atomically
from dtbench.files.preflight import FindingRow, PreflightFile
from dtbench.preflight.rounds import BETWEEN
from dtbench.terminal import new_console, print_columns, print_json, print_line
from dtbench.units import bandwidth_unit, format_seconds, format_size, plural

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


def write_all(file: PreflightFile, paths: Sequence[Path], as_json: bool) -> None:
    """Prints the verdict and writes the files."""
    if as_json:
        print_json(msgspec.to_builtins(file))
    else:
        print_all(file)
    for path in paths:
        if path.suffix == ".html":
            from dtbench.show.report import Sources, write_report

            write_report(Sources(preflights=(file,)), path)
        else:
            text = junit(file) if path.suffix == ".xml" else json.dumps(msgspec.to_builtins(file)) + "\n"
            write_atomically(path, text, lambda _: False, "preflight")


def print_all(file: PreflightFile) -> None:
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


def _rows(file: PreflightFile) -> Iterator[tuple[str, str, str, str, str]]:
    for kind in dict.fromkeys(link.kind for link in file.links):
        rates = [link.rate for link in file.links if link.kind == kind]
        unit = bandwidth_unit(rates)
        cells = (f"{unit.format(v)} {unit.name}" for v in (min(rates), median(rates), max(rates)))
        yield f"links {kind}, each way", *cells, plural(len(rates), "pair")  # type: ignore[misc]
    if lost := [link.lost for link in file.links if link.kind == BETWEEN]:
        shares = (f"{of(lost):.2%}" for of in (max, median, min))
        yield "TCP segments sent again", *shares, plural(len(lost), "pair")  # type: ignore[misc]
    for dim in file.dims:
        of = f"{plural(len(dim.groups), 'group')} at once; one alone {format_seconds(dim.alone_s)}"
        times = (max(dim.times_s), median(dim.times_s), min(dim.times_s))
        title = f"all_reduce of {format_size(dim.size_bytes)} over {dim.dim}={len(dim.groups[0])}"
        yield title, *map(format_seconds, times), of  # type: ignore[misc]
    for kind, by_rank in file.work_s.items():
        times = (max(by_rank), median(by_rank), min(by_rank))
        yield kind, *map(format_seconds, times), plural(len(by_rank), "rank")  # type: ignore[misc]


def sentence(file: PreflightFile) -> str:
    """The verdict in one line."""
    about = f"{len(file.hosts)} ranks on {plural(len(set(file.hosts)), 'host')}, {file.seconds:.0f} s"
    if not file.findings:
        return f"preflight: healthy ({about}): nothing below {file.named:.0%} of its peers"
    return f"preflight: slow ({about}): {'; '.join(map(words, file.findings))}"


def words(one: FindingRow) -> str:
    """`host node-3: 79% of its peers (links between hosts)`."""
    kind = one.kind if one.kind.startswith(("all_reduce", "matrix", "memory")) else f"links {one.kind}"
    return f"{plain(one.what)}: {one.how} ({kind})"


def junit(file: PreflightFile) -> str:
    """A testcase per kind of link, mesh dim and work; one that has findings fails."""
    kinds = [
        *dict.fromkeys(link.kind for link in file.links),
        *(f"all_reduce over {dim.dim}" for dim in file.dims),
    ]
    kinds += [*file.work_s, *(one.kind for one in file.findings)]
    suite = ET.Element(
        "testsuite", name="dtbench preflight", errors="0", skipped="0", time=f"{file.seconds:.3f}"
    )
    failures = 0
    for kind in dict.fromkeys(kinds):
        case = ET.SubElement(suite, "testcase", classname="preflight", name=kind)
        slow = [words(one) for one in file.findings if one.kind == kind]
        if slow:
            failures += 1
            ET.SubElement(case, "failure", message="; ".join(slow)).text = "\n".join(slow)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    root = ET.Element("testsuites")
    root.append(suite)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
