"""Results of gate, profile and history with made-up numbers, for tests of the report only."""

import json
from pathlib import Path
from typing import Any

import msgspec

from dtbench.records.profile import CallsProfile, CallStages, RanksProfile, RanksSection, Stage
from dtbench.tests import made_up_jobs

LABEL = "dispatch add placements=S(0) mesh=8"
SECTION = "overlap all_reduce mesh_dim=tp size=65536 (core)"


def benchmark(verdict: str, name: str, ratio: float | None, **changes: Any) -> dict[str, Any]:
    effect = None
    if ratio is not None:
        effect = {
            "ratio": ratio,
            "low": ratio / 1.02,
            "high": ratio * 1.02,
            "sd": 0.015,
            "pairs": 10,
            "p_slower": 0.001,
            "p_faster": 1.0,
            "smallest_detectable": 0.02,
        }
    return {
        "suite": "dispatch",
        "name": name,
        "impl": "core",
        "params": {"placements": "S(0)", "mesh": "8"},
        "verdict": verdict,
        "stage": "confirmed",
        "tolerance": 0.05,
        "floor_s": 0.0,
        "estimator": "min",
        "effect": effect,
        "base_s": 10e-6,
        "head_s": None if ratio is None else 10e-6 * ratio,
    } | changes


def gate(**changes: Any) -> dict[str, Any]:
    """A gate's result with each of its verdicts; in an order that is not that of gravity."""
    benchmarks = [
        benchmark("same", "view", 1.001),
        benchmark("slower", "matmul", 1.25),
        benchmark("faster", "cat", 0.8),
        benchmark("inconclusive", "sum", 1.03, effect=None, reason="the budget is spent"),
        benchmark("slower", "add", 1.5, counters={"collectives": {"base": 1, "head": 2}}),
        benchmark("missing", "relu", None),
        benchmark("failed", "mm", None, reason="out of memory"),
        benchmark("new", "gelu", None, base_s=None),
    ]
    arm = {"arm": "main", "commit": "0123456789ab", "built": "a wheel", "python": "3.11", "torch": "2.13"}
    return {
        "kind": "gate",
        "schema": 1,
        "exit_code": 1,
        "trust": {"control": 1.001, "null": 0.999, "reasons": []},
        "notes": ["a note of the gate"],
        "base": arm,
        "head": arm | {"arm": "change"},
        "benchmarks": benchmarks,
    } | changes


def calls() -> dict[str, Any]:
    rows = tuple(
        Stage(stage=s, ns=ns, plus_minus_ns=20.0) for s, ns in (("local op", 2500.0), ("entry", 1500.0))
    )
    cases = tuple(
        CallStages(
            impl=impl,
            floor_ns=floor_ns,
            whole_ns=4000.0,
            recorded_ns=6000.0,
            fitted_to_calibrated=1.1,
            unattributed_ns=0.0,
            rows=rows,
            label=LABEL,
            source="counters",
            calls=10,
            spans_per_call=13.0,
        )
        for impl, floor_ns in (("core", 1200.0), ("torch", None))
    )
    return dict(msgspec.to_builtins(CallsProfile(cases=cases)))


def ranks() -> dict[str, Any]:
    job = made_up_jobs.job(ranks=2, late=1, label=SECTION)
    return dict(
        msgspec.to_builtins(
            RanksProfile(sections=(RanksSection(job=job, plain_us=900.0, profiled_us=1000.0),))
        )
    )


def history(revisions: int = 6, **changes: Any) -> list[dict[str, Any]]:
    """`add` becomes 20 % slower at the last revision, `view` stays."""
    return [
        {
            "kind": "history",
            "schema": 1,
            "machine": {"cpu": "Made-up CPU", "cores": 2, "gpus": [], "system": "Linux", "arch": "x86_64"},
            "time": f"2026-01-{k + 1:02d}T00:00:00+00:00",
            "revision": f"{k}" * 40,
            "torch": "2.13",
            "times_s": {"view": 5e-6, "add": 10e-6 * (1.2 if k == revisions - 1 else 1.0)},
        }
        | changes
        for k in range(revisions)
    ]


def write(folder: Path, name: str, data: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def write_lines(folder: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_all(folder: Path, **contents: Any) -> list[Path]:
    """Writes a result of each kind and returns the paths. contents: kind -> one that replaces the made-up one."""
    contents = {"gate": gate(), "calls": calls(), "ranks": ranks(), "history": history()} | contents
    (folder / "profile").mkdir()
    return [
        write(folder, "gate.json", contents["gate"]),
        write(folder, "calls.json", contents["calls"]),
        write(folder / "profile", "table.json", contents["ranks"]).parent,
        write_lines(folder, "history.jsonl", contents["history"]),
    ]
