"""The two files that pass between our launcher and the ranks it starts: the launch's spec and the ranks' report.

Both lie in the launch's scratch folder. Ranks of another launcher have neither: they parse the command line.
"""

from typing import Any, Literal, TypeVar

import msgspec

from dtbench.engine.failure import ActiveCase, Diagnosis

_RequestT = TypeVar("_RequestT")


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of a launch. Ranks of our launcher read it instead of parsing the command line.

    Attributes:
        command: the command that starts the ranks.
        request: the command's validated request, as JSON data.
        argv: the command line without the program's name, for the header of the run file.
        launch: which of the --launches this is, from 0.
        is_restart: whether ranks of this launch were lost before.
        start_s: when the run began, seconds on this host's monotonic clock.
        launcher_pid: process id of our launcher; 0 for ranks of another launcher.
        report_path: where the ranks report to our launcher; "" for ranks of another launcher.
    """

    command: Literal["run", "preflight", "profile"]
    request: Any = None
    argv: tuple[str, ...] = ()
    launch: int = 0
    is_restart: bool = False
    start_s: float = 0.0
    launcher_pid: int = 0
    report_path: str = ""

    def request_as(self, kind: type[_RequestT]) -> _RequestT:
        """Returns the request as the dataclass that the command works with."""
        return msgspec.convert(self.request, kind, dec_hook=lambda kind, text: kind(text))


class RankReport(msgspec.Struct, frozen=True):
    """The state of a launch, as its ranks last reported it.

    Attributes:
        case: the case that the ranks are measuring.
        ok_results: number of the run's results with status "ok".
        exit_code: the launch's exit code once it is over and the ranks have printed why; else None.
        is_complete: whether everything was measured.
        diagnosis: what ended the ranks, for the launcher to record and print.
    """

    case: ActiveCase = msgspec.field(default_factory=ActiveCase)
    ok_results: int = 0
    exit_code: int | None = None
    is_complete: bool = False
    diagnosis: Diagnosis | None = None
