"""Builds the page: one HTML file that needs no network and no script."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dtbench.calibration import check_same_setup
from dtbench.files import write_atomically
from dtbench.model import Result, Run
from dtbench.reporting import sections as s
from dtbench.reporting import tables as t
from dtbench.reporting.calibration import calibration
from dtbench.reporting.cases import Case, collect, geometric_mean, group
from dtbench.reporting.svg import printable
from dtbench.units import format_bandwidth, format_bytes, format_size

GENERATOR = "dtbench report"
BUDGET_BYTES = 2_000_000
# What is given up, in this order, to stay within the budget: (embed the raw data, rows per table).
ECONOMIES = ((True, 2000), (False, 2000), (False, 500), (False, 100), (False, 20))
TEMPLATES = Path(__file__).parent
OWN_SUITES = ("dispatch", "redistribute", "collectives", "bucketer", "tensor_parallel")


@dataclass(frozen=True)
class Headline:
    """The most telling figures: a number and what it says, with the section that shows more."""

    figure: str
    words: str
    section: str


def write_report(runs: Sequence[Run], topology: Mapping[str, Any] | None, path: str | Path) -> None:
    """Writes the report of one or several launches of one setup.

    topology: what `calibration.read_topology` gives, or None to leave the cost model out.

    Raises:
        UsageError: no runs, or runs of different machines, meshes or backends.
        OutputError: the place cannot be written, or holds a file that is no report.
    """
    write_atomically(Path(path), render(runs, topology), _is_report, "report of dtbench")


def render(runs: Sequence[Run], topology: Mapping[str, Any] | None = None) -> str:
    """The page as text; the same inputs give the same bytes."""
    check_same_setup(runs)
    suites = collect(runs)
    sections = _sections(suites, topology)
    context = {
        "title": _title(runs[0].header),
        "summary": _summary(runs, suites),
        "warnings": _warnings(runs, topology),
        "headlines": _headlines(suites, topology),
        "provenance": _provenance(runs),
        "environment": sorted(runs[0].header["env"].items()),
        "sections": sections,
        "failures": _failures(runs),
        "generator": GENERATOR,
    }
    page = ""
    for embed, rows in ECONOMIES:
        cuts = _cuts(embed, rows, sections)
        page = _fill(
            {**context, "raw": _raw(runs, topology) if embed else None, "max_rows": rows, "cuts": cuts}
        )
        if len(page.encode()) <= BUDGET_BYTES:
            break
    return page


def _fill(context: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    css = (TEMPLATES / "page.css").read_text("utf-8")
    return environment.get_template("page.html.j2").render(**context, css=Markup(css))


def _visible(value: Any) -> Any:
    """Control characters and marks that turn the reading direction become visible."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return value if value.isprintable() else printable(value)
    return value


def _is_report(head: str) -> bool:
    return f'<meta name="generator" content="{GENERATOR}">' in head


def _cuts(embed: bool, rows: int, sections: Sequence[s.Section]) -> list[str]:
    cuts = []
    if not embed:
        cuts.append(f"The raw data are left out to keep the page below {BUDGET_BYTES // 1_000_000} MB.")
    longest = max((table.total_rows for section in sections for table in section.tables), default=0)
    if longest > rows:
        cuts.append(
            f"Tables are cut after {rows} rows; the longest has {longest}. The run file has them all."
        )
    return cuts


