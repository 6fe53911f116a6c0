"""Records the rank that imports it, on its own torch: a window of steps, and where it stood when it ended badly.
A step ends with the `step` of the optimizer that steps first, so all ranks count alike. No error of ours gets out, and
after the window nothing is hooked that costs time. `rankN.json.gz`: the trace; `rankN.txt`: what else is to be said."""

import atexit
import faulthandler
import functools
import gc
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

import torch
from torch.autograd.profiler import profile as session
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, profile, record_function

# From the class's __dict__, for they are put back: what getattr returns would no longer be bound to a group.
TRANSFERS = {name: vars(c10d.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")}


class Recorder:
    optimizer: "Callable[[], Optimizer | None]" = staticmethod(lambda: None)
    profile: "profile | None" = None
    done, over, mesh_dims = 0, False, ""

    def __init__(self, path: str) -> None:
        self.steps, self.warmup, self.timeout_s = map(int, os.environ["DTBENCH_RECORD_WINDOW"].split())
        self.path, self.pid = path, os.getpid()
        self.notes = Path(f"{path}.txt").open("w", buffering=1)  # noqa: SIM115 - for signals until the end
        self.hook = register_optimizer_step_post_hook(lambda *args: self.guard(self.on_step, *args))
        self.init = session.__init__
        session.__init__ = lambda *args, **kwargs: self.on_session(*args, **kwargs)  # type: ignore[method-assign]
        atexit.register(self.guard, self.on_exit)
        if not faulthandler.is_enabled():
            faulthandler.enable(self.notes)
        self.answer_sigterm(signal.SIG_DFL)
        self.await_step()
        if self.warmup <= 1 or not self.steps:
            self.guard(self.begin)

    def guard(self, action: "Callable[..., object]", *args: object) -> None:
        """Not in a process that the rank forked, nor in a graph; an error ends the recording, not the job."""
        try:
            if not torch.compiler.is_compiling() and self.pid == os.getpid():
                action(*args)
        except Exception as error:
            self.profile, self.over = None, True
            with suppress(OSError):
                self.notes.write(f"could not be recorded: {type(error).__name__}: {error}\n")

    def await_step(self) -> None:
        if self.timeout_s:
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self.notes)

    def answer_sigterm(self, handler: object) -> None:
        """With all threads' stacks, even where the main thread is stuck, and the handler; unless the program does."""
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self.on_sigterm):
            faulthandler.unregister(signal.SIGTERM)  # first: it puts back what it hides
            with suppress(ValueError):  # in another thread than the main one
                signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
            faulthandler.register(signal.SIGTERM, self.notes, chain=True)

    def on_sigterm(self, number: int, _frame: object) -> None:
        self.guard(self.end, "SIGTERM ended it")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def on_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.optimizer() is None:
            self.optimizer = weakref.ref(optimizer)
        if self.optimizer() is not optimizer:
            return
        self.done += 1
        self.mesh_dims = self.mesh_dims or mesh_dims()  # a whole run is written after its groups are gone
        self.await_step()
        if self.profile is None and self.done == self.warmup - 1 and not self.over:
            self.begin()
        elif self.profile is not None and self.steps and self.done == self.warmup + self.steps:
            self.end()
        elif self.profile is not None:
            self.profile.step()

    def begin(self) -> None:
        """The last step of the warm-up is the profiler's own. Without steps the whole run is recorded as it is."""
        kinds = (ProfilerAction.RECORD, ProfilerAction.WARMUP)
        schedule = (lambda step: kinds[step < self.warmup]) if self.steps else None
        self.profile = profile(record_shapes=True, schedule=schedule)
        self.profile.step_num = self.done
        self.profile.preset_metadata_json("dtbench", about())
        self.profile.start()
        self.answer_sigterm(self.on_sigterm)
        for name, transfer in TRANSFERS.items():
            setattr(c10d.ProcessGroup, name, functools.partialmethod(annotated, transfer))

    def end(self, why: str = "the program ended") -> None:
        """Writes what was recorded and takes the hooks out. why: the reason for fewer steps than asked for."""
        ended, self.profile, self.over = self.profile, None, True
        session.__init__ = self.init  # type: ignore[method-assign]
        if not self.timeout_s:
            self.hook.remove()
        if ended is not None:
            for name, transfer in TRANSFERS.items():
                setattr(c10d.ProcessGroup, name, transfer)
            is_recording = ended.current_action is ProfilerAction.RECORD
            if is_recording:
                ended.add_metadata_json("dtbench_mesh_dims", self.mesh_dims or mesh_dims())
            if is_recording and self.steps:
                ended.add_metadata_json(
                    "dtbench_window",
                    json.dumps({"asked": self.steps, "whole": self.done - self.warmup, "why": why}),
                )
            ended.stop()
            self.answer_sigterm(signal.SIG_DFL)
            if is_recording:
                ended.export_chrome_trace(f"{self.path}.part.gz")
                Path(f"{self.path}.part.gz").rename(f"{self.path}.json.gz")

    def on_session(self, other: session, *args: object, **kwargs: object) -> None:
        if self.profile is None or self.profile.profiler is not None:  # it is not ours that is being made
            self.guard(
                self.notes.write, f"has a profiler of its own from step {self.done} on, which is let be\n"
            )
            self.guard(self.end, "the program began a profiler of its own")
        self.init(other, *args, **kwargs)  # type: ignore[arg-type]

    def on_exit(self) -> None:
        if error := getattr(sys, "last_value", None):
            # Innermost first, as faulthandler has them.
            frames = reversed(traceback.extract_tb(error.__traceback__))
            self.notes.write(f"{type(error).__name__}: {error}\n")
            self.notes.writelines(f'  File "{at[0]}", line {at[1]} in {at[2]}\n' for at in frames)
            faulthandler.dump_traceback_later(15, exit=True)  # its GPU may wait for peers that are gone
        elif self.done <= self.warmup and self.steps and not self.over:
            remedy = "a smaller --warmup" if self.done else "--steps 0, which needs no optimizer"
            self.notes.write(f"ended after {self.done} steps, none of them recorded: give {remedy}\n")
        self.end()
        faulthandler.cancel_dump_traceback_later()


