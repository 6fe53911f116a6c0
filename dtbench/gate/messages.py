"""The messages between the gate, its loaders and its launches."""

from typing import NamedTuple

# From a launch: the benchmark it is at (a label), the arm's Listing and a Result (msgpack), ready for its next sample
# (its number), its end (exit code). From the gate: GO, the answer to READY (a CPU, -1 for any).
NOW, LISTING, RESULT, READY, ENDED, GO = "now", "listing", "result", "ready", "ended", "go"


class LaunchRequest(NamedTuple):
    """A request of the gate to a loader: fork a launch of an arm.

    Attributes:
        order: an Order, as msgpack.
        log: the file that takes what the launch prints.
        root: the working directory.
        path: the arm's entries of sys.path.
        env: the arm's environment variables.
    """

    order: bytes
    log: str
    root: str
    path: tuple[str, ...]
    env: dict[str, str]