def _raw(runs: Sequence[Run], topology: Mapping[str, Any] | None) -> Markup:
    """Headers, results without their samples, and the topology, as JSON that cannot end its element."""
    data = {
        "runs": [
            {"header": dict(run.header), "complete": run.complete, "results": [_line(r) for r in run.results]}
            for run in runs
        ],
        "topology": topology,
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _line(result: Result) -> dict[str, Any]:
    line = dataclasses.asdict(dataclasses.replace(result, samples_s=(), rank_samples_s={}))
    return {k: v for k, v in line.items() if v not in (None, "", (), {})}


# ------------------------------------------------------------------------------------------- words


def _mesh(header: Mapping[str, Any]) -> str:
    mesh = header["mesh"]
    return " × ".join(f"{name} = {size}" for name, size in zip(mesh["dim_names"], mesh["shape"], strict=True))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _hosts(header: Mapping[str, Any]) -> list[str]:
    return sorted({rank["host"] for rank in header["ranks"] if rank.get("host")})


def _hardware(header: Mapping[str, Any]) -> str:
    machine = header["machine"]
    gpus: dict[str, int] = {}
    for gpu in machine["gpus"]:
        name = str(gpu.get("name") or "GPU")
        gpus[name] = gpus.get(name, 0) + 1
    named = [f"{count} × {name}" for name, count in gpus.items()]
    return ", ".join([*named, str(machine["cpu"].get("model") or "unknown CPU")])


def _title(header: Mapping[str, Any]) -> str:
    mesh = _mesh(header)
    backend = header["versions"].get("backend") or "no backend"
    ranks = f", {_plural(len(header['ranks']), 'rank')}" if header["ranks"] else ""
    where = f" on {_plural(len(_hosts(header)), 'host')}" if _hosts(header) else ""
    return f"Mesh {mesh or 'unknown'} over {backend}{ranks}{where}"


def _summary(runs: Sequence[Run], suites: Mapping[str, Sequence[Case]]) -> str:
    header = runs[0].header
    cases = [case for members in suites.values() for case in members]
    both = sum({"core", "torch"} <= set(case.impls) for case in cases)
    launches = len({(run.header["run_id"], r.launch) for run in runs for r in run.results})
    names = f" ({', '.join(suites)})" if suites else ""
    summary = (
        f"{_plural(len(cases), 'case')} of {_plural(len(suites), 'suite')}{names} measured in "
        f"{launches} {'launch' if launches == 1 else 'launches'} on {_hardware(header)} with "
        f"torch {header['versions'].get('torch') or 'of unknown version'}."
    )
    if both:
        summary += f" In {both} of them dtbench’s own core and torch.distributed.tensor did the same in turn."
    return summary


def _warnings(runs: Sequence[Run], topology: Mapping[str, Any] | None) -> list[str]:
    """What a reader has to know before believing a figure; the gravest first."""
    found = []
    cut = [run.path.name for run in runs if not run.complete]
    if cut:
        found.append(
            f"Incomplete: {', '.join(cut)} has no end line; cases are missing. "
            "`dtbench run --resume` goes on with it."
        )
    tally: dict[str, int] = {}
    for run in runs:
        for result in run.results:
            tally[result.status] = tally.get(result.status, 0) + 1
    if tally.get("wrong"):
        found.append(
            f"{_plural(tally['wrong'], 'result')} held wrong data: see Failures. No time of theirs is shown."
        )
    if tally.get("failed"):
        found.append(f"{_plural(tally['failed'], 'result')} failed: see Failures.")
    if any(run.header["plan"].get("quick") for run in runs):
        found.append("Measured with --quick: few samples, so small differences mean nothing.")
    if topology is not None:
        known = {run.header["run_id"] for run in runs}
        strangers = sorted(r["run_id"] for r in topology["runs"] if r["run_id"] not in known)
        if strangers:
            found.append(
                f"The topology was fitted to another run ({', '.join(strangers)}): "
                "its points are not those here."
            )
        found += topology.get("warnings") or []
        found += [
            f"Cost model, mesh dim {dim['name']}: {w}."
            for dim in topology["dims"]
            for w in dim.get("warnings", [])
        ]
    return found


def _headlines(suites: Mapping[str, Sequence[Case]], topology: Mapping[str, Any] | None) -> list[Headline]:
    found = []
    for suite, what in (
        ("dispatch", "cached dispatch"),
        ("redistribute", "redistribute"),
        ("tensor_parallel", "block"),
    ):
        cases = [c for c in suites.get(suite, ()) if c.get("call") != "first"]
        ratios = [r for c in cases if (r := c.ratio("core", "torch")) is not None]
        mean = geometric_mean(ratios)
        if mean is not None:
            words = (
                f"core over torch, time per {what}: geometric mean of {_plural(len(ratios), 'case')}, "
                f"from {min(ratios):.2f}× to {max(ratios):.2f}×"
            )
            found.append(Headline(f"{mean:.2f}×", words, suite))
    found += _bandwidth_headlines(suites.get("collectives", ()))
    found += _bucket_headline(suites.get("bucketer", ()))
    for dim in (topology or {"dims": []})["dims"]:
        if dim["builtin"] and "geometric_mean_ratio" in dim["builtin"]:
            off, fit = dim["builtin"]["geometric_mean_ratio"], dim["residuals"]["geometric_mean_ratio"]
            words = (
                f"how far PyTorch’s built-in constants are off over {dim['name']}; "
                f"the fitted ones by {t.factor(fit)}"
            )
            found.append(Headline(t.factor(off), words, "calibration"))
    return found


def _bandwidth_headlines(cases: Sequence[Case]) -> list[Headline]:
    """The all_reduce of each dim at its best, all groups together where that was measured."""
    found = []
    reduces = [c for c in cases if c.name == "all_reduce"]
    for dim, members in group(reduces, lambda c: c.get("mesh_dim")).items():
        together = [c for c in members if c.get("groups") == "together"] or members
        best = max(
            ((m, c) for c in together for m in c.impls.values() if m.busbw_Bps),
            key=lambda pair: pair[0].busbw_Bps or 0,
            default=None,
        )
        if best is not None:
            measured, case = best
            words = (
                f"bus bandwidth of all_reduce over {dim} at its best, "
                f"{format_size(measured.size_bytes)}, groups {case.get('groups')}"
            )
            found.append(Headline(format_bandwidth(measured.busbw_Bps), words, "collectives"))
    return found


def _bucket_headline(cases: Sequence[Case]) -> list[Headline]:
    ratios = [(r, c) for c in cases if (r := c.ratio("unbucketed", "core")) is not None]
    if not ratios:
        return []
    ratio, case = max(ratios, key=lambda pair: pair[0])
    tensor, bucket = format_size(case.number("tensor_bytes")), format_size(case.number("bucket_bytes"))
    words = f"unbucketed over bucketed time at the best: tensors of {tensor} in buckets of {bucket}"
    limit = case.ratio("limit", "core")
    if limit is not None:
        words += f", {limit:.0%} of the limit"
    return [Headline(t.factor(ratio), words, "bucketer")]


# ---------------------------------------------------------------------------------------- sections


def _sections(suites: Mapping[str, list[Case]], topology: Mapping[str, Any] | None) -> list[s.Section]:
    made = [
        s.dispatch(suites.get("dispatch", [])),
        s.collectives(suites.get("collectives", [])),
        calibration(topology, bool(suites.get("collectives"))),
        s.redistribute(suites.get("redistribute", [])),
        s.bucketer(suites.get("bucketer", [])),
        s.tensor_parallel(suites.get("tensor_parallel", [])),
        s.other_suites({name: cases for name, cases in suites.items() if name not in OWN_SUITES}),
    ]
    return [section for section in made if section is not None]


def _provenance(runs: Sequence[Run]) -> list[tuple[str, str]]:
    header = runs[0].header
    machine = header["machine"]
    known = {"cpu", "gpus"}
    facts = [("Command", _command(run.header["argv"])) for run in runs]
    facts += [
        (
            "Run",
            ", ".join(
                [
                    run.header["run_id"],
                    f"started {run.header['started'] or 'at an unknown time'}",
                    "complete" if run.complete else "incomplete",
                    f"file {run.path.name}",
                ]
            ),
        )
        for run in runs
    ]
    facts += [
        ("Mesh", _mesh(header)),
        ("Ranks", _placement(header)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in header["versions"].items() if v is not None)),
        ("Checkout", _checkout(header["git"])),
        ("dtbench’s checkout", _checkout(header["git"].get("dtbench"))),
        ("CPU", _described(machine["cpu"])),
        *[("GPU", _described(gpu)) for gpu in machine["gpus"]],
        *[(_words(k).capitalize(), _described(v, k)) for k, v in machine.items() if k not in known],
        ("Suites", ", ".join(header["suites"])),
        ("Plan", _described({k: v for k, v in header["plan"].items() if k != "mesh"})),
    ]
    return [(name, value) for name, value in facts if value]


