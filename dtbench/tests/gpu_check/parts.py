"""The parts of `dtbench gpu-check`: which commands each runs, what it needs, what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Tests whose tensors lie where DTBENCH_TEST_DEVICE says; see core/tests/on_device.py.
TESTS = ("bucketer", "bucketer_more", "comm", "comm_tensor", "dispatch", "redistribute")
# Suites that one rank can run, and those that need two.
ALONE = ("dispatch", "packing", "collectives")
TWO = ("bucketer", "redistribute", "collectives", "tensor_parallel", "compile")
CHECKOUT = Path(__file__).parents[3]


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


def _dtbench(words: str, *argv: str, made: str, **given: Any) -> Step:
    return Step(("-P", "-m", "dtbench", *words.split(), *argv, "-o", made), made, **given)


def _tests(setting: Setting) -> Iterator[Step]:
    only = ("-k", "layout or capacity or moves or waits or cache") if setting.rehearse else ()
    device = "cpu:0" if setting.rehearse else "cuda"  # the same memory by another name
    for name in TESTS:
        made = setting.file(f"test_{name}.xml")
        argv = ("-m", "pytest", "-q", "-pno:cacheprovider", f"--rootdir={CHECKOUT}", f"--junit-xml={made}")
        of = str(CHECKOUT / f"core/tests/test_{name}.py")
        # 5: of these words there is no test in the file.
        yield Step((*argv, *only, of), made, good=(0, 5), env={"DTBENCH_TEST_DEVICE": device})


def _suites(setting: Setting) -> Iterator[Step]:
    much = f"--device {setting.device} " + ("--budget 10s --quick" if setting.rehearse else "--budget 50s")
    of_two = ("two-gloo-ranks", TWO, "--nproc 2 --backend gloo")
    for name, suites, ranks in (("one-rank", ALONE, "--nproc 1"), of_two):
        for suite in suites:
            made = setting.file(f"{name}-{suite}.jsonl")
            yield _dtbench(f"run {suite} {much} {ranks}", made=made, again=("--resume",))


def _truth(setting: Setting) -> Iterator[Step]:
    made = setting.file("truth.json")
    yield Step(("-P", "-m", "dtbench.tests.gpu_check.truth", made), made)


def _gate(setting: Setting) -> Iterator[Step]:
    budget = "20s" if setting.rehearse else "390s"  # then come the trials
    # 2: the budget held too few launches, as it does in a rehearsal; 3: goals are missed.
    good = (0, 2, 3) if setting.rehearse else (0, 3)
    made = setting.file("gate-selftest")
    words = ("--device", setting.device, "--budget", budget, "-o", made)
    yield Step(("-P", "-m", "dtbench.tests.gate_selftest", *words), made, ("--resume",), good)


def _profile(setting: Setting) -> Iterator[Step]:
    words = f"profile tensor_parallel --filter pass=forward --quick --device {setting.device} --nproc 2 --backend gloo"
    yield _dtbench(words, *(() if setting.rehearse else ("--nvtx",)), made=setting.file("profile"))


def _report(setting: Setting) -> Iterator[Step]:
    for ranks in ("one-rank", "two-gloo-ranks"):  # a page holds runs of one setup
        runs = [str(path) for path in sorted(setting.folder.glob(f"*{ranks}-*.jsonl"))]
        made = setting.file(f"{ranks}.html")
        if runs:
            yield _dtbench("report", *runs, made=made, always=True)


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
    Part("gate", "a GPU", "several ranks; the next call goes on with a pool too small for its trials", _gate),
    Part("profile", "a GPU, NVML", "NCCL kernels: its two ranks share the card", _profile),
    Part("report", "what the other parts have written", "what they have not", _report),
)
