"""Runs a preflight on the ranks of a launcher, or on ranks that it starts itself."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NoReturn

from msgspec import Struct, to_builtins

from dtbench.cost.estimate import estimate_collective
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.launch import start_ranks
from dtbench.engine.launch_files import LaunchSpec
from dtbench.engine.options import RunRequest
from dtbench.engine.progress import print_status, print_status_if_slow
from dtbench.engine.rank import LaunchedRank, silence_torch
from dtbench.engine.rank_env import RankEnv, find_rank_env
from dtbench.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REGRESSION,
    UsageError,
    plain,
    print_error,
)
from dtbench.grouping import group_by
from dtbench.machine.backends import resolve_backend
from dtbench.machine.device import choose_device, count_ranks
from dtbench.preflight.examine import (
    LEVEL,
    NAMED,
    DimTimes,
    Examination,
    ExaminedWorld,
    Measuring,
    ProbeCommand,
    Recheck,
    SlowFinding,
    examine,
)
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.suite.mesh import Mesh
from dtbench.text.terminal import new_console, print_columns, print_json, print_line
from dtbench.text.units import bandwidth_unit, format_bandwidth, format_seconds, format_size, plural

# Share of the topology's speed below which a mesh dim is reported. Speeds differ more between days and jobs than
# between peers within a minute.
SLOWER_THAN_EXPECTED = 0.80


@dataclass(frozen=True)
class PreflightRequest:
    """The options of `dtbench preflight`.

    Attributes:
        options: the options shared with `dtbench run`.
        expect: the path of a topology to compare with.
        as_json: whether to print JSON.
    """

    options: RunRequest
    expect: Path | None = None
    as_json: bool = False


def preflight(request: PreflightRequest) -> int:
    """Runs a preflight on the ranks of a launcher, or on ranks started here.

    Returns the exit code: 1 if something is slow, 3 if a comparison has no verdict, e.g. without peers.

    Raises:
        UsageError: there is only one rank, or an option is invalid.
    """
    silence_torch()
    options = request.options
    if (place := find_rank_env()) is not None:
        Coordinator(request, place).run_and_exit()
    if request.expect is not None:
        read_topology(request.expect)
    tell = (lambda _text: None) if request.as_json else print_status
    with print_status_if_slow("loading torch", tell):
        device_type = choose_device(options.device)
        nproc = count_ranks(options.ranks, device_type, options.backend)
    options.resolve(device_type, nproc)
    _refuse_one(nproc)
    tell(f"starting {plural(nproc, 'process')}, loading torch")
    report = start_ranks(LaunchSpec(command="preflight", request=request), nproc)
    if report.diagnosis is not None:
        _report(report.diagnosis, report.case)
    return EXIT_INTERRUPTED if report.exit_code is None else report.exit_code


def _refuse_one(ranks: int) -> None:
    if ranks < 2:
        raise UsageError("a preflight compares ranks with each other: got 1 rank, expected 2 or more")


def _report(diagnosis: Diagnosis, now: ActiveCase) -> None:
    print_error(f"preflight: {diagnosis.message_during(now)}: no verdict")


class Coordinator:
    """Runs the preflight on one rank. Rank 0 also runs the examination and prints the result."""

    def __init__(self, request: PreflightRequest, place: RankEnv, report_path: str = "") -> None:
        self._options, self._as_json = request.options, request.as_json
        self._expected = None if request.expect is None else read_topology(request.expect)
        self._rank = LaunchedRank(place, _report, report_path=report_path)

    def run_and_exit(self) -> NoReturn:
        """Runs the preflight and exits with its exit code."""
        with self._rank as rank:
            _refuse_one(rank.env.world_size)
            options = self._options
            device_type = choose_device(options.device)
            run_options = options.resolve(device_type, rank.env.world_size)
            rank.join(device_type, resolve_backend(device_type))
            rank.active_case.name = "the first round"
            began = time.monotonic()
            with rank.limit(options.timeout_s):
                examination = self._examine(run_options.mesh, options.timeout_s)
            rank.conclude(
                self.conclude(examination, time.monotonic() - began) if rank.env.rank == 0 else None
            )
        rank.exit()

    def _examine(self, mesh: Mesh, timeout_s: float) -> Examination:
        """Carries out the commands of rank 0. Only rank 0 returns the complete examination."""
        from dtbench.preflight.part import Probe

        rank, ranks = self._rank, self._rank.ranks
        examined = ExaminedWorld(names_of(rank.rank_facts), mesh)
        examination, examining = Examination(examined), self.examining(examined)

        def next_command(votes: Sequence[object]) -> ProbeCommand | None:
            nonlocal examination
            try:
                return examining.send(None if votes[0] is None else votes)  # type: ignore[arg-type]
            except StopIteration as end:
                examination = end.value
                return None

        with rank.process_group(mesh, timeout_s) as (world, barrier):
            probe = Probe(world, barrier)
            answer: object = None
            while (command := ranks.agree(answer, next_command)) is not None:
                rank.active_case.name = str(command.get("kind") or command.get("dim") or command["do"])
                rank.active_case.samples_begun += 1
                answer = probe.do(command)
        return examination

    def examining(self, world: ExaminedWorld) -> Measuring[Examination]:
        """Returns the generator of commands that rank 0 runs."""
        return examine(world)

    def conclude(self, examination: Examination, seconds: float) -> int:
        """Compares the result with --expect, prints it and returns the exit code. Runs on rank 0 only."""
        if self._expected is not None:
            compare_with(self._expected, examination)
        file = result_of(examination, seconds, str(self._rank.device).partition(":")[0])
        if self._as_json:
            print_json(to_builtins(file))
        else:
            print_all(file)
        if file.findings:
            return EXIT_REGRESSION
        return EXIT_INCONCLUSIVE if file.unjudged else EXIT_OK


def compare_with(expected: CalibratedTopology, examination: Examination) -> None:
    """Adds findings for mesh dims that are slower than the upper end of the topology's interval.

    A comparison of peers cannot find that all ranks are slow; this one can.
    """
    dims = {dim.name: dim for dim in expected.dims}
    if not dims.keys() & examination.dims.keys():
        examination.unjudged.append(
            f"--expect has mesh dim {', '.join(dims)}, measured here: {', '.join(examination.dims) or 'none'}"
        )
    elif examination.world.size == 2:  # the topology replaces the missing peers
        examination.unjudged.clear()
    for name in dims.keys() & examination.dims.keys():
        times = examination.dims[name]
        price = estimate_collective(dims[name], "all_reduce", len(times.groups[0]), times.size_bytes)
        share = price.high_us * 1e-6 / median(times.times_s)
        if share < SLOWER_THAN_EXPECTED:
            examination.findings.append(
                SlowFinding(
                    what=f"mesh dim {name} compared with --expect",
                    kind=f"all_reduce over {name}",
                    ranks=tuple(range(examination.world.size)),
                    share=share,
                    p=0.0,
                )
            )


class LinkRate(Struct, frozen=True, kw_only=True):
    """The bandwidth of a pair of ranks.

    Attributes:
        kind: kind of link.
        ranks: the pair.
        rate: bytes per second in each direction, both directions at once.
    """

    kind: str
    ranks: tuple[int, int]
    rate: float


class Preflight(Struct, frozen=True, kw_only=True):
    """The result of a preflight, as printed by --json.

    Attributes:
        time: end of the preflight, UTC.
        seconds: duration of the examination.
        device: "cpu" or "cuda".
        hosts: host of each rank.
        mesh: mesh dims with their sizes.
        links: bandwidth of each measured pair.
        dims: times of each mesh dim.
        work_s: kind of work -> seconds of each rank, all for the same work.
        findings: links, ranks, hosts and mesh dims that are reported as slow.
        rechecks: suspects that were measured again.
        notes: remarks for the user.
        unjudged: comparisons without a verdict, with the reason.
        named: share of the peers' speed below which a suspect is reported.
        level: probability that anything is reported if all ranks are equal.
    """

    kind: Literal["preflight"] = "preflight"
    schema: Literal[1] = 1
    time: str
    seconds: float
    device: str
    hosts: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    links: tuple[LinkRate, ...]
    dims: tuple[DimTimes, ...]
    work_s: dict[str, tuple[float, ...]]
    findings: tuple[SlowFinding, ...]
    rechecks: tuple[Recheck, ...]
    notes: tuple[str, ...]
    unjudged: tuple[str, ...]
    named: float
    level: float


def result_of(examination: Examination, seconds: float, device: str) -> Preflight:
    """Returns an examination as the `Preflight` that --json prints."""
    return Preflight(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=seconds,
        device=device,
        hosts=examination.world.hosts,
        mesh=examination.world.mesh,
        links=tuple(
            LinkRate(kind=kind, ranks=pair, rate=link_times.size_bytes / link_times.seconds(pair))
            for kind, link_times in examination.pairs.items()
            for pair in sorted(link_times.exchanges)
        ),
        dims=tuple(examination.dims.values()),
        work_s={kind: tuple(times) for kind, times in examination.work_s.items()},
        findings=tuple(examination.findings),
        rechecks=tuple(examination.rechecks),
        notes=tuple(examination.notes),
        unjudged=tuple(examination.unjudged),
        named=NAMED,
        level=LEVEL,
    )


def names_of(rank_facts: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """Returns the host name of each rank. Different hosts (by boot id) with the same name get a number."""
    keys = [(str(info["host"]), info["boot_id"]) for info in rank_facts]
    numbered = {
        key: f"{key[0]}#{number}"
        for namesakes in group_by(dict.fromkeys(keys), lambda key: key[0]).values()
        if len(namesakes) > 1
        for number, key in enumerate(namesakes)
    }
    return tuple(numbered.get(key, key[0]) for key in keys)


def print_all(file: Preflight) -> None:
    """Prints the speeds of peers, the suspects and the verdict."""
    console = new_console()
    rows = list(_rows(file))
    print_columns(
        console,
        [("", [row[0] for row in rows])],
        [
            (title, [row[column] for row in rows])
            for column, title in enumerate(("slowest", "median", "fastest"), 1)
        ],
        [("measured", [row[4] for row in rows])],
    )
    if rows := list(_rechecked(file)):
        print_columns(
            console,
            [("measured again, alternating with peers", [row[0] for row in rows])],
            [(title, [row[n] for row in rows]) for n, title in enumerate(("suspect", "peers", "share"), 1)],
            [("", [row[4] for row in rows])],
        )
    for note in file.notes:
        print_line(console, f"note: {note}")
    print_line(console, summary_line(file))


def _rows(file: Preflight) -> Iterator[list[str]]:
    """Yields rows: name, slowest, median and fastest value, number of compared pairs, groups or ranks."""
    for kind, links in group_by(file.links, lambda link: link.kind).items():
        rates = [link.rate for link in links]
        unit = bandwidth_unit(rates)
        yield [
            f"links {kind}, each way",
            *(f"{unit.format(rate)} {unit.name}" for rate in reversed(_worst_first(rates))),
            plural(len(rates), "pair"),
        ]
    for dim in file.dims:
        yield [
            f"all_reduce of {format_size(dim.size_bytes)} over {dim.dim}={len(dim.groups[0])}",
            *map(format_seconds, _worst_first(dim.times_s)),
            f"{plural(len(dim.groups), 'group')}, compared by --expect only",
        ]
    for kind, by_rank in file.work_s.items():
        yield [kind, *map(format_seconds, _worst_first(by_rank)), plural(len(by_rank), "rank")]


def _rechecked(file: Preflight) -> Iterator[list[str]]:
    """Yields rows: suspect, its time or bandwidth, that of its peers, its share of their speed, verdict."""
    for recheck in file.rechecks:
        finding, size = recheck.finding, recheck.size_bytes
        unclear = "no verdict" if finding.share <= file.named else "like its peers"
        yield [
            f"{finding.what} ({finding.kind})",
            *(
                format_bandwidth(size / time_s) if size else format_seconds(time_s)
                for time_s in (recheck.time_s, recheck.peers_s)
            ),
            f"{finding.share:.0%}",
            "slow" if recheck.slow else unclear,
        ]


def _worst_first(values: Sequence[float]) -> list[float]:
    return [max(values), median(values), min(values)]


def summary_line(file: Preflight) -> str:
    """Returns the verdict in one line."""
    about = f"{len(file.hosts)} ranks on {plural(len(set(file.hosts)), 'host')}, {file.seconds:.0f} s"
    if file.findings:
        return f"preflight: slow ({about}): {'; '.join(plain(finding.words()) for finding in file.findings)}"
    if file.unjudged:
        return f"preflight: no verdict ({about}): {plain('; '.join(file.unjudged))}"
    if len(file.hosts) == 2:
        return f"preflight: as expected ({about}): nothing below {SLOWER_THAN_EXPECTED:.0%} of the topology"
    repeated = f" ({plural(len(file.rechecks), 'suspect')} measured again)" if file.rechecks else ""
    return f"preflight: healthy ({about}): nothing below {file.named:.0%} of its peers{repeated}"
