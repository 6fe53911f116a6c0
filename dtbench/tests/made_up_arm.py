"""Arms whose launches take milliseconds: a worker that needs no torch and does what its variables say.

LACKS=add,view   benchmarks that the arm does not have     SKIPS=add   those it skips
SLOW=1.1         all its times, times this                 CALLS=43    Python calls per call
CRASHES=add      dies with SIGKILL in that benchmark       HANGS=add   never ends there
RAISES=add       fails in it                               CONTROL=1.1 the control's times, times this
TIME=0           the time itself                           SCHEMA=99   of the run file
MUTE=1           dies before it lists anything             FLAKY=1     the calls differ between launches
SLEEPS=1         a timed launch lasts so many seconds longer
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import getsource
from pathlib import Path

from dtbench.engine import workers
from dtbench.gate import loader
from dtbench.gate.arms import Arm
from dtbench.gate.verdict import exit_code_of
from dtbench.records.gate import Arm as Facts
from dtbench.records.gate import Gate, Trust
from dtbench.records.judged import Judged

NAMES = ("add", "mul", "view")

WORKER = """
import hashlib, json, os, random, signal, sys, time

def load(more):
    pass

def main(stem, await_turn):
    order, out = json.load(open(f"{stem}.full-order.json")), f"{stem}.jsonl"
    env = os.environ.get
    listed = lambda name: env(name, "").split(",")
    if env("MUTE"):
        sys.exit("no such luck")
    names = [n for n in ("add", "mul", "view") if n not in listed("LACKS")]
    benchmarks = [("fake", n, "core") for n in names] + [("gate-control", "add", "plain")]
    label = lambda b: f"{b[0]} {b[1]} [{b[2]}]"
    draw = random.Random(hashlib.sha256((out + env("SEED", "")).encode()).hexdigest())
    if order["mode"] == "count":
        lines = [{"key": [*b, []], "label": label(b), "world": "simulated", "estimator": "min"} for b in benchmarks]
        problems = [] if names else ["no suite is called 'fake'"]
        json.dump({"python": "3.11", "torch": "0", "problems": problems,
                   "benchmarks": lines if names else lines[-1:]}, open(f"{stem}.listing.json", "w"))
        benchmarks = benchmarks[:-1]
    lines = [{"kind": "run", "schema": int(env("SCHEMA", "1")), "run_id": "made up"}]
    def flush():
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\\n" for line in lines)
    for b in benchmarks:
        control = b[0] == "gate-control"
        if not control and order["mode"] == "count" and label(b) in order["without"]:
            continue
        if not control and order["mode"] == "time" and label(b) not in order["call_s"]:
            continue
        flush()
        with open(f"{stem}.now", "w") as file:
            file.write(label(b))
        if b[1] in listed("CRASHES") and not control:
            os.kill(os.getpid(), signal.SIGKILL)
        if b[1] in listed("HANGS") and not control:
            time.sleep(600)
        result = {"kind": "result", "suite": b[0], "name": b[1], "impl": b[2], "params": {}, "status": "ok"}
        if b[1] in listed("RAISES") and not control:
            result |= {"status": "failed", "reason": "ValueError: <b>|no`"}
        elif b[1] in listed("SKIPS") and not control:
            result |= {"status": "skipped", "reason": "not here"}
        elif order["mode"] == "count":
            calls = float(env("CALLS", "41")) + (draw.random() if env("FLAKY") else 0)
            result["counters"] = {"python_calls": calls, "call_s": 1e-4}
        else:
            factor = float(env("CONTROL" if control else "SLOW", "1"))
            t = float(env("TIME", "1e-4")) * factor * draw.lognormvariate(0, 0.002)
            result["time_s"] = dict.fromkeys(("min", "p25", "median", "p75", "p95", "max", "mean"), t) | {"n": 10}
        lines.append(result)
    if order["mode"] == "time":
        time.sleep(float(env("SLEEPS", "0")))
    lines.append({"kind": "end"})
    flush()
    return 0
"""


def concluded(
    judged: Sequence[Judged], *reasons: str, head: str = "b" * 40, notes: Sequence[str] = ()
) -> Gate:
    """A gate's end. reasons: not to trust it. head: its commit."""
    trust = Trust(reasons=reasons)
    return Gate(
        exit_code=exit_code_of(judged, trust),
        trust=trust,
        notes=tuple(notes),
        head=Facts(commit=head, arm="rev:x", torch="2.13"),
        benchmarks=tuple(judged),
    )


def made_up_arm(folder: Path, **variables: str) -> Arm:
    """An arm of the worker above."""
    package = folder / "sources" / "dtbench"
    for room in (package, package / "gate", package / "engine"):
        room.mkdir(parents=True, exist_ok=True)
        (room / "__init__.py").touch()
    (package / "gate" / "worker.py").write_text(WORKER)
    for module in (loader, workers):
        (package / Path(*module.__name__.split(".")[1:])).with_suffix(".py").write_text(getsource(module))
    text = "env:" + ",".join(f"{k}={v}" for k, v in variables.items())
    path = (str(folder / "sources"),)
    return Arm(text, text, "made up", sys.executable, path, variables, folder, "", "3.11.7", "0")
