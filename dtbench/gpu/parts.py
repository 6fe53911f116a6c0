"""The parts of `dtbench gpu-check`: which commands each runs, what it needs, what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What a part may take, so that a machine lent for ten minutes a time holds one with its start.
LIMIT_S = 480.0
# Tests whose tensors lie where DTBENCH_TEST_DEVICE says; see core/tests/on_device.py.
TESTS = (
    "test_bucketer",
    "test_bucketer_more",
    "test_comm",
    "test_comm_tensor",
    "test_dispatch",
    "test_redistribute",
)
# Suites that one rank can run, and those that need two.
ALONE = ("dispatch", "packing", "collectives")
TWO = ("bucketer", "redistribute", "collectives", "tensor_parallel", "compile")
CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """folder: where everything goes. rehearse: on a CPU, with little of everything."""

    folder: Path
    rehearse: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def file(self, name: str) -> str:
        """The path of an output, whose name says if it is a rehearsal's."""
        return str(self.folder / (f"rehearsal-{name}" if self.rehearse else name))


@dataclass(frozen=True)
class Step:
    """A command. argv: after `python`. makes: its output, with which `again` goes on; without `again` it is removed
    before another try. good: exit codes that end it, for a verdict is a finding. always: done anew by every call."""

    argv: tuple[str, ...]
    makes: str = ""
    again: tuple[str, ...] = ()
    good: tuple[int, ...] = (0,)
    env: dict[str, str] = field(default_factory=dict)
    always: bool = False


@dataclass(frozen=True)
class Part:
    name: str
    needs: str
    leaves_out: str
    steps: Callable[[Setting], Iterator[Step]]


def _dtbench(*argv: str, **given: Any) -> Step:
    return Step(("-P", "-m", "dtbench", *argv), **given)


def _tests(setting: Setting) -> Iterator[Step]:
    only = ("-k", "layout or capacity or moves or waits or cache") if setting.rehearse else ()
    device = "cpu:0" if setting.rehearse else "cuda"  # the same memory by another name
    for name in TESTS:
        made = setting.file(f"{name}.xml")
        argv = (
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={CHECKOUT}",
            f"--junit-xml={made}",
            *only,
        )
        # 5: of these words there is no test in the file.
        yield Step(
            (*argv, str(CHECKOUT / f"core/tests/{name}.py")),
            made,
            good=(0, 5),
            env={"DTBENCH_TEST_DEVICE": device},
        )


def _run(setting: Setting, suite: str, name: str, seconds: int, *options: str) -> Step:
    made = setting.file(f"{name}.jsonl")
    little = ("--quick",) if setting.rehearse else ()
    budget = f"{10 if setting.rehearse else seconds}s"
    argv = ("run", suite, "--device", setting.device, "--budget", budget, *little, *options, "-o", made)
    return _dtbench(*argv, makes=made, again=("--resume",))


def _suites(setting: Setting) -> Iterator[Step]:
    for suite in ALONE:
        yield _run(setting, suite, f"one-rank-{suite}", 50, "--nproc", "1")
    for suite in TWO:
        yield _run(setting, suite, f"two-gloo-ranks-{suite}", 50, "--nproc", "2", "--backend", "gloo")


def _truth(setting: Setting) -> Iterator[Step]:
    made = setting.file("truth.json")
    yield Step(("-P", "-m", "dtbench.gpu.truth", made), made)


def _gate(setting: Setting) -> Iterator[Step]:
    made = setting.file("gate-selftest")
    budget = "20s" if setting.rehearse else "390s"  # then come the trials
    argv = ("gate", "--selftest", "--device", setting.device, "--budget", budget, "-o", made)
    # 2: the budget held too few launches, as it does in a rehearsal; 3: goals are missed.
    good = (0, 2, 3) if setting.rehearse else (0, 3)
    yield _dtbench(*argv, makes=made, again=("--resume",), good=good)


def _profile(setting: Setting) -> Iterator[Step]:
    made = setting.file("profile")
    argv = ("profile", "tensor_parallel", "--filter", "pass=forward", "--quick", "--device", setting.device)
    ranks = ("--nproc", "2", "--backend", "gloo")
    yield _dtbench(*argv, *ranks, *(() if setting.rehearse else ("--nvtx",)), "-o", made, makes=made)


def _report(setting: Setting) -> Iterator[Step]:
    for ranks in ("one-rank", "two-gloo-ranks"):  # a page holds runs of one setup
        runs = [str(path) for path in sorted(setting.folder.glob(f"*{ranks}-*.jsonl"))]
        made = setting.file(f"{ranks}.html")
        if runs:
            yield _dtbench("report", *runs, "-o", made, makes=made, always=True)
    yield Step(("-P", "-m", "dtbench.gpu.summary", str(setting.folder)), always=True)


PARTS = (
    Part(
        "tests",
        "a checkout with the tests, pytest and hypothesis",
        "tests of other rooms of the core, whose tensors are the CPU's; ranks of NCCL beyond the one of part 2",
        _tests,
    ),
    Part(
        "suites",
        "a GPU",
        "NCCL between GPUs: two ranks share the card through gloo, which says nothing of links; copies beside a matmul",
        _suites,
    ),
    Part("truth", "a GPU, NVML", "lower power limits: throttling is only seen if the card throttles", _truth),
    Part(
        "gate",
        "a GPU",
        "several ranks; a pool too small for its trials is gone on with by the next call",
        _gate,
    ),
    Part("profile", "a GPU, NVML", "NCCL kernels: its two ranks share the card", _profile),
    Part("report", "what the other parts have written", "what they have not", _report),
)
