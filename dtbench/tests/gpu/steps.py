"""The steps of the check of one GPU, by worth: a command of Python's each, its limit, and where its results go.

Which steps repeat what `results/gpu/nvidia-h200` has, and why:

- smoke, limits: every figure stands beside the limits of the same card on the same day.
- packing, kernels: the bucketer's packing has changed since.
- profile: it failed there.
- the tests of comm, CommTensor, bucketer and redistribute: on two NCCL ranks this time, not on threads and gloo.

Steps named in `REPEATED` come last and run if time is left: in a second call, or where two NCCL ranks do not work. That
folder has most of them; they are worth having of another kind of card. The gate's self-test and a profile of two gloo
ranks are among them, as 540 s do not hold these beside the others.
"""

import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
# Test files that run on two ranks of DTBENCH_TEST_BACKEND (core/tests/two_ranks.py): a step each.
PAIR_TESTS = {
    "comm": "core/tests/test_comm.py core/tests/test_comm_tensor.py",
    "bucketer": "core/tests/test_bucketer.py",
    "redistribute": "core/tests/test_redistribute.py core/tests/test_parallel.py",
}
# Test files whose tensors lie where DTBENCH_TEST_DEVICE says (core/tests/on_device.py), by worth.
TESTS = ("comm_tensor", "bucketer", "dispatch", "comm", "redistribute")
# Plugins of other packages are not loaded (the check's environment says so); failures beyond these repeat the first.
PYTEST = "-m pytest -v -p pytest_benchmark.plugin -p no:cacheprovider -W default --maxfail=20 -rs"
# Parts of a suite's time limit: until its first sample (torch, CUDA's context, ranks), and after its last sample.
TO_START_S = 15
# The dispatch suite's `pass` of a forward call whose inputs require gradients.
FORWARD_WITH_GRAD = "forward+requires_grad"
# Any one of these lines: forward with gradients, with backward, and optimizers of 100 parameters.
GRAD_FILTER = f"""pass={FORWARD_WITH_GRAD} call=cached mesh=8
pass=forward+backward call=cached mesh=8
_x100 mesh=8"""
GATE_SUITE = "dtbench/tests/gate_selftest_suite.py"
REPEATED = frozenset(
    {"profile-gloo", "gate-selftest", "dispatch", "graph", "nccl", "clocks", "two-ranks", "two-ranks-more"}
    | {f"tests-{name}" for name in TESTS}
)


class Step(NamedTuple):
    """A command, and when it is run.

    Attributes:
        name: names its log, its results and its line in the summary.
        expected_s: seconds that it takes on an H200, as measured or estimated.
        limit_s: seconds; it is begun if so much is left, and ended after that.
        command: words as a shell has them; `{out}` is the folder of all results. The last word is the output.
        resume: a later call goes on with that output.
        good: exit codes that count as ok. A missed goal is a finding.
        last: it reads what the others have left, each time, and its time is kept for it.
        pair: it starts two NCCL ranks on the card, with the environment that the step "pair" found to work.
    """

    name: str
    expected_s: float
    limit_s: float
    command: str
    resume: bool = False
    good: tuple[int, ...] = (0,)
    last: bool = False
    pair: bool = False


