"""A rank's life, the same in every command: it joins its world, does its part, and leaves with an exit code.

with LaunchedRank(place, print_failure) as rank:
    ...                          # a DtbenchError here is raised on all ranks alike: options are refused
    rank.join(device_type)       # from here on, what goes wrong on one rank ends all of them
    with rank.process_group(mesh, timeout_s) as (world, barrier):
        ...
    rank.exit_code = 0
rank.exit()
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from dtbench._version import __version__
from dtbench.engine import clock_offsets
from dtbench.engine.failure import (
    LAUNCHER_DIED,
    ActiveCase,
    Diagnosis,
    FailureDetector,
    block_signals,
    exit_now,
)
from dtbench.engine.launch_files import RankReport
from dtbench.engine.rank_env import RankEnv, launch_number, valid_rank_env
from dtbench.engine.ranks import (
    LiveWorld,
    StoreRanks,
    choose_backend,
    make_barrier,
    real_world,
    select_device,
    store_connector,
    vote_of_rank_0,
    why_unreachable,
)
from dtbench.errors import (
    EXIT_OK,
    DtbenchError,
    RankMismatchError,
    UsageError,
    WorldBrokenError,
    complain,
    describe,
    plain,
)
from dtbench.machine.limits import refuse_few_files
from dtbench.suite.mesh import Mesh
from dtbench.text.masking import mask

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

JOIN_TIMEOUT = "DTBENCH_JOIN_TIMEOUT"  # seconds
# Thousands of ranks that load torch from one file system need minutes.
_JOIN_TIMEOUT_S = 300.0
# How long it is not said whom a rank waits for; our own launcher ends a start of which a rank has ended.
_PATIENCE_S, _PATIENCE_HERE_S = 5.0, 60.0
_TRIES_EVERY_S = 0.2
_MOST_NAMED = 8
# A launcher kills the others when the first rank leaves: the one that says why gets so long.
_SPEAKS_S = 1.0
_CHECK_ADDRESS = "check MASTER_ADDR, MASTER_PORT and the firewall"
# Options that are refused on every rank are said by rank 0. The others give it time to: a launcher ends the remaining
# ranks as soon as one of them has left, and a store that rank 0 served is gone.
LET_RANK_0_SPEAK_S = 10.0
_MAX_SHOWN_CHARS = 60
# Ranks may need long to find each other's addresses, and the GPU its first context.
_LEAST_GROUP_S = 60.0


class LaunchedRank:
    """This process as a rank that a launcher started. Entered before torch is loaded.

    Attributes:
        place: the rank's number, and the address of the store that the ranks share.
        active_case: what this rank is measuring, for the diagnosis of a failure.
        exit_code: the exit code of the process unless it fails.
        infos: the machine provenance of each rank, by rank.
        ranks: votes of all ranks, over the store.
    """

    infos: list[dict[str, Any]]
    ranks: StoreRanks
    store: Store
    device: torch.device

    def __init__(
        self,
        place: RankEnv,
        print_failure: Callable[[Diagnosis, ActiveCase], object],
        launch: int = 0,
        report_path: str = "",
    ) -> None:
        """Describes the rank; it starts with `with`.

        Args:
            print_failure: called once with what ended the ranks and the active case, in a helper thread of the lowest
                living rank. Only under another launcher: ours receives a report and prints it.
            launch: number of the launch, from 0.
            report_path: where our launcher reads the ranks' report; "" under another launcher.
        """
        self.place = place.of_launch(launch)
        self.active_case = ActiveCase(launch=launch)
        self.exit_code = EXIT_OK
        self.connect = store_connector(self.place, launch)
        self._print_failure = print_failure
        self._report_path = report_path
        self._reporting = threading.Lock()
        self._joining = False

    def __enter__(self) -> Self:
        block_signals()
        faulthandler.enable()  # what dies in a library's C++ says where
        silence_torch()
        self._detector = FailureDetector(
            self.active_case, self.place.rank, self.place.world_size, self._report_failure
        )
        self.limit = self._detector.limit
        return self

    @property
    def is_ours(self) -> bool:
        """Whether our launcher started this rank, and will start those of the next launch."""
        return bool(self._report_path)

    @property
    def joined(self) -> bool:
        return self._detector.joined

    def join(
        self, device_type: str, transport: str | None = None, same: Mapping[str, str] | None = None
    ) -> None:
        """Meets the other ranks.

        transport: of the process group that is to come, for the ranks' `infos`. same: what has to be the same on all
            ranks, by the names that users know it by.

        Raises:
            RankMismatchError: it is not, or a rank was refused something.
            WorldBrokenError: they do not come, or their store does not answer.
        """
        from dtbench.machine.provenance import installed, local_rank_info

        self._joining = True
        self._backend = transport or choose_backend(device_type)
        place = self.place
        versions = {"dtbench": __version__, "torch": installed("torch") or ""}
        limit_s = join_timeout_s()
        try:
            self.device = select_device(device_type, place.local_rank)
        except RuntimeError as error:
            raise WorldBrokenError(
                f"rank {place.rank} cannot use its {device_type} device: {describe(error)}"
            ) from error
        # Well after the waits of `meet`, which name who is missing: torch's import may keep them from ending in time.
        with self.limit(limit_s + 15 * _SPEAKS_S, f"joining through {place.store} within {limit_s:g} s"):
            self.store = await_all_ranks(
                place, self.connect, limit_s, _PATIENCE_HERE_S if self.is_ours else _PATIENCE_S
            )
            ranks = StoreRanks(self.store, place.rank, place.world_size, self._detector.raised)
            info = local_rank_info(str(self.device), transport)
            mine = {
                "info": info | {"rank": place.rank, "local_rank": place.local_rank},
                "same": versions | dict(same or {}),
            }
            self.infos, fault = ranks.agree(mine, _compare)
            if fault:
                raise RankMismatchError(fault)
            self._detector.join(
                functools.partial(self.connect, False),
                [info["host"] for info in self.infos],
                lambda: ranks.votes,
                None if place.agent_store else 0,
            )
        self.ranks = ranks

    def clock_offset(self, now_ns: Callable[[], int]) -> clock_offsets.Offset:
        """From this rank's clock to rank 0's, and how far off that may be; all ranks call it."""
        return clock_offsets.offset_to_rank_0(
            self.ranks, self.store, [info["boot_id"] for info in self.infos], now_ns
        )

    @contextlib.contextmanager
    def process_group(self, mesh: Mesh, timeout_s: float) -> Iterator[tuple[LiveWorld, Callable[[], None]]]:
        """The world of all ranks and its barrier. timeout_s: of a collective."""
        with contextlib.ExitStack() as stack:
            limit_s = min(max(timeout_s, _LEAST_GROUP_S), join_timeout_s())
            with self.limit(limit_s, f"the start of its {self._backend} process group within {limit_s:g} s"):
                here = (self.place, self.store, self.device)
                world = stack.enter_context(real_world(*here, mesh, timeout_s, self._backend))
                barrier = make_barrier(self.device)
                barrier()
            yield world, barrier
            self.wait_for_all()  # nobody leaves the group while others use it

    def wait_for_all(self) -> None:
        """Asleep, and outside the process group."""
        self.ranks.agree(None, lambda votes: None)

    def conclude(self, exit_code: int | None) -> None:
        """Ends the launch on all ranks with the exit code of rank 0.

        Args:
            exit_code: ignored on the other ranks.
        """
        if self.place.rank == 0:
            self.report(exit_code=exit_code, is_complete=True)
        self.exit_code = self.ranks.agree(exit_code, vote_of_rank_0) or EXIT_OK

    def report(self, **fields: Any) -> bool:
        """Updates fields of the `RankReport` for our launcher, from any thread.

        Returns:
            Whether it was written; False under another launcher.
        """
        if not self._report_path:
            return False
        with self._reporting:
            report = msgspec.structs.replace(RankReport.read(self._report_path), **fields)
            return report.write(self._report_path)

    def stop_all(self, exit_code: int) -> NoReturn:
        """Ends all ranks. Called on rank 0, which has printed why."""
        self.report(exit_code=exit_code)
        self._detector.stop_others(exit_code)
        exit_now(exit_code)

    def exit(self) -> NoReturn:
        exit_now(self.exit_code)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._detector.leave(self.exit_code, self.store if self._joining else None)
        elif isinstance(error, DtbenchError) and not self._joining:
            return  # the command line says it, once for all ranks
        elif isinstance(error, RankMismatchError):
            if self.place.rank == 0:
                complain(str(error))
                self.report(exit_code=error.exit_code)
            self._detector.leave(error.exit_code, self.store)
            exit_now(error.exit_code)
        elif isinstance(error, DtbenchError) and (self.place.rank == 0 or not self._detector.joined):
            complain(str(error))
            self.stop_all(error.exit_code)
        else:  # SystemExit in a suite's code is a fault like any other
            if os.environ.get("DTBENCH_TRACEBACK"):
                sys.excepthook(type(error), error, trace)
            self._detector.fault(mask(describe(error)))

    def _report_failure(self, diagnosis: Diagnosis) -> None:
        # Without a case here, rank 0 may have one, which it has reported.
        case = {"case": self.active_case} if self.active_case.name else {}
        if diagnosis == LAUNCHER_DIED or not self.report(diagnosis=diagnosis, **case):
            self._print_failure(diagnosis, self.active_case)


def join_timeout_s() -> float:
    """How long a rank waits for its world.

    Raises:
        UsageError: the environment has no number of seconds.
    """
    text = os.environ.get(JOIN_TIMEOUT, "")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text or _JOIN_TIMEOUT_S)) < 1e6:
            return seconds
    raise UsageError(f"the environment has {JOIN_TIMEOUT}={text[:40]!r}: expected seconds above 0")


def await_all_ranks(
    place: RankEnv, connect: Callable[[bool], Store], limit_s: float, patience_s: float
) -> Store:
    """The store of the ranks, once all have come. After `patience_s` one rank of each host says whom it waits for.

    Raises:
        WorldBrokenError: the store is not served, or not all ranks have come within the limit.
    """
    began_s = time.monotonic()
    store = _store_within(place, connect, limit_s, patience_s)
    store.set(f"hello/{place.rank}", "")
    for until_s in (patience_s, limit_s):
        left_s = max(began_s + until_s - time.monotonic(), 0.1)
        try:
            store.wait([f"hello/{rank}" for rank in range(place.world_size)], timedelta(seconds=left_s))
            return store
        except RuntimeError:
            missing = [rank for rank in range(place.world_size) if not store.check([f"hello/{rank}"])]
        lowest = next((rank for rank in range(place.world_size) if rank not in missing), place.rank)
        named = ", ".join(f"rank {rank}" for rank in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        whom = (
            f"{named}{more} of {place.world_size} to join through {place.store}" if missing else place.store
        )
        if until_s < limit_s and place.rank == lowest:
            _say_waiting(place, whom, limit_s - until_s)
    if place.rank != lowest:
        time.sleep(_SPEAKS_S)
        exit_now(WorldBrokenError.exit_code)
    raise WorldBrokenError(f"rank {place.rank} waited {limit_s:g} s for {whom}: nothing was measured")


def _store_within(
    place: RankEnv, connect: Callable[[bool], Store], limit_s: float, patience_s: float
) -> Store:
    began_s, seen = time.monotonic(), [""]
    # Torch waits without end for a server that takes connections and does not answer.
    opening = ThreadPoolExecutor(1).submit(_open, place, connect, seen)
    for until_s in (patience_s, limit_s):
        try:
            return opening.result(max(began_s + until_s - time.monotonic(), 0.0))
        except TimeoutError:
            if until_s < limit_s and place.local_rank == 0:
                _say_waiting(place, f"{place.store} ({seen[0]})", limit_s - until_s)
        except RuntimeError as error:
            raise WorldBrokenError(
                f"rank {place.rank} cannot {'serve' if place.serves else 'reach'} {place.store} ({describe(error)}): "
                f"nothing was measured; {_CHECK_ADDRESS}"
            ) from error
    raise WorldBrokenError(
        f"rank {place.rank} waited {limit_s:g} s for {place.store} ({seen[0]}): nothing was measured; {_CHECK_ADDRESS}"
    )


def _open(place: RankEnv, connect: Callable[[bool], Store], seen: list[str]) -> Store:
    """Opens the store. seen: takes what was met at its address so far."""
    while why := why_unreachable(place):
        seen[0] = why
        time.sleep(_TRIES_EVERY_S)
    seen[0] = "what listens there does not answer as a TCPStore"
    return connect(True)


def _say_waiting(place: RankEnv, whom: str, left_s: float) -> None:
    complain(f"rank {place.rank} waits for {whom}; up to {left_s:.0f} s more ({JOIN_TIMEOUT})")


def silence_torch() -> None:
    """Before torch loads: no log lines of its C++ side and no warnings about its own names.

    Raises:
        UsageError: it could not be loaded here.
    """
    refuse_few_files()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _compare(votes: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """On rank 0: what the ranks say of themselves, and why they cannot work together; "" where they can."""
    first: dict[str, str] = votes[0]["same"]
    for rank, vote in enumerate(votes):
        for name in [*first, *vote["same"]]:
            theirs, ours = vote["same"].get(name, "none"), first.get(name, "none")
            if theirs != ours:
                return [], (
                    f"rank {rank} has {name} {_short(theirs)}, rank 0 has {_short(ours)}: "
                    "expected the same on every rank"
                )
    return [vote["info"] for vote in votes], ""


def _short(value: str) -> str:
    text = plain(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def complain_from_one_rank(text: str) -> None:
    """Before a rank has joined: rank 0 says what all ranks have met; a rank that has met it alone says so itself."""
    place = valid_rank_env()
    line = " ".join(text.split())
    if place is None or place.rank == 0:
        complain(line)
        return
    time.sleep(LET_RANK_0_SPEAK_S)
    if not why_unreachable(place.of_launch(launch_number())):
        complain(f"rank {place.rank}: {line}")
