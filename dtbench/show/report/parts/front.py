"""The head of the page: title, summary, what to know first, the most telling figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.model import Run
from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, geometric_mean, group
from dtbench.show.report.parts.provenance import hardware, hosts, mesh_words, plural
from dtbench.show.report.sources import Sources
from dtbench.units import format_bandwidth, format_size


@dataclass(frozen=True)
class Headline:
    """The most telling figures: a number and what it says, with the section that shows more."""

    figure: str
    words: str
    section: str


def title(sources: Sources) -> str:
    if sources.runs:
        return _title(sources.runs[0].header)
    if sources.gate is not None:
        return "Gate: head against base"
    if sources.verdict_runs or sources.verdict_tables:
        return "Ops on distributed tensors"
    if sources.calls or sources.ranks:
        return "Profile"
    return "Cost model" if sources.topology is not None or sources.regret is not None else "History"


def started(sources: Sources) -> str:
    """When the runs were measured, for the index."""
    return max(
        (str(run.header["started"] or "") for run in (*sources.runs, *sources.verdict_runs)), default=""
    )


def summary(sources: Sources, suites: Mapping[str, Sequence[Case]]) -> str:
    if sources.runs:
        return _summary(sources.runs, suites)
    return "No run is part of this report, so it shows results without their measurements."


def warnings(sources: Sources) -> list[str]:
    """What a reader has to know before believing a figure; the gravest first."""
    return [*_warnings(sources.runs, sources.topology if sources.runs else None), *sources.notes]


def _title(header: Mapping[str, Any]) -> str:
    mesh = mesh_words(header)
    backend = header["versions"].get("backend") or "no backend"
    ranks = f", {plural(len(header['ranks']), 'rank')}" if header["ranks"] else ""
    where = f" on {plural(len(hosts(header)), 'host')}" if hosts(header) else ""
    return f"Mesh {mesh or 'unknown'} over {backend}{ranks}{where}"


def _summary(runs: Sequence[Run], suites: Mapping[str, Sequence[Case]]) -> str:
    header = runs[0].header
    cases = [case for members in suites.values() for case in members]
    both = sum({"core", "torch"} <= set(case.impls) for case in cases)
    launches = len({(run.header["run_id"], r.launch) for run in runs for r in run.results})
    names = f" ({', '.join(suites)})" if suites else ""
    summary = (
        f"{plural(len(cases), 'case')} of {plural(len(suites), 'suite')}{names} measured in "
        f"{launches} {'launch' if launches == 1 else 'launches'} on {hardware(header)} with "
        f"torch {header['versions'].get('torch') or 'of unknown version'}."
    )
    if both:
        summary += f" In {both} of them dtbench’s own core and torch.distributed.tensor did the same in turn."
    return summary


def _warnings(runs: Sequence[Run], topology: Mapping[str, Any] | None) -> list[str]:
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
            f"{plural(tally['wrong'], 'result')} held wrong data: see Failures. No time of theirs is shown."
        )
    if tally.get("failed"):
        found.append(f"{plural(tally['failed'], 'result')} failed: see Failures.")
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


def headlines(suites: Mapping[str, Sequence[Case]], topology: Mapping[str, Any] | None) -> list[Headline]:
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
                f"core over torch, time per {what}: geometric mean of {plural(len(ratios), 'case')}, "
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
