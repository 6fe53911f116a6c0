"""What is run on a GPU, by worth: a command of Python's each, its limit, and where its results go."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
# Test files whose tensors lie where DTBENCH_TEST_DEVICE says (core/tests/on_device.py), by worth.
TESTS = ("bucketer", "comm_tensor", "dispatch", "comm", "redistribute")
# Plugins of other packages are not loaded (the check's environment says so); failures beyond these repeat the first.
PYTEST = "-m pytest -v -p pytest_benchmark.plugin -p no:cacheprovider -W default --maxfail=20"
# Of a suite's limit: to its first sample (torch, CUDA's context, ranks), and from its last to its end.
TO_START_S = 15


class Step(NamedTuple):
    """limit_s: it is begun if so much is left, and ended after that. command: `{out}` is the folder of all results; its
    last word is the output. resume: a later call goes on with that. good: exit codes; a missed goal is a finding. last:
    it reads what the others have left, each time, and its time is kept for it."""

    name: str
    limit_s: float
    command: str
    resume: bool = False
    good: tuple[int, ...] = (0,)
    last: bool = False


def steps_of(rehearse: bool) -> list[Step]:
    """In the order in which they are run. rehearse: on a CPU with a fake GPU, little of each suite; the tests are the
    same."""
    device = "--device cpu" if rehearse else "--device cuda"
    # NCCL refuses two ranks on one card; on gloo torch's DTensor cannot gather, nor can what is compiled.
    two = "--nproc 2 --backend gloo"
    profile = f"-P -m dtbench profile tensor_parallel --filter pass=forward --quick {two} {device}"
    gate = f"-P -m dtbench.tests.gate_selftest {device} --budget {20 if rehearse else 150}s -o {{out}}/gate"

    def measured(group: str, limit_s: float) -> Step:
        return Step(group, limit_s, f"-P -m dtbench.tests.gpu.instruments {group} {{out}}/{group}.json")

    def suite(name: str, limit_s: float, words: str) -> Step:
        much = "--quick --budget 20s" if rehearse else f"--budget {limit_s - TO_START_S:.0f}s"
        return Step(name, limit_s, f"-P -m dtbench run {words} {device} {much} -o {{out}}/{name}.jsonl", True)

    def tests(name: str) -> Step:
        words = f"{PYTEST} core/tests/test_{name}.py --junit-xml {{out}}/tests-{name}.xml"
        # Every error of a rank that comm_tensor's tests expect costs a start of four.
        return Step(f"tests-{name}", 90 if name == "comm_tensor" else 60, words)

    def report(name: str, limit_s: float, *runs: str) -> Step:
        files = " ".join(f"{{out}}/{run}.jsonl" for run in runs)
        return Step(
            f"report-{name}", limit_s, f"-P -m dtbench report {files} -o {{out}}/{name}.html", last=True
        )

    return [
        measured("smoke", 100),  # the first to load torch from the disk: 45 s were seen
        measured("limits", 45),
        suite("dispatch", 90, "dispatch --nproc 1"),
        measured("graph", 30),
        suite("packing", 60, "packing --nproc 1"),
        suite("nccl", 50, "collectives --nproc 1"),
        suite("two-ranks", 55, f"bucketer redistribute --quick {two}"),
        measured("clocks", 40),
        Step("profile", 50, f"{profile} -o {{out}}/profile"),
        *map(tests, TESTS[:3]),
        measured("profiler", 40),
        *map(tests, TESTS[3:]),
        suite("two-ranks-more", 90, f"tensor_parallel collectives --quick {two}"),
        # 3: goals are missed; 2: the budget of a rehearsal holds too few launches for a verdict.
        Step("gate", 180, gate, True, (0, 2, 3) if rehearse else (0, 3)),
        # A page holds runs of one setup. The first loads matplotlib and pandas from the disk.
        report("one-rank", 25, "dispatch", "packing", "nccl"),
        report("two-ranks", 15, "two-ranks", "two-ranks-more"),
    ]
