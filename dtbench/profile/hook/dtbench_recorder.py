"""Records one rank of a user's job, in its process and on its torch: a window of steps with torch.profiler, and where
the rank stood when it ended badly. A step ends with the `step` of the optimizer that steps first, so all ranks count
alike. No error of ours gets out, and after the window nothing is hooked that costs time.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from torch.autograd.profiler import profile as session
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, profile

_LAST_WRITE_S = 15  # what a failing rank gets to write its trace: its GPU may wait for peers that are gone


def start() -> None:
    """Called when this process has joined its default process group."""
    if Recorder.pid != os.getpid():
        Recorder.pid = os.getpid()
        Recorder(f"{os.environ['DTBENCH_RECORD_FOLDER']}/rank{c10d.get_rank()}")


def about() -> str:
    """What a trace does not say. gloo's threads, two per group and named alike (ProcessGroupGloo.cpp), are listed in
    the order of their start, as the groups are."""
    groups = [g["pg_name"] for g in c10d._world.pg_config_info if "gloo" in g["backend_config"]]
    tasks = os.listdir("/proc/self/task")  # noqa: PTH208
    tids = [t for t in tasks if Path(f"/proc/self/task/{t}/comm").read_text() == "pt_gloo_runloop\n"]
    threads = {tid: groups[i // 2] for i, tid in enumerate(tids)} if len(tids) == 2 * len(groups) else {}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"gloo_threads": threads, "clock_ns": time.time_ns(), "torch": torch.__version__}
    return json.dumps(about | {"host": os.uname().nodename, "device": device})


class Recorder:
    """path: of the rank's files, less their suffixes: `.json` the trace, `.txt` where it stood, `.state` the rest."""

    pid = 0  # of the rank that records

    def __init__(self, path: str) -> None:
        self.steps, self.warmup, self.timeout_s = (
            int(os.environ[f"DTBENCH_RECORD_{name}"]) for name in ("STEPS", "WARMUP", "TIMEOUT")
        )
        self.path, self.done, self.recorded, self.note, self.failed = path, 0, 0, "", False
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        self.profile: profile | None = None
        self.stood = Path(f"{path}.txt").open("w", buffering=1)  # noqa: SIM115 - for signals until the end
        self.excepthook, sys.excepthook = sys.excepthook, self.on_exception
        self.hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: self.guard(self.on_step, optimizer)
        )
        self.ours, self.init = False, session.__init__
        session.__init__ = lambda *args, **kwargs: self.on_session(*args, **kwargs)  # type: ignore[method-assign]
        atexit.register(self.guard, self.on_exit)
        os.register_at_fork(after_in_child=lambda: self.answer_sigterm(signal.SIG_DFL, stacks=False))
        if not faulthandler.is_enabled():
            faulthandler.enable(self.stood)
        self.answer_sigterm(signal.SIG_DFL)
        self.tell()
        if self.warmup <= 1 or not self.steps:
            self.guard(self.begin)

    def guard(self, action: Callable[..., None], *args: object) -> None:
        """Does nothing in a process that the rank forked or in a graph; an error ends the recording, not the job."""
        try:
            if not torch.compiler.is_compiling() and self.pid == os.getpid():
                action(*args)
        except Exception as error:
            self.note = f"recording failed: {type(error).__name__}: {error}"
            self.profile = None

    def tell(self) -> None:
        """To the parent; and a step has its time anew."""
        state = {
            "host": os.uname().nodename,
            "steps": self.done,
            "recorded": self.recorded,
            "note": self.note,
        }
        Path(f"{self.path}.state").write_text(json.dumps(state))
        self.wait()

    def wait(self) -> None:
        if self.timeout_s:
            faulthandler.dump_traceback_later(self.timeout_s, file=self.stood)

    def answer_sigterm(self, handler: object, *, stacks: bool = True) -> None:
        """Has SIGTERM write all threads' stacks, even where the main thread is stuck, and go on to the handler; not
        where the program answers it, or where this is not the main thread."""
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self.on_sigterm):
                faulthandler.unregister(signal.SIGTERM)  # first: it puts back what it hides
                signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
                if stacks:
                    faulthandler.register(signal.SIGTERM, self.stood, chain=True)

    def on_step(self, optimizer: Optimizer) -> None:
        if self.optimizer() is None:
            self.optimizer = weakref.ref(optimizer)
        if self.optimizer() is not optimizer:
            return
        self.done += 1
        self.wait()
        if self.profile is None and self.done == self.warmup - 1:
            self.begin()
        elif self.profile is not None and self.done == self.warmup + self.steps:
            self.end()
        elif self.profile is not None:
            self.profile.step()

    def begin(self) -> None:
        """The last step of the warm-up is the profiler's own. Without steps the whole run is recorded as it is."""

        def action(step: int) -> ProfilerAction:
            return ProfilerAction.WARMUP if step < self.warmup else ProfilerAction.RECORD

        self.ours = True  # its session
        self.profile = profile(record_shapes=True, schedule=action if self.steps else None)
        self.profile.step_num = self.done
        self.profile.preset_metadata_json("dtbench", about())
        self.profile.start()
        self.ours = False
        self.answer_sigterm(self.on_sigterm)

    def end(self) -> None:
        """Writes what was recorded and takes the hooks out."""
        session.__init__ = self.init  # type: ignore[method-assign]
        if not self.timeout_s:
            self.hook.remove()
        ended, self.profile = self.profile, None
        if ended is not None:
            if c10d.is_initialized():
                ended.add_metadata_json("dtbench", about())
            ended.stop()
            if ended.current_action is ProfilerAction.RECORD:
                ended.export_chrome_trace(f"{self.path}.part.json")
                Path(f"{self.path}.part.json").rename(f"{self.path}.json")
                self.recorded = max(self.done - self.warmup, 0)
            self.answer_sigterm(signal.SIG_DFL)
        self.tell()

    def on_session(self, other: session, *args: object, **kwargs: object) -> None:
        """The program starts a profiler: two cannot run."""
        if not self.ours:
            self.guard(self.end)
            self.note = f"the program's own profiler began in step {self.done}: none of ours ran beside it"
            self.guard(self.tell)
        self.init(other, *args, **kwargs)  # type: ignore[arg-type]

    def on_exception(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        with suppress(Exception):
            self.failed = True
            lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in traceback.extract_tb(tb)]
            self.stood.write("\n".join([f"{kind.__name__}: {error}", *reversed(lines), ""]))
        self.excepthook(kind, error, tb)

    def on_sigterm(self, number: int, _frame: object) -> None:
        self.guard(self.end)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def on_exit(self) -> None:
        if self.failed:
            faulthandler.dump_traceback_later(_LAST_WRITE_S, exit=True, file=self.stood)
        self.end()
        faulthandler.cancel_dump_traceback_later()