def steps_of(rehearse: bool) -> list[Step]:
    """Returns the steps in the order in which they are run.

    rehearse: on a CPU with a fake GPU and gloo in place of NCCL, little of each suite; the tests are the same.
    """
    device = "--device cpu" if rehearse else "--device cuda"
    gloo = "--nproc 2 --backend gloo"
    # Inductor's C++ compiler takes a minute on two cores; Triton does not.
    compiler = "aot_eager" if rehearse else "inductor"
    # NCCL's own variable lets two ranks share a card; `--timeout` bounds what a lock-up costs.
    two = "--nproc 2 --timeout 20"
    selftest = f"-P -m dtbench.tests.gate_selftest {device} --budget {20 if rehearse else 150}s"
    gate = (
        f"-P -m dtbench gate {GATE_SUITE}/relu --base env: --head env:DTBENCH_SELFTEST_EXTRA=1 --counters report "
        f"{device} --budget {30 if rehearse else 45}s -o {{out}}/gate"
    )
    profile = f"-P -m dtbench profile tensor_parallel --filter 'mlp pass=forward' --quick {device}"

    def measured(group: str, expected_s: float, limit_s: float) -> Step:
        return Step(
            group, expected_s, limit_s, f"-P -m dtbench.tests.gpu.instruments {group} {{out}}/{group}.json"
        )

    def ranks(check: str, expected_s: float, limit_s: float) -> Step:
        words = f"-P -m dtbench.tests.gpu.pair {check} {limit_s - 5:.0f} {{out}}/{check}.json"
        return Step(check, expected_s, limit_s, words, pair=True)

    def suite(name: str, expected_s: float, limit_s: float, words: str, pair: bool = False) -> Step:
        budget = "--quick --budget 15s" if rehearse else f"--budget {limit_s - TO_START_S:.0f}s"
        command = f"-P -m dtbench run {words} {device} {budget} -o {{out}}/{name}.jsonl"
        return Step(name, expected_s, limit_s, command, True, pair=pair)

    def pair_tests(name: str, expected_s: float, limit_s: float) -> Step:
        command = f"{PYTEST} {PAIR_TESTS[name]} --junit-xml {{out}}/pair-tests-{name}.xml"
        return Step(f"pair-tests-{name}", expected_s, limit_s, command, pair=True)

    def tests(name: str) -> Step:
        # Every error of a rank that comm_tensor's tests expect costs a start of four.
        limit_s = 90.0 if name == "comm_tensor" else 60.0
        command = f"{PYTEST} core/tests/test_{name}.py --junit-xml {{out}}/tests-{name}.xml"
        return Step(f"tests-{name}", limit_s / 2, limit_s, command)

    def report(name: str, limit_s: float, *runs: str) -> Step:
        files = " ".join(f"{{out}}/{run}.jsonl" for run in runs)
        command = f"-P -m dtbench report {files} -o {{out}}/{name}.html"
        return Step(f"report-{name}", 5, limit_s, command, last=True)

    return [
        measured("smoke", 15, 100),  # the first to load torch from the disk: 45 s were seen
        measured("limits", 8, 45),
        ranks("pair", 20, 80),
        pair_tests("comm", 35, 70),
        pair_tests("bucketer", 25, 50),
        pair_tests("redistribute", 40, 70),
        suite("pair-parallel", 35, 50, f"tensor_parallel --quick {two}", pair=True),
        ranks("attach", 30, 60),
        ranks("pair-captured", 15, 40),
        suite("packing", 28, 50, "packing --nproc 1"),
        measured("kernels", 20, 45),
        suite("dispatch-grad", 60, 75, f"dispatch --nproc 1 --filter {shlex.quote(GRAD_FILTER)}"),
        measured("moves", 20, 45),
        measured("compiled", 25, 60),
        measured("captured", 15, 40),
        suite(
            "pair-compile",
            40,
            70,
            f"compile --quick {two} --filter 'call=cached backend={compiler}'",
            pair=True,
        ),
        Step("profile", 20, 50, f"{profile} {two} -o {{out}}/profile", pair=True),
        # 1: it found the extra work of head, by time alone; 3: too few launches, in a rehearsal.
        Step("gate", 45, 60, gate, good=(0, 1, 3) if rehearse else (1,)),
        # What jobs send and keep: sharded groups, narrower dtypes, unequal parts.
        suite("pair-jobs", 30, 55, f"fsdp payload expert_parallel --quick {two}", pair=True),
        # ---- `REPEATED` ----
        # Used if two NCCL ranks do not work.
        Step("profile-gloo", 20, 50, f"{profile} {gloo} -o {{out}}/profile-gloo"),
        # 3: goals are missed; 2: the budget of a rehearsal holds too few launches for a verdict.
        Step(
            "gate-selftest",
            165,
            180,
            f"{selftest} -o {{out}}/gate-selftest",
            True,
            (0, 2, 3) if rehearse else (0, 3),
        ),
        suite("dispatch", 75, 90, "dispatch --nproc 1"),
        measured("graph", 11, 30),
        suite("nccl", 13, 50, "collectives --nproc 1"),
        measured("clocks", 8, 40),
        suite("two-ranks", 55, 55, f"bucketer redistribute --quick {gloo}"),
        *map(tests, TESTS),
        suite("two-ranks-more", 75, 90, f"tensor_parallel collectives --quick {gloo}"),
        # A page holds runs of one setup. The first loads matplotlib and pandas from the disk.
        report("one-rank", 25, "dispatch-grad", "packing", "dispatch", "nccl"),
        report("two-ranks", 15, "pair-parallel", "pair-compile", "pair-jobs"),
    ]
