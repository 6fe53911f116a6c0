"""Arms whose launches take milliseconds: a worker that needs no torch and does what its variables say.

LACKS=add,view   benchmarks that the arm does not have     SKIPS=add   those it skips
SLOW=1.1         all its times, times this                 CALLS=43    Python calls per call
CRASHES=add      dies with SIGKILL in that benchmark       HANGS=add   never ends there
RAISES=add       fails in it                               CONTROL=1.1 the control's times, times this
FLAKY=1          the calls differ between launches         SLEEPS=1    a timed launch lasts so many seconds longer
MUTE=1           dies before it lists anything
"""

import sys
from collections.abc import Sequence
from inspect import getsource
from pathlib import Path

from dtbench.engine import workers
from dtbench.gate import loader, messages
from dtbench.gate.arms import Arm
from dtbench.gate.verdict import exit_code_of
from dtbench.records.comparison import ComparedCase
from dtbench.records.gate import ArmRecord, Gate, Trust

WORKER = """
import hashlib, os, random, signal, sys, time
import msgspec

def load():
    pass

def main(order, connection):
    order, env = msgspec.msgpack.decode(order), os.environ.get
    counting = order["mode"] == "count"
    listed = lambda name: env(name, "").split(",")
    send = lambda what, value: connection.send((what, msgspec.msgpack.encode(value)))
    if env("MUTE"):
        sys.exit("no such luck")
    names = [n for n in ("add", "mul", "view") if n not in listed("LACKS")]
    control = ("gate-control", "add", "plain")
    benchmarks = [("fake", n, "core") for n in names] + [control]
    label = lambda b: f"{b[0]} {b[1]} [{b[2]}]"
    draw = random.Random(f"{time.time_ns()} {os.getpid()}")
    if counting:
        lines = [{"key": [*b, []], "label": label(b), "world": "simulated", "estimator": "min"} for b in benchmarks]
        problems = [] if names else ["no suite is called 'fake'"]
        send("listing", {"problems": problems, "benchmarks": lines})
        benchmarks.remove(control)
    for b in benchmarks:
        if label(b) in order["without"] or (b != control and not counting and label(b) not in order["call_s"]):
            continue
        connection.send(("now", label(b)))
        result = {"kind": "result", "suite": b[0], "name": b[1], "impl": b[2], "params": {}, "status": "ok"}
        if b != control and b[1] in listed("CRASHES"):
            os.kill(os.getpid(), signal.SIGKILL)
        if b != control and b[1] in listed("HANGS"):
            time.sleep(600)
        if b != control and b[1] in listed("RAISES"):
            result |= {"status": "failed", "reason": "ValueError: <b>|no`"}
        elif b != control and b[1] in listed("SKIPS"):
            result |= {"status": "skipped", "reason": "not here"}
        elif counting:
            calls = float(env("CALLS", "41")) + (draw.random() if env("FLAKY") else 0)
            result["counters"] = {"python_calls": calls, "call_s": 1e-4}
        else:
            factor = float(env("CONTROL" if b == control else "SLOW", "1"))
            t = 1e-4 * factor * draw.lognormvariate(0, 0.002)
            result["time_s"] = dict.fromkeys(("min", "p25", "median", "p75", "p95", "max", "mean"), t) | {"n": 10}
        send("result", result)
    if not counting:
        time.sleep(float(env("SLEEPS", "0")))
    return 0
"""


def concluded(
    judged: Sequence[ComparedCase], *reasons: str, head: str = "b" * 40, notes: Sequence[str] = ()
) -> Gate:
    """A gate's end. reasons: not to trust it. head: its commit."""
    trust = Trust(reasons=reasons)
    return Gate(
        exit_code=exit_code_of(judged, trust),
        trust=trust,
        notes=tuple(notes),
        head=ArmRecord(commit=head, arm="rev:x", torch="2.13"),
        benchmarks=tuple(judged),
    )


def made_up_arm(folder: Path, **variables: str) -> Arm:
    """An arm of the worker above."""
    package = folder / "sources" / "dtbench"
    for room in (package, package / "gate", package / "engine"):
        room.mkdir(parents=True, exist_ok=True)
        (room / "__init__.py").touch()
    (package / "gate" / "worker.py").write_text(WORKER)
    for module in (loader, messages, workers):
        (package / Path(*module.__name__.split(".")[1:])).with_suffix(".py").write_text(getsource(module))
    text = "env:" + ",".join(f"{k}={v}" for k, v in variables.items())
    return Arm(text, "made up", sys.executable, (str(package.parent),), variables, folder, "", "3.11.7", "0")
