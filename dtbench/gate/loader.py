"""The process that launches are forked off: it loads what all of them need, and each then loads its arm's code.

    gate ---> python -P -m dtbench.gate.loader FD     a fresh process for every round of launches
                load torch and the harness; READY
       ---> launch: fork, path and variables of one arm, set up; READY, wait for GO, a sample, READY, ...; ENDED
       ---> launch: the same of another arm

Loading torch takes longer than measuring thirty benchmarks. Launches of one round share its luck, such as where its
libraries lie in memory, so that it does not tell them apart; the next round draws anew. Of an arm nothing is
loaded before the fork. Needs no torch itself.
"""

from __future__ import annotations

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
    """argv: the descriptor of the connection to the gate."""
    from dtbench.gate import worker

    connection = connection_at(argv[0])
    worker.load()
    gc.collect()
    gc.freeze()  # what is collected later writes to no page of these
    with contextlib.suppress(OSError):  # the gate may be gone
        connection.send((READY, 0))
    running: list[tuple[Fork, Connection]] = []
    while True:
        ready = wait([connection, *(fork.ended for fork, _ in running)])
        for fork, own in [one for one in running if one[0].ended in ready]:
            running.remove((fork, own))
            with own, contextlib.suppress(OSError):
                own.send((ENDED, fork.code()))
        if connection in ready:
            try:
                request = LaunchRequest(*connection.recv())
                own = receive_connection(connection)
            except (EOFError, OSError):  # the gate is gone
                for fork, _ in running:
                    fork.end()
                return 0
            others = [connection, *(other for _, other in running)]
            running.append((Fork(partial(_launch, request, own, others)), own))


def _launch(request: LaunchRequest, connection: Connection, others: Sequence[Connection]) -> int:
    """In the fork: takes on the arm and carries out the order."""
    from dtbench.gate import worker

    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for other in others:
        other.close()
    shared = len(os.environ["PYTHONPATH"].split(os.pathsep))  # entries that the loader was started with
    sys.path[:shared] = request.path
    os.environ.update(request.env, PYTHONPATH=os.pathsep.join(request.path))
    os.chdir(request.root)
    return worker.main(request.order, connection)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