def annotated(
    group: c10d.ProcessGroup, transfer: "Callable[..., object]", *args: object, **kwargs: object
) -> object:
    """A send or receive within an annotation that names its group, which gloo's events of it do not."""
    with record_function(f"dtbench:group {c10d._world.pg_names.get(group, '')}"):
        return transfer(group, *args, **kwargs)


def mesh_dims() -> str:
    """Group's name -> names of the mesh dims that it serves: a dim over all ranks has the default group, which other
    meshes may share and no description names."""
    dims: dict[str, list[str]] = {}
    meshes = [mesh for mesh in gc.get_objects() if type(mesh).__name__ == "DeviceMesh"]
    for mesh, dim in [(owner, dim) for owner in meshes for dim in owner.mesh_dim_names or ()]:
        with suppress(Exception):  # this rank is not in it
            dims.setdefault(mesh.get_group(dim).group_name, []).append(dim)
    return json.dumps({group: "/".join(dict.fromkeys(names)) for group, names in dims.items()})


def about() -> str:
    """What a trace does not say. gloo's threads, two per group (ProcessGroupGloo.cpp), start in the groups' order."""
    names = [group["pg_name"] for group in c10d._world.pg_config_info if "gloo" in group["backend_config"]]
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    tids = [task.name for task in tasks if (task / "comm").read_text() == "pt_gloo_runloop\n"]
    threads = {tid: names[k // 2] for k, tid in enumerate(tids) if len(tids) == 2 * len(names)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return json.dumps(
        {
            "gloo_threads": threads,
            "clock_ns": time.time_ns(),
            "torch": torch.__version__,
            "host": os.uname().nodename,
            "device": device,
        }
    )


if __name__ == "dtbench_recorder":  # by `sitecustomize` beside it; elsewhere `about` alone is wanted
    Recorder(f"{os.environ['DTBENCH_RECORD_FOLDER']}/rank{c10d.get_rank()}")
