"""Runs the parts of `dtbench gpu-check`, each command in a process of its own, and keeps a record of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError
from dtbench.gpu.parts import LIMIT_S, PARTS, Part, Setting, Step
from dtbench.gpu.summary import STATE
from dtbench.machine import device as machine
from dtbench.machine import provenance
from dtbench.machine.fake_gpu import NAME


def check(setting: Setting, wanted: Sequence[str], say: Callable[[str], None]) -> int:
    """The parts named, or all; what is done already is not done again. The exit code: 5 where a part is not done.

    Raises:
        UsageError: no GPU; a folder of another kind of check.
    """
    device = NAME if setting.rehearse else _card()
    setting.folder.mkdir(parents=True, exist_ok=True)
    state = _read(setting, device)
    for part in PARTS:
        if wanted and part.name not in wanted:
            continue
        record = next(p for p in state["parts"] if p["name"] == part.name)
        say(f"part {part.name}: needs {part.needs}; leaves out {part.leaves_out}")
        _run(part, record, setting, lambda: _write(setting.folder, state))
        say(f"part {part.name}: {record['outcome']}")
    not_done = [
        p["name"] for p in state["parts"] if p["outcome"] != "done" and (not wanted or p["name"] in wanted)
    ]
    say(f"{setting.folder}: {'not done: ' + ', '.join(not_done) if not_done else 'all done'}")
    return EXIT_CASE_FAILED if not_done else EXIT_OK


def _card() -> str:
    if not machine.gpus().count():
        raise UsageError(
            "gpu-check: torch finds no GPU here; expected one, its driver and a CUDA build of torch; "
            "give --rehearse to try its commands on this CPU"
        )
    known = provenance.gpus()
    return str(known[0]["name"]) if known else "a GPU that NVML does not name"


def _read(setting: Setting, device: str) -> dict[str, Any]:
    fresh = {
        "kind": "gpu-check",
        "rehearsal": setting.rehearse,
        "device": device,
        "parts": [
            {k: v for k, v in asdict(part).items() if k != "steps"} | {"outcome": "not run", "steps": []}
            for part in PARTS
        ],
    }
    path = setting.folder / STATE
    if not path.exists():
        if any(setting.folder.iterdir()):
            raise UsageError(
                f"-o {setting.folder} holds other files: expected a new folder, or one of a gpu-check"
            )
        return fresh
    state: dict[str, Any] = json.loads(path.read_text())
    if (state["rehearsal"], state["device"]) != (setting.rehearse, device):
        raise UsageError(
            f"-o {setting.folder} holds a check of {state['device']}, this is one of {device}: give another"
        )
    return state


def _write(folder: Path, state: dict[str, Any]) -> None:
    new = folder / f".{STATE}"
    new.write_text(json.dumps(state, indent=1) + "\n")
    new.replace(folder / STATE)


def _run(part: Part, record: dict[str, Any], setting: Setting, keep: Callable[[], None]) -> None:
    """Every step of the part that has not ended well yet, while there is time; a step that fails stops none."""
    until = time.monotonic() + LIMIT_S
    steps = list(part.steps(setting))
    before = {tuple(step["argv"]): step for step in record["steps"]}
    fresh = {"code": None, "seconds": 0.0}
    record["steps"] = done = [before.get(step.argv, {"argv": list(step.argv), **fresh}) for step in steps]
    with (setting.folder / f"{part.name}.log").open("a") as log:
        for number, step in enumerate(steps):
            if done[number]["code"] in step.good and not step.always:
                continue
            left_s = until - time.monotonic()
            ended = _step(step, setting.rehearse, left_s, log) if left_s > 1 else fresh
            done[number] = {"argv": list(step.argv), **ended}
            keep()
    failed = sum(taken["code"] not in step.good for step, taken in zip(steps, done, strict=True))
    record["outcome"] = "done" if not failed else f"{failed} of its commands failed, see {part.name}.log"
    if any(taken["code"] is None for taken in done):
        record["outcome"] = f"out of its {LIMIT_S:.0f} s: the next call goes on"
    keep()


def _step(step: Step, rehearse: bool, left_s: float, log: Any) -> dict[str, Any]:
    """Its exit code, None where it was ended at its limit, and seconds."""
    argv = [sys.executable, *step.argv]
    if step.makes and Path(step.makes).exists():
        if step.again:
            argv += step.again
        else:
            made = Path(step.makes)
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    rehearsal = {machine.REHEARSAL: "1"} if rehearse else {}
    print("$", *argv[1:], file=log, flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env=os.environ | step.env | rehearsal,
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(left_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"code": code, "seconds": round(time.monotonic() - began, 1)}
