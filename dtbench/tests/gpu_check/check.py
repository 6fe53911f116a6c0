"""Runs the parts of `dtbench gpu-check`, each command in a process of its own; keeps a record and a table of them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from dtbench.machine import device as machine
from dtbench.machine import provenance
from dtbench.model.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError
from dtbench.records.atomic import write_atomically
from dtbench.records.run import read_run
from dtbench.tests.gpu_check import fake_gpu
from dtbench.tests.gpu_check.parts import PARTS, Part, Setting, Step
from dtbench.tests.gpu_check.truth import Check, Truth
from dtbench.text.markdown import table
from dtbench.world.workers import Program

STATE = "gpu-check.json"
# What a part may take, so that a machine lent for ten minutes a time holds one with its start.
LIMIT_S = 480.0
# From a step's limit to its kill.
GRACE_S = 15.0
# A page is sent around.
PAGE_BYTES = 2 * 10**6
_WARNING = (
    f"**REHEARSAL, {fake_gpu.NAME}: a CPU measured all of this. No figure here says anything of a GPU.**"
)


class Taken(msgspec.Struct):
    """A step's exit code, None where it was ended at the part's limit or not begun, and its time."""

    argv: tuple[str, ...]
    code: int | None = None
    seconds: float = 0.0


class Record(msgspec.Struct):
    """A part, as far as it was run."""

    outcome: str = "not run"
    steps: list[Taken] = []


class State(msgspec.Struct, tag_field="kind", tag="gpu-check"):
    """The file of a check; its kind comes first, where `_write` looks for it. device: the card's name, or the fake's.
    parts: by name."""

    device: str
    rehearsal: bool
    parts: dict[str, Record]


def check(setting: Setting, wanted: Sequence[str], say: Callable[[str], None]) -> int:
    """The parts named, or all; what is done already is not done again. The exit code: 5 where a part is not done.

    Raises:
        UsageError: no GPU; a folder of another kind of check.
    """
    device = fake_gpu.NAME if setting.rehearse else _card()
    setting.folder.mkdir(parents=True, exist_ok=True)
    state = read(setting, device)
    chosen = [part for part in PARTS if not wanted or part.name in wanted]
    for part in chosen:
        record = state.parts.setdefault(part.name, Record())
        say(f"part {part.name}: needs {part.needs}; leaves out {part.leaves_out}")
        _run(part, record, setting, lambda: _write(setting.folder, state))
        say(f"part {part.name}: {record.outcome}")
    summary = setting.folder / "README.md"
    summary.write_text("\n".join(lines(setting.folder, state)) + "\n")
    not_done = [part.name for part in chosen if state.parts[part.name].outcome != "done"]
    say(f"{summary}: {'not done: ' + ', '.join(not_done) if not_done else 'all done'}")
    return EXIT_CASE_FAILED if not_done else EXIT_OK


def _card() -> str:
    if not machine.gpus().count():
        raise UsageError(
            "gpu-check: torch finds no GPU here; expected one, its driver and a CUDA build of torch; "
            "give --rehearse to try its commands on this CPU"
        )
    known = provenance.gpus()
    return str(known[0].name) if known else "a GPU that NVML does not name"


def read(setting: Setting, device: str) -> State:
    """The folder's record, or a fresh one."""
    path = setting.folder / STATE
    if not path.exists():
        if any(setting.folder.iterdir()):
            raise UsageError(
                f"-o {setting.folder} holds other files: expected a new folder, or one of a gpu-check"
            )
        return State(device, setting.rehearse, {})
    state = msgspec.json.decode(path.read_bytes(), type=State)
    if (state.rehearsal, state.device) != (setting.rehearse, device):
        raise UsageError(
            f"-o {setting.folder} holds a check of {state.device}, this is one of {device}: give another"
        )
    return state


def _write(folder: Path, state: State) -> None:
    text = msgspec.json.format(msgspec.json.encode(state), indent=1).decode() + "\n"
    write_atomically(folder / STATE, text, lambda head: "gpu-check" in head, "record of a gpu-check")


