"""Records a window of steps of the rank that imports this module, and where the rank stopped if it fails.

A step ends with the `step()` of the optimizer that steps first, so all ranks count the same steps. Errors of the
recorder do not reach the program. After the window, no hook that costs time remains.

If a delay is requested, one rank sleeps before the first collective of each step, until the window ends. Without an
optimizer, steps are unknown, and only the first collective of the program is delayed.

`rankN.json.gz` is the trace. `rankN.txt` holds the reason for a missing trace, or the stacks of a rank that failed.
"""

import atexit
import faulthandler
import functools
import gc
import json
import os
import re
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

# Taken from the class's __dict__, to be restored later. The result of getattr would no longer bind to a group.
TRANSFERS = {name: vars(c10d.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")}
# Rank and seconds of the requested delay; no rank without one.
DELAY = os.environ.get("DTBENCH_RECORD_DELAY", "-1 0")
NOT_COLLECTIVE = re.compile(r"send|recv|check|monitored")  # ops of c10d that are not delayed


class Recorder:
    """Hooks into the rank's program and records its steps.

    Attributes:
        optimizer: weak reference to the optimizer whose `step()` ends a step.
        profile: the profiler while it records or warms up.
        done: number of finished steps.
        has_ended: whether the window has ended.
        mesh_dims: JSON of the mesh dims, from the first step on.
        delay_s: delay of the next collective, seconds; 0 if this step had its delay.
        library: kernels that delay collectives, if this rank is to be delayed.
    """

    optimizer: "Callable[[], Optimizer | None]" = staticmethod(lambda: None)
    profile: "profile | None" = None
    done, has_ended, mesh_dims = 0, False, ""
    delay_s, library = 0.0, None

    def __init__(self, path: str) -> None:
        self.steps, self.warmup, self.timeout_s = map(int, os.environ["DTBENCH_RECORD_WINDOW"].split())
        self.path, self.pid = path, os.getpid()
        self.notes = Path(f"{path}.txt").open("w", buffering=1)  # noqa: SIM115 - signal handlers write to it until the end
        delayed_rank, delay_s = DELAY.split()
        if int(delayed_rank) >= (ranks := c10d.get_world_size()):
            self.notes.write(
                f"stopped: --delay names rank {delayed_rank}, the job has ranks 0 to {ranks - 1}\n"
            )
            raise SystemExit(2)
        if int(delayed_rank) == c10d.get_rank():
            self.delay_s = float(delay_s)
            self.guard(self.hook_collectives)
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
        """Runs an action unless torch compiles or this process is forked. An error ends the recording, not the job."""
        try:
            if not torch.compiler.is_compiling() and self.pid == os.getpid():
                action(*args)
        except Exception as error:
            self.profile, self.has_ended = None, True
            with suppress(OSError):
                self.notes.write(f"could not be recorded: {type(error).__name__}: {error}\n")

    def await_step(self) -> None:
        """Restarts the timeout for the next step."""
        if self.timeout_s:
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self.notes)

    def answer_sigterm(self, handler: object) -> None:
        """Makes SIGTERM write the stacks of all threads, then call the handler, unless the program handles SIGTERM.

        faulthandler writes the stacks even if the main thread is blocked.
        """
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, self.on_sigterm):
            faulthandler.unregister(signal.SIGTERM)  # first, since it restores the previous handler
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
            faulthandler.register(signal.SIGTERM, self.notes, chain=True)

    def on_sigterm(self, number: int, _frame: object) -> None:
        self.guard(self.end, "SIGTERM ended it")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def hook_collectives(self) -> None:
        """Registers kernels that sleep before the first collective of a step.

        Every call that passes torch's dispatcher reaches the key BackendSelect before the backend. This includes calls
        of DDP's reducer, functional collectives and compiled graphs.
        """
        self.library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        later_keys = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
        for name in [name for room, _, name in names if room == "c10d" and not NOT_COLLECTIVE.search(name)]:
            kernel = functools.partial(self.delayed, getattr(torch.ops.c10d, name).default, later_keys)
            self.library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]

    def delayed(
        self,
        op: "torch._ops.OpOverload",
        later_keys: torch._C.DispatchKeySet,
        keys: torch._C.DispatchKeySet,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Runs a collective, after the delay if it is the first one of its step."""
        self.guard(self.delay)
        return op.redispatch(keys & later_keys, *args, **kwargs)

    def delay(self) -> None:
        """Sleeps once in each step, within an annotation."""
        delay_s, self.delay_s = self.delay_s, 0.0
        if delay_s:
            with record_function("dtbench:delay"):
                time.sleep(delay_s)

    def on_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.optimizer() is None:
            self.optimizer = weakref.ref(optimizer)
        if self.optimizer() is not optimizer:
            return
        self.done += 1
        self.delay_s = float(DELAY.split()[1]) if self.library else 0.0
        # Read now, because the process groups may be destroyed before a recording of the whole run ends.
        self.mesh_dims = self.mesh_dims or mesh_dims()
        self.await_step()
        if self.profile is None and self.done == self.warmup - 1 and not self.has_ended:
            self.begin()
        elif self.profile is not None and self.steps and self.done == self.warmup + self.steps:
            self.end()
        elif self.profile is not None:
            self.profile.step()

    def begin(self) -> None:
        """Starts the profiler for the window, or for the whole run if the number of steps is 0.

        The profiler itself warms up in the last step of the warm-up.
        """
        self.profile = profile(
            record_shapes=True,
            schedule=(lambda step: ProfilerAction.WARMUP if step < self.warmup else ProfilerAction.RECORD)
            if self.steps
            else None,
        )
        self.profile.step_num = self.done
        self.profile.preset_metadata_json("dtbench", about())
        self.profile.start()
        self.answer_sigterm(self.on_sigterm)
        for name, transfer in TRANSFERS.items():
            setattr(c10d.ProcessGroup, name, functools.partialmethod(annotated, transfer))

    def end(self, why: str = "the program ended") -> None:
        """Writes the trace and removes the hooks.

        Args:
            why: the reason if fewer steps than requested were recorded.
        """
        ended, self.profile, self.has_ended = self.profile, None, True
        session.__init__ = self.init  # type: ignore[method-assign]
        if self.library:
            self.library._destroy()  # type: ignore[no-untyped-call]
            self.library = None
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
        """Ends the recording if the program starts a profiler, since torch allows one at a time."""
        if self.profile is None or self.profile.profiler is not None:  # not the recorder's own profiler
            self.guard(
                self.notes.write, f"starts its own profiler at step {self.done}, which ends the recording\n"
            )
            self.guard(self.end, "the program started its own profiler")
        self.init(other, *args, **kwargs)  # type: ignore[arg-type]

    def on_exit(self) -> None:
        """Reports the error that ends the program, or why there is no trace, and ends the recording."""
        if error := getattr(sys, "last_value", None):
            self.notes.write(f"{type(error).__name__}: {error}\n")
            # Innermost frame first, as in faulthandler.
            self.notes.writelines(
                f'  File "{frame[0]}", line {frame[1]} in {frame[2]}\n'
                for frame in reversed(traceback.extract_tb(error.__traceback__))
            )
            faulthandler.dump_traceback_later(15, exit=True)  # its GPU may wait for ranks that have exited
        elif self.done <= self.warmup and self.steps and not self.has_ended:
            self.notes.write(
                f"ended after {self.done} steps, none of them recorded: give "
                f"{'a smaller --warmup' if self.done else '--steps 0, which needs no optimizer'}\n"
            )
        self.end()
        faulthandler.cancel_dump_traceback_later()


def annotated(
    group: c10d.ProcessGroup, transfer: "Callable[..., object]", *args: object, **kwargs: object
) -> object:
    """Runs a send or receive within an annotation that names its group, since gloo's events do not contain it."""
    with record_function(f"dtbench:group {c10d._world.pg_names.get(group, '')}"):
        return transfer(group, *args, **kwargs)


def mesh_dims() -> str:
    """Returns JSON of group name -> names of its mesh dims, joined by "/".

    A dim over all ranks uses the default group. Several meshes may share that group, and its description names no dim.
    """
    dims: dict[str, list[str]] = {}
    meshes = [mesh for mesh in gc.get_objects() if type(mesh).__name__ == "DeviceMesh"]
    for mesh, dim in [(owner, dim) for owner in meshes for dim in owner.mesh_dim_names or ()]:
        with suppress(Exception):  # this rank is not in the mesh
            dims.setdefault(mesh.get_group(dim).group_name, []).append(dim)
    return json.dumps({group: "/".join(dict.fromkeys(names)) for group, names in dims.items()})


def about() -> str:
    """Returns JSON of facts that a trace does not contain.

    "gloo_threads" maps thread ids to groups. Each group has two threads (ProcessGroupGloo.cpp), and the groups start
    theirs one after the other.
    """
    names = [group["pg_name"] for group in c10d._world.pg_config_info if "gloo" in group["backend_config"]]
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    tids = [task.name for task in tasks if (task / "comm").read_text() == "pt_gloo_runloop\n"]
    return json.dumps(
        {
            "gloo_threads": {
                tid: names[index // 2] for index, tid in enumerate(tids) if len(tids) == 2 * len(names)
            },
            "clock_ns": time.time_ns(),
            "torch": torch.__version__,
            "delay": DELAY,
            "host": os.uname().nodename,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    )


if __name__ == "dtbench_recorder":  # imported by `sitecustomize`; other modules import only `about`
    Recorder(f"{os.environ['DTBENCH_RECORD_FOLDER']}/rank{c10d.get_rank()}")
