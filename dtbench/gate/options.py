"""The options of a gate, checked before anything is built."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dtbench.engine.options import LAUNCH_TIMEOUT_S, RunRequest
from dtbench.errors import UsageError
from dtbench.gate.arms import check_text
from dtbench.gate.benchmark import SuiteSelection
from dtbench.machine.backends import check_backend
from dtbench.machine.device import DEFAULT_CPU_RANKS
from dtbench.suite import CHOOSABLE_IMPLS, RunOptions


@dataclass(frozen=True)
class GateOptions:
    """The options of a gate, named as on the command line.

    Attributes:
        request: the options shared with `dtbench run`, except the implementations.
        impls: implementations to compare; empty: all.
    """

    base: str
    head: str
    selections: tuple[SuiteSelection, ...]
    request: RunRequest
    impls: tuple[str, ...] = ()
    budget_s: float | None = None
    timeout_s: float = LAUNCH_TIMEOUT_S
    seed: int | None = None
    allow_new: bool = False
    counters: Literal["judge", "report"] = "judge"
    folder: Path | None = None

    def __post_init__(self) -> None:
        for text in (self.base, self.head):
            check_text(text)
        if not self.selections:
            raise UsageError("nothing is selected: name a suite, such as `dispatch`, or SUITE/TEXT")
        if self.timeout_s <= 0:
            raise UsageError(f"--launch-timeout {self.timeout_s:g}: expected seconds above 0")

    def run_options(self, gpus: int) -> RunOptions:
        """Returns the options of both arms' runs.

        Args:
            gpus: number of GPUs that torch finds in both arms.

        Raises:
            UsageError: there is no GPU, or torch does not have the backend.
        """
        device = self.request.device if self.request.device != "auto" else "cuda" if gpus else "cpu"
        if device == "cuda" and not gpus:
            raise UsageError("--device cuda: an arm's torch finds no GPU here; use --device cpu")
        # A run always measures the references; `--impl` chooses only between core and torch.
        impls = tuple(impl for impl in CHOOSABLE_IMPLS if impl in self.impls) or CHOOSABLE_IMPLS
        check_backend(device, self.request.backend)
        ranks = self.request.ranks or (gpus if device == "cuda" else DEFAULT_CPU_RANKS)
        return replace(self.request, impls=impls).resolve(device, ranks)

    def missing_impls(self, impls: Collection[str]) -> str:
        """Returns an error text if `--impl` names none of these implementations, else ""."""
        if not self.impls or {*self.impls} & {*impls}:
            return ""
        return f"the selection holds no benchmark of --impl {','.join(self.impls)}: it has {', '.join(sorted(impls))}"
