"""Runs the parts of `dtbench gpu-check`, each command in a process of its own, and keeps a record of them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dtbench.machine import device as machine
from dtbench.machine import provenance
from dtbench.model.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError
from dtbench.records.atomic import write_atomically
from dtbench.tests.gpu_check import fake_gpu
from dtbench.tests.gpu_check.parts import PARTS, Part, Setting, Step
from dtbench.world.workers import Program

STATE = "gpu-check.json"
# What a part may take, so that a machine lent for ten minutes a time holds one with its start.
LIMIT_S = 480.0
# From a step's limit to its kill.
GRACE_S = 15.0


class Taken(msgspec.Struct):
    """A step's exit code, None where it was ended at the part's limit or not begun, and its time."""

    argv: tuple[str, ...]
    code: int | None = None
    seconds: float = 0.0


class Record(msgspec.Struct):
    """A part, as far as it was run."""

    name: str
    needs: str
    leaves_out: str
    outcome: str = "not run"
    steps: list[Taken] = []


class State(msgspec.Struct):
    """The file of a check. device: the card's name, or the fake's."""

    device: str
    rehearsal: bool
    parts: list[Record]
    kind: str = "gpu-check"


def check(setting: Setting, wanted: Sequence[str], say: Callable[[str], None]) -> int:
    """The parts named, or all; what is done already is not done again. The exit code: 5 where a part is not done.

    Raises:
        UsageError: no GPU; a folder of another kind of check.
    """
    device = fake_gpu.NAME if setting.rehearse else _card()
    setting.folder.mkdir(parents=True, exist_ok=True)
    state = read(setting, device)
    records = {record.name: record for record in state.parts}
    chosen = [part for part in PARTS if not wanted or part.name in wanted]
    for part in chosen:
        say(f"part {part.name}: needs {part.needs}; leaves out {part.leaves_out}")
        _run(part, records[part.name], setting, lambda: _write(setting.folder, state))
        say(f"part {part.name}: {records[part.name].outcome}")
    not_done = [part.name for part in chosen if records[part.name].outcome != "done"]
    say(f"{setting.folder}: {'not done: ' + ', '.join(not_done) if not_done else 'all done'}")
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
        return State(device, setting.rehearse, [Record(p.name, p.needs, p.leaves_out) for p in PARTS])
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
    rehearsal = {machine.REHEARSAL: fake_gpu.__name__} if setting.rehearse else {}
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv[1:])}\n".encode())
        out.flush()
        with Program(argv, out=out, env=os.environ | step.env | rehearsal) as program:
            code = program.wait(left_s)
            if code is None:
                program.end(GRACE_S)
            return code
