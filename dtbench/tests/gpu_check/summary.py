"""The table of a `dtbench gpu-check`: what was found, each figure beside the card's own limit.

python -m dtbench.tests.gpu_check.summary FOLDER
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from dtbench.records.run import read_run
from dtbench.tests.gpu_check.check import STATE, State
from dtbench.tests.gpu_check.fake_gpu import NAME
from dtbench.tests.gpu_check.truth import Check, Truth
from dtbench.text.markdown import table

# A page is sent around.
PAGE_BYTES = 2 * 10**6
_WARNING = f"**REHEARSAL, {NAME}: a CPU measured all of this. No figure here says anything of a GPU.**"


def write(folder: Path) -> Path:
    """README.md in the folder, of what is there."""
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    truth = next(iter(folder.glob("*truth.json")), None)
    checks = msgspec.json.decode(truth.read_bytes(), type=Truth).checks if truth else []
    lines = [f"# {'Rehearsal' if state.rehearsal else 'One GPU'}: {state.device}", ""]
    lines += [_WARNING, ""] if state.rehearsal else []
    lines += [*_parts(state), *_tests(folder), *_checks(checks), *_copies(folder, checks)]
    lines += [*_profile(folder), *_page(folder)]
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _parts(state: State) -> Iterator[str]:
    parts = [part for part in state.parts if part.name != "report"]  # this one, which has not ended yet
    rows = [
        [
            part.name,
            part.outcome,
            f"{sum(step.seconds for step in part.steps):.0f}",
            part.needs,
            part.leaves_out,
        ]
        for part in parts
    ]
    yield from (*table(["part", "outcome", "seconds", "needs", "leaves out"], rows), "")


def _tests(folder: Path) -> Iterator[str]:
    names = ("tests", "failures", "errors", "skipped")
    count: Counter[str] = Counter()
    for path in folder.glob("*test_*.xml"):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            count.update({name: int(suite.get(name, 0)) for name in names})
    if count:
        yield from (f"Tests of the core: {', '.join(f'{n} {name}' for name, n in count.items())}.", "")


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    met = {True: "yes", False: "NO", None: ""}
    rows = []
    for check in checks:
        found = ", ".join(f"{name} {_short(value)}" for name, value in check.got.items())
        rows.append([check.name, found or check.left_out, check.goal, met[check.met]])
    if rows:
        yield from (*table(["instrument", "found", "goal", "met"], rows), "")


def _copies(folder: Path, checks: Sequence[Check]) -> Iterator[str]:
    """Packing beside the card's own copy in the same run."""
    limit = next((c.got["copy_TBps"] for c in checks if c.name == "limits" and c.got), None)
    for path in sorted(folder.glob("*one-rank-packing.jsonl")):
        rates = {
            (r.impl, tuple(r.params.items())): (r, r.algbw_Bps) for r in read_run(path).results if r.algbw_Bps
        }
        beside = "" if limit is None else f"; a plain large copy moves {_short(limit)} TB/s"
        yield from (f"Packing, bytes read and written{beside}.", "")
        rows = []
        for (impl, params), (result, rate) in rates.items():
            copy = rates.get(("copy", params))
            case = "{tensors} x {tensor_bytes} B".format(**result.params)
            rows.append([case, impl, _short(2 * rate / 1e12), f"{rate / copy[1]:.0%}" if copy else ""])
        yield from (*table(["case", "impl", "TB/s", "of a plain copy"], rows), "")


def _profile(folder: Path) -> Iterator[str]:
    for path in folder.glob("*profile/trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        kernels = sum(event.get("cat") == "kernel" for event in events)
        yield from (f"The trace holds {kernels} kernels and {len(events)} events.", "")


def _page(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.html")):
        size = path.stat().st_size
        more = ", MORE than the 2 MB it may have" if size > PAGE_BYTES else ""
        yield f"{path.name} has {size / 1e6:.2f} MB{more}."


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
