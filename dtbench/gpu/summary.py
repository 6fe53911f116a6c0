"""The table of a `dtbench gpu-check`: what was found, each figure beside the card's own limit.

python -m dtbench.gpu.summary FOLDER
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dtbench.files.run import read_run
from dtbench.machine.fake_gpu import NAME
from dtbench.model import Result

STATE = "gpu-check.json"
# A page is sent around.
PAGE_BYTES = 2 * 10**6
_WARNING = f"**REHEARSAL, {NAME}: a CPU measured all of this. No figure here says anything of a GPU.**"


def write(folder: Path) -> Path:
    """README.md in the folder, of what is there."""
    state = json.loads((folder / STATE).read_text())
    lines = [f"# {'Rehearsal' if state['rehearsal'] else 'One GPU'}: {state['device']}", ""]
    if state["rehearsal"]:
        lines += [_WARNING, ""]
    lines += _parts(state)
    truth = next(iter(folder.glob("*truth.json")), None)
    checks = json.loads(truth.read_text())["checks"] if truth else []
    lines += [*_tests(folder), *_checks(checks), *_copies(folder, checks), *_profile(folder), *_page(folder)]
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _parts(state: dict[str, Any]) -> Iterator[str]:
    yield from ("| part | outcome | seconds | needs | leaves out |", "|---|---|---|---|---|")
    for part in state["parts"]:
        if part["name"] == "report":  # this one, which has not ended yet
            continue
        seconds = sum(step["seconds"] for step in part["steps"])
        yield f"| {part['name']} | {part['outcome']} | {seconds:.0f} | {part['needs']} | {part['leaves_out']} |"
    yield ""


def _tests(folder: Path) -> Iterator[str]:
    count: Counter[str] = Counter()
    for path in folder.glob("*test_*.xml"):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            count.update(
                {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
            )
    if count:
        yield from (f"Tests of the core: {', '.join(f'{n} {name}' for name, n in count.items())}.", "")


def _checks(checks: list[dict[str, Any]]) -> Iterator[str]:
    if checks:
        yield from ("| instrument | found | goal | met |", "|---|---|---|---|")
    for check in checks:
        found = ", ".join(f"{name} {_short(value)}" for name, value in check["got"].items())
        met = {True: "yes", False: "NO", None: ""}[check["met"]]
        yield f"| {check['name']} | {found or check['left_out']} | {check['goal']} | {met} |"
    if checks:
        yield ""


def _copies(folder: Path, checks: list[dict[str, Any]]) -> Iterator[str]:
    """Packing beside the card's own copy in the same run."""
    for path in sorted(folder.glob("*one-rank-packing.jsonl")):
        results = [r for r in read_run(path).results if r.algbw_Bps]
        limit = next((c["got"]["copy_TBps"] for c in checks if c["name"] == "limits" and c["got"]), None)
        beside = "" if limit is None else f"; a plain large copy moves {_short(limit)} TB/s"
        yield from (
            f"Packing, bytes read and written{beside}.",
            "",
            "| case | impl | TB/s | of a plain copy |",
        )
        yield "|---|---|---|---|"
        for result in results:
            copy = next((r for r in results if r.impl == "copy" and _same(r, result)), None)
            share = "" if copy is None or not copy.algbw_Bps else f"{_rate(result) / _rate(copy):.0%}"
            case, moved = "{tensors} x {tensor_bytes} B".format(**result.params), 2 * _rate(result) / 1e12
            yield f"| {case} | {result.impl} | {_short(moved)} | {share} |"
        yield ""


def _profile(folder: Path) -> Iterator[str]:
    for path in folder.glob("*profile/trace.json.gz"):
        kinds = Counter(
            event.get("cat") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        )
        yield from (f"The trace holds {kinds['kernel']} kernels and {kinds.total()} events.", "")


def _page(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.html")):
        size = path.stat().st_size
        more = ", MORE than the 2 MB it may have" if size > PAGE_BYTES else ""
        yield f"{path.name} has {size / 1e6:.2f} MB{more}."


def _rate(result: Result) -> float:
    return float(result.algbw_Bps or 0.0)


def _same(one: Result, other: Result) -> bool:
    return one.params == other.params


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
