"""The life of a rank, the same in every command: it joins the other ranks, does its part, and leaves.

with LaunchedRank(env, print_failure) as rank:
    ...                          # a DtbenchError here means invalid options, on every rank
    rank.join(device_type)       # from here on, an error on one rank ends all of them
    with rank.process_group(mesh, timeout_s) as (world, barrier):
        ...
    rank.conclude(exit_code)
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
from pathlib import Path
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
from dtbench.engine.rank_votes import (
    LiveWorld,
    StoreRanks,
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
    describe,
    plain,
    print_error,
)
from dtbench.machine.backends import prepare_backend, resolve_backend
from dtbench.machine.limits import ensure_file_limit
from dtbench.records.atomic import replace_file
from dtbench.suite.mesh import Mesh
from dtbench.text.masking import mask

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_TIMEOUT = "DTBENCH_JOIN_TIMEOUT"  # seconds
# Thousands of ranks that load torch from one file system need minutes.
_JOIN_TIMEOUT_S = 300.0
# Seconds after which a rank prints which other ranks are missing: later under our launcher, which itself notices a rank
# that dies during the start.
_SILENT_WAIT_S, _SILENT_WAIT_OF_OURS_S = 5.0, 60.0
_RETRY_S = 0.2
_MAX_NAMED_RANKS = 8
# A launcher kills the other ranks when the first one exits. The rank that prints the reason has this many seconds.
_REPORT_TIMEOUT_S = 1.0
_CHECK_ADDRESS = "check MASTER_ADDR, MASTER_PORT and the firewall"
# If every rank refuses the options, rank 0 prints the reason. The other ranks wait this many seconds, because a
# launcher kills all ranks at the first exit. If the store of rank 0 is gone afterwards, rank 0 has refused them, too.
RANK_0_PRINTS_S = 10.0
_MAX_SHOWN_CHARS = 60
# Exchanging addresses and creating the first context on a GPU may take long.
_MIN_GROUP_TIMEOUT_S = 60.0


class LaunchedRank:
    """This process as a rank that a launcher started. Enter it with `with` before torch is loaded.

    Attributes:
        env: the rank's number, and the address of the store that the ranks share.
        active_case: what this rank is measuring, for the diagnosis of a failure.
        exit_code: the exit code of the process unless it fails.
        rank_facts: description of each rank's hardware and software, by rank.
        ranks: votes of all ranks, over the store.
        store: the store that the ranks share.
        device: this rank's device. `join` sets rank_facts, ranks, store and device.
    """

    def __init__(
        self,
        env: RankEnv,
        print_failure: Callable[[Diagnosis, ActiveCase], object],
        launch: int = 0,
        report_path: str = "",
    ) -> None:
        """Stores the arguments. Entering the context starts the rank.

        Args:
            print_failure: called once with the diagnosis and the active case, in a helper thread of the rank that
                reports. Not called if our launcher receives a report, which it prints itself.
            launch: number of the launch, from 0.
            report_path: where our launcher reads the ranks' report; "" under another launcher.
        """
        self.env = env.of_launch(launch)
        self.active_case = ActiveCase(launch=launch)
        self.exit_code = EXIT_OK
        self.connect = store_connector(self.env, launch)
        self._print_failure = print_failure
        self._report_path = report_path
        self._reporting = threading.Lock()
        self._joining = False

    def __enter__(self) -> Self:
        block_signals()
        faulthandler.enable()  # prints where a library's C++ crashed
        silence_torch()
        self._detector = FailureDetector(
            self.active_case, self.env.rank, self.env.world_size, self._report_failure
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
        self, device_type: str, backend: str | None = None, agreement: Mapping[str, str] | None = None
    ) -> None:
        """Waits for the other ranks.

        Args:
            backend: backend of the process group that will be started, also recorded in `rank_facts`.
            agreement: values that must be the same on all ranks, by the names that users know.

        Raises:
            UsageError: the backend cannot be used.
            RankMismatchError: the ranks differ in `agreement` or versions.
            WorldBrokenError: ranks are missing, or their store does not answer.
        """
        from dtbench.machine.provenance import installed, local_rank_info

        self._backend = backend or resolve_backend(device_type)
        prepare_backend(
            self._backend
        )  # if it is refused, it is by all ranks, before they wait for each other
        self._joining = True
        env, limit_s = self.env, join_timeout_s()
        try:
            self.device = select_device(device_type, env.local_rank)
        except RuntimeError as error:
            raise WorldBrokenError(
                f"rank {env.rank} cannot use its {device_type} device: {describe(error)}"
            ) from error
        # Longer than the limits of `await_all_ranks`, so that its errors, which name the missing ranks, come first.
        with self.limit(
            limit_s + 15 * _REPORT_TIMEOUT_S, f"joining through {env.store} within {limit_s:g} s"
        ):
            self.store = await_all_ranks(
                env, self.connect, limit_s, _SILENT_WAIT_OF_OURS_S if self.is_ours else _SILENT_WAIT_S
            )
            self.ranks = StoreRanks(self.store, env.rank, env.world_size, self._detector.report_failure)
            vote = {
                "info": local_rank_info(str(self.device), backend)
                | {"rank": env.rank, "local_rank": env.local_rank},
                "agreement": {
                    "dtbench": __version__,
                    "torch": installed("torch") or "",
                    **(agreement or {}),
                },
            }
            self.rank_facts, mismatch = self.ranks.agree(vote, _compare_votes)
            if mismatch:
                raise RankMismatchError(mismatch)
            self._detector.join(
                functools.partial(self.connect, False),
                [info["host"] for info in self.rank_facts],
                lambda: self.ranks.votes,
                None if env.agent_store else 0,
            )

    def clock_offset(self, now_ns: Callable[[], int]) -> clock_offsets.Offset:
        """Measures the offset from this rank's clock to rank 0's. All ranks call it."""
        return clock_offsets.offset_to_rank_0(
            self.ranks, self.store, [info["boot_id"] for info in self.rank_facts], now_ns
        )

    @contextlib.contextmanager
    def process_group(self, mesh: Mesh, timeout_s: float) -> Iterator[tuple[LiveWorld, Callable[[], None]]]:
        """Yields the world of all ranks and its barrier.

        Args:
            timeout_s: limit of a collective, seconds.
        """
        with contextlib.ExitStack() as stack:
            limit_s = min(max(timeout_s, _MIN_GROUP_TIMEOUT_S), join_timeout_s())
            with self.limit(limit_s, f"the start of its {self._backend} process group within {limit_s:g} s"):
                world = stack.enter_context(
                    real_world(self.env, self.store, self.device, mesh, timeout_s, self._backend)
                )
                barrier = make_barrier(self.device)
                barrier()
            yield world, barrier
            self.wait_for_all()  # before a rank leaves a group that others still use

    def wait_for_all(self) -> None:
        """Waits for all ranks by a vote, without the process group. Waiting ranks sleep."""
        self.ranks.agree(None, vote_of_rank_0)

    def conclude(self, exit_code: int | None) -> None:
        """Ends the launch on all ranks with the exit code of rank 0.

        Args:
            exit_code: ignored on the other ranks.
        """
        if self.env.rank == 0:
            self.report(exit_code=exit_code, is_complete=True)
        self.exit_code = self.ranks.agree(exit_code, vote_of_rank_0) or EXIT_OK

    def report(self, **fields: Any) -> bool:
        """Updates fields of the `RankReport` for our launcher, from any thread.

        Returns:
            Whether it was written; False under another launcher.
        """
        if not self._report_path:
            return False
        path = Path(self._report_path)
        # A full disk must not end a run that writes elsewhere.
        with self._reporting, contextlib.suppress(OSError):
            report = msgspec.json.decode(path.read_bytes(), type=RankReport)
            replace_file(path, msgspec.json.encode(msgspec.structs.replace(report, **fields)))
            return True
        return False

    def stop_all(self, exit_code: int) -> NoReturn:
        """Ends all ranks. Called on rank 0, which has printed the reason."""
        self.report(exit_code=exit_code)
        self._detector.stop_other_ranks(exit_code)
        exit_now(exit_code)

    def exit(self) -> NoReturn:
        exit_now(self.exit_code)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._detector.leave(self.exit_code, self.store if self._joining else None)
        elif isinstance(error, DtbenchError) and not self._joining:
            return  # the command line prints it, once for all ranks
        elif isinstance(error, RankMismatchError):
            if self.env.rank == 0:
                print_error(str(error))
                self.report(exit_code=error.exit_code)
            self._detector.leave(error.exit_code, self.store)
            exit_now(error.exit_code)
        elif isinstance(error, DtbenchError) and (self.env.rank == 0 or not self._detector.joined):
            print_error(str(error))
            self.stop_all(error.exit_code)
        else:  # including SystemExit, which a suite may raise
            if os.environ.get("DTBENCH_TRACEBACK"):
                sys.excepthook(type(error), error, trace)
            self._detector.fail(mask(describe(error)))

    def _report_failure(self, diagnosis: Diagnosis) -> None:
        # Between cases, this rank has no active case. It leaves the case that rank 0 may have written into the report.
        case = {"case": self.active_case} if self.active_case.name else {}
        if diagnosis == LAUNCHER_DIED or not self.report(diagnosis=diagnosis, **case):
            self._print_failure(diagnosis, self.active_case)


def join_timeout_s() -> float:
    """Returns how long a rank waits for the others.

    Raises:
        UsageError: the environment variable is not a number of seconds.
    """
    text = os.environ.get(JOIN_TIMEOUT, "")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text or _JOIN_TIMEOUT_S)) < 1e6:
            return seconds
    raise UsageError(f"the environment has {JOIN_TIMEOUT}={text[:40]!r}: expected seconds above 0")


def await_all_ranks(env: RankEnv, connect: Callable[[bool], Store], limit_s: float, silent_s: float) -> Store:
    """Returns the store of the ranks once all have joined.

    Args:
        limit_s: how long to wait.
        silent_s: after this many seconds, the lowest rank that has joined prints which ranks are missing.

    Raises:
        WorldBrokenError: the store is not served, or ranks are missing at the limit.
    """
    start_s = time.monotonic()
    store = _open_store(env, connect, limit_s, silent_s)
    store.set(f"hello/{env.rank}", "")
    for until_s in (silent_s, limit_s):
        wait = timedelta(seconds=max(start_s + until_s - time.monotonic(), 0.1))
        try:
            store.wait([f"hello/{rank}" for rank in range(env.world_size)], wait)
            return store
        except RuntimeError:
            missing = [rank for rank in range(env.world_size) if not store.check([f"hello/{rank}"])]
        lowest = next((rank for rank in range(env.world_size) if rank not in missing), env.rank)
        awaited = env.store
        if missing:
            named = ", ".join(f"rank {rank}" for rank in missing[:_MAX_NAMED_RANKS])
            if len(missing) > _MAX_NAMED_RANKS:
                named += f" and {len(missing) - _MAX_NAMED_RANKS} more"
            awaited = f"{named} of {env.world_size} to join through {env.store}"
        if until_s < limit_s and env.rank == lowest:
            _print_waiting(env, awaited, limit_s - until_s)
    if env.rank != lowest:
        time.sleep(_REPORT_TIMEOUT_S)
        exit_now(WorldBrokenError.exit_code)
    raise WorldBrokenError(f"rank {env.rank} waited {limit_s:g} s for {awaited}: nothing was measured")


def _open_store(env: RankEnv, connect: Callable[[bool], Store], limit_s: float, silent_s: float) -> Store:
    start_s, obstacle = time.monotonic(), [""]
    # In a thread: torch waits without end for a server that accepts connections and does not answer.
    opening = ThreadPoolExecutor(1).submit(_connect_when_served, env, connect, obstacle)
    for until_s in (silent_s, limit_s):
        try:
            return opening.result(max(start_s + until_s - time.monotonic(), 0.0))
        except TimeoutError:
            if until_s < limit_s and env.local_rank == 0:
                _print_waiting(env, f"{env.store} ({obstacle[0]})", limit_s - until_s)
        except RuntimeError as error:
            raise WorldBrokenError(
                f"rank {env.rank} cannot {'serve' if env.serves else 'reach'} {env.store} ({describe(error)}): "
                f"nothing was measured; {_CHECK_ADDRESS}"
            ) from error
    raise WorldBrokenError(
        f"rank {env.rank} waited {limit_s:g} s for {env.store} ({obstacle[0]}): nothing was measured; {_CHECK_ADDRESS}"
    )


def _connect_when_served(env: RankEnv, connect: Callable[[bool], Store], obstacle: list[str]) -> Store:
    """Opens the store once it is served. Until then, `obstacle` holds the reason why it is not."""
    while reason := why_unreachable(env):
        obstacle[0] = reason
        time.sleep(_RETRY_S)
    obstacle[0] = "what listens there does not answer as a TCPStore"
    return connect(True)


def _print_waiting(env: RankEnv, awaited: str, remaining_s: float) -> None:
    print_error(f"rank {env.rank} waits for {awaited}; up to {remaining_s:.0f} s more ({JOIN_TIMEOUT})")


def silence_torch() -> None:
    """Suppresses the log of torch's C++ and its deprecation warnings. Called before torch is imported.

    Raises:
        UsageError: torch cannot be loaded here.
    """
    ensure_file_limit()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _compare_votes(votes: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """Returns the rank facts of all ranks, and the reason why the ranks cannot work together or ""."""
    expected: dict[str, str] = votes[0]["agreement"]
    for rank, vote in enumerate(votes):
        for name in [*expected, *vote["agreement"]]:
            value, value_of_0 = vote["agreement"].get(name, "none"), expected.get(name, "none")
            if value != value_of_0:
                return [], (
                    f"rank {rank} has {name} {_shorten(value)}, rank 0 has {_shorten(value_of_0)}: "
                    "expected the same on every rank"
                )
    return [vote["info"] for vote in votes], ""


def _shorten(value: str) -> str:
    text = plain(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def complain_from_one_rank(text: str) -> None:
    """Prints an error from before joining.

    Rank 0 prints at once. Another rank first waits `RANK_0_PRINTS_S`. If the store is still served, rank 0 has not
    failed, and this rank prints.
    """
    env = valid_rank_env()
    line = " ".join(text.split())
    if env is None or env.rank == 0:
        print_error(line)
        return
    time.sleep(RANK_0_PRINTS_S)
    if not why_unreachable(env.of_launch(launch_number())):
        print_error(f"rank {env.rank}: {line}")