def _placement(header: Mapping[str, Any]) -> str:
    by_host: dict[str, list[str]] = {}
    for rank in header["ranks"]:
        place = f"{rank['rank']} ({rank.get('device') or 'unknown device'})"
        by_host.setdefault(rank.get("host") or "unknown host", []).append(place)
    return "; ".join(f"{host}: {', '.join(places)}" for host, places in by_host.items())


def _command(argv: Sequence[str]) -> str:
    line = shlex.join(str(arg) for arg in argv)
    return line if not argv or Path(argv[0]).name == "dtbench" else f"dtbench {line}"


def _checkout(git: Any) -> str:
    if not isinstance(git, Mapping) or not git.get("commit"):
        return ""
    dirty = git.get("dirty")
    return f"{git['commit']}{', with uncommitted changes' if dirty is True else ', clean' if dirty is False else ''}"


def _words(key: str) -> str:
    return str(key).removesuffix("_bytes").replace("_", " ")


def _described(value: Any, key: str = "") -> str:
    """A fact of the header in words; its shape is the machine's and not known here."""
    if isinstance(value, Mapping):
        there = {k: v for k, v in value.items() if v not in (None, "", [], {})}
        return ", ".join(f"{_words(k)} {_described(v, str(k))}" for k, v in there.items())
    if isinstance(value, list | tuple):
        return " ".join(_described(v, key) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if str(key).endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Fault:
    """A reason that one or several results gave for not being ok, and which results those are."""

    reason: str
    results: list[str]


@dataclass(frozen=True)
class Faults:
    caption: str
    faults: list[Fault]


def _failures(runs: Sequence[Run]) -> list[Faults]:
    """What is not ok, by status and reason: a cause that meets many cases is told once."""
    found = []
    for status, caption in (
        ("wrong", "Wrong data: timed, but the result was not what it should be"),
        ("failed", "Failed"),
        ("skipped", "Skipped"),
    ):
        by_reason: dict[str, list[str]] = {}
        for run in runs:
            for result in run.results:
                if result.status == status:
                    by_reason.setdefault(result.reason or "no reason given", []).append(_named(result))
        if by_reason:
            found.append(Faults(caption, [Fault(reason, named) for reason, named in by_reason.items()]))
    return found


def _named(result: Result) -> str:
    params = ", ".join(f"{k}={v}" for k, v in result.params.items())
    rank = "" if result.rank is None else f", rank {result.rank}"
    named = f"{result.suite} {result.name}, {result.impl}{f' ({params})' if params else ''}"
    return f"{named}{rank}, launch {result.launch}"
