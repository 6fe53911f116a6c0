"""The messages between the gate, its loaders and its launches: (kind, value) pairs, and requests to fork a launch."""

from typing import NamedTuple

NOW = "now"  # launch -> gate: label of the benchmark that runs next
LISTING = "listing"  # launch -> gate: the arm's Listing, as msgpack
RESULT = "result"  # launch -> gate: a Result, as msgpack
READY = "ready"  # launch -> gate: number of the sample that it is ready to take; loader -> gate: 0, torch is imported
GO = "go"  # gate -> launch, the answer to READY: CPU to run on, -1 for any
ENDED = "ended"  # loader -> gate, on the launch's connection: exit code of the launch


class LaunchRequest(NamedTuple):
    """A request of the gate to a loader: fork a launch of an arm.

    Attributes:
        order: the task of the launch, a `gate.benchmark.Order` as msgpack.
        log: file for the output of the launch.
        root: the working directory.
        path: the arm's entries of sys.path.
        env: the arm's environment variables.
    """

    order: bytes
    log: str
    root: str
    path: tuple[str, ...]
    env: dict[str, str]