def _run(part: Part, record: Record, setting: Setting, keep: Callable[[], None]) -> None:
    """Every step of the part that has not ended well yet, while there is time; a step that fails stops none."""
    until = time.monotonic() + LIMIT_S
    steps = list(part.steps(setting))
    before = {taken.argv: taken for taken in record.steps}
    record.steps = [before.get(step.argv, Taken(step.argv)) for step in steps]
    for step, taken in zip(steps, record.steps, strict=True):
        if taken.code in step.good and not step.always:
            continue
        began = time.monotonic()
        taken.code = None
        if until - began > 1:
            taken.code = _step(step, setting, until - began, setting.folder / f"{part.name}.log")
        taken.seconds = round(time.monotonic() - began, 1)
        keep()
    failed = sum(taken.code not in step.good for step, taken in zip(steps, record.steps, strict=True))
    record.outcome = "done" if not failed else f"{failed} of its commands failed, see {part.name}.log"
    if any(taken.code is None for taken in record.steps):
        record.outcome = f"out of its {LIMIT_S:.0f} s: the next call goes on"
    keep()


def _step(step: Step, setting: Setting, left_s: float, log: Path) -> int | None:
    """Its exit code; None where it was ended at its limit."""
    argv = [sys.executable, *step.argv]
    made = Path(step.makes)
    if step.makes and made.exists() and step.again:
        argv += step.again
    elif step.makes and made.exists():
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    rehearsal = {machine.REHEARSAL: fake_gpu.__file__} if setting.rehearse else {}
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv[1:])}\n".encode())
        out.flush()
        with Program(argv, out=out, env=os.environ | step.env | rehearsal) as program:
            code = program.wait(left_s)
            if code is None:
                program.end(GRACE_S)
            return code


# ------------------------------------------------------------------------------------- the table


def lines(folder: Path, state: State) -> Iterator[str]:
    """README.md of what is in the folder: what was found, each figure beside the card's own limit."""
    truth = next(iter(folder.glob("*truth.json")), None)
    checks = msgspec.json.decode(truth.read_bytes(), type=Truth).checks if truth else []
    yield from (f"# {'Rehearsal' if state.rehearsal else 'One GPU'}: {state.device}", "")
    yield from [_WARNING, ""] if state.rehearsal else []
    yield from _parts(state)
    yield from _tests(folder)
    yield from _checks(checks)
    yield from _copies(folder, checks)
    for path in folder.glob("*profile/trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        kernels = sum(event.get("cat") == "kernel" for event in events)
        yield from (f"The trace holds {kernels} kernels and {len(events)} events.", "")
    for path in sorted(folder.glob("*.html")):
        size = path.stat().st_size
        more = ", MORE than the 2 MB it may have" if size > PAGE_BYTES else ""
        yield f"{path.name} has {size / 1e6:.2f} MB{more}."


def _parts(state: State) -> Iterator[str]:
    rows = []
    for part in PARTS:
        record = state.parts.get(part.name, Record())
        seconds = f"{sum(step.seconds for step in record.steps):.0f}"
        rows.append([part.name, record.outcome, seconds, part.needs, part.leaves_out])
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
    for one in checks:
        found = ", ".join(f"{name} {_short(value)}" for name, value in one.got.items())
        rows.append([one.name, found or one.left_out, one.goal, met[one.met]])
    if rows:
        yield from (*table(["instrument", "found", "goal", "met"], rows), "")


def _copies(folder: Path, checks: Sequence[Check]) -> Iterator[str]:
    """Packing beside the card's own copy in the same run."""
    limit = next((c.got["copy_TBps"] for c in checks if c.name == "limits" and c.got), None)
    for path in sorted(folder.glob("*one-rank-packing.jsonl")):
        timed = [(r, r.algbw_Bps) for r in read_run(path).results if r.algbw_Bps]
        copies = {tuple(r.params.items()): rate for r, rate in timed if r.impl == "copy"}
        beside = "" if limit is None else f"; a plain large copy moves {_short(limit)} TB/s"
        yield from (f"Packing, bytes read and written{beside}.", "")
        rows = []
        for result, rate in timed:
            copy = copies.get(tuple(result.params.items()))
            case = "{tensors} x {tensor_bytes} B".format(**result.params)
            rows.append([case, result.impl, _short(2 * rate / 1e12), f"{rate / copy:.0%}" if copy else ""])
        yield from (*table(["case", "impl", "TB/s", "of a plain copy"], rows), "")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
