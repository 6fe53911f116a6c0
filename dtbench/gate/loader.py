"""The process from which launches are forked. It imports torch once; each launch then imports its arm's code.

    gate ---> python -P -m dtbench.gate.loader FD     a new process for every round of launches
                import torch and the harness; send READY
       ---> launch: fork, set path and variables of one arm; send READY, wait for GO, sample, send READY, ...; ENDED
       ---> launch: the same for another arm

Importing torch takes longer than measuring thirty benchmarks. The launches of one round share the loader's memory
layout, so the layout does not bias their comparison. Every round starts a new loader, so the layouts vary over rounds.
No code of an arm is imported before the fork.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait

from dtbench.engine.workers import Fork, connection_at, receive_connection
from dtbench.gate.messages import ENDED, READY, LaunchRequest


def main(argv: Sequence[str]) -> int:
    """Forks launches on request until the gate closes the connection.

    Args:
        argv: the file descriptor of the connection to the gate, as its only element.
    """
    from dtbench.gate import worker

    connection = connection_at(argv[0])
    worker.load()
    gc.collect()
    gc.freeze()  # else later garbage collections would copy the memory pages that launches share
    with contextlib.suppress(OSError):  # the gate may be gone
        connection.send((READY, 0))
    running: list[tuple[Fork, Connection]] = []
    while True:
        ready = wait([connection, *(fork.ended for fork, _ in running)])
        for fork, launch_connection in [entry for entry in running if entry[0].ended in ready]:
            running.remove((fork, launch_connection))
            with launch_connection, contextlib.suppress(OSError):
                launch_connection.send((ENDED, fork.code()))
        if connection in ready:
            try:
                request = LaunchRequest(*connection.recv())
                launch_connection = receive_connection(connection)
            except (EOFError, OSError):  # the gate is gone
                for fork, _ in running:
                    fork.end()
                return 0
            inherited = [connection, *(launch for _, launch in running)]
            running.append((Fork(partial(_launch, request, launch_connection, inherited)), launch_connection))


def _launch(request: LaunchRequest, connection: Connection, inherited: Sequence[Connection]) -> int:
    """Carries out the order in the forked process, with the arm's path and variables. Returns the exit code."""
    from dtbench.gate import worker

    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for inherited_connection in inherited:
        inherited_connection.close()
    shared = len(os.environ["PYTHONPATH"].split(os.pathsep))  # entries that the loader was started with
    sys.path[:shared] = request.path
    os.environ.update(request.env, PYTHONPATH=os.pathsep.join(request.path))
    os.chdir(request.root)
    return worker.main(request.order, connection)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
