"""What a profile is asked for, validated as far as that needs no ranks. No torch."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dtbench.bench.options import RunOptions, Task, split_target
from dtbench.bench.session import choose_device, prepare
from dtbench.errors import UsageError
from dtbench.profile.choose import choose
from dtbench.suite import load
from dtbench.world.launch import OUTPUT

TRACE_NAME, FLAME_NAME = "trace.json.gz", "flame.svg"
TABLE_NAME, DATA_NAME = "table.txt", "table.json"


@dataclass(frozen=True)
class Request:
    """`dtbench profile`: options as `dtbench run` has them (its `suites` is the one of the target), the
    case's name ("": all of the suite), the folder to make, and whether to push NVTX ranges."""

    options: RunOptions
    case: str
    folder: Path
    nvtx: bool = False
    filter_text: str = ""

    def device_type(self) -> str:
        """
        Raises:
            UsageError: a GPU is asked for where there is none.
        """
        device_type = choose_device(self.options)
        if self.nvtx and device_type != "cuda":
            raise UsageError(
                "--nvtx marks ranges for NVIDIA's tools, and this profile runs on a CPU: leave --nvtx out, "
                "or profile where torch finds a GPU"
            )
        return device_type

    def tasks(self, device_type: str, world_size: int) -> list[Task]:
        """The cases to profile, in the order of the suite; the same on every rank.

        Raises:
            UsageError: no such suite or case, or too many.
        """
        for suite in load(self.options.suites):
            if suite.world == "own":
                raise UsageError(
                    f"{suite.name} times nothing that a profile could take apart: name another suite"
                )
        # The filter comes after the case's name, so that a message can name the nearest.
        listed = prepare(self.options, device_type, world_size)
        return choose(listed.tasks, self.case, self.filter_text)


def make_request(
    target: str, filter_text: str, output: Path | None, nvtx: bool, options: RunOptions
) -> Request:
    """From the command line. `options` has everything but the suite; without -o the folder is named by
    the time, and ranks take the name that their launcher chose.

    Raises:
        UsageError: a target that is none.
    """
    suite, case = split_target(target)
    chosen = dataclasses.replace(options, suites=(suite,), filter="")
    named = os.environ.get(OUTPUT) or time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())
    return Request(chosen, case, output or Path(named), nvtx, filter_text)
